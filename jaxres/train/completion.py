"""Decides whether a run is complete: its last step is committed and valid. No jax.

A step is verified before it is committed. Storage may damage it later, and then no restart would
notice: a complete run is not restored. So the command that finds nothing left to train reads the
whole checkpoint once. If it is damaged, an attempt follows: it restores an older step, quarantines
the damaged one, and trains the missing steps again (checkpoint/restore/restore.py).

A worker that is killed after its last commit leaves steps that it has pruned and not deleted. No
attempt follows that would delete them, so they are deleted here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jaxres import config as configs
from jaxres.checkpoint.retention import pruning
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import Fenced, StorageUnavailable
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import AttemptEnded, Record
from jaxres.storage import files
from jaxres.storage.timeouts import CallTimeout, call_with_timeout, write_with_timeout
from jaxres.supervisor.run_config import newest_config
from jaxres.supervisor.run_lock import RunLock
from jaxres.telemetry import stdio

SLOWEST_BYTES_PER_SECOND = 10e6
"""Speed of the slowest storage that is not taken for hanging."""
DELETION_SECONDS = 60.0
"""Longest wait for the deletion of leftovers; the next command deletes the rest."""


@dataclass(frozen=True)
class Completion:
    """Whether there is nothing left to train."""

    is_complete: bool
    unconfirmed: str | None = None
    """Path of the last step if it is committed and does not count yet: it is damaged, or the data
    or initial weights are read from another path than before."""


def check(run_dir: RunDir, config: RunConfig) -> Completion:
    """Returns whether the run is complete, and prints a message about its last step.

    Raises:
      StorageUnavailable: the last step can't be read, so it is not known to be valid.
    """
    records = run_log.read_records(run_dir.log)
    if config.program is not None:
        return _of_program(run_dir, records)
    newest = run_log.fold(records).newest
    if newest is None or newest.step < config.train.steps:
        return Completion(is_complete=False)
    if configs.moved_content(newest_config(run_dir), config):
        # A worker compares the content: a run that has not trained on it is not complete.
        return Completion(is_complete=False, unconfirmed=newest.path)
    from jaxres.checkpoint.read.verify import verify_step  # TensorStore: slow to import.

    what = f"{run_dir.root}: step {newest.step} of {config.train.steps} is committed already"
    step_dir = (run_dir.root / newest.path).absolute()
    seconds = config.deadlines.restore_seconds + newest.bytes / SLOWEST_BYTES_PER_SECOND
    try:
        report = call_with_timeout(lambda: verify_step(step_dir, newest), seconds=seconds)
    except CallTimeout as error:
        raise StorageUnavailable(
            f"{what}, but it could not be read within {seconds:.0f} s: storage does not answer. "
            "Nothing was judged damaged; rerun the same command when it answers."
        ) from error
    if report.problems:
        stdio.eprint(
            f"{what}, but its checkpoint is damaged: {report.evidence}. An older step is restored, "
            "and the missing steps are trained again.\n"
        )
        return Completion(is_complete=False, unconfirmed=newest.path)
    sys.stdout.write(
        f"{what}; nothing to do: its checkpoint is valid. For a new run, change run.seed, run.dir "
        "or the config.\n"
    )
    delete_leftovers(run_dir)
    return Completion(is_complete=True)


def _of_program(run_dir: RunDir, records: Sequence[Record]) -> Completion:
    """Returns whether the program of a run is done, and prints so."""
    if not is_done(records):
        return Completion(is_complete=False)
    sys.stdout.write(
        f"{run_dir.root}: the program has exited with 0 already; nothing to do. For a new run, "
        "change run.dir, the command or its files.\n"
    )
    return Completion(is_complete=True)


def is_done(records: Sequence[Record]) -> bool:
    """Returns whether an attempt of a program has recorded that it is done."""
    bodies = (record.body for record in run_log.in_force(records))
    return any(isinstance(body, AttemptEnded) and body.exit == ExitCode.DONE for body in bodies)


def delete_leftovers(run_dir: RunDir) -> None:
    """Deletes leftovers of a complete run's killed processes; while it is live, nothing.

    These are unused step directories, and temporary files in the log and of the attempts.

    A failure is printed: the run is complete all the same.
    """

    def delete() -> None:
        files.delete_temporaries(run_dir.log)
        history = run_log.fold(run_log.read_records(run_dir.log))
        is_clean = not files.has_leftovers(run_dir.attempts)
        if is_clean and not pruning.leftovers(history, run_dir=run_dir):
            return
        with contextlib.suppress(Fenced), RunLock(run_dir, clock=SystemClock()):
            history = run_log.fold(run_log.read_records(run_dir.log))
            pruning.delete_all_but(history, run_dir=run_dir, attempt=history.attempt)
            files.delete_leftovers(run_dir.attempts)

    what = f"{run_dir.root}: leftovers of a killed worker were not deleted"
    write_with_timeout(
        delete, seconds=DELETION_SECONDS, what=what, report=lambda text: stdio.eprint(f"{text}\n")
    )


def is_complete(run_dir: RunDir, config: RunConfig) -> bool:
    """Returns whether there is nothing left to train; as `check`."""
    return check(run_dir, config).is_complete
