"""Simulates `launch gce` between two attempts, with the launcher's own decider. Pure.

It calls `launch.reconcile.decide` on a simulated clock, as the launcher does: whether and where VMs
are replaced, when they are requested, when the next attempt starts and whether the job ends are
decisions of that function. What it observes is simulated: which VMs are lost, how the service
answers each request, and when the agents report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.decide import lost_vms, reconcile
from jaxres.launch.gce.decide.reconcile import CYCLE_SECONDS
from jaxres.launch.gce.state.capacity_options import CreateErrorKind
from jaxres.launch.gce.state.desired_state import DesiredState, HostAddress
from jaxres.launch.gce.state.observed_state import (
    AgentReport,
    CreateFailed,
    ObservedState,
    VmStatus,
)
from jaxres.launch.gce.state.observed_state import RunLogSummary as LogSummary
from jaxres.supervisor.restart_policy import GiveUp, Restart

HALF_CYCLE = CYCLE_SECONDS / 2
"""The launcher observes once a cycle, and the recorded times of a run are times of observations. So
a wait of some cycles there takes as many here, though they are not exactly as long.
"""
CLOCK_ERROR = 1e-5
"""Share of a cycle by which the float of a time may be wrong."""
MAX_CYCLES = 1_000_000
"""Most decisions between two attempts: over eleven days."""
IDLE_SECONDS = 60.0
"""Time between two decisions while nothing is known to happen before."""
SETTLED_SECONDS = 1e6
"""Since the exit of the hosts: the launcher waits for no further one."""
EPOCH = 1e9
"""The begin of the simulated run, in seconds since the epoch: 0 has a meaning in a state."""
OPERATIONS = {kind: operation for operation, kind in lost_vms.KINDS.items()}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Result of a request for VMs."""

    seconds: float
    """From the request until the launcher knows whether the VMs exist."""
    refused: CreateErrorKind | None = None
    """Why they don't; None: they do."""
    report_seconds: float = 0.0
    """From then until their agents have reported."""
    lost_seconds: float | None = None
    """From then until the VMs are lost before an attempt starts; None: they are not."""


@dataclass(frozen=True, kw_only=True)
class LostVm:
    """A VM that an attempt had, and that is replaced after it."""

    slot: int
    kind: str
    """As the launcher counts it; see `launch.lost_vms`."""
    seconds: float = 0.0
    """After the end of the attempt; 0: its loss ended the attempt, or its host's exit did."""
    notice_seconds: float = 0.0
    """Before that end: since when the launcher knows that it is being stopped."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Events of service and VMs between two attempts."""

    lost: tuple[LostVm, ...] = ()
    freed_seconds: float = 0.0
    """From the decision to delete a VM until the service no longer lists it."""
    answers: tuple[Answer, ...] = ()
    """Answers to the requests in the gap, in order; further ones get `Vms.usual`."""


@dataclass(frozen=True, kw_only=True)
class Vms:
    """Inputs of the simulation of a job on VMs, besides its failures."""

    config: RunConfig
    first: Gap
    """Before the first attempt."""
    before_seconds: float
    """From the begin of the job until the first attempt is claimed."""
    usual: Answer
    label: str
    """Label of the VMs, from which the launcher takes the seed of its waits."""


