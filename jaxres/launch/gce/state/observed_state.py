"""Observed state of a job: VMs as listed by the service, reports of agents, and their durations.

Durations grow only while the service or the bucket answers: an outage of the bucket or of the
control plane does not make VMs look lost.

An agent reports in the metadata of an object, so one list request returns the reports of all VMs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxres.launch.gce.state.boot_report import VmBoot
from jaxres.launch.gce.state.capacity_options import CreateErrorKind
from jaxres.launch.gce.state.run_speed import RunSpeed
from jaxres.runlog.faulty_hosts import FaultyHost
from jaxres.runlog.run_log import AttemptEnded

MAX_REASON = 600
AgentState = Literal["ready", "running", "ended"]
STATES: tuple[AgentState, ...] = ("ready", "running", "ended")


@dataclass(frozen=True)
class AgentReport:
    """The newest report of one agent."""

    state: AgentState
    boot: str
    """Random id of this start of the agent."""
    attempt: int = 0
    """Newest attempt in which this host has trained; 0: none yet."""
    exit: int | None = None
    """Exit code of the host's training process, once it has exited."""
    reason: str = ""
    """Why the training process exited, for the operator."""
    notice: str = ""
    """Preemption notice of the VM that is in force, for the operator; empty: none."""
    notice_until: float | None = None
    """When the VM will be stopped by it, in seconds since the epoch; None: unknown or no notice."""

    def metadata(self) -> dict[str, str]:
        """Returns the report as metadata of an object.

        >>> AgentReport.of(AgentReport("ended", "a1", 3, 75, "saved").metadata()).exit
        75
        """
        code = "" if self.exit is None else str(self.exit)
        return {
            "state": self.state,
            "boot": self.boot,
            "attempt": str(self.attempt),
            "exit": code,
            "reason": _ascii(self.reason),
            "notice": _ascii(self.notice),
            "notice_until": "" if self.notice_until is None else f"{self.notice_until:.0f}",
        }

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> AgentReport | None:
        """Parses the metadata of an object; None: it is not a report of an agent."""
        attempt, code = metadata.get("attempt", ""), metadata.get("exit", "")
        until = metadata.get("notice_until", "")
        states: dict[str | None, AgentState] = {state: state for state in STATES}
        state = states.get(metadata.get("state"))
        if state is None or re.fullmatch("[0-9]{1,9}", attempt) is None:
            return None
        return cls(
            state,
            metadata.get("boot", ""),
            int(attempt),
            int(code) if re.fullmatch("-?[0-9]{1,9}", code) else None,
            metadata.get("reason", ""),
            metadata.get("notice", ""),
            float(until) if re.fullmatch("[0-9]{1,12}", until) else None,
        )


def _ascii(text: str) -> str:
    """Returns the text as one line that an HTTP header can carry, cut to MAX_REASON characters."""
    line = " ".join(text.split())
    return "".join(c if " " <= c <= "~" else "?" for c in line)[:MAX_REASON]


MAX_GAP_SECONDS = 2.0
"""Most that one observation adds to a duration: a suspended controller observes nothing."""
SLOW_BUCKET_SECONDS = 1.5
"""Wait for one answer of the bucket above which it is no silence: agents wait as long."""
OUTAGE_SECONDS = 5.0
"""The same above which the bucket was unavailable to the agents too, though it has answered."""
HALTED = ("TERMINATED", "STOPPED", "SUSPENDED")
HOST_ERROR = "compute.instances.hostError"
EVENTS = {
    HOST_ERROR: "its host has failed",
    "compute.instances.preempted": "it was preempted",
    "compute.instances.terminateOnHostMaintenance": "it was ended for maintenance of its host",
    "compute.instances.guestTerminate": "it was shut down from inside",
}
"""Operations of the service itself on a VM, by type, with a text for the operator."""


@dataclass(frozen=True)
class VmStatus:
    """A VM as the service lists it."""

    name: str
    zone: str
    status: str
    ip: str = ""
    id: int = 0
    """Unique id of the VM; its name may have been used by a deleted run."""
    run_id: str = ""
    """Id of the run that created it, from its label; see DesiredState.id."""
    code: str = ""
    """Beginning of the digest of its code, from its label."""
    physical_host: str = ""
    """The server that it runs on; empty: the service does not show it for this kind of VM."""


@dataclass(frozen=True)
class CreateFailed:
    """A failed creation of VMs."""

    kind: CreateErrorKind
    message: str
    """Error message for the operator."""


@dataclass(frozen=True)
class RunLogSummary:
    """Facts from the run log that decisions need."""

    step: int = 0
    """Newest committed step."""
    seq: int = 0
    """Number of the newest record."""
    last_end: AttemptEnded | None = None
    """Newest record of an attempt's end."""
    last_end_seq: int = 0
    """Number of that record."""
    longest_wait: float | None = None
    """Longest time between two commits of one attempt, in seconds; None: there were no two yet."""
    speed: RunSpeed = field(default_factory=RunSpeed)
    faulty_hosts: tuple[FaultyHost, ...] = ()
    """VMs whose hardware has failed, with their physical hosts."""


