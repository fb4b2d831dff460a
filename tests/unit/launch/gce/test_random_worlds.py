"""Promises of the decisions of `launch gce` over random worlds: any faults in any order.

The decisions and the observer are the real ones; VMs, agents and training are a model
(random_world.py). test_simulated_cloud.py has the whole controller in fewer worlds.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import pytest

from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.controller import new_state
from jaxres.launch.gce.decide import cheaper_option, elastic, reconcile, spares
from jaxres.launch.gce.decide.lost_vms import find_suspects
from jaxres.launch.gce.state import transition_events
from jaxres.launch.gce.state.desired_state import DesiredState, PendingCreate
from jaxres.launch.gce.state.observed_state import (
    AgentReport,
    CreateFailed,
    ObservedState,
    StateObserver,
)
from tests.tiers import campaign_but
from tests.unit.launch.changed_state import value_of
from tests.unit.launch.gce_config import OPTION, config
from tests.unit.launch.random_world import (
    FAR_SECONDS,
    FAULTS,
    FINAL,
    HARMLESS,
    LOSSES,
    NOTICES,
    START_SECONDS,
    STEP_SECONDS,
    FaultKind,
    ModelVm,
    RandomWorld,
)

RESTART_SECONDS = elastic.LEAVE_SECONDS + START_SECONDS
FAULT_SECONDS = 1500.0
"""Faults begin within this time."""
PATIENCE_SECONDS = 2400.0
"""After the last fault a step is committed within this time, or the job has ended. It is less than
the backoff after a quota: only VMs of the job itself use up the quotas and reservations here."""
LONGEST_SECONDS = 48 * 3600.0
REPLACEMENTS = 6
STANDARD = {**OPTION, "kind": "standard", "zones": ["us-east4-a"], "dollars_per_hour": 4.0}
RESERVED = {**OPTION, "kind": "reservation", "zones": ["us-east4-b"], "reservation": "r"}
OPTIONS = ([OPTION, STANDARD], [OPTION], [RESERVED, OPTION], [STANDARD])
EVERLASTING: tuple[FaultKind, ...] = (
    *LOSSES,
    *HARMLESS,
    *("crash", "hang", "failed_boot", "silent_boot", "failed_creation"),
)


@functools.cache
def job(hosts: int | str, options: int, num_spares: int = 0) -> RunConfig:
    return config(
        num_hosts=hosts,
        spares=num_spares,
        capacity_options=OPTIONS[options],
        ready_minutes=5.0,
        repair_minutes=3.0,
        max_backoff_minutes=10,
        stall_minutes=10.0,
        max_replacements_without_commit=REPLACEMENTS,
    )


@dataclass
class ModelLauncher:
    """What a controller does in a cycle, without requests: observes, decides, writes, acts."""

    world: RandomWorld
    _observer: StateObserver = field(default_factory=StateObserver)
    _known: set[str] = field(default_factory=set)
    """Requests of which this launcher knows that the service has them."""
    _observed_at: float = 0.0
    _created_at: float = 0.0

    def __post_init__(self) -> None:
        self._observed_at = self._created_at = self.world.now

    def cycle(self) -> bool:
        """Returns whether the launcher is still there: one that is killed may have acted."""
        world = self.world
        kill, world.kill = world.kill, ""
        if world.is_away("bucket"):
            self._observer.bucket_unavailable()
            return not kill
        before = world.desired
        assert before is not None
        observed = self._observe(before)
        after = reconcile.decide(before, observed, world.config).desired
        check_change(world, before, after, observed)
        if (events := transition_events.to_store(before)) and world.draw.random() < 0.8:
            world.events_stored |= {event.number: event for event in events}
            after = transition_events.without_stored(after, before=events[-1].number + 1)
        if kill == "before the write":
            return False
        if after != before:
            world.write(after)
        if kill != "before acting":
            self._act(after, observed)
        return not kill

    def _observe(self, desired: DesiredState) -> ObservedState:
        world, now = self.world, self.world.now
        reports = world.reports()
        self._observer.update_reports(reports, now=now)
        is_on, log = desired.phase == "running", world.log()
        any_ended = any(
            metadata["state"] == "ended" and metadata["attempt"] == str(desired.attempt.number)
            for name, (_, metadata) in reports.items()
            if name in desired.names
        )
        self._observer.update_progress(
            *(log, desired.attempt.number),
            is_on=is_on,
            any_ended=any_ended,
            since=now - self._observed_at,
            heartbeat=world.heartbeat if is_on else None,
        )
        self._observed_at = now
        wanted = {vm.name: vm.created for vm in desired.all_vms}
        vms = None if world.is_away("service") else world.listed()
        self._observer.update_vms(vms, wanted, now=now)
        creation, not_found, looked_up = None, frozenset[str](), dict[str, str | None]()
        if vms is not None:
            self._observer.update_events(world.events)
            creation = self._result(desired.creation)
            left = {vm.name for vm in desired.deleting} - vms.keys() - world.vms.keys()
            not_found = frozenset(left)
            observer = self._observer
            due = find_suspects(desired.all_vms, observer.silent, vms, observer.events, world.gce)
            names = [vm.name for vm in due]
            looked_up = {n: world.vms[n].status if n in world.vms else None for n in names}
        found = self._observer.snapshot(
            wall=world.wall(),
            creation=creation,
            since_create_seconds=now - self._created_at,
            not_found=not_found,
        )
        boots = world.boots()
        return replace(found, boots=boots, looked_up=looked_up) if boots or looked_up else found

    def _result(self, creation: PendingCreate | None) -> CreateFailed | bool | None:
        found = None if creation is None else self.world.operations.get(creation.request_id)
        if found is None or isinstance(found, CreateFailed):
            return found
        return False if self.world.now < found.done_at else found.error or True

    def _act(self, desired: DesiredState, observed: ObservedState) -> None:
        world = self.world
        if world.is_away("service"):
            return
        creation = reconcile.request_to_send(desired)
        if creation is not None and creation.request_id not in self._known:
            (first, *_) = (vm for vm in desired.all_vms if vm.name in creation.names)
            world.create(creation.request_id, creation.names, first.zone, first.option)
            self._known.add(creation.request_id)
            self._created_at = world.now
        for vm in reconcile.vms_to_delete(desired, observed):
            world.delete(vm.name)


def check_change(
    world: RandomWorld, before: DesiredState, after: DesiredState, observed: ObservedState
) -> None:
    """Checks what holds at each decision."""
    if after == before:
        return
    if (after.reason, after.phase) != (before.reason, before.phase):
        world.note(f"{after.phase} {sorted(after.names)} {after.reason}")
    stages = (*reconcile.STAGES[before.phase], *(reconcile.STAGES["ending"] if after.end else ()))
    may_follow = {before.phase, *(phase for stage in stages for phase in stage.leads_to)}
    assert after.phase in may_follow, f"{before.phase} leads to {after.phase}"
    spent = [reconcile.dollars(state, world.gce, now=observed.now) for state in (before, after)]
    assert spent[1] >= spent[0] - 1e-9, f"costs decrease: {spent}"
    for count in ("attempt", "placement", "next_name", "vm_seconds", "spent_dollars"):
        assert value_of(after, count) >= value_of(before, count), f"{count} decreases"
    check_spares(world, before, after, observed)
    check_cheaper_set(world, before, after, observed)
    gone = before.names - after.names
    assert gone <= {vm.name for vm in after.deleting}, "a VM is forgotten without a deletion"
    is_first = all(vm.option == 0 for vm in after.vms)
    assert is_first or world.was_refused, "a costlier option is used, without a stockout"
    if after.phase not in ("placing", "running") or after.end is not None:
        return
    since = before.capacity.refill_since if not after.vms else None
    if since is not None and observed.now - since >= 60 * world.gce.repair_minutes:
        return  # The zone has no capacity for the others.
    unused = {vm.name: vm.replaces for vm in before.early_vms}
    more = world.gce.most_hosts - len(after.vms)
    left = STEP_SECONDS * (world.steps - observed.log.step)
    is_useless = more > 0 and left * more / world.gce.most_hosts <= RESTART_SECONDS
    waiting = {spare.name for spare in before.spares} if is_useless else set[str]()
    cheaper = {vm.name for vm in spares.of_other_option(before)}
    has_moved = bool(cheaper) and {vm.name for vm in after.vms} == cheaper
    for name in gone & world.vms.keys():
        vm = world.vms[name]
        if name in cheaper or has_moved:
            continue  # Only a complete set is used; see check_cheaper_set.
        if name in waiting and after.phase == "running":
            continue  # It waited to become a host, which would not pay any more.
        if name in unused:
            old = world.vms.get(unused[name])
            assert unused[name] in after.names, "a replacement is deleted, and so is its VM"
            assert (
                old is None
                or old.agent is None
                or observed.log.step >= world.steps
                or not old.is_alive
                or not is_near_notice(old.agent, now=observed.now)
            ), f"{name} is deleted, and {unused[name]} is about to be stopped"
            continue
        assert not lives(vm, world), f"{name} is deleted, and it shows that it lives"
        world.num_faults += vm.is_alive and not vm.has_failed  # No sign of life is a fault, too.


def is_near_notice(report: AgentReport, *, now: float) -> bool:
    """Returns whether the VM of a report is about to be stopped; a maintenance may be far ahead."""
    until = report.notice_until
    return bool(report.notice) and (until is None or until - now < FAR_SECONDS / 2)


def check_spares(
    world: RandomWorld, before: DesiredState, after: DesiredState, observed: ObservedState
) -> None:
    """Checks that spares are no hosts, and that a ready one does not wait beside an empty slot."""
    names = {vm.name for vm in spares.of_job_option(after)}
    lacking = world.gce.most_hosts - len(after.vms) if after.vms else 0
    assert len(names) <= world.gce.spares + lacking, "too many spares"
    allowed = elastic.allowed_counts(world.config, option=0)
    hosts = {host.name for host in after.attempt.hosts}
    assert len(hosts) in (0, world.gce.most_hosts, *allowed), "another number of hosts"
    assert names.isdisjoint(hosts), "a spare is a host"
    assert names.isdisjoint(vm.name for vm in after.vms), "a spare has a slot"
    creations = (before.creation, after.creation)
    if after.phase != "placing" or after.end is not None or creations != (None, None):
        return
    if any(not vm.created for vm in after.vms):
        ready = {vm.name for vm in spares.find_ready(before, observed, world.gce)}
        assert not ready & names, f"{ready & names} wait beside an empty slot"
    world.num_spares_used = max(
        world.num_spares_used, sum(vm.spare_seconds > 0 for vm in after.vms)
    )


def check_cheaper_set(
    world: RandomWorld, before: DesiredState, after: DesiredState, observed: ObservedState
) -> None:
    """Checks VMs of a cheaper option: rarely requested, used all or none, never mixed."""
    were, are = (spares.of_other_option(state) for state in (before, after))
    prices = [option.dollars_per_hour or 0.0 for option in world.gce.capacity_options]
    assert len({(vm.option, vm.zone) for vm in after.vms}) <= 1, "hosts of two zones"
    assert len(are) in (0, world.gce.most_hosts), "a part of a set of cheaper VMs"
    hosts = {host.name for host in after.attempt.hosts}
    assert hosts.isdisjoint(vm.name for vm in are), "they are hosts"
    assert all(prices[vm.option] < prices[after.vms[0].option] for vm in are), "not cheaper"
    if are and not were:
        assert after.phase == "running", "no attempt runs"
        waited = world.now - world.cheaper_set_ended_at
        assert waited >= cheaper_option.FIRST_WAIT_SECONDS - 1e-6, f"requested after {waited} s"
        world.num_cheaper_sets += 1
    if not were or are:
        return
    world.cheaper_set_ended_at = world.now
    names = {vm.name for vm in were}
    if {vm.name for vm in after.vms} == names:
        assert before.phase == "placing", "it moves while an attempt runs"
        ready = spares.find_ready_of(were, observed, world.gce)
        is_alone = not any(vm.created for vm in before.vms)
        assert is_alone or len(ready) == len(were), "it moves to VMs that are not ready"
        return
    assert names <= {vm.name for vm in after.deleting}, "cheaper VMs are left"


def lives(vm: ModelVm, world: RandomWorld) -> bool:
    """Returns whether a VM that nothing has happened to has shown a sign of life lately."""
    if not vm.is_alive or vm.has_failed or vm.agent is None:
        return False
    is_host = world.is_training and vm.attempt  # A spare shows nothing but its reports.
    signs = [vm.reported_at, world.step_at if is_host else -inf]
    return world.now - max(signs) < world.gce.confirm_lost_seconds


def pause(world: RandomWorld) -> float:
    """Returns the seconds until the next cycle: longer ones where nothing is to be measured."""
    desired = world.desired
    assert desired is not None
    if desired.phase == "running" and world.is_training:
        silent = any(vm.stopped_until > world.now for vm in world.vms.values())
        silent |= world.has_near_notice
        return world.draw.uniform(1, 2) if silent or world.is_hung else world.draw.uniform(4, 20)
    waits = [c.until - world.wall() for c in desired.capacity.backoffs if c.until > world.wall()]
    if not desired.vms and not desired.deleting and waits:
        return min(waits) + 1.0
    return world.draw.uniform(1, 2) if desired.phase == "running" else world.draw.uniform(1, 5)


def run(world: RandomWorld) -> None:
    """Runs a job to its end; launchers that are killed are followed by others."""
    world.desired = new_state("jx", "code", "config", now=world.wall(), after=None)
    launcher = ModelLauncher(world)
    trained_at, spent = 0.0, 0.0
    while world.desired.phase != "ended":
        world.advance(world.now + pause(world))
        before = world.step
        if not launcher.cycle():
            world.note("the launcher is killed")
            world.advance(world.now + world.draw.uniform(0, 60))
            launcher = ModelLauncher(world)
        now_spent = reconcile.dollars(world.desired, world.gce, now=world.wall())
        assert now_spent >= spent - 1e-9, "costs decrease"
        spent = now_spent
        if world.step > before or world.always:
            trained_at = world.now
        since = world.now - max(trained_at, world.step_at, world.faults_until)
        assert since < PATIENCE_SECONDS, "it neither trains nor ends"
        assert world.now < LONGEST_SECONDS, "it never ends"
        most = bound(world)
        assert world.num_made <= most, f"{world.num_made} VMs are made, more than {most}"
    check_events(world)
    world.advance(world.now + 600.0)
    assert world.vms == {}, f"left: {sorted(world.vms)}"


def check_events(world: RandomWorld) -> None:
    """Checks that each event is there once, whichever launchers were killed."""
    assert world.desired is not None
    found = world.events_stored | {event.number: event for event in world.desired.events.newest}
    assert sorted(found) == list(range(world.desired.events.count)), "an event is lost"
    kinds = world.kinds = Counter(event.kind for event in found.values())
    number = world.desired.attempt.number
    assert kinds["attempt_started"] == number, "a start is lost or counted twice"
    assert kinds["attempt_ended"] in (number - 1, number), kinds
    assert kinds["job_ended"] == 1, kinds
    results = kinds["vms_created"] + kinds["request_failed"]
    assert results in (kinds["vms_requested"] - 1, kinds["vms_requested"]), kinds


def bound(world: RandomWorld) -> int:
    """Returns the most VMs that the faults so far may have cost.

    A fault costs a VM; where the zone has no other one, it costs all of them.
    """
    hosts = world.gce.most_hosts + world.gce.spares
    beside = world.gce.most_hosts * world.num_cheaper_sets
    if world.always is not None and world.always not in HARMLESS:
        return beside + hosts * (REPLACEMENTS + 2)
    return beside + hosts * (1 + world.num_faults)


def made(seed: int) -> RandomWorld:
    """Returns the world of a seed, with its faults ahead."""
    draw = random.Random(f"faults-{seed}")
    hosts, options = draw.choice([1, 2, 4]), draw.randrange(len(OPTIONS))
    num_spares = random.Random(f"spares-{seed}").choice([0, 1, 2])
    is_elastic = hosts == 4 and random.Random(f"elastic-{seed}").random() < 0.6
    settings = job(f"{1 + seed % 2}..4" if is_elastic else hosts, options, num_spares)
    steps = draw.choice([3, 30, 60])
    world = RandomWorld(f"world-{seed}", settings, steps=10 * steps if is_elastic else steps)
    world.config = world.config.model_copy(
        update={"train": world.config.train.model_copy(update={"steps": world.steps})}
    )
    costly = random.Random(f"costly-{seed}")
    if options == 0 and costly.random() < 0.5:  # The job begins on the second option, and is long.
        world.leave_without_preferred(costly.uniform(60, 1500))
        world.num_faults += 1
        world.steps = 600
        train = world.config.train.model_copy(update={"steps": world.steps})
        world.config = world.config.model_copy(update={"train": train})
    if draw.random() < 0.4:  # Quotas and reservations of exactly what the job needs.
        limit = hosts + random.Random(f"limit-{seed}").choice([0, num_spares])
        world.limits = dict.fromkeys(range(len(OPTIONS[options])), limit)
    if draw.random() < 0.15:
        world.always = draw.choice(EVERLASTING)
        return world
    number = draw.choice([0, 2, 5, 12])
    is_noticed = draw.random() < 0.3
    kinds = (*NOTICES, "stockout", "failed_creation", "crash") if is_noticed else FAULTS
    longest = 400.0 if is_noticed else FAULT_SECONDS  # Most jobs are short.
    for at in sorted(draw.uniform(0, longest) for _ in range(number)):
        kind = draw.choice(kinds)
        world.after(at, lambda kind=kind: world.inject(kind))
        world.faults_until = at + 1500.0  # A stockout takes so long.
    if is_elastic:
        scarce = random.Random(f"scarce-{seed}")
        for at in (scarce.uniform(0, 15.0 * steps) for _ in range(scarce.randint(1, 3))):
            world.after(at, lambda: world.lose_in_a_stockout(scarce))
            world.faults_until = max(world.faults_until, at + 1500.0)
    return world


def check(seed: int) -> RandomWorld:
    """Runs the world of a seed and checks its end."""
    world = made(seed)
    try:
        run(world)
        end = world.desired and world.desired.end
        assert end is not None
        if end.exit == ExitCode.DONE:
            assert world.step >= world.steps, "it is done before the last step"
        else:
            assert world.num_faults or world.always, f"it ends without a fault: {end}"
            allowed = (*FINAL, ExitCode.NO_PROGRESS, ExitCode.UNHEALTHY, ExitCode.FENCED)
            assert end.exit in (*allowed, *OTHER_ENDS), f"{end}"
        if world.always in HARMLESS:
            assert end.exit == ExitCode.DONE, f"{world.always}: {end}"
    except AssertionError as error:
        history = "\n".join(world.seen[-40:])
        raise AssertionError(f"world {seed}: {error}\n{history}") from error
    return world


OTHER_ENDS = (ExitCode.OUT_OF_MEMORY,)


def ends(seeds: Sequence[int]) -> Counter[int | str]:
    """Counts, over the worlds of these seeds, the exit codes and the kinds of recoveries."""
    counts = Counter[int | str]()
    for seed in seeds:
        world = check(seed)
        desired: Any = world.desired
        counts[desired.end.exit] += 1
        counts["spares used"] += world.num_spares_used > 0
        counts.update(dict.fromkeys(("shrunk", "grown", "moved") & world.kinds.keys(), 1))
        counts["cheaper VMs deleted"] += world.num_cheaper_sets > world.kinds["moved"]
    return counts


@pytest.mark.slow
def test_every_job_trains_or_ends_and_no_healthy_vm_is_deleted_in_a_few_worlds() -> None:
    assert ends(range(20))[ExitCode.DONE] > 10


@pytest.mark.slow
@pytest.mark.parametrize("first", campaign_but(range(0, 6000, 100), 0))
def test_every_job_trains_or_ends_and_no_healthy_vm_is_deleted_in_random_worlds(first: int) -> None:
    counts = ends(range(first, first + 100))
    assert counts[ExitCode.DONE] > 50, counts
    if first > 0:  # Another hundred may lack what is rare, such as a job that grows.
        return
    assert counts[ExitCode.NO_PROGRESS] > 2, counts
    rare = ("spares used", "shrunk", "grown", "moved", "cheaper VMs deleted")
    assert all(counts[name] > 2 for name in rare), counts
