"""Moves a job back to a cheaper capacity option while it trains, if that pays. Pure.

After a stockout a job trains on a costlier option. While an attempt runs, a complete set of VMs of
a cheaper option is requested beside it: spares of another option, which take no slot of a lost VM
and for which no attempt waits. Once all are ready, the attempt saves and ends after its next
commit, and the next one runs on them. The old VMs are deleted then.
"""

from __future__ import annotations

from dataclasses import replace

from jaxres.config import RunConfig
from jaxres.config.schema.gce import CapacityOption, GceSection
from jaxres.launch.gce.decide import beside_attempt, elastic, lost_vms, provisioning, spares
from jaxres.launch.gce.state import capacity_options, spending
from jaxres.launch.gce.state.capacity_options import ZoneChoice
from jaxres.launch.gce.state.desired_state import DesiredState, Transition, VmSpec
from jaxres.launch.gce.state.observed_state import CreateFailed, ObservedState

MOVE_FACTOR, KEEP_FACTOR = 2.0, 1.0
"""VMs are requested, and the attempt is ended for them, if the move saves at least this many times
its costs; VMs that exist are kept while it does by the lower one."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 600.0, 4 * 3600.0
"""Wait before the next request after one was refused, its VMs were deleted, or the job has moved;
doubled each time, and its longest value. Once it has passed by the longest one without a request,
the next wait is the first one again."""
MOVED = "left for cheaper ones"
"""Kind of the VMs that a move deletes, in the count of replacements."""


def find_site(desired: DesiredState, gce: GceSection, *, now: float) -> ZoneChoice | None:
    """Returns the first zone that is not left out of an option to which the job may return.

    `now`: seconds since the epoch.
    """
    skipped = {(one.option, one.zone) for one in desired.capacity.backoffs if one.until > now}
    options = gce.capacity_options
    if not desired.vms or desired.vms[0].option >= len(options):
        return None
    current = options[desired.vms[0].option]
    for site in capacity_options.zone_choices(options[: desired.vms[0].option]):
        may_return = _may_return(options[site.option], current)
        if may_return and (site.option, site.zone) not in skipped:
            return site
    return None


def _may_return(option: CapacityOption, current: CapacityOption) -> bool:
    """Returns whether an option that is preferred to the current one is known to be cheaper.

    Prices of other machine types do not compare: their speed differs. A reservation is paid for
    whether it is used or not, so nothing is saved by leaving it.
    """
    price, now = option.dollars_per_hour, current.dollars_per_hour
    is_cheaper = price is not None and now is not None and price < now
    is_same = option.machine_type == current.machine_type
    is_excluded = (
        option.waits_in_queue
        or current.uses_reservation
        or (current.kind, option.kind) == ("spot", "standard")
    )
    return is_cheaper and is_same and not is_excluded


def gain_dollars(
    desired: DesiredState, observed: ObservedState, config: RunConfig, *, option: int
) -> float:
    """Returns the dollars that another option saves in the rest of the job, moving costs ignored.

    The rest is bounded by `launch.max_hours` and `launch.max_dollars`. If the speed of the run is
    unknown, it is as long as these VMs have trained already.
    """
    gce, section = config.launch.gce, config.launch
    assert gce is not None, config
    price, hosts = _price(gce, desired.vms[0].option), len(desired.vms)
    each = observed.log.speed.host_seconds_per_step
    if each is None or config.last_step is None:
        since = desired.attempt.since or observed.now
        left = hosts * (desired.vms[0].trained_seconds + max(0.0, observed.now - since))
    else:
        left = each * max(0, config.last_step - observed.log.step)
    if section.max_hours is not None:
        seconds = desired.started_at + 3600 * section.max_hours - observed.now
        left = min(left, hosts * max(0.0, seconds))
    if section.max_dollars is not None and price:
        money = section.max_dollars - spending.total(desired, gce, now=observed.now)
        left = min(left, 3600 * max(0.0, money) / price)
    return left / 3600 * (price - _price(gce, option))


def cost_dollars(
    desired: DesiredState,
    observed: ObservedState,
    gce: GceSection,
    *,
    option: int,
    are_requested: bool,
) -> float:
    """Returns the most that a move costs: both sets of VMs, idle during a restart.

    Before the request, also the new VMs until they are used: `ready_minutes`, and the longest wait
    for a commit so far.
    """
    restart = elastic.LEAVE_SECONDS + observed.log.speed.start_seconds
    waiting = 0.0 if are_requested else 60 * gce.ready_minutes + (observed.log.longest_wait or 0.0)
    new = gce.most_hosts * _price(gce, option) * (waiting + restart)
    old = len(desired.vms) * _price(gce, desired.vms[0].option) * restart
    return (new + old) / 3600


def _price(gce: GceSection, option: int) -> float:
    return gce.capacity_options[option].dollars_per_hour or 0.0


def _pays(
    desired: DesiredState,
    observed: ObservedState,
    config: RunConfig,
    *,
    option: int,
    factor: float,
    are_requested: bool,
) -> bool:
    gce = config.launch.gce
    assert gce is not None, config
    gain = gain_dollars(desired, observed, config, option=option)
    cost = cost_dollars(desired, observed, gce, option=option, are_requested=are_requested)
    return gain >= factor * cost


def saved_dollars(desired: DesiredState, gce: GceSection, *, now: float) -> float:
    """Returns the net savings of all moves so far: less the costs of VMs requested for them."""
    set_costs = sum(spending.cost(vm, gce, now=now) for vm in spares.of_other_option(desired))
    return desired.costs.saved_dollars + spending.saved_in_attempt(desired, now=now) - set_costs


def note(found: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Requests VMs of a cheaper option; ends the attempt for them after its next commit."""
    gce, desired = config.launch.gce, found.desired
    assert gce is not None, config
    if desired.phase not in ("placing", "running") or desired.end is not None or not desired.vms:
        return found
    found = _without_lost(_settle_creation(found, observed, gce), observed, gce)
    planned, is_running = found.desired.beside.move_after, found.desired.phase == "running"
    if not is_running or beside_attempt.must_restart(found.desired, planned, observed):
        return found
    found = _note_end_of_attempt(_without_gain(found, observed, config), observed, config)
    site = find_site(found.desired, gce, now=observed.now)
    if site is None or not _may_request(found.desired, site, observed, config):
        return found
    return _request(found, site, observed, gce)