@dataclass(frozen=True)
class ObservedState:
    """All inputs of a decision besides the desired state and the config."""

    now: float
    """Seconds since the epoch."""
    vms: Mapping[str, VmStatus] | None
    """VMs of the run as the service lists them; None: it has not answered."""
    absent: Mapping[str, float]
    """Seconds for which lists have lacked a VM, by name."""
    not_found: frozenset[str]
    """VMs to delete that are not listed and for which the service returns 404."""
    reports: Mapping[str, AgentReport]
    silent: Mapping[str, float]
    """Seconds without a new report of an agent while the bucket answers, by name."""
    creation: CreateFailed | bool | None
    """Result of the pending creation.

    True: done. False: in progress. None: the service did not answer, or does not know the creation.
    """
    log: RunLogSummary
    no_commit_seconds: float
    """Seconds without a commit while an attempt runs and the bucket answers."""
    ended_seconds: float | None
    """Seconds since a training process of the attempt was first seen exited; None: none has."""
    events: Mapping[str, str] = field(default_factory=dict)
    """Newest operation of the service itself on a VM, by name; a key of EVENTS."""
    boots: Mapping[str, VmBoot] = field(default_factory=dict)
    """Boots of VMs whose agents have not reported yet, by name."""
    looked_up: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """Status of suspected VMs as the service returns it for each, by name; None: 404."""
    run_quiet_seconds: float = math.inf
    """Seconds since the running attempt last showed a sign of life: a new committed step, or a
    heartbeat of the supervisor that holds the run lock; inf: none yet, or a process has exited."""
    since_commit_seconds: float = 0.0
    """Seconds without a new committed step, in all phases, since this controller began."""
    lacking_seconds: float = 0.0
    """Seconds for which VMs of the job have been lacking since this controller began; 0: all are
    created."""
    unreachable: frozenset[str] = frozenset()
    """Zones that have not answered: their VMs are unknown, and missing in `vms`."""
    first_reports: Mapping[str, float] = field(default_factory=dict[str, float])
    """When this controller first saw a report of an agent, in seconds since the epoch, by name."""
    since_create_seconds: float = 0.0
    """Seconds since this controller last requested a creation, or since it took the lease."""
    gone_groups: frozenset[str] = frozenset()
    """Unwanted groups that are deleted, with their resize requests and templates."""
    stop_requested: bool = False
    down_requested: bool = False

    def listed_in(self, zone: str) -> Mapping[str, VmStatus] | None:
        """Returns the listed VMs for a judgement about a zone; None: it has not answered."""
        return None if zone in self.unreachable else self.vms


