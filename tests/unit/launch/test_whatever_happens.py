"""Promises that hold whatever happens to leaders, VMs, the bucket and the service, in any order.

The leaders are the real ones; the world that they meet is simulated (world.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from jaxres.config import RunConfig
from jaxres.faults import Exit, Fenced, StorageUnavailable
from jaxres.launch import reconcile
from jaxres.launch.controller import Leader, fresh
from jaxres.launch.desired_state import Intent, Next, Record, Vm
from jaxres.launch.lease import Lease
from jaxres.launch.observed_state import Seen
from jaxres.launch.paths import Places
from jaxres.storage.path import BucketPath
from tests.unit.launch.gce_config import RUNG, config
from tests.unit.launch.world import Chances, Killed, Service, World

LONGEST = 6 * 3600.0
"""Of a job, in which troubles end after half an hour."""
LATER = 1200.0
"""In which whatever is on its way has landed."""
DECIDE = reconcile.decide
ENDS = (Exit.DONE, Exit.STOPPED, Exit.NO_PROGRESS, Exit.UNHEALTHY, Exit.OUT_OF_MEMORY, Exit.CONFIG)


def job(seed: int, *, steps: int, hosts: int) -> RunConfig:
    draw = random.Random(f"job-{seed}")
    ladder = [RUNG, {**RUNG, "kind": "standard", "zones": ["us-east4-a"], "dollars_per_hour": 4.0}]
    limits = draw.choice([{}, {}, {"max_hours": 0.2}, {"max_dollars": 1.0}])
    made = config(
        launch=limits,
        num_hosts=hosts,
        ladder=ladder,
        lease_seconds=10.0,
        ready_minutes=5.0,
        repair_minutes=3.0,
        max_cool_minutes=10,
        stall_minutes=30.0,
    )
    return made.model_copy(update={"train": made.train.model_copy(update={"steps": steps})})


class Watch:
    """What has to hold at every change of the intent, and at the end."""

    def __init__(self, world: World, config: RunConfig) -> None:
        self.world, self.config = world, config
        self.gce = config.launch.gce
        assert self.gce is not None
        self.ever: set[str] = set()
        self.words: list[str] = []

    def told(self) -> str:
        return f"seed {self.world.seed}, {self.world.interrupted}:\n" + "\n".join(self.words[-60:])

    def tell(self, words: str) -> None:
        self.words.append(f"{self.world.now:7.1f} {words}")

    def hold(self, before: Intent | None, after: Intent) -> None:
        now = self.world.wall()
        self.tell(f"#{after.serial} {after.phase} {[v.name[-4:] for v in after.vms]} {after.why}")
        new = after.names - (frozenset() if before is None else before.names)
        assert not new & self.ever, f"names are used twice: {new & self.ever}\n{self.told()}"
        self.ever |= after.names
        if before is None:
            return
        for count in ("serial", "epoch", "attempt", "placement", "next_name", "vm_seconds"):
            assert getattr(after, count) >= getattr(before, count), f"{count} falls\n{self.told()}"
        doomed = {vm.name for vm in after.doomed}
        gone = [vm for vm in before.vms if vm.name not in after.names]
        assert {vm.name for vm in gone} <= doomed, f"forgotten without an end\n{self.told()}"
        if after.phase in ("placing", "running"):
            self._hold_no_sound_vm_is_given_up(before, after, gone, now)

    def decide(self, intent: Intent, seen: Seen, config: RunConfig) -> Next:
        """Decides, and holds that what is spent stays spent."""
        found = DECIDE(intent, seen, config)
        assert self.gce is not None
        spent = [reconcile.dollars(i, self.gce, now=seen.now) for i in (intent, found.intent)]
        assert spent[1] >= spent[0] - 1e-9, f"money comes back: {spent}\n{self.told()}"
        return found

    def _hold_no_sound_vm_is_given_up(
        self, before: Intent, after: Intent, gone: list[Vm], now: float
    ) -> None:
        assert self.gce is not None
        sound = {vm.name for vm in gone if vm.made} - self.world.excused
        if not after.vms and before.refill_since is not None:
            patience = 60 * self.gce.repair_minutes
            assert not sound or now - before.refill_since >= patience, f"{sound}\n{self.told()}"
        else:
            assert not sound, f"{sound} were sound\n{self.told()}"


def lead(world: World, config: RunConfig, tell: Callable[[str], None]) -> None:
    """One `up`: waits for the lease, then leads to the end."""
    places = world.places
    lease = Lease(places.lease, holder="", seconds=10.0, now=world.monotonic)
    record = Record(places.intent)
    while not lease.acquire():
        if (intent := world.intent()) is not None and intent.phase == "ended":
            return
        world.sleep(1.0)
    intent = record.read()
    if intent is None:
        intent = fresh(places.label, "code", "config", now=world.wall(), after=None)
    record.write(intent, epoch=lease.epoch)
    service = Service(world)
    words = (places, config, service, lease, record, world, tell)
    Leader(*words, awake_or_not=world.monotonic).lead()  # pyright: ignore[reportArgumentType]


def leads(world: World, config: RunConfig, watch: Watch, until: float) -> None:
    """Leaders follow one another until the job has ended, or until then."""
    before, world.deadline = world.deadline, until
    try:
        while (intent := world.intent()) is None or intent.phase != "ended":
            assert world.now < LONGEST, f"it never ends\n{watch.told()}"
            try:
                watch.tell("a leader")
                lead(world, config, watch.tell)
            except Killed:
                watch.tell("killed")
                if world.now > until:
                    return
                world.let_pass(world.draw.uniform(0, 20))
            except (Fenced, StorageUnavailable) as left:
                watch.tell(f"left: {left}")
                world.let_pass(2.0)
    finally:
        world.deadline = before


def happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[World, Watch]:
    """Lets one job run in one world, to its end and some time beyond."""
    draw = random.Random(f"world-{seed}")
    steps, hosts = draw.choice([5, 40, 100]), draw.choice([1, 2, 4])
    chances = draw.choice([Chances(), Chances(seconds=300.0, loss=0.1), Chances(crash=0.0)])
    settings = job(seed, steps=steps, hosts=hosts)
    world = World(seed, steps, Places(BucketPath("bkt", f"run-{seed}")), chances)
    watch = Watch(world, settings)
    world.hold = watch.hold

    def other(until: float) -> None:
        watch.tell(f"paused until {until:.0f}")
        leads(world, settings, watch, until)
        world.let_pass(max(0.0, until - world.now) if until < LONGEST else 0.0)
        watch.tell("goes on")

    world.other = other
    if draw.random() < 0.2:
        asked = draw.choice([world.places.stop, world.places.down])
        world.after(draw.uniform(1, 600), lambda: world.put(asked.key, b""))
    world.patch(monkeypatch)
    monkeypatch.setattr(reconcile, "decide", watch.decide)
    leads(world, settings, watch, LONGEST)
    return world, watch


def holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> Exit:
    world, watch = happens(seed, monkeypatch)
    intent = world.intent()
    assert intent is not None
    assert intent.end is not None
    assert intent.end.exit in ENDS, f"{intent.end}\n{watch.told()}"
    if intent.end.exit == Exit.DONE:
        assert world.step >= world.steps, watch.told()
    world.let_pass(LATER)
    assert world.machines == {}, f"left: {sorted(world.machines)}\n{watch.told()}"
    asked = {name: len(requests) for name, requests in world.created.items()}
    assert set(asked.values()) <= {1}, f"asked for by several requests: {asked}\n{watch.told()}"
    return Exit(intent.end.exit)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_vm_is_left_or_lost_whatever_happens(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [holds(seed, monkeypatch) for seed in range(first, first + 20)]
    assert Exit.DONE in ends


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_no_vm_is_left_or_lost_in_a_long_campaign(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + 250):
        holds(seed, monkeypatch)