def _settle_creation(found: Transition, observed: ObservedState, gce: GceSection) -> Transition:
    """Applies the result of the creation of cheaper VMs; a failure ends nothing."""
    desired, creation = found.desired, found.desired.creation
    if creation is None or not spares.is_of_other_option(desired, creation):
        return found
    first = next(vm for vm in desired.all_vms if vm.name in creation.names)

    def refused(answer: CreateFailed) -> tuple[DesiredState, str]:
        backoffs = capacity_options.with_backoff(
            desired.capacity.backoffs,
            ZoneChoice(first.option, first.zone),
            answer.kind,
            now=observed.now,
            longest=60.0 * gce.max_backoff_minutes,
            seed=desired.run,
        )
        capacity = replace(desired.capacity, backoffs=backoffs)
        text = f"no cheaper VMs in {first.zone}: {answer.kind}: {answer.message}"
        new = replace(_without_set(desired, observed, gce), capacity=capacity)
        return new, f"{text}; the attempt goes on"

    return beside_attempt.settle(found, observed, gce, refused=refused)


def _without_set(desired: DesiredState, observed: ObservedState, gce: GceSection) -> DesiredState:
    """Returns the state with the VMs of the cheaper option to be deleted."""
    vms, now = spares.of_other_option(desired), observed.now
    costs = sum(spending.cost(vm, gce, now=now) for vm in vms)
    new = spares.dropped(desired, {vm.name for vm in vms}, now=now)
    saved = replace(new.costs, saved_dollars=new.costs.saved_dollars - costs)
    return _with_wait(replace(new, costs=saved), now=now)


def _with_wait(desired: DesiredState, *, now: float) -> DesiredState:
    """Returns the state in which no VMs of a cheaper option are requested for a while."""
    before = desired.beside.cheaper_wait
    seconds = FIRST_WAIT_SECONDS * 2.0 ** min(max(0, before.tries - 1), 10)
    wait = replace(before, not_before=now + min(LONGEST_WAIT_SECONDS, seconds))
    return replace(desired, beside=replace(desired.beside, cheaper_wait=wait))


def _without_lost(found: Transition, observed: ObservedState, gce: GceSection) -> Transition:
    """Deletes all VMs of the cheaper option if one of them is lost: only a complete set is used."""
    lost = spares.find_lost(spares.of_other_option(found.desired), observed, gce)
    if not lost:
        return found
    lines = (
        f"{name}: of the cheaper VMs: {loss.text}; all of them are deleted, the job goes on"
        for name, loss in lost.items()
    )
    new = found.then(_without_set(found.desired, observed, gce), *lines)
    return replace(new, unused={**found.unused, **lost_vms.kinds(lost)})


