"""Desired state of a job on VMs: one object in the run's bucket, written by the controller only.

A launcher writes the desired state first and acts on it afterwards. Its actions follow from the
desired state and from what it observes, so a successor resumes wherever its predecessor was killed.
The agents on the VMs read the object too: it has the current attempt and its hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxres.launch.gce.state.capacity_options import Backoff
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.runlog.launch_events import LaunchEvent

SpendingCause = Literal["training", "boot", "waiting", "spare"]
Phase = Literal["placing", "running", "ending", "ended"]
MAX_HISTORY = 200
"""Number of attempts whose outcomes are kept."""


@dataclass(frozen=True)
class VmSpec:
    """A VM that should exist, or that should be deleted."""

    name: str
    """Name of the VM; never used again for another one."""
    zone: str
    option: int
    """Index of its capacity option in launch.gce.capacity_options."""
    requested_at: float
    """When its creation was requested, in seconds since the epoch, for the costs; 0: not yet."""
    created: bool = False
    """Whether its creation is known to have succeeded."""
    deleting_since: float = 0.0
    """Since when it should be deleted, in seconds since the epoch; 0: it should exist."""
    trained_from: float = 0.0
    """When the first attempt on it started, in seconds since the epoch; 0: none has yet."""
    trained_seconds: float = 0.0
    """Duration of the attempts on it that have ended."""
    replaces: str = ""
    """VM that it replaces, if it was requested before that VM was lost; empty: it was not."""
    spare_seconds: float = 0.0
    """For how long it was a spare, from its request on, once it is none any more."""
    created_at: float = 0.0
    """When its creation was first known to have succeeded, in seconds since the epoch; 0: it is not
    known, or the state was written before there was this time."""

    @property
    def boots_since(self) -> float:
        """When a created VM began to boot: a queue may deliver it long after its request."""
        return max(self.requested_at, self.created_at)


@dataclass(frozen=True)
class Spending:
    """Lifetime and costs of VMs of one capacity option for one cause; see spending.py."""

    option: int
    """Index of the capacity option in launch.gce.capacity_options."""
    cause: SpendingCause
    vm_seconds: float = 0.0
    dollars: float = 0.0


@dataclass(frozen=True)
class PendingCreate:
    """VMs that one request creates. Repeating the request creates nothing more."""

    names: tuple[str, ...]
    request_id: str
    is_of_spares: bool = False
    """Whether no slot needs these VMs, so that no attempt waits for them."""


@dataclass(frozen=True)
class InstanceGroup:
    """A managed instance group, its resize request and its template; see resize_requests.py."""

    name: str
    """Name of all three; never used again for others."""
    zone: str
    """Zone of the group; empty: there is only a template."""
    names: tuple[str, ...]
    """VMs that the resize request creates."""


@dataclass(frozen=True)
class HostAddress:
    """A host of the current attempt. Its index in the list is its host id."""

    name: str
    ip: str
    instance: str = ""
    """Unique id of the VM; empty: written before there were ids here."""
    physical_host: str = ""
    """The server that the VM runs on; empty: unknown."""


@dataclass(frozen=True)
class JobEnd:
    """How the job ended or is about to end."""

    exit: int
    reason: str
    since: float
    """When the end was decided, in seconds since the epoch."""


@dataclass(frozen=True)
class BootFailure:
    """Why the newest VMs did not come up."""

    cause: str
    """Key, equal for failures for the same reason."""
    at: float
    """When it was last seen, in seconds since the epoch."""
    times: int = 1
    """Number of times in a row."""


@dataclass(frozen=True)
class LossCount:
    """Number of VMs that were replaced for one reason."""

    kind: str
    vms: int


@dataclass(frozen=True)
class Replacements:
    """VMs that were replaced since the newest committed step."""

    step: int = 0
    """Newest committed step when the first of them was replaced."""
    at: float = 0.0
    """When `times` last grew, in seconds since the epoch."""
    times: int = 0
    """Number of times that VMs were replaced; VMs that are lost together count once."""
    losses: tuple[LossCount, ...] = ()
    vm_seconds: float = 0.0
    """Lifetime of the replaced VMs."""
    dollars: float = 0.0
    """Costs of the replaced VMs."""


@dataclass(frozen=True)
class Condition:
    """A condition of a job that has an event at its begin, and may have one at its end."""

    kind: str
    """Kind of the event at its begin."""
    value: float = 0.0
    """Of stalled commits: the newest committed step. Of the spending: the bound in dollars."""


@dataclass(frozen=True)
class AlertStart:
    """First event of which a target receives alerts; earlier ones are older than the target."""

    target: str
    """Name of the target, as in `alerts.jsonl`."""
    event: int
    """Number of the first event."""


@dataclass(frozen=True)
class JobAttempt:
    """The newest attempt of a job, and when the next one may start."""

    number: int = 0
    """Number of the attempt; 0: none has started yet."""
    hosts: tuple[HostAddress, ...] = ()
    """Its hosts; empty: it has ended."""
    draining: tuple[str, ...] = ()
    """Its hosts whose agents request a save and the end of the attempt."""
    port: int = 0
    """Port of its rendezvous."""
    step_before: int = 0
    """Newest committed step when it started."""
    since: float = 0.0
    """When it started, in seconds since the epoch; 0: it has ended."""
    seq_before: int = 0
    """Number of the newest record in the run log when it started."""
    not_before: float = 0.0
    """Earliest start of the next attempt, in seconds since the epoch."""


@dataclass(frozen=True)
class RequestWait:
    """The wait before the next request for VMs of one kind beside the attempt."""

    tries: int = 0
    """Of spares: how often one was lost or refused since all of them were ready. Of VMs of a
    cheaper option: how often they were requested lately."""
    not_before: float = 0.0
    """Earliest next request, in seconds since the epoch."""


@dataclass(frozen=True)
class BesideAttempt:
    """VMs that are requested while an attempt runs, and why the attempt ends for them."""

    early_for: tuple[str, ...] = ()
    """Hosts of the attempt that had a replacement requested: once each, with any result."""
    spare_wait: RequestWait = RequestWait()
    """See spare_requests.py."""
    cheaper_wait: RequestWait = RequestWait()
    """See cheaper_option.py."""
    grow_after: int | None = None
    """Step after whose commit the attempt ends, because more hosts are ready; see elastic.py."""
    move_after: int | None = None
    """Step after whose commit the attempt ends, because all VMs of a cheaper option are ready."""


@dataclass(frozen=True)
class CapacityState:
    """The search for capacity: where VMs were refused, and since when they are lacking."""

    placement: int = 0
    """Number of placements tried so far."""
    backoffs: tuple[Backoff, ...] = ()
    """Zones that are skipped for a while."""
    freed_at: float = 0.0
    """When a VM of the job was last found deleted, in seconds since the epoch; 0: never yet."""
    refill_since: float | None = None
    """Since when lost VMs are being replaced in the others' zone, in seconds since the epoch."""