@dataclass
class StateObserver:
    """Durations that one controller accumulates between observations, on its own clock."""

    _reports: dict[str, tuple[int, AgentReport, float]] = field(default_factory=dict)
    """Generation of a report, the report, and the seconds without a new one, by name."""
    _first_reports: dict[str, float] = field(default_factory=dict)
    """When the first report of an agent was seen, by name."""
    _absent: dict[str, tuple[bool, float]] = field(default_factory=dict)
    """Whether a VM was created, and for how long lists have lacked it since, by name."""
    _vms: Mapping[str, VmStatus] | None = None
    _ids: dict[str, int] = field(default_factory=dict)
    _events: dict[str, str] = field(default_factory=dict)
    _bucket_at: float | None = None
    """Time of the last observation if the bucket answered it."""
    _service_at: float | None = None
    _log: RunLogSummary = RunLogSummary()
    _no_commit_seconds: float = 0.0
    _attempt: int = 0
    _ended_seconds: float | None = None
    _run_quiet_seconds: float = math.inf
    _heartbeat: int | None = None
    """Generation of the run's heartbeat as read last."""
    _since_commit_seconds: float = 0.0
    _lacking_seconds: float = 0.0
    _committed: int = 0
    """Newest committed step when `update_waits` was last called."""

    @property
    def silent(self) -> dict[str, float]:
        """Seconds without a new report of an agent while the bucket answers, by name of its VM."""
        return {name: still for name, (_, _, still) in self._reports.items()}

    @property
    def events(self) -> Mapping[str, str]:
        """Newest operation of the service itself on a VM, by name."""
        return self._events

    def bucket_unavailable(self) -> None:
        """Records an observation that the bucket did not answer."""
        self._bucket_at = None

    def update_reports(
        self,
        listed: Mapping[str, tuple[int, Mapping[str, str]]],
        *,
        now: float,
        waited: float = 0.0,
    ) -> None:
        """Records the agents' reports as the bucket lists them.

        Args:
          listed: generation and metadata by name.
          now: time of the list.
          waited: longest wait for one answer of the bucket since the last observation.
        """
        was_unavailable = self._bucket_at is None or waited > OUTAGE_SECONDS
        since = 0.0 if self._bucket_at is None else now - self._bucket_at
        since = max(0.0, since - waited) if waited > SLOW_BUCKET_SECONDS else since
        since = min(MAX_GAP_SECONDS, since)
        if was_unavailable:  # The agents could not report either: their silence starts at 0 again.
            since = 0.0
            self._reports = {name: (g, r, 0.0) for name, (g, r, _) in self._reports.items()}
        self._bucket_at = now
        for name, (generation, metadata) in listed.items():
            report = AgentReport.of(metadata)
            before = self._reports.get(name)
            if report is None:
                continue
            still = before[2] + since if before is not None and before[0] == generation else 0.0
            self._reports[name] = generation, report, still
            self._first_reports.setdefault(name, now)
        for name in self._reports.keys() - listed.keys():
            generation, report, still = self._reports[name]
            self._reports[name] = generation, report, still + since

    def update_vms(
        self,
        vms: Mapping[str, VmStatus] | None,
        wanted: Mapping[str, bool],
        *,
        now: float,
        unknown: Container[str] = (),
    ) -> None:
        """Records the VMs that the service lists.

        Args:
          vms: the VMs; None: it has not answered.
          wanted: for each VM whether it is known to be created. Absence before that moment does not
            count as absence afterwards.
          now: time of the list.
          unknown: VMs in zones that have not answered.
        """
        since = 0.0 if self._service_at is None else min(MAX_GAP_SECONDS, now - self._service_at)
        self._vms, self._service_at = vms, None if vms is None else now
        self._ids |= {name: vm.id for name, vm in (vms or {}).items()}
        before, self._absent = self._absent, {}
        for name, is_made in wanted.items():
            was_made, absent = before.get(name, (not is_made, 0.0))
            absent = absent if was_made == is_made else 0.0
            if vms is None or name in unknown:
                self._absent[name] = is_made, absent
            elif name not in vms:
                self._absent[name] = is_made, absent + since

    def update_events(self, events: Mapping[int, str]) -> None:
        """Records the newest operation of the service itself on each VM, by id."""
        self._events |= {name: events[id] for name, id in self._ids.items() if id in events}

    def update_progress(
        self,
        log: RunLogSummary,
        attempt: int,
        *,
        is_on: bool,
        any_ended: bool,
        since: float,
        heartbeat: int | None = None,
    ) -> None:
        """Records the run log's facts, and whether a training process of the attempt has exited.

        Args:
          log: facts from the run log.
          is_on: whether it runs.
          any_ended: whether a training process of it has exited.
          since: seconds since the last observation.
          heartbeat: generation of the heartbeat of the run lock; None: it was not read.
        """
        since = min(MAX_GAP_SECONDS, since)
        beats = None not in (heartbeat, self._heartbeat) and heartbeat != self._heartbeat
        if attempt != self._attempt or not is_on or any_ended:
            self._run_quiet_seconds = math.inf
        elif log.step != self._log.step or beats:
            self._run_quiet_seconds = 0.0
        else:
            self._run_quiet_seconds += since
        self._heartbeat = heartbeat
        if log.step != self._log.step or attempt != self._attempt or not is_on:
            self._no_commit_seconds = 0.0
        else:
            self._no_commit_seconds += since
        if attempt != self._attempt or not is_on or not any_ended:
            self._ended_seconds = None
        else:
            self._ended_seconds = (
                0.0 if self._ended_seconds is None else self._ended_seconds + since
            )
        self._log, self._attempt = log, attempt

    def update_waits(self, step: int, *, lacks_vms: bool, since: float) -> None:
        """Records how long the job has waited for a commit, and for VMs.

        Args:
          step: newest committed step.
          lacks_vms: whether a VM of the job is not created.
          since: seconds since the last observation.
        """
        since = min(MAX_GAP_SECONDS, since)
        is_new = step != self._committed
        self._since_commit_seconds = 0.0 if is_new else self._since_commit_seconds + since
        self._lacking_seconds = self._lacking_seconds + since if lacks_vms else 0.0
        self._committed = step

    def snapshot(
        self,
        *,
        wall: float,
        creation: CreateFailed | bool | None,
        since_create_seconds: float,
        not_found: frozenset[str] = frozenset(),
        stop_requested: bool = False,
        down_requested: bool = False,
    ) -> ObservedState:
        """Returns the observed state for a decision."""
        return ObservedState(
            now=wall,
            vms=self._vms,
            absent={name: absent for name, (_, absent) in self._absent.items()},
            not_found=not_found,
            reports={name: report for name, (_, report, _) in self._reports.items()},
            silent=self.silent,
            creation=creation,
            log=self._log,
            no_commit_seconds=self._no_commit_seconds,
            ended_seconds=self._ended_seconds,
            events=self._events,
            run_quiet_seconds=self._run_quiet_seconds,
            since_commit_seconds=self._since_commit_seconds,
            lacking_seconds=self._lacking_seconds,
            first_reports={
                name: wall - ((self._bucket_at or at) - at)
                for name, at in self._first_reports.items()
            },
            since_create_seconds=since_create_seconds,
            stop_requested=stop_requested,
            down_requested=down_requested,
        )
