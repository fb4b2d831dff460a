"""A simulated run with a true time: attempts that train, save, wait, are killed or crash."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

from jaxres.runlog.events import (
    EVENTS,
    Evaluated,
    GuardWarned,
    PhaseChanged,
    RunEnded,
    RunOpened,
    SaveStarted,
)
from jaxres.runlog.events import TrainingStarted as Began
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.records import AttemptEnded, Body, Commit, Record, Start
from jaxres.runlog.supervisor_events import PreemptionWatchStarted
from tests.unit.runlog.example_records import CLAIM

SAVE_EVERY, EVALUATE_EVERY = 5, 7


class Killed(Exception):
    """The process and its supervisor are gone."""


@dataclass
class SimulatedRun:
    """Writes what a run writes, by clocks that a test sets; `now` is the true time."""

    now: float = 0.0
    wall_offset: float = 1e9
    boot: int = 0
    boot_offset: float = 500.0
    kill_at: float = float("inf")
    records: list[Record] = field(default_factory=list)
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    supervisor_events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    lines: dict[int, list[MetricsLine]] = field(default_factory=dict)
    attempt: int = 0
    began: float = 0.0
    """True time of the first claim."""
    waited: float = 0.0
    own_seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    """Segment and step -> its seconds without the wait for data."""
    step: int = 0
    committed: int = 0

    def spend(self, seconds: float) -> None:
        """Lets time pass; raises Killed if the kill comes first."""
        self.now += seconds
        if self.now >= self.kill_at:
            self.now, self.kill_at = self.kill_at, float("inf")
            raise Killed

    def record(self, body: Body) -> int:
        """Appends a record; returns its number."""
        seq = len(self.records) + 1
        self.records.append(Record(seq, self.attempt, self.now + self.wall_offset, body))
        return seq

    def event(self, kind: type, *, supervisor: bool = False, **fields: Any) -> None:
        """Appends an event of host 0, or of its supervisor."""
        own = self.supervisor_events if supervisor else self.events
        times = {"time": self.now + self.wall_offset, "monotonic": self.now + self.boot_offset}
        own[self.attempt].append(times | {"event": EVENTS.tag(kind)} | fields)

    def phase(self, name: str, seconds: float = 0.0) -> None:
        """Enters a phase and spends time in it."""
        self.event(PhaseChanged, phase=name)
        self.spend(seconds)

    def reboot(self, down_seconds: float) -> None:
        """The machine is down, then another boot begins."""
        self.now += down_seconds
        self.boot += 1
        self.boot_offset = 20.0 - self.now

    def begin(self, *setup: tuple[str, float], claim_seconds: float = 0.5) -> int:
        """Claims the next attempt, up to the begin of its training; returns its start record."""
        self.attempt, self.waited = self.attempt + 1, 0.0
        self.began = self.now if self.attempt == 1 else self.began
        self.events[self.attempt], self.supervisor_events[self.attempt] = [], []
        self.lines[self.attempt] = []
        self.record(dataclasses.replace(CLAIM, attempt=self.attempt, boot_id=f"b{self.boot}"))
        self.spend(claim_seconds)
        self.event(PreemptionWatchStarted, supervisor=True)
        self.spend(claim_seconds)
        self.event(RunOpened)
        for name, seconds in setup:
            self.phase(name, seconds)
        return self.start(self.committed)

    def start(self, step: int) -> int:
        """Records a start at a step."""
        self.step = step
        start = Start(step=step, path=None, dataset="d", computation={}, devices=(4,))
        seq = self.record(start)
        self.event(Began, step=step)
        self.phase("train")
        return seq

    def wait_for_data(self, seconds: float) -> None:
        """The next step waits for its batch, which is part of its `step_seconds`."""
        self.phase("wait for data", seconds)
        self.waited += seconds
        self.phase("train")

    def train(self, seq: int, seconds: float, *, skipped: bool = False) -> None:
        """Trains one step."""
        self.spend(seconds)
        self.step += 1
        self.own_seconds[seq, self.step] = seconds
        self.lines[self.attempt].append(
            MetricsLine(
                seq=seq,
                step=self.step,
                attempt=self.attempt,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=1.0,
                tokens=self.step,
                step_seconds=self.waited + seconds,
                skipped=skipped,
                samples="",
            )
        )
        self.waited = 0.0

    def save(self, seconds: float) -> None:
        """Commits the step."""
        self.phase("save", seconds)
        self.event(SaveStarted, step=self.step)
        self.committed = self.step
        self.record(Commit(step=self.step, path=f"p{self.step}", manifest="m", bytes=1))
        self.phase("train")

    def evaluate(self, seconds: float) -> None:
        """Computes a validation loss."""
        self.phase("evaluate", seconds)
        self.phase("train")
        self.event(Evaluated, step=self.step)

    def end(self, exit: int, *, detection_seconds: float) -> None:
        """Records the end; with exit 0 the worker has reported it."""
        if exit == 0:
            self.event(RunEnded, exit=0)
        self.now += detection_seconds
        self.record_crash(exit)

    def record_crash(self, exit: int) -> None:
        """Records an end of which the worker has reported nothing."""
        self.record(AttemptEnded(exit=exit, reason="why", committed=exit == 0))

    def claim_only(self, exit: int, *, after_seconds: float = 86400.0) -> None:
        """Claims an attempt that trains nothing, as `checkpoints prune` and `adopt` do."""
        self.now += after_seconds
        self.attempt += 1
        self.events[self.attempt], self.supervisor_events[self.attempt] = [], []
        self.lines[self.attempt] = []
        self.record(dataclasses.replace(CLAIM, attempt=self.attempt, boot_id=f"b{self.boot}"))
        self.now += 1.0
        self.record_crash(exit)


def finished_run() -> SimulatedRun:
    """Returns a run that is complete after two steps."""
    run = SimulatedRun()
    seq = run.begin(("compile", 2.0))
    run.train(seq, 1.0)
    run.train(seq, 1.0)
    run.save(0.5)
    run.end(0, detection_seconds=0.25)
    return run


def random_run(seed: int, *, jumps: bool) -> SimulatedRun:
    """Returns a run of several attempts; the last one ends, the others are killed or crash.

    With `jumps` the wall clock is set, forwards and backwards, while an attempt trains, and in gaps
    between attempts of one boot. An event follows in the same attempt, and each attempt has one.
    """
    rng = random.Random(seed)
    run = SimulatedRun(now=rng.uniform(0, 1e5))

    def jump() -> None:
        if jumps and rng.random() < 0.2:
            run.wall_offset += rng.choice((-1, 1)) * 10 ** rng.uniform(-1, 6)

    num_attempts = rng.randint(1, 5)
    for number in range(num_attempts):
        is_last = number == num_attempts - 1
        is_killed = not is_last and rng.random() < 0.6
        if is_killed:
            run.kill_at = run.now + rng.uniform(2.1, 120)
        try:
            setup = [
                (n, rng.uniform(0, 8)) for n in ("import", "data", "build", "compile", "restore")
            ]
            seq = run.begin(*setup, claim_seconds=rng.uniform(0, 1))
            for _ in range(rng.randint(1, 40)):
                jump()
                run.event(GuardWarned, step=run.step, reason="")
                if rng.random() < 0.1:
                    run.wait_for_data(rng.uniform(0, 4))
                run.train(seq, rng.uniform(0.01, 3), skipped=rng.random() < 0.05)
                if run.step % EVALUATE_EVERY == 0:
                    run.evaluate(rng.uniform(0, 5))
                if run.step % SAVE_EVERY == 0:
                    run.save(rng.uniform(0, 2))
            if is_killed:
                raise Killed
            if is_last:
                run.save(rng.uniform(0, 2))
            run.end(0 if is_last else 70, detection_seconds=rng.uniform(0, 30))
        except Killed:
            run.kill_at = float("inf")
        if not is_last:
            if rng.random() < 0.3:
                run.reboot(rng.uniform(0, 300))
            else:
                jump()
                run.now += rng.uniform(0, 300)
    return run