def _without_gain(found: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Deletes the VMs of the cheaper option once a restart on them would not pay."""
    gce, desired = config.launch.gce, found.desired
    assert gce is not None, config
    vms = spares.of_other_option(desired)
    if not vms or desired.beside.move_after is not None:
        return found
    factor, option = KEEP_FACTOR, vms[0].option
    if _pays(desired, observed, config, option=option, factor=factor, are_requested=True):
        return found
    names = ", ".join(vm.name for vm in vms)
    line = f"{names}: deleted; a restart on these cheaper VMs would not pay any more"
    return found.then(_without_set(desired, observed, gce), line)


def _note_end_of_attempt(
    found: Transition, observed: ObservedState, config: RunConfig
) -> Transition:
    """Records whether the attempt ends after its next commit, for cheaper VMs that are ready."""
    gce, desired = config.launch.gce, found.desired
    assert gce is not None, config
    wants = (
        _is_ready(desired, observed, gce)
        and not observed.stop_requested
        and _pays(
            desired,
            observed,
            config,
            option=spares.of_other_option(desired)[0].option,
            factor=MOVE_FACTOR,
            are_requested=True,
        )
    )
    line = "all cheaper VMs are ready; the attempt saves and ends after the next commit"
    return beside_attempt.plan_restart(found, "move_after", line, wants=wants, observed=observed)


def _is_ready(desired: DesiredState, observed: ObservedState, gce: GceSection) -> bool:
    """Returns whether the job may move to a complete set of cheaper VMs now."""
    vms = spares.of_other_option(desired)
    ready = spares.find_ready_of(vms, observed, gce)
    is_complete = bool(vms) and len(ready) == gce.most_hosts
    return is_complete and beside_attempt.has_budget(desired, observed, gce)


def _may_request(
    desired: DesiredState, site: ZoneChoice, observed: ObservedState, config: RunConfig
) -> bool:
    gce = config.launch.gce
    assert gce is not None, config
    if gce.return_to_cheaper == "off" or spares.of_other_option(desired):
        return False
    like, wait = VmSpec("", site.zone, site.option, 0.0), desired.beside.cheaper_wait
    return beside_attempt.may_request(
        desired, like, observed, config, wait=wait, longest_wait=LONGEST_WAIT_SECONDS
    ) and _pays(
        desired,
        observed,
        config,
        option=site.option,
        factor=MOVE_FACTOR,
        are_requested=False,
    )


def _request(
    found: Transition, site: ZoneChoice, observed: ObservedState, gce: GceSection
) -> Transition:
    """Requests a complete set of VMs, all or none."""
    desired, now = found.desired, observed.now
    before, like = desired.beside.cheaper_wait, VmSpec("", site.zone, site.option, now)
    is_long_ago = now > before.not_before + LONGEST_WAIT_SECONDS
    wait = replace(before, tries=1 if is_long_ago else before.tries + 1)
    found = found.then(replace(desired, beside=replace(desired.beside, cheaper_wait=wait)))
    line = f"requesting {_describe(desired, like, gce, count=gce.most_hosts)}, beside the attempt"
    return beside_attempt.request(found, like, line, count=gce.most_hosts, now=now)


def _describe(desired: DesiredState, like: VmSpec, gce: GceSection, *, count: int) -> str:
    option = gce.capacity_options[like.option]
    less = count * (_price(gce, desired.vms[0].option) - _price(gce, like.option))
    what = f"{count} x {option.machine_type} ({option.kind}) in {like.zone}"
    return f"{what}, which cost ${less:.2f} an hour less"


def move(desired: DesiredState, observed: ObservedState, gce: GceSection) -> Transition:
    """Returns the state with the cheaper VMs as hosts while no attempt runs; the same if not.

    All of them must be ready, unless the job has no other VM.
    """
    vms, creation = spares.of_other_option(desired), desired.creation
    is_pending = creation is not None and (
        not creation.is_of_spares or spares.is_of_other_option(desired, creation)
    )
    if not all(vm.created for vm in vms) or is_pending:
        return Transition(desired)
    if not vms or not beside_attempt.has_budget(desired, observed, gce):
        return Transition(desired)
    if any(vm.created for vm in desired.vms) and not _is_ready(desired, observed, gce):
        return Transition(desired)
    now, names = observed.now, {vm.name for vm in vms}
    others = spares.end_spare_time((vm for vm in desired.spares if vm.name not in names), now=now)
    less = _price(gce, desired.vms[0].option) - _price(gce, vms[0].option)
    line = f"moves to {_describe(desired, vms[0], gce, count=len(vms))}"
    saved = desired.costs.saved_dollars - sum(spending.cost(vm, gce, now=now) for vm in vms)
    new = replace(
        desired,
        vms=spares.end_spare_time(vms, now=now),
        spares=(),
        deleting=(
            *desired.deleting,
            *provisioning.to_delete((*desired.vms, *others), now=now),
        ),
        capacity=replace(desired.capacity, refill_since=None),
        costs=replace(
            desired.costs, cheaper_by=desired.costs.cheaper_by + less, saved_dollars=saved
        ),
        reason=line,
    )
    new = _with_wait(new, now=now)
    return Transition(new, (line,), unused=dict.fromkeys((vm.name for vm in desired.vms), MOVED))
