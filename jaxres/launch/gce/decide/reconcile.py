"""Decides the next desired state of a job on VMs from the observed state. Pure.

The caller writes each decision before it acts on it. Every action may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxres.config import RunConfig
from jaxres.config.schema.gce import GceSection
from jaxres.exit_codes import ExitCode, exit_row
from jaxres.launch.gce.decide import (
    beside_attempt,
    cheaper_option,
    draining,
    early_replacement,
    elastic,
    instance_groups,
    job_conditions,
    lost_vms,
    provisioning,
    replacement_budget,
    spare_requests,
)
from jaxres.launch.gce.decide.lost_vms import Loss
from jaxres.launch.gce.decide.provisioning import may_still_create, release_all, replace_vms
from jaxres.launch.gce.state import capacity_options, spending, transition_events
from jaxres.launch.gce.state.desired_state import (
    DesiredState,
    JobEnd,
    PendingCreate,
    Phase,
    Transition,
    VmSpec,
)
from jaxres.launch.gce.state.observed_state import AgentReport, ObservedState
from jaxres.launch.gce.state.spending import lifetime_seconds
from jaxres.runlog.attempt_result import PLANNED_ENDS, AttemptOutcome, is_named_twice
from jaxres.supervisor import restart_policy
from jaxres.supervisor.restart_policy import GiveUp, Restart

CYCLE_SECONDS = 1.0
"""Time between two decisions of a launcher."""
IN_A_FULL_ZONE = "healthy, in a zone without capacity for the others"
"""Kind of VMs that are replaced though nothing has happened to them."""


def decide(desired: DesiredState, observed: ObservedState, config: RunConfig) -> Transition:
    """Returns the next desired state; the same one if nothing changes.

    The stages of the job's phase (STAGES) decide one after the other. What follows from their
    decision comes last: the budget of replacements, events, costs, and which hosts are drained.
    """
    gce = config.launch.gce
    assert gce is not None, config
    decided = Transition(_prepared(desired, observed, config))
    for stage in STAGES[_phase(decided.desired, observed, config)]:
        decided = stage.decide(decided, observed, config)
    decided = _count_replacements(desired, decided, observed, gce)
    decided = _note_suspicions(decided, observed, gce)
    decided = transition_events.record(desired, decided, observed, gce)
    spent = dollars(decided.desired, gce, now=observed.now)
    decided = job_conditions.note(decided, observed, config, dollars=spent)
    decided = spending.note_attempt(desired, decided, now=observed.now)
    return draining.note(decided, observed)


def _prepared(desired: DesiredState, observed: ObservedState, config: RunConfig) -> DesiredState:
    """Returns the state without VMs that are gone, and with an end that was requested since."""
    gce = config.launch.gce
    assert gce is not None, config
    desired = instance_groups.without_gone(_without_gone(desired, observed, gce), observed)
    longest = restart_policy.longest_delay(config.restart)
    if desired.attempt.not_before > observed.now + longest:  # The last launcher's clock was ahead.
        attempt = replace(desired.attempt, not_before=observed.now + longest)
        desired = replace(desired, attempt=attempt)
    if desired.phase not in ("placing", "running"):
        return desired
    return replace(desired, end=desired.end or _requested_end(desired, observed, config))


def _phase(desired: DesiredState, observed: ObservedState, config: RunConfig) -> Phase:
    """Returns the phase whose stages decide: a job whose end is due begins to end."""
    if desired.end is None or desired.phase not in ("placing", "running"):
        return desired.phase
    is_due = desired.phase == "placing" or _must_end_now(desired, observed, config)
    return "ending" if is_due else desired.phase


def place(decided: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Moves to a cheaper option, else changes the number of hosts, else requests VMs or starts."""
    desired, gce = decided.desired, config.launch.gce
    assert gce is not None, config
    most = config.restart.max_preemptions_without_commit
    if not any(vm.name in observed.reports for vm in desired.vms):
        most = config.restart.max_attempts_without_commit  # No agent has ever reported.
    decided = cheaper_option.move(desired, observed, gce)
    if not decided.messages:
        decided = elastic.resize(desired, observed, config)
    if not decided.messages:
        decided = provisioning.provision(desired, observed, gce, most_unready=most)
    return decided