@dataclass
class SimulatedLauncher:
    """The launcher of a simulated job, with the VMs of the job."""

    vms: Vms
    _desired: DesiredState = field(init=False)
    _reports_from: dict[str, float] = field(default_factory=dict[str, float])
    """When the agent of a VM first reports, by name."""
    _lost: dict[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])
    """When a VM is lost, and the kind of the loss, by name."""
    _notices: dict[str, float] = field(default_factory=dict[str, float])
    """When the launcher knows that a VM of the present attempt is being stopped, by name."""

    def __post_init__(self) -> None:
        """Starts the first attempt."""
        began = EPOCH - self.vms.before_seconds
        self._desired = DesiredState(self.vms.label, "", "", started_at=began)
        self._until_start(self.vms.first, began, step=0, exits={})

    @property
    def hosts(self) -> tuple[HostAddress, ...]:
        """The hosts of the present attempt."""
        return self._desired.attempt.hosts

    def end_attempt(self, code: int, gap: Gap, *, step: int, now: float) -> Restart | GiveUp:
        """Returns when the launcher starts the next attempt, or why it ends the job.

        Args:
          code: exit code of the attempt.
          gap: what happens after it.
          step: newest committed step.
          now: seconds since the first claim, when the launcher knows of the end.
        """
        if (end := self._desired.end) is not None:
            return GiveUp(end.exit, end.reason)
        names, at = [host.name for host in self.hosts], EPOCH + now
        by_exit = {names[vm.slot] for vm in gap.lost if vm.kind.startswith(lost_vms.BY_EXIT)}
        gone = {names[vm.slot]: vm for vm in gap.lost if names[vm.slot] not in by_exit}
        self._lost |= {name: (at + vm.seconds, vm.kind) for name, vm in gone.items()}
        noticed = {name: vm.notice_seconds for name, vm in gone.items() if vm.notice_seconds}
        self._notices = {name: at - seconds for name, seconds in noticed.items()}
        exits: dict[str, int] = {}
        if all(vm.seconds > 0 for vm in gone.values()):
            is_cause = by_exit or set(names)
            exits = {n: code if n in is_cause else int(ExitCode.PEER_LOST) for n in names}
        return self._until_start(gap, at, step=step, exits=exits)

    def _until_start(
        self, gap: Gap, ended: float, *, step: int, exits: Mapping[str, int]
    ) -> Restart | GiveUp:
        """Decides from the notices on until an attempt starts.

        Args:
          gap: what is observed.
          ended: when the attempt before has ended, or when the job begins.
          step: newest committed step.
          exits: exit codes of that attempt's hosts.
        """
        at, answers = min([ended, *self._notices.values()]), iter(gap.answers)
        request, asked, answer = "", at, self.vms.usual
        for _ in range(MAX_CYCLES):
            at = ended if abs(at - ended) <= HALF_CYCLE else at
            before, result = self._desired, None
            if before.creation is not None:
                result = self._result(answer, before.creation.names, asked=asked, at=at)
            known = exits if at >= ended else {}
            observed = self._observe(at, gap, step=step, exits=known, result=result)
            after = reconcile.decide(before, observed, self.vms.config).desired
            self._desired = replace(after, events=replace(after.events, newest=()))
            if after.end is not None:
                return GiveUp(after.end.exit, after.end.reason)
            if after.phase == "running" and at >= ended:
                assert before.phase != "running", "the end of an attempt has no consequence"
                return Restart(at - ended, frozenset(), "as the launcher decides")
            if after.creation is not None and after.creation.request_id != request:
                request, asked = after.creation.request_id, at
                answer = next(answers, self.vms.usual)
            longest = CYCLE_SECONDS if after != before else IDLE_SECONDS
            observed_at = (asked + answer.seconds, *self._times(gap))
            times = [ended, *self._waits(), *(one - HALF_CYCLE for one in observed_at)]
            at = _next_cycle(at, min([at + longest, *(one for one in times if one > at)]))
        raise AssertionError(f"no attempt starts within {at - ended:.0f} s")

    def _result(
        self, answer: Answer, names: tuple[str, ...], *, asked: float, at: float
    ) -> CreateFailed | bool:
        """Returns the result of the present request; records the fate of its VMs."""
        if at + HALF_CYCLE < asked + answer.seconds:
            return False
        if answer.refused is not None:
            return CreateFailed(answer.refused, "as in the run")
        for name in names:
            self._reports_from[name] = at + answer.report_seconds
            if answer.lost_seconds is not None:
                self._lost[name] = at + answer.lost_seconds, ""
        return True

    def _is_lost(self, name: str, at: float) -> bool:
        return name in self._lost and self._lost[name][0] <= at + HALF_CYCLE

    def _observe(
        self,
        at: float,
        gap: Gap,
        *,
        step: int,
        exits: Mapping[str, int],
        result: CreateFailed | bool | None,
    ) -> ObservedState:
        desired = self._desired
        seen = at + HALF_CYCLE
        freed = [vm for vm in desired.deleting if seen >= vm.deleting_since + gap.freed_seconds]
        wanted = (*desired.vms, *desired.early_vms)
        exist = [vm for vm in (*wanted, *desired.deleting) if vm.created and vm not in freed]
        lost = {vm.name for vm in exist if self._is_lost(vm.name, at)}
        reports = {
            vm.name: AgentReport(
                "ended" if vm.name in exits else "running",
                boot="",
                attempt=desired.attempt.number,
                exit=exits.get(vm.name),
                notice="as in the run" if self._notices.get(vm.name, inf) <= seen else "",
            )
            for vm in wanted
            if self._reports_from.get(vm.name, inf) <= seen
        }
        kinds = {name: self._lost[name][1] for name in lost}
        return ObservedState(
            now=at,
            vms={
                vm.name: VmStatus(vm.name, vm.zone, "TERMINATED" if vm.name in lost else "RUNNING")
                for vm in exist
            },
            absent={},
            not_found=frozenset(vm.name for vm in freed),
            reports=reports,
            silent={},
            creation=result,
            log=LogSummary(step),
            no_commit_seconds=0.0,
            ended_seconds=SETTLED_SECONDS if exits else None,
            events={n: OPERATIONS[kind] for n, kind in kinds.items() if kind in OPERATIONS},
        )

    def _waits(self) -> Iterator[float]:
        """Yields when the waits of the launcher's own are over."""
        yield self._desired.attempt.not_before
        yield from (one.until for one in self._desired.capacity.backoffs)

    def _times(self, gap: Gap) -> Iterator[float]:
        """Yields when something may be observed that changes a decision."""
        yield from (vm.deleting_since + gap.freed_seconds for vm in self._desired.deleting)
        for vm in (*self._desired.vms, *self._desired.early_vms):
            yield self._reports_from.get(vm.name, 0.0)
            yield self._lost.get(vm.name, (0.0, ""))[0]


def _next_cycle(at: float, until: float) -> float:
    """Returns when the launcher decides first, at or after a time that is after `at`."""
    return at + CYCLE_SECONDS * max(1, math.ceil((until - at) / CYCLE_SECONDS - CLOCK_ERROR))
