"""Which conditions of a job begin or end: no new commit, no capacity, spending. Pure.

A condition in force is part of the desired state, and its begin is an event. So it has one event,
whichever launcher is killed while it lasts. Durations are those that one launcher has observed: a
new launcher counts again from 0, and a clock that is set has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxres.config import RunConfig
from jaxres.config.schema.alerts import AlertsSection
from jaxres.launch.gce.state.desired_state import Condition, DesiredState, Transition
from jaxres.launch.gce.state.observed_state import ObservedState
from jaxres.launch.gce.state.transition_events import Fields, with_events

STALLED, CAPACITY, SPEND = "commits_stalled", "no_capacity", "spend_exceeded"


def note(
    found: Transition, observed: ObservedState, config: RunConfig, *, dollars: float
) -> Transition:
    """Returns the decision with the events of conditions that begin or end.

    Args:
      found: the decision.
      observed: the observed state.
      config: its section on alerts has the limits.
      dollars: costs of the job so far.
    """
    desired = found.desired
    if desired.phase not in ("placing", "running") or desired.end is not None:
        return found
    known = {condition.kind: condition for condition in desired.events.conditions}
    changes = [
        *_commits(known.get(STALLED), observed, config.alerts),
        *_capacity(known.get(CAPACITY), desired, observed, config.alerts),
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


def lacks_vms(desired: DesiredState) -> bool:
    """Returns whether a VM of a job that should train is not created."""
    is_waiting = desired.phase == "placing" and desired.end is None
    return is_waiting and not (desired.vms and all(vm.created for vm in desired.vms))


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
    limits: AlertsSection,
) -> Iterator[Change]:
    minutes = limits.no_capacity_minutes
    if lacking is not None:
        if not lacks_vms(desired):
            yield CAPACITY, None, ("capacity_found", {})
    elif minutes is not None and lacks_vms(desired) and observed.lacking_seconds >= 60 * minutes:
        reason = f"VMs are lacking for {minutes:g} minutes; {desired.reason or 'none was refused'}"
        yield CAPACITY, Condition(CAPACITY), ("no_capacity", {"reason": reason})


def _spend(known: Condition | None, limits: AlertsSection, *, dollars: float) -> Iterator[Change]:
    bound = limits.spend_dollars
    is_new = known is None or known.value != bound
    if bound is not None and is_new and dollars > bound:
        reason = f"${dollars:.2f} spent, more than alerts.spend_dollars={bound:g}"
        yield SPEND, Condition(SPEND, bound), ("spend_exceeded", {"reason": reason})
