"""Starts and ends the process that replicates a run, and watches how far it is behind.

The process is `jaxres checkpoints replicate --follow`. A thread starts it again if it dies, and
emits an event when a committed step is missing in the replica for too long. Nothing here stops or
delays training.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from jaxres.clock import Awake, Clock
from jaxres.config import RunConfig
from jaxres.config.schema.alert_kinds import Kind
from jaxres.exit_codes import ExitCode, RestartRule, exit_row
from jaxres.faults import RunError
from jaxres.host.side_process import SideProcess, end_all
from jaxres.runlog import replica_files, run_log
from jaxres.runlog.events import Event
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Commit, Record
from jaxres.runlog.replica_files import ReplicaProgress
from jaxres.runlog.supervisor_events import ReplicaBehind, ReplicaCaughtUp
from jaxres.storage.threads import make_thread
from jaxres.telemetry import stdio
from jaxres.telemetry.alert_monitors import ReplicaLag, step_of_open

CLOSE_SECONDS = 10.0
"""Longest delay of the exit for a copy; the next start copies the rest."""
FINISH_SECONDS = 300.0
"""The same for a run that is complete: most likely there is no next start."""
WATCH_SECONDS = 10.0
"""Longest time between two looks at the lag."""
SLEPT_SECONDS = 30.0


class ReplicaProcess:
    """The replicator of a run with `checkpoint.replica`; a context manager, which ends it."""

    def __init__(
        self, config: RunConfig, run_dir: RunDir, *, env: Mapping[str, str], clock: Clock
    ) -> None:
        """Starts nothing."""
        self._section = config.checkpoint.replica
        if self._section is not None and self._section.place == run_dir.root.absolute():
            stdio.eprint(
                "checkpoint.replica.path: this run trains in its replica now, so it has none. Give "
                "another path\n"
            )
            self._section = None
        self._run_dir, self._clock = run_dir, clock
        self._process = SideProcess(env)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._close_seconds = CLOSE_SECONDS
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ReplicaProcess:
        return self

    def ensure_started(self, emit: Callable[[Event], None]) -> None:
        """Starts process and thread unless they run; `emit` is called in the thread."""
        if self._section is None:
            return
        self._start()
        if self._thread is None:
            self._thread = make_thread("replica-watch", lambda: self._watch(emit), daemon=True)
            self._thread.start()

    @property
    def pids(self) -> set[int]:
        """Pid of the process, if it runs."""
        return self._process.pids

    def on_run_ended(self, code: int) -> None:
        """Allows FINISH_SECONDS for the rest if the run is complete."""
        if code == ExitCode.DONE:
            self._close_seconds = FINISH_SECONDS

    def __exit__(self, *_: object) -> None:
        """Waits for the rest for a limited time, then kills the process."""
        with self._lock:
            self._closed.set()
        end_all([self._process], seconds=self._close_seconds, clock=self._clock)
        if self._process.exit_code:
            stdio.eprint(f"replica: {self._missing()}\n")

    def _missing(self) -> str:
        assert self._section is not None
        text = f"{self._section.place} lacks newer steps"
        with contextlib.suppress(RunError):
            step = run_log.fold(run_log.read_records(self._run_dir.log)).step
            progress = replica_files.read_progress(self._run_dir)
            has = progress.step if progress is not None else 0
            text = f"{self._section.place} has step {has}; step {step} is committed"
        return f"{text}. The same command copies the rest, also when the run is complete"

    def _start(self) -> None:
        """Starts the process unless it runs, or has ended in a way that would repeat itself."""
        assert self._section is not None
        with self._lock:
            code = self._process.exit_code
            is_over = self._closed.is_set() or (code is not None and _is_final(code))
            if is_over or self._process.pids:
                return
            command = [sys.executable, "-m", "jaxres", "checkpoints", "replicate"]
            command += [str(self._run_dir.root.absolute()), str(self._section.place)]
            command += ["--follow", "--until-stdin-closes"]
            if (rate := self._section.max_mb_per_second) is not None:
                command += [f"--max-mb-per-second={rate}"]
            try:
                self._process.start(command, stdin=subprocess.PIPE)
            except OSError as error:
                stdio.eprint(f"checkpoint.replica: did not start: {error}\n")

    def _watch(self, emit: Callable[[Event], None]) -> None:
        assert self._section is not None
        minutes = self._section.lag_minutes
        limit = None if minutes is None else 60 * minutes
        every = WATCH_SECONDS if limit is None else min(WATCH_SECONDS, limit / 4)
        awake = Awake(self._clock, beyond_seconds=every + SLEPT_SECONDS)
        was_behind = step_of_open(self._run_dir, Kind.REPLICA_BEHIND) is not None
        lag = ReplicaLag(limit, is_behind=was_behind)
        log, records = run_log.reader_of(self._run_dir.log), list[Record]()
        while not self._closed.wait(every):
            self._start()
            known = run_log.last_seq(records)
            with contextlib.suppress(RunError):  # Unreadable storage shows no commit.
                records = log.read()
            if not records:
                continue  # Whether a step is missing is not known yet.
            progress = self._progress()
            now = awake.now()
            new = (record for record in records if record.seq > known)
            commits = [record.seq for record in new if isinstance(record.body, Commit)]
            kind = lag.check(commits, replicated=progress.seq, now=now)
            if kind is not None:
                emit(self._event(lag, records, progress, now=now))

    def _progress(self) -> ReplicaProgress:
        assert self._section is not None
        with contextlib.suppress(RunError):
            found = replica_files.read_progress(self._run_dir)
            if found is not None and found.path == str(self._section.place):
                return found
        return ReplicaProgress(str(self._section.place))

    def _event(
        self, lag: ReplicaLag, records: list[Record], progress: ReplicaProgress, *, now: float
    ) -> Event:
        history = run_log.fold(records)
        if not lag.is_behind:
            return ReplicaCaughtUp(history.attempt, history.step, progress.path, lag.series)
        seconds = lag.seconds(now)
        reason = f"{progress.path} has step {progress.step}; a newer one is missing there for "
        reason += f"{seconds / 60:.0f} minutes"
        reason += f": {progress.error}" if progress.error else ""
        return ReplicaBehind(
            attempt=history.attempt,
            step=history.step,
            replica=progress.path,
            replica_step=progress.step,
            seconds=seconds,
            reason=reason,
            series=lag.series,
        )


def lacks_records(config: RunConfig, run_dir: RunDir, records: Sequence[Record]) -> bool:
    """Returns whether the run has a replica that lacks some of its records, or their steps."""
    if config.checkpoint.replica is None:
        return False
    progress = replica_files.read_progress(run_dir)
    is_same = progress is not None and progress.path == str(config.checkpoint.replica.place)
    return progress is None or not is_same or progress.seq < run_log.last_seq(records)


def _is_final(code: int) -> bool:
    """Returns whether another process would exit in the same way."""
    return exit_row(code).restart is RestartRule.NEVER and code != ExitCode.DONE
