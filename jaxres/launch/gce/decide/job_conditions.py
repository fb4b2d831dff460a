"""Which conditions of a job begin or end: no new commit, no capacity, no spare, spending. Pure.

A condition in force is part of the desired state, and its begin is an event. So it has one event,
whichever launcher is killed while it lasts. Durations are those that one launcher has observed: a
new launcher counts again from 0, and a clock that is set has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxres.config import RunConfig
from jaxres.config.schema.alerts import AlertsSection
from jaxres.launch.gce.decide import elastic, spares
from jaxres.launch.gce.state.desired_state import Condition, DesiredState, Transition
from jaxres.launch.gce.state.observed_state import ObservedState
from jaxres.launch.gce.state.transition_events import Fields, with_events

STALLED, CAPACITY, SPARE, SPEND = "commits_stalled", "no_capacity", "spare_lost", "spend_exceeded"


def note(
    found: Transition, observed: ObservedState, config: RunConfig, *, dollars: float
) -> Transition:
    """Returns the decision with the events of conditions that begin or end.

    Args:
      config: its section on alerts has the limits.
      dollars: costs of the job so far.
    """
    desired = found.desired
    if desired.phase not in ("placing", "running") or desired.end is not None:
        return found
    known = {condition.kind: condition for condition in desired.events.conditions}
    changes = [
        *_commits(known.get(STALLED), observed, config.alerts),
        *_capacity(known.get(CAPACITY), desired, observed, config),
        *_spares(known.get(SPARE), desired, observed, config),
        *_spend(known.get(SPEND), config.alerts, dollars=dollars),
    ]
    if not changes:
        return found
    for kind, begun, _ in changes:
        known.pop(kind, None)
        if begun is not None:
            known[kind] = begun
    desired = replace(desired, events=replace(desired.events, conditions=(*known.values(),)))
    events = [event for _, _, event in changes]
    return replace(found, desired=with_events(desired, events, observed))


def lacks_vms(desired: DesiredState, config: RunConfig) -> bool:
    """Returns whether a VM of a job that should train is not created.

    A job that trains with fewer hosts than its range allows lacks those that no VM waits to become.
    """
    if desired.phase not in ("placing", "running") or desired.end is not None:
        return False
    if desired.phase == "placing" and not (desired.vms and all(vm.created for vm in desired.vms)):
        return True
    waiting = sum(vm.created for vm in spares.of_job_option(desired))
    return len(desired.vms) + waiting < _most_hosts(desired, config)


def _most_hosts(desired: DesiredState, config: RunConfig) -> int:
    """Returns with how many hosts the job would train; 0: its number of hosts is fixed."""
    gce = config.launch.gce
    assert gce is not None, config
    if gce.least_hosts == gce.most_hosts or not desired.vms:
        return 0
    return max(elastic.allowed_counts(config, option=desired.vms[0].option), default=0)


Change = tuple[str, Condition | None, Fields]
"""Kind of a condition, the condition if it begins, and its event."""


def _commits(
    stalled: Condition | None, observed: ObservedState, limits: AlertsSection
) -> Iterator[Change]:
    step, minutes = observed.log.step, limits.no_commit_minutes
    if stalled is not None:
        if step > stalled.value:
            yield STALLED, None, ("commits_resumed", {})
    elif minutes is not None and observed.since_commit_seconds >= 60 * minutes:
        reason = f"no new committed step for {minutes:g} minutes; the newest is {step}"
        yield STALLED, Condition(STALLED, step), ("commits_stalled", {"reason": reason})


def _capacity(
    lacking: Condition | None,
    desired: DesiredState,
    observed: ObservedState,
    config: RunConfig,
) -> Iterator[Change]:
    minutes, is_lacking = config.alerts.no_capacity_minutes, lacks_vms(desired, config)
    if lacking is not None:
        if not is_lacking:
            yield CAPACITY, None, ("capacity_found", {})
    elif minutes is not None and is_lacking and observed.lacking_seconds >= 60 * minutes:
        why = desired.reason or "none was refused"
        if desired.phase == "running":
            why = (
                f"trains with {len(desired.vms)} of {_most_hosts(desired, config)} hosts meanwhile"
            )
        reason = f"VMs are lacking for {minutes:g} minutes; {why}"
        yield CAPACITY, Condition(CAPACITY), ("no_capacity", {"reason": reason})


def _spares(
    lacking: Condition | None, desired: DesiredState, observed: ObservedState, config: RunConfig
) -> Iterator[Change]:
    """Yields that a spare is lost or refused, and that all are ready again.

    A spare that boots for too long is taken for lost too.
    """
    gce = config.launch.gce
    assert gce is not None, config
    num_ready = len(spares.find_ready(desired, observed, gce))
    if lacking is not None:
        if num_ready >= gce.spares:
            yield SPARE, None, ("spares_ready", {})
    elif num_ready < gce.spares and desired.beside.spare_wait.tries:
        reason = f"{num_ready} of {gce.spares} spares are ready; one was lost or refused"
        yield SPARE, Condition(SPARE), ("spare_lost", {"reason": reason})


def _spend(known: Condition | None, limits: AlertsSection, *, dollars: float) -> Iterator[Change]:
    bound = limits.spend_dollars
    is_new = known is None or known.value != bound
    if bound is not None and is_new and dollars > bound:
        reason = f"${dollars:.2f} spent, more than alerts.spend_dollars={bound:g}"
        yield SPEND, Condition(SPEND, bound), ("spend_exceeded", {"reason": reason})
