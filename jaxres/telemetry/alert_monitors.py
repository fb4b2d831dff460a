"""Watches the run log, and says when no commit came for too long, and when one comes again.

Says once that storage refuses a run's saves, and once that it takes them again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxres.clock import Awake, Clock
from jaxres.faults import TypedEnd
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Record
from jaxres.telemetry.heartbeat import SaveNews, SavesRefused
from jaxres.telemetry.incidents import Incident, Kind

LOOK_SECONDS = 30.0
"""Between looks for a new commit."""
SLEPT_SECONDS = 30.0
"""A look that comes by so much too late was held up: the process or storage was asleep."""


def committed_step(records: Iterable[Record]) -> int:
    """Returns the newest step that records commit; 0 if none does."""
    return max((r.body.step for r in records if isinstance(r.body, Commit)), default=0)


@dataclass
class CommitWatch:
    """Says when no step was committed for too long, and when there is one again."""

    limit_seconds: float | None
    """None: never."""
    step: int
    since: float
    """When the newest commit was seen, by the time that the watcher was awake."""
    times_told: int = 0
    """Of the present silence or, while there is none, of earlier ones too: the incident's seq."""
    is_silent: bool = False

    def look(self, step: int, *, now: float) -> Kind | None:
        """Returns what is to be told, once each; `times_told` is its seq."""
        if step > self.step:
            self.step, self.since = step, now
            was_silent, self.is_silent = self.is_silent, False
            return "commits_again" if was_silent else None
        if self.limit_seconds is None or self.is_silent or now - self.since < self.limit_seconds:
            return None
        self.is_silent = True
        self.times_told += 1
        return "no_commit_for_too_long"


class Commits:
    """Watches the log for commits in a thread of its own, and tells when there is none."""

    def __init__(
        self, tell: Callable[[Incident], None], run_dir: RunDir, limit: float, clock: Clock
    ) -> None:
        self._tell = tell
        self._run_dir = run_dir
        self._limit = limit
        self._clock = clock
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxres-alerts-commits", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Lets the thread end whenever storage lets it; nobody waits for it."""
        self._closed.set()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        every = min(LOOK_SECONDS, self._limit / 4)
        run = self._run_dir.root.absolute().name
        watch: CommitWatch | None = None
        awake = Awake(self._clock, beyond_seconds=every + SLEPT_SECONDS)
        last_seq, attempt = 0, 0
        while not self._closed.is_set():
            records: list[Record] = []
            with contextlib.suppress(TypedEnd):  # Storage is not ours to judge; silence counts.
                records = run_log.read_after(self._run_dir.log, last_seq)
            now = awake.now()
            last_seq += len(records)
            attempt = max([attempt, *(record.attempt for record in records)])
            step = committed_step(records)
            if watch is None:
                watch = CommitWatch(self._limit, step, now)
            step = max(watch.step, step)
            kind = watch.look(step, now=now)
            if kind is not None:
                minutes = self._limit / 60
                reason = f"no new committed step for {minutes:g} minutes; the newest is {step}"
                self._tell(
                    Incident(
                        kind=kind,
                        run=run,
                        attempt=attempt,
                        step=step,
                        reason=reason if kind == "no_commit_for_too_long" else "",
                        next=f"jaxres status {self._run_dir.root}",
                        seq=watch.times_told,
                    )
                )
            self._closed.wait(every)


@dataclass
class Saves:
    """What is known of a run's saves over all attempts of a supervisor."""

    tell: Callable[[Incident], None]
    run: str
    """Name of the run."""
    times_refused: int = 0
    """Of the present row or, while there is none, of earlier ones too: the incident's seq."""
    is_refused: bool = False

    def heard(self, news: SaveNews, *, attempt: int) -> None:
        """Takes what an attempt's lead says; tells what has changed."""
        was_refused, self.is_refused = self.is_refused, isinstance(news, SavesRefused)
        if self.is_refused == was_refused:
            return
        self.times_refused += self.is_refused
        self.tell(
            Incident(
                kind="saves_refused" if self.is_refused else "saves_again",
                run=self.run,
                attempt=attempt,
                step=news.step,
                reason=news.reason if isinstance(news, SavesRefused) else "",
                next="training goes on, and every save is tried" if self.is_refused else "",
                seq=self.times_refused,
            )
        )