def _count_replacements(
    before: DesiredState, found: Transition, observed: ObservedState, gce: GceSection
) -> Transition:
    """Counts the VMs that a decision replaces; ends a job that has used its budget."""
    after = found.desired
    replaced = [
        (vm, found.losses.get(vm.name) or found.unused.get(vm.name, IN_A_FULL_ZONE))
        for vm in before.vms
        if vm.name not in after.names and (vm.created or vm.name in found.losses)
    ]
    if after.phase == "running":
        replaced = [
            (vm, found.unused[vm.name]) for vm in before.early_vms if vm.name in found.unused
        ]
    is_only_spares = not replaced
    replaced += [(vm, found.unused[vm.name]) for vm in before.spares if vm.name in found.unused]
    if not replaced or after.phase not in ("placing", "running") or after.end is not None:
        return found
    count = replacement_budget.add(
        before.failures.replacements,
        replaced,
        step=observed.log.step,
        now=observed.now,
        vm_seconds=sum(lifetime_seconds(vm, gce, now=observed.now) for vm, _ in replaced),
        dollars=sum(spending.cost(vm, gce, now=observed.now) for vm, _ in replaced),
    )
    end = replacement_budget.end_of_job(
        count,
        most=gce.max_replacements_without_commit,
        requested=before.next_name,
        has_prices=all(option.dollars_per_hour is not None for option in gce.capacity_options),
        now=observed.now,
    )
    end = None if is_only_spares else end  # A lost spare ends no job.
    failures = replace(after.failures, replacements=count)
    return found.then(replace(after, failures=failures, end=end))


def _note_suspicions(found: Transition, observed: ObservedState, gce: GceSection) -> Transition:
    """Records which VMs may be lost, and adds a line for each change."""
    desired = found.desired
    suspected = tuple(sorted(lost_vms.find_suspected(desired, observed, gce)))
    known = desired.failures.suspected
    if suspected == known:
        return found
    lines = lost_vms.suspicion_messages(known, suspected, observed, desired.names)
    failures = replace(desired.failures, suspected=suspected)
    return found.then(replace(desired, failures=failures), *lines)


def request_to_send(desired: DesiredState) -> PendingCreate | None:
    """Returns the creation to request, if it is not yet; None: there is none, or it is not needed.

    Nothing is requested for a job that ends, or if all its VMs are being deleted by now.
    """
    creation = desired.creation
    if creation is None or desired.end is not None or desired.names.isdisjoint(creation.names):
        return None
    return creation


def vms_to_delete(desired: DesiredState, observed: ObservedState) -> list[VmSpec]:
    """Returns the VMs to delete: the intended ones, and VMs of this run that are not in the state.

    The latter were created by a launcher that had lost the lease. VMs of groups that are deleted
    are deleted with them.
    """
    known = desired.names | {vm.name for vm in desired.deleting}
    listed = (observed.vms or {}).values()
    unknown = [VmSpec(vm.name, vm.zone, 0, observed.now) for vm in listed if vm.name not in known]
    with_group = {name for group in instance_groups.unwanted(desired) for name in group.names}
    return [vm for vm in (*desired.deleting, *unknown) if vm.name not in with_group]


def dollars(desired: DesiredState, gce: GceSection, *, now: float) -> float:
    """Returns the costs of the VMs so far, by the prices of the capacity options."""
    return spending.total(desired, gce, now=now)


def describe_costs(desired: DesiredState, gce: GceSection, *, now: float) -> str:
    """Returns the costs so far, or the hours of the VMs if an option has no price."""
    if all(option.dollars_per_hour is not None for option in gce.capacity_options):
        return f"${dollars(desired, gce, now=now):.2f}"
    return f"{vm_hours(desired, gce, now=now):.2f} VM hours"


def vm_hours(desired: DesiredState, gce: GceSection, *, now: float) -> float:
    """Returns the hours of all VMs so far."""
    running_seconds = sum(lifetime_seconds(vm, gce, now=now) for vm in desired.all_vms)
    return (desired.costs.vm_seconds + running_seconds) / 3600


def _requested_end(
    desired: DesiredState, observed: ObservedState, config: RunConfig
) -> JobEnd | None:
    """Returns the end that a request, `launch.max_hours` or `launch.max_dollars` demands."""
    section, gce = config.launch, config.launch.gce
    assert gce is not None, config
    spent = dollars(desired, gce, now=observed.now)
    if observed.down_requested:
        return JobEnd(ExitCode.STOPPED, "taken down by `launch gce down`", observed.now)
    if (
        section.max_hours is not None
        and observed.now - desired.started_at > 3600 * section.max_hours
    ):
        return JobEnd(
            ExitCode.NO_PROGRESS, f"launch.max_hours={section.max_hours:g} is reached", observed.now
        )
    if section.max_dollars is not None and spent > section.max_dollars:
        limit = f"launch.max_dollars={section.max_dollars:g}"
        return JobEnd(
            ExitCode.NO_PROGRESS, f"{limit} is reached (${spent:.2f} spent)", observed.now
        )
    if observed.stop_requested and desired.phase == "placing":
        reason = "stop was requested while no attempt ran: nothing new to save"
        return JobEnd(ExitCode.STOPPED, reason, observed.now)
    return None