@dataclass(frozen=True)
class VmFailures:
    """VMs that were lost or did not come up, as far as they use up a budget."""

    unready: int = 0
    """Number of times that VMs were lost since the last attempt started."""
    replacements: Replacements = Replacements()
    suspected: tuple[str, ...] = ()
    """VMs that may be lost: their agents are silent, and nothing confirms a loss yet."""
    boot_failure: BootFailure | None = None
    """Newest known cause for which VMs did not come up since the last attempt started."""


@dataclass(frozen=True)
class JobCosts:
    """Costs of the VMs that are deleted, and what moves to cheaper options have saved."""

    spent_dollars: float = 0.0
    """Costs of the VMs that are deleted."""
    vm_seconds: float = 0.0
    """Lifetime of the VMs that are deleted."""
    spending: tuple[Spending, ...] = ()
    """The same two by capacity option and cause."""
    cheaper_by: float = 0.0
    """Dollars by which a VM costs less in an hour since the job has moved to cheaper options."""
    saved_dollars: float = 0.0
    """Dollars that moves have saved until the end of the newest ended attempt, less the costs until
    then of VMs that were requested for a move."""
    prices: tuple[dict[str, Any], ...] = ()
    """Records of an earlier version, which asked Google for prices: option_prices.py."""


@dataclass(frozen=True)
class JobEvents:
    """Events of the launcher, the conditions that have caused some, and who is alerted."""

    count: int = 0
    """Number of events so far; see jaxres/runlog/launch_events.py."""
    newest: tuple[LaunchEvent, ...] = ()
    """The newest events, until they are in `launch/events`."""
    conditions: tuple[Condition, ...] = ()
    """Conditions in force; see job_conditions.py."""
    alert_starts: tuple[AlertStart, ...] = ()
    """For every target of alerts: its first event."""


