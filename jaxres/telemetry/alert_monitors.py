"""Monitors that send an incident when commits stall or saves fail, and one when they resume."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxres.clock import Awake, Clock
from jaxres.config.schema.alert_kinds import Kind
from jaxres.faults import RunError, command_line
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Record
from jaxres.storage.threads import make_thread
from jaxres.telemetry import alert_delivery_log
from jaxres.telemetry.heartbeat import News, SaveHealth, SavesFailing, SpeedChanged, TrainingReport
from jaxres.telemetry.incidents import Incident, of_training

CHECK_SECONDS = 30.0
"""Interval between two polls of the run log."""
SLEPT_SECONDS = 30.0
"""Delay of a poll beyond which the process or the storage is assumed to have been suspended."""


def step_of_open(run_dir: RunDir, kind: Kind) -> int | None:
    """Returns the committed step of an incident that an earlier process has sent.

    None: there is none that is not resolved.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(RunError, OSError):
        rows = read_json_lines(run_dir.alerts)
    names = {name for row in rows if isinstance(name := row.get("target"), str)}
    ledgers = (alert_delivery_log.fold(name, rows) for name in names)
    sent = (incident for ledger in ledgers for incident in ledger.unresolved.values())
    return min((incident.step for incident in sent if incident.kind is kind), default=None)


@dataclass
class CommitStall:
    """Detects that no step was committed for too long, and that commits have resumed.

    Commits are counted: after a rollback or a quarantine, new ones have smaller steps.
    """

    limit_seconds: float | None
    """None: never."""
    newest: int
    """Number of the newest commit record; 0: there is none."""
    since: float
    """Time at which the newest commit was seen, without time in suspension."""
    num_stalls: int = 0
    """Number of stalls so far, the present one included: the incident's seq."""
    is_stalled: bool = False

    def check(self, newest: int, *, now: float) -> Kind | None:
        """Returns the kind of incident to send, once per change; `num_stalls` is its seq."""
        if newest > self.newest:
            self.newest, self.since = newest, now
            was_stalled, self.is_stalled = self.is_stalled, False
            return Kind.COMMITS_RESUMED if was_stalled else None
        if self.limit_seconds is None or self.is_stalled or now - self.since < self.limit_seconds:
            return None
        self.is_stalled = True
        self.num_stalls += 1
        return Kind.COMMITS_STALLED


def _newest_commit(records: Sequence[Record]) -> int:
    """Returns the number of the newest commit record in force; 0: there is none."""
    commits = (r.seq for r in run_log.in_force(records) if isinstance(r.body, Commit))
    return max(commits, default=0)


class CommitMonitor:
    """Thread that polls the run log and sends an incident when commits stall or resume."""

    def __init__(
        self, send: Callable[[Incident], None], run_dir: RunDir, limit: float, clock: Clock
    ) -> None:
        self._send = send
        self._run_dir = run_dir
        self._limit = limit
        self._clock = clock
        self._closed = threading.Event()
        self._thread = make_thread("alerts-commits", self._run, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stops the thread without waiting for it: it may be blocked on storage."""
        self._closed.set()

    def _run(self) -> None:
        every = min(CHECK_SECONDS, self._limit / 4)
        run = self._run_dir.root.absolute().name
        stall: CommitStall | None = None
        awake = Awake(self._clock, beyond_seconds=every + SLEPT_SECONDS)
        log, records = run_log.reader_of(self._run_dir.log), list[Record]()
        while not self._closed.is_set():
            with contextlib.suppress(RunError):  # Unreadable storage counts as no commit.
                records = log.read()
            now = awake.now()
            commits = _newest_commit(records)
            if stall is None:
                stalled = step_of_open(self._run_dir, Kind.COMMITS_STALLED)
                has_resumed = stalled is not None and run_log.fold(records).step > stalled
                known = 0 if has_resumed else commits
                stall = CommitStall(self._limit, known, now, is_stalled=stalled is not None)
            kind = stall.check(commits, now=now)
            if kind is not None:
                step, minutes = run_log.fold(records).step, self._limit / 60
                reason = f"no new committed step for {minutes:g} minutes; the newest is {step}"
                self._send(
                    Incident(
                        kind=kind,
                        run=run,
                        attempt=max((record.attempt for record in records), default=0),
                        step=step,
                        reason=reason if kind is Kind.COMMITS_STALLED else "",
                        next=command_line("jaxres status", self._run_dir.root),
                        seq=stall.num_stalls,
                    )
                )
            self._closed.wait(every)


@dataclass
class SaveMonitor:
    """Tracks over all attempts of a supervisor whether a run's saves fail."""

    send: Callable[[Incident], None]
    run: str
    """Name of the run."""
    num_failures: int = 0
    """Number of series of failed saves so far, the present one included: the incident's seq."""
    is_failing: bool | None = None
    """None: not known yet. The first commit is sent, since saves may have failed in an attempt of
    another supervisor; a target that has no alert open of it receives no message."""

    def on_news(self, news: News, *, attempt: int) -> None:
        """Sends the incident that a message from host 0's worker causes, if any."""
        if isinstance(news, SpeedChanged | TrainingReport):
            self.send(of_training(news, run=self.run, attempt=attempt))
        else:
            self.on_save_health(news, attempt=attempt)

    def on_save_health(self, health: SaveHealth, *, attempt: int) -> None:
        """Handles a message from host 0's worker; sends an incident if the state has changed."""
        was_failing, self.is_failing = self.is_failing, isinstance(health, SavesFailing)
        if self.is_failing == was_failing:
            return
        self.num_failures += self.is_failing
        self.send(
            Incident(
                kind=Kind.SAVES_FAILING if self.is_failing else Kind.SAVES_RECOVERED,
                run=self.run,
                attempt=attempt,
                step=health.step,
                reason=health.reason if isinstance(health, SavesFailing) else "",
                next="training continues; every later save is tried" if self.is_failing else "",
                seq=self.num_failures,
            )
        )


@dataclass
class ReplicaLag:
    """Measures for how long the oldest missing step is missing in a replica. Pure."""

    limit_seconds: float | None
    """None: never too long."""
    waiting: dict[int, float] = field(default_factory=dict)
    """Number of each missing commit record -> time at which it was first seen."""
    series: int = 0
    """Number of times that the limit was exceeded, the present one included."""
    is_behind: bool = False

    def check(self, commits: Iterable[int], *, replicated: int, now: float) -> Kind | None:
        """Returns the kind of incident to send, once per change.

        Args:
          commits: numbers of the commit records that were read since the last call.
          replicated: number of records that the replica has.
          now: time without suspensions, in seconds.
        """
        self.waiting |= dict.fromkeys(commits, now)
        self.waiting = {seq: since for seq, since in self.waiting.items() if seq > replicated}
        if not self.waiting:
            was_behind, self.is_behind = self.is_behind, False
            return Kind.REPLICA_CAUGHT_UP if was_behind else None
        if self.limit_seconds is None or self.is_behind or self.seconds(now) < self.limit_seconds:
            return None
        self.is_behind = True
        self.series += 1
        return Kind.REPLICA_BEHIND

    def seconds(self, now: float) -> float:
        """Returns the lag; 0 if nothing is missing."""
        return now - min(self.waiting.values(), default=now)