def _must_end_now(desired: DesiredState, observed: ObservedState, config: RunConfig) -> bool:
    """Returns whether an attempt that should save and stop has used its time, or gets none."""
    assert desired.end is not None, desired
    limit = config.deadlines.save_seconds + SETTLE_SECONDS
    return observed.down_requested or observed.now - desired.end.since > limit


def _without_gone(desired: DesiredState, observed: ObservedState, gce: GceSection) -> DesiredState:
    """Removes VMs that are deleted: neither listed nor found, and not being created."""
    being_created = () if desired.creation is None else desired.creation.names
    gone = [
        vm
        for vm in desired.deleting
        if observed.vms is not None
        and vm.name not in observed.vms
        and vm.name in observed.not_found
        and vm.name not in being_created
    ]
    if not gone:
        return desired
    if any(vm.created for vm in gone):
        backoffs = capacity_options.without_quota(desired.capacity.backoffs)
        capacity = replace(desired.capacity, freed_at=observed.now, backoffs=backoffs)
        desired = replace(desired, capacity=capacity)
    costs = replace(
        desired.costs,
        spent_dollars=desired.costs.spent_dollars
        + sum(spending.cost(vm, gce, now=observed.now) for vm in gone),
        vm_seconds=desired.costs.vm_seconds
        + sum(lifetime_seconds(vm, gce, now=observed.now) for vm in gone),
        spending=spending.add(desired, gone, gce, now=observed.now),
    )
    left = tuple(vm for vm in desired.deleting if vm not in gone)
    return replace(desired, deleting=left, costs=costs)


