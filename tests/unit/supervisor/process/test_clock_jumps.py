"""The wall clock may jump by an hour, either way, at any moment: all is decided as without."""

from __future__ import annotations

import random
import socket

import pytest

from jaxres.clock import Awake
from jaxres.cluster.connection import Connection
from jaxres.cluster.messages import Disconnected, Heartbeat, encode
from jaxres.cluster.peer_connections import PeerLinks
from jaxres.config.schema.alert_kinds import Kind
from jaxres.config.schema.supervision import DeadlinesSection, LaunchSection, RestartSection
from jaxres.faults import Fenced
from jaxres.runlog.attempt_result import AttemptOutcome, AttemptResult
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import restart_policy, root_cause, run_lock
from jaxres.supervisor.process.watchdog import ProgressTracker, overdue_seconds
from jaxres.supervisor.restart_policy import Restart, RestartPolicy
from jaxres.supervisor.root_cause import WorkerExit
from jaxres.supervisor.run_lock import RunLock
from jaxres.telemetry.alert_monitors import CommitStall
from jaxres.telemetry.heartbeat import PhaseEntered, StepFinished
from tests.tiers import slow_but

HOUR = 3600.0
TICKS = 400
LIMITS = DeadlinesSection(step_seconds=5, compile_seconds=9, start_seconds=9)
RESTARTS = RestartSection(max_attempts_without_commit=50, jitter=0.0)


class SimClock:
    """A clock that moves on sleep, and whose wall time jumps when it is told to."""

    def __init__(self, jumps: dict[float, float]) -> None:
        self.now = 0.0
        self.jumps = jumps
        """Seconds by the moment of the jump."""

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.7e9 + self.now + sum(by for at, by in self.jumps.items() if at <= self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class HeartbeatClock(SimClock):
    """A clock on which another process writes a heartbeat at each sleep."""

    other: RunLock | None = None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.other is not None:
            self.other.heartbeat()


def supervised(seed: int, jumps: dict[float, float]) -> list[object]:
    """Plays a supervisor over attempts, hangs, falls and sleeps; returns all that was decided."""
    chance, clock = random.Random(seed), SimClock(jumps)
    launch = LaunchSection(max_hours=0.5)
    policy = RestartPolicy(RESTARTS, launch, num_hosts=(1, 2), began=clock.monotonic(), seed=seed)
    awake, commits = Awake(clock), CommitStall(60.0, newest=0, since=0.0)
    watch, history = ProgressTracker(last_progress=clock.monotonic()), list[AttemptOutcome[int]]()
    step = committed = before = 0
    decided: list[object] = []
    for _ in range(TICKS):
        clock.sleep(chance.choice([0.25, 0.5, 1.0, 1.9, 1.9, 40.0]))
        if slept := awake.slept():
            watch = watch.extend(slept)
        now = clock.monotonic()
        if chance.random() < 0.5:
            step += 1
            watch = watch.on_status(StepFinished(step, 1.0), now=now)
        elif chance.random() < 0.1:
            watch = watch.on_status(PhaseEntered("train"), now=now)
        committed = step if chance.random() < 0.05 else committed
        decided.append(commits.check(committed, now=awake.now()))
        late = overdue_seconds(watch, LIMITS, now=now)
        decided.append(late > 0)
        fell = WorkerExit(AttemptResult(137, "killed"), now) if chance.random() < 0.1 else None
        if late > 0 or fell is not None:
            decided.append(root_cause.decision_time([fell, None], settle_seconds=30.0) - now)
            history.append(
                AttemptOutcome(137 if fell else 80, "", before, committed, chance.randint(0, 1))
            )
            found = restart_policy.decide(history, clock.monotonic(), policy)
            decided.append(found)
            if not isinstance(found, Restart):
                return decided
            clock.sleep(found.after_seconds)
            awake, watch, before = (
                Awake(clock),
                ProgressTracker(last_progress=clock.monotonic()),
                committed,
            )
    return decided


def starters(run_dir: RunDir, jumps: dict[float, float]) -> list[object]:
    """Starts processes while the lock holder writes heartbeats, and after it has stopped."""
    clock = HeartbeatClock(jumps)
    decided: list[object] = []
    for is_alive in (True, False, True):
        clock.other = None
        with RunLock(run_dir, clock=clock) as first:
            clock.other = first if is_alive else None
            for _ in range(3):
                began = clock.monotonic()
                try:
                    with RunLock(run_dir, clock=clock):
                        decided.append("owns")
                except Fenced:
                    decided.append("refused")
                moves = run_lock.heartbeat_advances(run_dir, clock=clock, seconds=3.0)
                decided.append((moves, round(clock.monotonic() - began, 3)))
    return decided


def silences(jumps: dict[float, float]) -> list[object]:
    """Lets another supervisor send, be silent, and this process sleep."""
    clock, decided = SimClock(jumps), list[object]()
    ours, theirs = socket.socketpair()
    with theirs, PeerLinks(clock=clock, silence_seconds=10.0) as peers:
        peers.add(1, "node1", Connection(ours, None))
        for tick in range(60):
            clock.sleep(300.0 if tick == 20 else 1.0)
            if tick < 30:
                theirs.sendall(encode(Heartbeat(tick, "train")))
            decided.append([type(word) for _, word in peers.receive()])
    assert [Disconnected] in decided
    assert decided.index([Disconnected]) == 40
    return decided


JUMPS = [{at: by * HOUR} for at in (0.0, 1.5, 7.0, 9.0, 11.0, 13.0, 99.0) for by in (1, -1)]
JUMPS.append({1.0: HOUR, 2.0: -2 * HOUR, 50.0: HOUR})


@pytest.mark.parametrize("seed", slow_but(range(20), 0, 1))
def test_clock_jumps_change_no_decision_on_crashes_hangs_or_restarts(seed: int) -> None:
    calm = supervised(seed, {})
    kinds = {type(one) for one in calm}
    assert {bool, Kind, Restart} <= kinds, "nothing happened"
    for jumps in JUMPS:
        assert supervised(seed, jumps) == calm


def test_clock_jumps_do_not_change_the_lock_holder(tmp_path) -> None:
    calm = starters(RunDir(tmp_path / "calm"), {})
    assert {"owns", "refused"} <= set(calm)
    for number, jumps in enumerate(JUMPS):
        assert starters(RunDir(tmp_path / str(number)), jumps) == calm


def test_clock_jumps_do_not_change_which_supervisor_is_lost() -> None:
    calm = silences({})
    for jumps in JUMPS:
        assert silences(jumps) == calm


def test_the_simulated_clock_jumps() -> None:
    clock = SimClock({1.0: HOUR, 2.0: -2 * HOUR})
    walls = []
    for _ in range(3):
        walls.append(clock.wall() - 1.7e9)
        clock.sleep(1.0)
    assert walls == [0.0, HOUR + 1, -HOUR + 2]