@dataclass(frozen=True)
class DesiredState:
    """Everything that the launcher remembers of a job."""

    run: str
    """Label of all VMs of the run directory, and beginning of their names."""
    code: str
    """Digest of the code that every attempt runs."""
    config: str
    """Digest of the resolved config that all agents and controllers use."""
    id: str = ""
    """Random id of the run, part of the names of its VMs; empty: written before there were ids."""
    image: str = ""
    """Boot image of all VMs, to which the image family led at the start; empty: as configured."""
    started_at: float = 0.0
    """When the job was requested, or requested again after an end, in seconds since the epoch."""
    epoch: int = 0
    """Epoch of the lease under which this was written."""
    serial: int = 0
    """Number of this write; grows by one with every write."""
    phase: Phase = "placing"
    reason: str = ""
    """Why the job is in this phase, for the operator."""
    end: JobEnd | None = None
    next_name: int = 0
    """Number of VM names used so far."""
    vms: tuple[VmSpec, ...] = ()
    """VMs of the job, by slot; empty: no zone is chosen yet."""
    early_vms: tuple[VmSpec, ...] = ()
    """Replacements of hosts with a notice, until the attempt ends; see early_replacement.py."""
    spares: tuple[VmSpec, ...] = ()
    """VMs without a slot that wait to replace lost ones; no attempt runs on them; see spares.py.

    Those of another capacity option than `vms` wait to replace all of them: cheaper_option.py."""
    creation: PendingCreate | None = None
    groups: tuple[InstanceGroup, ...] = ()
    """Groups that may exist, until they are known to be deleted; see instance_groups.py."""
    deleting: tuple[VmSpec, ...] = ()
    """VMs to delete, until they are known to be deleted."""
    attempt: JobAttempt = JobAttempt()
    history: tuple[AttemptOutcome[str], ...] = ()
    """Outcomes of the attempts that have ended."""
    beside: BesideAttempt = BesideAttempt()
    capacity: CapacityState = CapacityState()
    failures: VmFailures = VmFailures()
    costs: JobCosts = JobCosts()
    events: JobEvents = JobEvents()

    def with_outcome(self, outcome: AttemptOutcome[str]) -> DesiredState:
        """Returns the state with one more outcome in the history."""
        return dataclasses.replace(self, history=(*self.history, outcome)[-MAX_HISTORY:])

    @property
    def name_prefix(self) -> str:
        """Beginning of the names of the run's VMs; of a new run in the same place it differs."""
        return f"{self.run}-{self.id}" if self.id else self.run

    @property
    def names(self) -> frozenset[str]:
        """Names of the VMs that should exist."""
        return frozenset(vm.name for vm in (*self.vms, *self.early_vms, *self.spares))

    @property
    def all_vms(self) -> tuple[VmSpec, ...]:
        """VMs that should exist or that are being deleted."""
        return (*self.vms, *self.early_vms, *self.spares, *self.deleting)


@dataclass(frozen=True)
class Transition:
    """The next desired state, and the lines to print about the change."""

    desired: DesiredState
    messages: tuple[str, ...] = ()
    losses: Mapping[str, str] = field(default_factory=dict[str, str])
    """Kind of the loss of VMs that are replaced, by name."""
    unused: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why early replacements and spares are deleted that no attempt has used, by name; and VMs
    that the job leaves for cheaper ones."""

    def then(self, desired: DesiredState, *messages: str) -> Transition:
        """Returns the decision with a later state, and with more lines."""
        return dataclasses.replace(self, desired=desired, messages=(*self.messages, *messages))