def end(decided: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Deletes all VMs; the job has ended once none exists and none is being created."""
    desired, gce = decided.desired, config.launch.gce
    assert desired.end is not None, desired
    assert gce is not None, config
    messages: tuple[str, ...] = ()
    if desired.phase != "ending":
        messages = (f"{desired.end.reason}; VMs to be deleted: {len(desired.names)}",)
        released = release_all(desired, now=observed.now)
        desired = replace(released, phase="ending", creation=desired.creation)
    if desired.creation is not None:
        if may_still_create(desired, desired.creation, observed, gce):
            return Transition(desired, messages)
        desired = replace(desired, creation=None)
    if desired.deleting or desired.groups or observed.vms is None or observed.vms:
        return Transition(desired, messages)
    if observed.unreachable & capacity_options.zones_of(gce.capacity_options):
        return Transition(desired, messages)  # A launcher without the lease may have VMs there.
    return Transition(replace(desired, phase="ended"), messages)


SETTLE_SECONDS = 45.0
"""Longest wait for the exits of the other hosts after the first one, if none of them saves."""
STALL_WAITS, LEAST_STALL_MINUTES = 3, 60.0
"""An attempt is stalled after so many times the longest wait for a commit so far, and not before so
many minutes."""
START_SECONDS = 120.0
"""Longest time until an agent has started its training process."""


def follow_attempt(decided: Transition, observed: ObservedState, config: RunConfig) -> Transition:
    """Decides what follows from lost VMs, from exits of hosts, and from an attempt that stalls."""
    desired, gce = decided.desired, config.launch.gce
    assert gce is not None, config
    names = {m.name for m in desired.attempt.hosts}
    hosts = (vm for vm in desired.vms if vm.name in names)
    lost = lost_vms.find_lost(hosts, observed, gce, is_training=True)
    ended = {
        name: report
        for name in names
        if (report := observed.reports.get(name)) is not None
        and (report.attempt, report.state) == (desired.attempt.number, "ended")
    }
    codes = {name: ExitCode.BUG if r.exit is None else r.exit for name, r in ended.items()}
    if not lost and not codes:
        return _check_stall(desired, observed, config)
    is_settled = bool(lost) or len(codes) == len(desired.attempt.hosts)
    may_be_lost = lost_vms.find_suspected(desired, observed, gce) & names - codes.keys()
    is_early = (observed.ended_seconds or 0.0) < _settle_seconds(codes, config)
    if not is_settled and (is_early or may_be_lost):
        return Transition(desired)
    outcome = _attempt_outcome(desired, codes, ended, lost, observed, config)
    planned = "" if lost else _planned(desired, outcome, ended, observed)
    if planned:
        outcome = replace(outcome, planned=planned, reason=PLANNED_ENDS[planned])
    unhealthy = [name for name, code in codes.items() if code == ExitCode.UNHEALTHY]
    return _after_attempt(desired, outcome, observed, config, unhealthy=unhealthy)


def _planned(
    desired: DesiredState,
    outcome: AttemptOutcome[str],
    ended: Mapping[str, AgentReport],
    observed: ObservedState,
) -> str:
    """Returns why the launcher has ended an attempt, one of PLANNED_ENDS; empty: it has not.

    A preemption notice ends it too, and then is the cause.
    """
    has_notice = any(lost_vms.is_notice_due(report, now=observed.now) for report in ended.values())
    if not desired.attempt.draining or outcome.code != ExitCode.PREEMPTED or has_notice:
        return ""
    if draining.to_drain(desired, observed):
        return "drain"
    return beside_attempt.planned_end(desired, observed)


def _settle_seconds(codes: Mapping[str, int], config: RunConfig) -> float:
    saves = all(exit_row(code).is_graceful for code in codes.values())
    return SETTLE_SECONDS + (config.deadlines.save_seconds if saves else 0.0)


def _attempt_outcome(
    desired: DesiredState,
    codes: Mapping[str, int],
    ended: Mapping[str, AgentReport],
    lost: Mapping[str, Loss],
    observed: ObservedState,
    config: RunConfig,
) -> AttemptOutcome[str]:
    """Returns the outcome of the attempt: its most severe exit, or the loss of a VM."""
    name = min(codes, key=lambda name: (_severity_key(codes[name]), name), default=None)
    code = ExitCode.PEER_LOST if name is None else codes[name]
    if lost and not exit_row(code).outranks_lost_host:
        gone, loss = next(iter(lost.items()))
        return _outcome(desired, ExitCode.PREEMPTED, f"{gone}: {loss.text}", observed)
    assert name is not None, lost
    num_hosts = len(desired.attempt.hosts)
    reason = f"{name}: {ended[name].reason}" if num_hosts > 1 else ended[name].reason
    recorded = observed.log.last_end
    if (
        recorded is not None
        and recorded.exit == code
        and observed.log.last_end_seq > desired.attempt.seq_before
    ):
        reason = recorded.reason  # The supervisors' own result, which names the host.
    is_short = config.last_step is not None and observed.log.step < config.last_step
    if code == ExitCode.DONE and is_short:
        code, reason = (
            ExitCode.BUG,
            f"{reason}; it exited with 0 but the newest step is {observed.log.step}",
        )
    if code == ExitCode.FENCED and desired.deleting:
        # A VM that is being deleted may still hold the run lock.
        code, reason = (
            ExitCode.PEER_LOST,
            f"{reason} (a VM that was judged lost still held the run lock)",
        )
    is_one_of_many = num_hosts > 1 and [*codes.values()].count(codes[name]) == 1
    culprit = name if is_one_of_many or code == ExitCode.UNHEALTHY else None
    return _outcome(desired, code, reason, observed, culprit=culprit)


def _outcome(
    desired: DesiredState,
    code: int,
    reason: str,
    observed: ObservedState,
    *,
    culprit: str | None = None,
) -> AttemptOutcome[str]:
    before, after = desired.attempt.step_before, observed.log.step
    return AttemptOutcome(code, reason, before, after, culprit, desired.attempt.number)


def _severity_key(code: int) -> tuple[int, int]:
    """Returns the sort key of an exit: the most severe first; the order in time is unknown here."""
    row = exit_row(code)
    return -row.severity, row.tie_break


def _check_stall(desired: DesiredState, observed: ObservedState, config: RunConfig) -> Transition:
    """Ends an attempt without commits for too long: its processes are restarted, within budgets."""
    gce = config.launch.gce
    assert gce is not None, config
    reports = {m.name: observed.reports.get(m.name) for m in desired.attempt.hosts}
    late = [n for n, r in reports.items() if r is None or r.attempt != desired.attempt.number]
    stall = gce.stall_minutes
    if stall is None and observed.log.longest_wait is not None:
        stall = max(LEAST_STALL_MINUTES, STALL_WAITS * observed.log.longest_wait / 60)
    if late and observed.no_commit_seconds > START_SECONDS:
        reason = f"{late[0]}: has not started training within {START_SECONDS:.0f} s"
    elif stall is not None and observed.no_commit_seconds > 60 * stall:
        reason = f"no new committed step for {stall:g} minutes (launch.gce.stall_minutes)"
    else:
        return Transition(desired)
    culprit = late[0] if len(late) == 1 < len(desired.attempt.hosts) else None
    outcome = _outcome(desired, ExitCode.HUNG, reason, observed, culprit=culprit)
    return _after_attempt(desired, outcome, observed, config, unhealthy=())


def _after_attempt(
    desired: DesiredState,
    outcome: AttemptOutcome[str],
    observed: ObservedState,
    config: RunConfig,
    *,
    unhealthy: Sequence[str],
) -> Transition:
    """Decides after the end of an attempt: the end of the job, or another attempt.

    Every VM whose host has reported itself unhealthy is replaced, also if it is the only one.
    """
    gce = config.launch.gce
    assert gce is not None, config
    desired = replace(
        desired.with_outcome(outcome),
        phase="placing",
        attempt=replace(desired.attempt, hosts=()),
        beside=replace(desired.beside, grow_after=None, move_after=None),
        reason=outcome.reason,
    )
    message = f"attempt {outcome.attempt} ended ({outcome.code}): {outcome.reason}"
    if desired.end is not None and outcome.code != ExitCode.DONE:
        reason = f"{desired.end.reason}; newest committed step {observed.log.step}"
        return Transition(replace(desired, end=replace(desired.end, reason=reason)), (message,))
    decision = _restart(desired.history, config, seed=desired.attempt.number)
    if not isinstance(decision, Restart):
        reason = decision.reason
        if decision.exit == ExitCode.DONE:
            reason = f"the last step, {observed.log.step}, is committed"
        return Transition(
            replace(desired, end=JobEnd(decision.exit, reason, observed.now)), (message,)
        )
    attempt = replace(desired.attempt, not_before=observed.now + decision.after_seconds)
    desired = replace(desired, attempt=attempt)
    lost = lost_vms.find_lost(desired.vms, observed, gce, is_training=False)
    for name in {*unhealthy, _to_replace(desired.history)}:
        if name in desired.names:
            kind = f"{lost_vms.BY_EXIT} {outcome.code}"
            lost[name] = Loss(kind, f"is replaced: {outcome.reason}")
    settled = early_replacement.settle(desired, lost, observed)
    messages = (f"{message}; {decision.reason}", *settled.messages)
    if not (rest := {name: loss for name, loss in lost.items() if name in settled.desired.names}):
        return replace(settled, messages=messages)
    replaced = replace_vms(settled.desired, rest, observed, gce)
    losses = {**settled.losses, **replaced.losses}
    return Transition(replaced.desired, (*messages, *replaced.messages), losses)


def _restart(
    history: Sequence[AttemptOutcome[str]], config: RunConfig, *, seed: int
) -> Restart | GiveUp:
    """Applies the supervisor's restart policy; the launcher itself checks hours and hosts."""
    outcomes = [
        AttemptOutcome[int](p.code, p.reason, p.step_before, p.step_after, planned=p.planned)
        for p in history
    ]
    return restart_policy.decide_next(outcomes, config, seed=seed)


def _to_replace(history: Sequence[AttemptOutcome[str]]) -> str | None:
    """Returns the VM that two consecutive failures name; None: they name none."""
    return history[-1].culprit if is_named_twice(history) else None


@dataclass(frozen=True)
class Stage:
    """A part of the decision of a phase."""

    decide: Callable[[Transition, ObservedState, RunConfig], Transition]
    leads_to: tuple[Phase, ...] = ()
    """Phases to which it may lead the job."""

    @property
    def name(self) -> str:
        """Module and function."""
        return f"{self.decide.__module__.rpartition('.')[2]}.{self.decide.__name__}"


STAGES: Mapping[Phase, tuple[Stage, ...]] = {
    "placing": (
        Stage(place, leads_to=("running",)),
        Stage(spare_requests.note),
        Stage(cheaper_option.note),
    ),
    "running": (
        Stage(follow_attempt, leads_to=("placing",)),
        Stage(early_replacement.note),
        Stage(spare_requests.note),
        Stage(elastic.note),
        Stage(cheaper_option.note),
    ),
    "ending": (Stage(end, leads_to=("ending", "ended")),),
    "ended": (),
}
"""What decides in each phase, in this order; each stage gets what the ones before have decided."""


def table() -> str:
    """Returns the phases with their stages as a Markdown table."""
    rows = ["| phase | stages, in this order | may lead to |", "|---|---|---|"]
    for phase, stages in STAGES.items():
        for number, stage in enumerate(stages):
            text = (stage.decide.__doc__ or "").partition("\n")[0]
            named = "" if number else f"`{phase}`"
            leads_to = ", ".join(f"`{after}`" for after in stage.leads_to)
            rows.append(f"| {named} | `{stage.name}`: {text} | {leads_to} |")
        if not stages:
            rows.append(f"| `{phase}` |  |  |")
    return "\n".join(rows)
