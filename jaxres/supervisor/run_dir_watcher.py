"""Watches the run directory in a thread, because the supervisor must never wait for storage.

A mount that hangs may block its reader forever. So one thread writes the lock holder's heartbeat,
checks for a newer claim and reads the request files. It reports through a queue, and wakes the
supervisor through a pipe. While the thread hangs, deadlines and signals still work.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.exit_codes import ExitCode, RestartRule, exit_row
from jaxres.faults import RunError, StoppedError, StorageUnavailable
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, newer_claim
from jaxres.storage import files
from jaxres.storage.path import RunPath
from jaxres.storage.threads import WatcherThreads
from jaxres.supervisor.run_lock import RunLock, TrainingProgress, heartbeat_interval_seconds

POLL_SECONDS = 0.25
BUCKET_POLL_SECONDS = 2.5
"""Longer, because each request to a bucket is billed."""
CLOSE_SECONDS = 1.0


@dataclass(frozen=True)
class Superseded:
    """A later attempt has claimed the run; the watcher has ended and writes no more heartbeats."""

    claim: Claim


@dataclass(frozen=True)
class StopRequested:
    """A `stop` file exists."""

    path: RunPath


@dataclass(frozen=True)
class SaveRequested:
    """A `save` file existed; it was moved into the attempt's folder."""


@dataclass(frozen=True)
class WatcherFailed:
    """The watcher has ended with an error, which the supervisor raises."""

    error: Exception


WatcherEvent = Superseded | StopRequested | SaveRequested | WatcherFailed


class RunDirWatcher:
    """Watches one run directory until closed; a context manager."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        attempt: int,
        last_seq: int,
        run_lock: RunLock,
        clock: Clock,
        step: Callable[[], int],
        progress: Callable[[], TrainingProgress | None] = lambda: None,
        report: Callable[[WatcherEvent], object] | None = None,
    ) -> None:
        """Prepares the watcher; starts no thread yet.

        Args:
          attempt: the number of the running attempt.
          last_seq: number of the newest record that was read; a claim after it supersedes this one.
          run_lock: its heartbeat is written every second, in a bucket every five.
          step: returns the newest finished step, for the names of moved request files.
          progress: returns the progress of the training for the heartbeat.
          report: called with each event, in the watcher's thread; None: `reports` returns them.
        """
        self._run_dir = run_dir
        self._attempt = attempt
        self._last_seq = last_seq
        self._run_lock = run_lock
        self._clock = clock
        self._step, self._progress = step, progress
        self._poll_seconds = BUCKET_POLL_SECONDS if run_dir.is_remote else POLL_SECONDS
        self._threads = WatcherThreads[WatcherEvent]()
        self._report = report or self._threads.put
        self._polling_since = math.inf
        self._heartbeat_at = -math.inf
        self._is_stop_reported = False
        self.has_answered = False
        """Whether one poll has completed, so that storage answers."""

    def __enter__(self) -> RunDirWatcher:
        self._threads.start("run-dir-watcher", self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._threads.close(seconds=CLOSE_SECONDS):
            # The thread may use the lock's files as soon as storage answers again.
            self._run_lock.abandon()

    @property
    def wakeup(self) -> int:
        """A descriptor that is readable whenever `reports` may return something."""
        return self._threads.wakeup

    def reports(self) -> list[WatcherEvent]:
        """Returns the events since the last call."""
        return self._threads.take()

    def silent_seconds(self, *, now: float) -> float:
        """Returns the seconds of the current poll; storage normally answers in milliseconds."""
        return max(0.0, now - self._polling_since)

    def _watch(self) -> None:
        while True:
            self._polling_since = self._clock.monotonic()
            try:
                is_watching = self._poll()
            except Exception as error:  # noqa: BLE001 - raised by the supervisor's thread.
                self._report(WatcherFailed(error))
                is_watching = False
            self._polling_since = math.inf
            self.has_answered = True
            if not is_watching or self._threads.closed.wait(self._poll_seconds):
                return

    def _poll(self) -> bool:
        """Writes the heartbeat when due, reads request files; False once the run is superseded."""
        now = self._clock.monotonic()
        if now - self._heartbeat_at >= heartbeat_interval_seconds(self._run_dir):
            self._heartbeat_at = now
            if not self._heartbeat_unless_superseded():
                return False
        self._take_requests()
        return True

    def _heartbeat_unless_superseded(self) -> bool:
        """Writes the heartbeat unless a newer claim exists: a fenced process must write nothing."""
        try:
            claim, self._last_seq = newer_claim(
                self._run_dir.log, attempt=self._attempt, after=self._last_seq
            )
            if claim is None:
                self._run_lock.heartbeat(self._progress())
                return True
        except StorageUnavailable:
            return True  # No verdict without storage; the run log fences later writes.
        self._report(Superseded(claim))
        return False

    def _take_requests(self) -> None:
        """Reports request files that an operator has put into the run directory.

        `stop` stays there until the run has ended by it: the attempt may end otherwise, and be
        followed by another one, for which the request holds, too. It is reported once.
        """
        stop, save = self._run_dir.request("stop"), self._run_dir.request("save")
        if not self._is_stop_reported and _exists(stop):
            self._is_stop_reported = True
            self._report(StopRequested(stop))
        if _exists(save) and self._move(save):
            self._report(SaveRequested())

    def _move(self, request: RunPath) -> bool:
        """Moves a request file into the attempt's folder; returns whether that succeeded."""
        folder = self._run_dir.attempt(self._attempt)
        with contextlib.suppress(RunError, OSError):
            files.move(request, folder / f"{request.name}-{self._step():08d}")
            return True
        return False


def _exists(path: RunPath) -> bool:
    with contextlib.suppress(RunError, OSError):
        return files.file_exists(path)
    return False


@contextlib.contextmanager
def stop_while_waiting(run_dir: RunDir) -> Iterator[Callable[[], RunError | None]]:
    """Looks for a `stop` file, in a thread, while this process waits for other hosts.

    Yields what returns the error that ends the wait, once, after it has deleted the file: no
    attempt has begun, and the next start shall train.
    """
    stop, threads = run_dir.request("stop"), WatcherThreads[RunPath]()
    seconds = BUCKET_POLL_SECONDS if run_dir.is_remote else POLL_SECONDS

    def watch() -> None:
        while not _exists(stop):
            if threads.closed.wait(seconds):
                return
        threads.put(stop)

    def stopped() -> RunError | None:
        if not threads.take():
            return None
        files.delete(stop)
        return StoppedError(f"{stop}: stopped before the hosts had connected; nothing to save")

    threads.start("stop-file", watch)
    try:
        yield stopped
    finally:
        threads.close(seconds=CLOSE_SECONDS)


def stop_requested_before(run_dir: RunDir) -> AttemptResult | None:
    """Returns the result of an attempt before whose start a stop was requested; None: none was."""
    if not files.exists(run_dir.request("stop")):
        return None
    reason = f"{run_dir.request('stop')} existed at the start; the next start resumes"
    return AttemptResult(ExitCode.STOPPED, reason, committed=False, is_printed=True)


def end_stop_request(run_dir: RunDir, attempt: int, code: int) -> None:
    """Moves the `stop` file into the attempt's folder, if nothing starts the run again by itself.

    After other exits the next start takes it. One that is superseded leaves it to its successor.
    """
    if code == ExitCode.FENCED or exit_row(code).restart is not RestartRule.NEVER:
        return
    stop = run_dir.request("stop")
    if files.exists(stop):
        files.move(stop, run_dir.attempt(attempt) / "stop")
