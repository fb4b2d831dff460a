"""Promises under random faults of leaders, VMs, the bucket and the service, in any order.

The controllers are the real ones; their environment is simulated (simulated_cloud.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import Fenced, StorageUnavailable
from jaxres.launch.gce.controller import Controller, new_state
from jaxres.launch.gce.decide import reconcile
from jaxres.launch.gce.state.desired_state import DesiredState, Transition, VmSpec
from jaxres.launch.gce.state.lease import Lease
from jaxres.launch.gce.state.observed_state import ObservedState
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.runlog import launch_events
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from tests.tiers import campaign, slow_but
from tests.unit.launch.changed_state import value_of
from tests.unit.launch.gce_config import OPTION, config
from tests.unit.launch.simulated_cloud import SimulatedCloud, SimulatedCompute
from tests.unit.launch.simulated_vms import FaultRates, Killed

LONGEST = 6 * 3600.0
"""Longest job; faults end after half an hour."""
LATER = 1200.0
"""Time after which every pending creation has finished."""
OUTAGE = 90.0
"""Longest outage of the bucket; each begins before the faults end."""
DECIDE = reconcile.decide
ENDS = (
    ExitCode.DONE,
    ExitCode.STOPPED,
    ExitCode.NO_PROGRESS,
    ExitCode.UNHEALTHY,
    ExitCode.OUT_OF_MEMORY,
    ExitCode.CONFIG,
)


def job(seed: int, *, steps: int, hosts: int) -> RunConfig:
    draw = random.Random(f"job-{seed}")
    standard = {**OPTION, "kind": "standard", "zones": ["us-east4-a"], "dollars_per_hour": 4.0}
    limits = draw.choice([{}, {}, {"max_hours": 0.2}, {"max_dollars": 1.0}])
    queue = {**OPTION, "kind": "flex_start", "wait_minutes": 3}
    is_queue = random.Random(f"queue-{seed}").random() < 0.4
    made = config(
        launch=limits,
        num_hosts=hosts,
        capacity_options=[queue if is_queue else OPTION, standard],
        lease_seconds=10.0,
        ready_minutes=5.0,
        repair_minutes=3.0,
        max_backoff_minutes=10,
        stall_minutes=30.0,
    )
    return made.model_copy(update={"train": made.train.model_copy(update={"steps": steps})})


class Checker:
    """Checks what must hold at every change of the desired state and at the end."""

    def __init__(self, cloud: SimulatedCloud, config: RunConfig) -> None:
        self.cloud, self.config = cloud, config
        self.gce = config.launch.gce
        assert self.gce is not None
        self.ever: set[str] = set()
        self.lines: list[str] = []

    def history(self) -> str:
        return f"seed {self.cloud.seed}, {self.cloud.interrupted}:\n" + "\n".join(self.lines[-60:])

    def print_line(self, line: str) -> None:
        self.lines.append(f"{self.cloud.now:7.1f} {line}")

    def check(self, before: DesiredState | None, after: DesiredState) -> None:
        now = self.cloud.wall()
        self.print_line(
            f"#{after.serial} {after.phase} {[v.name[-4:] for v in after.vms]} {after.reason}"
        )
        new = after.names - (frozenset() if before is None else before.names)
        assert not new & self.ever, f"names are used twice: {new & self.ever}\n{self.history()}"
        self.ever |= after.names
        if before is None:
            return
        for count in ("serial", "epoch", "attempt", "placement", "next_name", "vm_seconds"):
            assert value_of(after, count) >= value_of(before, count), (
                f"{count} decreases\n{self.history()}"
            )
        deleting = {vm.name for vm in after.deleting}
        early = [vm for vm in before.early_vms if vm.name not in after.names]
        assert {vm.name for vm in early} <= deleting, f"an early one is left\n{self.history()}"
        gone = [vm for vm in before.vms if vm.name not in after.names]
        assert {vm.name for vm in gone} <= deleting, (
            f"forgotten without a deletion\n{self.history()}"
        )
        if after.phase in ("placing", "running"):
            self._check_no_healthy_vm_is_released(before, after, gone, now)

    def decide(
        self, desired: DesiredState, observed: ObservedState, config: RunConfig
    ) -> Transition:
        """Decides, and checks that costs do not decrease."""
        found = DECIDE(desired, observed, config)
        assert self.gce is not None
        spent = [reconcile.dollars(i, self.gce, now=observed.now) for i in (desired, found.desired)]
        assert spent[1] >= spent[0] - 1e-9, f"costs decrease: {spent}\n{self.history()}"
        return found

    def _check_no_healthy_vm_is_released(
        self, before: DesiredState, after: DesiredState, gone: list[VmSpec], now: float
    ) -> None:
        assert self.gce is not None
        healthy = {vm.name for vm in gone if vm.created} - self.cloud.excused
        since = before.capacity.refill_since
        if not after.vms and since is not None:
            limit = 60 * self.gce.repair_minutes
            assert not healthy or now - since >= limit, f"{healthy}\n{self.history()}"
        else:
            assert not healthy, f"{healthy} were healthy\n{self.history()}"


def lead(cloud: SimulatedCloud, config: RunConfig, console: Callable[[str], None]) -> None:
    """Runs one `up`: waits for the lease, then leads to the end."""
    if (leader := leader_of(cloud, config, console)) is not None:
        leader.run()


def leader_of(
    cloud: SimulatedCloud, config: RunConfig, console: Callable[[str], None]
) -> Controller | None:
    """Returns a controller that holds the lease; None: the job has ended meanwhile."""
    paths, service = cloud.paths, SimulatedCompute(cloud)
    lease = Lease(paths.lease, holder="", seconds=10.0, now=cloud.monotonic, console=console)
    record = StateObject(paths.desired_state)
    epoch = 0 if (desired := record.read_valid()) is None else desired.epoch
    may_be_led = desired is not None or bool(record.damage or cloud.vms)
    while not lease.acquire(after_epoch=epoch, may_be_led=may_be_led):
        if (desired := cloud.desired()) is not None and desired.phase == "ended":
            return None
        cloud.sleep(1.0)
    desired = record.read_valid()
    if record.damage:
        record.set_aside()
    if desired is None:
        vms, label = list(cloud.vms_listed().values()), paths.label
        run_id = f"{len(cloud.damages):04d}{cloud.draw.randrange(10**6):06d}"
        desired = new_state(
            label, "code", "config", now=cloud.wall(), after=None, run_id=run_id, orphans=vms
        )
    record.write(desired, epoch=lease.epoch, held=lease.held)
    arguments = (paths, config, service, lease, record, cloud, console)
    return Controller(*arguments, boottime=cloud.monotonic)  # pyright: ignore[reportArgumentType]


def run_leaders(cloud: SimulatedCloud, config: RunConfig, checker: Checker, until: float) -> None:
    """Runs leaders one after another until the job has ended or `until` is reached."""
    before, cloud.deadline = cloud.deadline, until
    try:
        while (desired := cloud.desired()) is None or desired.phase != "ended":
            assert cloud.now < LONGEST, f"it never ends\n{checker.history()}"
            try:
                checker.print_line("a leader")
                lead(cloud, config, checker.print_line)
            except Killed:
                checker.print_line("killed")
                if cloud.now > until:
                    return
                cloud.advance(cloud.draw.uniform(0, 20))
            except (Fenced, StorageUnavailable) as error:
                checker.print_line(f"exited: {error}")
                cloud.advance(2.0)
    finally:
        cloud.deadline = before


def simulate(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[SimulatedCloud, Checker]:
    """Runs one job in one simulated cloud to its end."""
    draw = random.Random(f"world-{seed}")
    steps, hosts = draw.choice([5, 40, 100]), draw.choice([1, 2, 4])
    rates = draw.choice([FaultRates(), FaultRates(seconds=300.0, loss=0.1), FaultRates(crash=0.0)])
    settings = job(seed, steps=steps, hosts=hosts)
    cloud = SimulatedCloud(seed, steps, LaunchPaths(GcsPath("bkt", f"run-{seed}")), rates)
    checker = Checker(cloud, settings)
    cloud.check = checker.check

    def other(until: float) -> None:
        checker.print_line(f"paused until {until:.0f}")
        run_leaders(cloud, settings, checker, until)
        cloud.advance(max(0.0, until - cloud.now) if until < LONGEST else 0.0)
        checker.print_line("resumes")

    cloud.other = other
    if draw.random() < 0.2:
        request = draw.choice([cloud.paths.stop, cloud.paths.down])
        cloud.after(draw.uniform(1, 600), lambda: cloud.put(request.key, b""))
    cloud.patch(monkeypatch)
    monkeypatch.setattr(reconcile, "decide", checker.decide)
    run_leaders(cloud, settings, checker, LONGEST)
    return cloud, checker


def checked_exit(seed: int, monkeypatch: pytest.MonkeyPatch) -> ExitCode:
    cloud, checker = simulate(seed, monkeypatch)
    desired = cloud.desired()
    assert desired is not None
    assert desired.end is not None
    assert desired.end.exit in ENDS, f"{desired.end}\n{checker.history()}"
    if desired.end.exit == ExitCode.DONE:
        assert cloud.step >= cloud.steps, checker.history()
    cloud.advance(LATER)
    assert cloud.vms == {}, f"left: {sorted(cloud.vms)}\n{checker.history()}"
    assert cloud.groups == {}, f"left: {sorted(cloud.groups)}\n{checker.history()}"
    counts = {name: len(requests) for name, requests in cloud.created.items()}
    assert set(counts.values()) <= {1}, f"requested several times: {counts}\n{checker.history()}"
    cloud.other = None  # What follows is no leader, which could be killed.
    cloud.advance(max(0.0, cloud.rates.seconds + OUTAGE - cloud.now))
    events = launch_events.read(RunDir(cloud.paths.run))
    numbers = sorted(event.number for event in events)
    assert numbers == list(range(desired.events.count)), f"events are lost\n{checker.history()}"
    starts = [event for event in events if event.kind == "attempt_started"]
    assert len(starts) == desired.attempt.number, f"starts are lost or doubled\n{checker.history()}"
    return ExitCode(desired.end.exit)


@pytest.mark.slow
@pytest.mark.parametrize("first", [*slow_but([0, 3, 6, 9], 0), *campaign(range(12, 60, 3))])
def test_no_vm_is_left_or_lost_under_random_faults(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [checked_exit(seed, monkeypatch) for seed in range(first, first + 3)]
    assert ExitCode.DONE in ends


def check_under_damage(seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs one job whose lease and desired state are damaged; returns how often they were.

    A creation whose state was lost may end after the job; only its own agent knows its VM then.
    """
    settings = job(seed, steps=40, hosts=2)
    cloud = SimulatedCloud(seed, 40, LaunchPaths(GcsPath("damaged", f"run-{seed}")))
    checker = Checker(cloud, settings)
    draw = random.Random(f"damage-{seed}")
    for _ in range(6):
        cloud.after(draw.uniform(5, 900), cloud.damage)

    def other(until: float) -> None:
        run_leaders(cloud, settings, checker, until)
        cloud.advance(max(0.0, until - cloud.now) if until < LONGEST else 0.0)

    cloud.other = other
    cloud.patch(monkeypatch)
    run_leaders(cloud, settings, checker, LONGEST)
    cloud.advance(LATER)
    left = {name for name, vm in cloud.vms.items() if vm.status != "TERMINATED"}
    assert not left, f"left: {sorted(left)}\n{cloud.damages}\n{checker.history()}"
    if not any("desired_state.json is an older copy" in line for line in cloud.damages):
        counts = {name: len(requests) for name, requests in cloud.created.items()}
        assert set(counts.values()) <= {1}, f"{counts}\n{cloud.damages}\n{checker.history()}"
    return len(cloud.damages)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param(0, 6, marks=pytest.mark.slow),
        *(pytest.param(n, n + 50, marks=pytest.mark.campaign) for n in range(6, 206, 50)),
    ],
)
def test_no_vm_runs_on_and_no_launcher_is_locked_out_whatever_the_launch_state(
    first: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease and the desired state are deleted, made unreadable, or replaced by older copies."""
    assert sum(check_under_damage(seed, monkeypatch) for seed in range(first, last)) > last - first


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_no_vm_is_left_or_lost_in_a_long_campaign(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + 250):
        checked_exit(seed, monkeypatch)
