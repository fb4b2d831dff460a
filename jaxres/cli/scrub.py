"""Process that verifies one committed step of a live run: `python -m jaxres.cli.scrub`.

The run's supervisor starts it when a step is due (supervisor/companions/scrub_process.py). It
writes its result to `RUN_DIR/scrub.json`, and only if the run still belongs to that supervisor.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

from jaxres import faults
from jaxres.checkpoint.read import scrub
from jaxres.checkpoint.throttle import BandwidthLimit
from jaxres.clock import Clock, SystemClock
from jaxres.config.argparser import path_argument
from jaxres.exit_codes import ExitCode
from jaxres.faults import Fenced, RunError
from jaxres.host import processes
from jaxres.runlog import run_log, scrub_progress
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Record, RunHistory
from jaxres.storage import files
from jaxres.storage.path import RunPath
from jaxres.supervisor.process import worker_group
from jaxres.telemetry import stdio

NICE = 19
"""Lowest priority: training gets all the processor time that it can use."""


def main(arguments: list[str], *, clock: Clock) -> int:
    """Verifies the step; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=path_argument)
    parser.add_argument("--path", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--max-mb-per-second", type=float, required=True)
    parser.add_argument("--replica", type=path_argument)
    options = parser.parse_args(arguments)
    processes.kill_me_with_parent(options.parent)
    os.nice(NICE)
    limit = BandwidthLimit(options.max_mb_per_second * 1e6, clock=clock)
    try:
        with files.untyped_failures():
            check_step(
                RunDir(options.run_dir),
                options.path,
                supervisor=options.parent,
                replica=options.replica,
                limit=limit,
                clock=clock,
            )
    except RunError as end:
        error = faults.by_phase(end, at_start=False)
        stdio.eprint(f"checkpoint.scrub: {error}\n")
        return error.exit_code
    return ExitCode.DONE


def check_step(
    run_dir: RunDir,
    path: str,
    *,
    supervisor: int,
    replica: RunPath | None,
    limit: BandwidthLimit,
    clock: Clock,
) -> None:
    """Verifies a step and writes the result; does nothing if the step is not committed any more.

    Args:
      path: path of the step's directory in it.
      supervisor: pid of the supervisor, which must own the run.
      replica: folder of the run's replica; None: there is none.
      limit: limit of the bytes that are read.

    Raises:
      Fenced: another process has claimed the run; nothing was written.
      StorageUnavailable: the run directory could not be read or written.
    """
    records = run_log.read_records(run_dir.log)
    commit = _commit(_history(run_dir, records, supervisor=supervisor), path)
    if commit is None:
        return
    result = scrub.verify(run_dir, commit, limit=limit, clock=clock)
    known = run_log.last_seq(records)
    records = run_log.read_records(run_dir.log, known=known)
    history = _history(run_dir, records, supervisor=supervisor)
    if _commit(history, path) is None:
        return  # It was pruned or quarantined while it was read.
    if isinstance(result, RunError) and not scrub.can_read_another(
        run_dir, history.committed, but=commit
    ):
        raise result
    checks = scrub_progress.read(run_dir)
    check = scrub.judge(result, commit, checks.get(path), now=clock.wall())
    if check.damage is not None and replica is not None:
        copy = scrub.intact_copy(run_dir, commit, replica, limit=limit, clock=clock)
        check = dataclasses.replace(check, damage=dataclasses.replace(check.damage, copy=copy))
        known = run_log.last_seq(records)
        records = run_log.read_records(run_dir.log, known=known)
        history = _history(run_dir, records, supervisor=supervisor)
    committed = {each.path for each in history.committed}
    checks = {name: each for name, each in {**checks, path: check}.items() if name in committed}
    scrub_progress.write(run_dir, checks)


def _history(run_dir: RunDir, records: list[Record], *, supervisor: int) -> RunHistory:
    """Returns the history; raises Fenced if the run is not the supervisor's."""
    history = run_log.fold(records)
    newest = history.claims[-1] if history.claims else None
    if newest is None or not worker_group.is_claim_of(newest, pid=supervisor):
        raise Fenced(run_log.superseded_message(run_dir.root, history.attempt, newest))
    return history


def _commit(history: RunHistory, path: str) -> Commit | None:
    return next((commit for commit in history.committed if commit.path == path), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], clock=SystemClock()))
