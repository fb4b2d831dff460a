"""Measurements of a run, for the plan of the next one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from jaxres.checkpoint.retention import save_interval
from jaxres.checkpoint.retention.save_interval import Costs
from jaxres.exit_codes import ExitCode, exit_row
from jaxres.goodput.intervals import SETUP, Activity
from jaxres.goodput.run_timeline import RunTimeline
from jaxres.goodput.summary import ROLLED_BACK, CostlyInterruption, Summary
from jaxres.launch.gce.decide.lost_vms import PREEMPTED, STOPPING
from jaxres.launch.gce.state.capacity_options import NO_CAPACITY
from jaxres.operate.plan.observed_vms import ObservedVms
from jaxres.operate.plan.simulated_attempts import SimulatedJob
from jaxres.operate.plan.simulated_vms import Gap
from jaxres.runlog.attempt_result import PLANNED_CAUSES
from jaxres.runlog.events import EVENTS, SaveCommitted, SaveStarted

HOUR_SECONDS = 3600.0
NO_FAILURES = (
    exit_row(ExitCode.STOPPED).name,
    exit_row(ExitCode.PREEMPTED).name,
    ROLLED_BACK,
    *PLANNED_CAUSES,
)
"""Causes of incidents that are no failures of the fleet."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Costs of saves and failures of a run; None: it has none."""

    goodput: float | None
    seconds: float
    num_gpus: int | None
    """Devices of the newest attempt."""
    num_hosts: int | None
    state_bytes: int | None
    """Of the newest committed step."""
    stall_seconds: float | None
    write_seconds: float | None
    """Until the commit."""
    detect_seconds: float | None
    """Mean over the failures, as all that follow."""
    boot_seconds: float | None
    """Between the attempts: capacity, boot of VMs, down. Of a job on VMs: boot of lost VMs only."""
    start_seconds: float | None
    """Start-up and compilation."""
    read_seconds: float | None
    failures: int
    preemptions: int
    trained_hours: float
    stockout_share: float | None = None
    """Share of the losses of VMs after which no machine was free."""
    stockout_seconds: float | None = None
    """Mean wait for machines then."""
    simulated: SimulatedJob | None = None
    """The run as simulated with its own failures and times; None: it can't be simulated."""

    def mtbf_hours(self, *, expected: float) -> float:
        """Returns the hours between failures: measured ones beside one in the expected time."""
        costs = Costs(failures=self.failures, trained_hours=self.trained_hours)
        return save_interval.mtbf_hours(costs, expected=expected)


def of_run(
    timeline: RunTimeline,
    summary: Summary,
    events: Iterable[Mapping[str, Any]],
    vms: ObservedVms | None = None,
) -> Measured:
    """Returns the measured costs of saves and failures of a run.

    Args:
      events: the events of host 0's workers, of all attempts.
      vms: of a job on VMs, what its launcher has recorded between the attempts.
    """
    saves, commits = EVENTS.tag(SaveStarted), EVENTS.tag(SaveCommitted)
    events = list(events)
    stalls = [e for e in events if e.get("event") == saves and "blocked_seconds" in e]
    committed = [e for e in events if e.get("event") == commits and "seconds" in e]
    losses = _losses(timeline, vms)
    failures = [
        incident
        for incident in summary.incidents
        if incident.cause not in NO_FAILURES or _is_failed_host(losses.get(incident.attempt))
    ]
    # A recovery on VMs takes as long after a preemption.
    ended = failures if vms is None else [i for i in summary.incidents if i.cause != ROLLED_BACK]
    restarted = [incident for incident in ended if sum(incident.setup_seconds.values())]
    boots = [
        incident.capacity_wait_seconds + incident.vm_boot_seconds + incident.down_seconds
        for incident in restarted
    ]
    if vms is not None:
        boots = [i.vm_boot_seconds for i in restarted if i.attempt in losses]
    waits = [i.capacity_wait_seconds for i in restarted if _is_stockout(losses.get(i.attempt))]
    newest = timeline.attempts[-1] if timeline.attempts else None
    return Measured(
        goodput=summary.goodput,
        seconds=summary.seconds,
        num_gpus=newest.num_devices if newest else None,
        num_hosts=newest.num_hosts if newest else None,
        state_bytes=committed[-1]["bytes"] if committed else None,
        stall_seconds=_mean(event["blocked_seconds"] for event in stalls),
        write_seconds=_mean(event["seconds"] for event in committed),
        detect_seconds=_mean(incident.detection_seconds for incident in restarted),
        boot_seconds=_mean(boots),
        start_seconds=_mean(_start_seconds(incident) for incident in restarted),
        read_seconds=_mean(i.setup_seconds.get(Activity.RESTORE, 0.0) for i in restarted),
        failures=len(failures),
        preemptions=sum(
            incident.cause == exit_row(ExitCode.PREEMPTED).name for incident in summary.incidents
        ),
        trained_hours=(summary.seconds - _idle_seconds(timeline)) / HOUR_SECONDS,
        stockout_share=_mean(float(_is_stockout(gap)) for gap in losses.values()),
        stockout_seconds=_mean(waits),
    )


def _idle_seconds(timeline: RunTimeline) -> float:
    """Returns the time in which the run does not train: gaps, setup, and detection of failures."""
    return sum(
        interval.seconds
        for interval in timeline.intervals
        if interval.in_gap or interval.activity in (*SETUP, Activity.DETECTION)
    )


def _losses(timeline: RunTimeline, vms: ObservedVms | None) -> dict[int, Gap]:
    """Returns the gaps after the attempts that have lost a VM, by attempt."""
    gaps = () if vms is None else vms.gaps
    found = zip(timeline.attempts, gaps, strict=False)
    return {attempt.attempt: one.gap for attempt, one in found if one.gap.lost}


def _is_failed_host(gap: Gap | None) -> bool:
    """Returns whether a VM was lost, and none was preempted."""
    return gap is not None and all(vm.kind not in (PREEMPTED, STOPPING) for vm in gap.lost)


def _is_stockout(gap: Gap | None) -> bool:
    return gap is not None and any(answer.refused in NO_CAPACITY for answer in gap.answers)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _start_seconds(incident: CostlyInterruption) -> float:
    parts = incident.setup_seconds
    return parts.get(Activity.START_UP, 0.0) + parts.get(Activity.COMPILE, 0.0)
