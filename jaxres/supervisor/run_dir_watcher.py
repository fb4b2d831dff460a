"""Looks at the run directory from a thread of its own, for a door that must never wait for storage.

A mount that hangs may hold whoever looks at it for ever. So the owner's beat, the look for a newer
claim and the request files are this thread's; it reports through a queue and wakes the door by a
pipe. While it hangs the door goes on: deadlines end, signals are answered.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.faults import StorageUnavailable, TypedEnd
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, newer_claim
from jaxres.storage import files
from jaxres.storage.path import BucketPath, Place
from jaxres.supervisor.run_lock import Owner, beat_seconds

LOOK_SECONDS = 0.25
BUCKET_LOOK_SECONDS = 2.5
"""Each look has its price there."""
CLOSE_SECONDS = 1.0


@dataclass(frozen=True)
class Overtaken:
    """A later attempt owns the run; the lookout has ended, and beats no more."""

    claim: Claim


@dataclass(frozen=True)
class StopAsked:
    """There is a stop file."""

    path: Place


@dataclass(frozen=True)
class SaveAsked:
    """There was a save file; it has been moved into the attempt's folder."""


@dataclass(frozen=True)
class Failed:
    """The lookout has ended by an error that is the door's to raise."""

    error: Exception


Report = Overtaken | StopAsked | SaveAsked | Failed


class Lookout:
    """Watches until closed; a context manager."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        attempt: int,
        last_seq: int,
        owner: Owner,
        clock: Clock,
        step: Callable[[], int],
    ) -> None:
        """Prepares the watch.

        Args:
          run_dir: whose requests are honoured.
          attempt: the attempt on whose behalf.
          last_seq: newest record of the log that was seen; a newer claim after it overtakes us.
          owner: beats every second, in a bucket every five.
          clock: for the beat.
          step: returns the newest finished step, for the names of honoured requests.
        """
        self._run_dir = run_dir
        self._attempt = attempt
        self._last_seq = last_seq
        self._owner = owner
        self._clock = clock
        self._step = step
        is_remote = isinstance(run_dir.root, BucketPath)
        self._look_seconds = BUCKET_LOOK_SECONDS if is_remote else LOOK_SECONDS
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._looking_since = math.inf
        self._beat_at = -math.inf
        self._stop_told = False
        self._closed = threading.Event()
        self.has_answered = False
        """Whether storage has answered a whole look."""
        self.wakeup, self._write_end = os.pipe()
        """The first: readable whenever there may be a report."""
        self._thread = threading.Thread(target=self._watch, name="jaxres-lookout", daemon=True)

    def __enter__(self) -> Lookout:
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._write_end, False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(timeout=CLOSE_SECONDS)
        if self._thread.is_alive():
            # It uses the owner's files whenever storage lets it go, if this process still lives.
            self._owner.leave_open()
        else:
            os.close(self.wakeup)
            os.close(self._write_end)

    def reports(self) -> list[Report]:
        """Takes what has been reported since the last time."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
        taken: list[Report] = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._reports.get_nowait())
        return taken

    def silent_seconds(self, *, now: float) -> float:
        """Returns for how long the present look has gone on; storage answers in milliseconds."""
        return max(0.0, now - self._looking_since)

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # All are the door's.
        while True:
            self._looking_since = self._clock.monotonic()
            try:
                goes_on = self._look()
            except Exception as error:  # noqa: BLE001 - a thread has nobody to raise it to.
                self._report(Failed(error))
                goes_on = False
            self._looking_since = math.inf
            self.has_answered = True
            if not goes_on or self._closed.wait(self._look_seconds):
                return

    def _look(self) -> bool:
        """Beats when it is time and looks for requests; False once there is nothing to look for."""
        now = self._clock.monotonic()
        if now - self._beat_at >= beat_seconds(self._run_dir):
            self._beat_at = now
            if not self._still_owns():
                return False
        self._take_requests()
        return True

    def _still_owns(self) -> bool:
        """Looks whether we still own the run, and only then beats: who is fenced writes nothing."""
        try:
            claim, self._last_seq = newer_claim(
                self._run_dir.log, attempt=self._attempt, after=self._last_seq
            )
            if claim is None:
                self._owner.beat()
                return True
        except StorageUnavailable:
            return True  # Not the watcher's to judge; the log fences whoever writes.
        self._report(Overtaken(claim))
        return False

    def _take_requests(self) -> None:
        """Honours the files that a person has put into the run directory."""
        stop, save = self._run_dir.request("stop"), self._run_dir.request("save")
        # Not honoured again and again where they can't be moved.
        if _is_there(stop) and (self._moved(stop) or not self._stop_told):
            self._stop_told = True
            self._report(StopAsked(stop))
        if _is_there(save) and self._moved(save):
            self._report(SaveAsked())

    def _moved(self, request: Place) -> bool:
        """Moves a request into the attempt's folder; says whether that went well."""
        folder = self._run_dir.attempt(self._attempt)
        with contextlib.suppress(TypedEnd, OSError):
            files.move(request, folder / f"{request.name}-{self._step():08d}")
            return True
        return False

    def _report(self, report: Report) -> None:
        self._reports.put(report)
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b"!")


def _is_there(path: Place) -> bool:
    with contextlib.suppress(TypedEnd, OSError):
        if isinstance(path, BucketPath):
            return files.read(path) is not None
        return path.exists()
    return False
