"""Owns the directory of a user's loop: the run lock, the claim of an attempt, its events, its end.

Under a supervisor (`program:` in a config) the supervisor holds the lock and has claimed the
attempt; JAXRES_RUN_DIR and JAXRES_ATTEMPT_NUMBER name them. Alone, this process does both.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.read import manifest as manifests
from jaxres.clock import Clock, SystemClock
from jaxres.cluster.host_group import ALONE, HostGroup, HostRank
from jaxres.config.load import load_checkpoint
from jaxres.config.schema.checkpoint import CheckpointSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Fenced, RunError, StorageUnavailable
from jaxres.host import process_lock
from jaxres.runlog import run_log
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.event_log import EventLog
from jaxres.runlog.events import Emit, PhaseChanged, RunEnded, RunOpened
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, RunHistory, RunLog
from jaxres.storage import files
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.process.watchdog import PROGRAM
from jaxres.supervisor.process.worker_group import WorkerGroup
from jaxres.supervisor.run_dir_watcher import RunDirWatcher, WatcherEvent
from jaxres.supervisor.run_lock import RunLock

RUN_DIR, ATTEMPT = "JAXRES_RUN_DIR", "JAXRES_ATTEMPT_NUMBER"
"""Variables by which the supervisor of a program names the run directory and the attempt."""
SETTINGS = (
    *("keep", "keep_last", "snapshot", "check_snapshot", "background_share", "timeout_seconds"),
    "max_failed_saves",
)
"""Keys of the section `checkpoint` that have an effect without the trainer."""


@dataclass
class OwnedRun:
    """An attempt that this process owns."""

    run_dir: RunDir
    log: RunLog
    claim: Claim
    emit: Emit
    clock: Clock
    result: AttemptResult
    """How it ends, unless an exception ends it."""


@dataclass(frozen=True)
class Observed:
    """Receivers of what happens while a run is owned."""

    on_event: Emit
    on_watcher_event: Callable[[WatcherEvent], object]
    step: Callable[[], int]
    """Returns the newest finished step."""


@contextlib.contextmanager
def own(
    run_dir: RunDir,
    observed: Observed,
    *,
    env: Mapping[str, str],
    peers: HostGroup | None = None,
) -> Iterator[OwnedRun]:
    """Owns a run directory within the block, and records how the block ended.

    Under a supervisor its worker (jaxres/program) records begin and end of the program, and this
    process is the writer of the host's events within the block.

    Raises:
      Fenced: another live process owns it.
      ConfigError: it is a run of the trainer.
    """
    supervised = is_supervised(run_dir, env)
    member = ALONE if peers is None else peers.member
    with contextlib.ExitStack() as stack:
        clock = SystemClock()
        claim, log = _claim(run_dir, stack, observed, clock, env=env, member=member)
        file = run_dir.events(claim.attempt, member.host)
        events = stack.enter_context(EventLog(file, clock=clock, listeners=[observed.on_event]))
        end = AttemptResult(ExitCode.DONE, "closed by its program", committed=True)
        owned = OwnedRun(run_dir, log, claim, events.emit, clock, end)
        opened = RunOpened(str(run_dir.root), claim.attempt, claim.threads, forked=False)
        try:
            (observed.on_event if supervised else events.emit)(opened)
            yield owned
        except BaseException as error:
            if owned.result is end:
                owned.result = end_by(error)
            raise
        finally:
            result, step = owned.result, observed.step()
            if not supervised:
                if result.code != ExitCode.FENCED:
                    attempt_runner.record_stop(log, result)
                name = ExitCode(result.code).name
                events.emit(RunEnded(result.code, name, step, result.committed, result.reason))


def _claim(
    run_dir: RunDir,
    stack: contextlib.ExitStack,
    observed: Observed,
    clock: Clock,
    *,
    env: Mapping[str, str],
    member: HostRank,
) -> tuple[Claim, RunLog]:
    """Returns the claim of the attempt, written here unless a supervisor has."""
    if is_supervised(run_dir, env):
        attempt, records = int(env[ATTEMPT]), run_log.read_records(run_dir.log)
        claim = run_log.claim_of(records, attempt=attempt, folder=run_dir.log)
        # Behind the loop the worker is the writer again: it is told after the lock is free.
        stack.callback(observed.on_event, PhaseChanged(PROGRAM))
        stack.enter_context(_only_process(run_dir, attempt, member.host))
        return claim, RunLog.of_attempt(run_dir.log, records, attempt=attempt, clock=clock)
    if files.exists(run_dir.config):
        raise ConfigError(
            f"{run_dir.root}: is a run of a config (config.yaml), which its supervisor owns. Give "
            "another directory; to read its steps no `with` is needed."
        )
    lock = stack.enter_context(RunLock(run_dir, clock=clock))
    claim, log = attempt_runner.claim_next(
        lock, lambda history: attempt_runner.new_claim(None, history, env=env, job=WorkerGroup())
    )
    watcher = RunDirWatcher(
        run_dir,
        attempt=claim.attempt,
        last_seq=log.last_seq,
        run_lock=lock,
        clock=clock,
        step=observed.step,
        report=observed.on_watcher_event,
    )
    stack.enter_context(watcher)
    return claim, log


@contextlib.contextmanager
def _only_process(run_dir: RunDir, attempt: int, host: int) -> Iterator[None]:
    """Keeps a second process of an attempt out: it may have inherited the variables."""
    path = run_dir.loop_lock(attempt, host)
    with process_lock.hold(path) as is_ours:
        if not is_ours:
            raise Fenced(
                f"{path}: another process of this attempt has its loop. Unset {ATTEMPT} for "
                "processes that your program starts."
            )
        yield


def is_supervised(run_dir: RunDir, env: Mapping[str, str]) -> bool:
    """Returns whether a supervisor has started this process for a run directory."""
    return ATTEMPT in env and env.get(RUN_DIR) == str(run_dir.root.absolute())


def end_by(error: BaseException) -> AttemptResult:
    """Returns the result of an attempt that an exception has ended."""
    if isinstance(error, SystemExit) and isinstance(error.__cause__, RunError):
        error = error.__cause__
    if isinstance(error, RunError):
        return AttemptResult(error.exit_code, str(error))
    if isinstance(error, KeyboardInterrupt):
        return AttemptResult(ExitCode.STOPPED, "interrupted")
    return AttemptResult(ExitCode.BUG, "".join(traceback.format_exception_only(error)).strip())


def section_of(
    settings: Mapping[str, Any], *, call: str, keys: Sequence[str] = SETTINGS
) -> CheckpointSection:
    """Returns the section `checkpoint` of the settings that a call was given as keywords.

    Raises:
      ConfigError: a key is unknown or has no effect there, or a value is not allowed.
    """
    others = [key for key in settings if key in CheckpointSection.model_fields and key not in keys]
    if others:
        raise ConfigError(
            f"{call}: {', '.join(others)} has no effect here (known: {', '.join(keys)})."
        )
    return load_checkpoint(settings, where=call)


def recorded_arrays(run_dir: RunDir, history: RunHistory) -> Mapping[str, ArrayInfo]:
    """Returns path -> dtype and shape of the newest step's arrays; {} if it can't be read."""
    if (newest := history.newest) is None:
        return {}
    with contextlib.suppress(RunError):
        return manifests.load((run_dir.root / newest.path).absolute(), newest).arrays
    return {}


def require_committed(last_error: str, step: int) -> None:
    """Raises StorageUnavailable if the last save has failed."""
    if last_error:
        raise StorageUnavailable(
            f"the newest save has failed; the newest committed step is {step}. {last_error}"
        )
