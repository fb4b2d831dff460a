"""Desired state of a job on VMs: one object in the run's bucket, written by the controller only.

A launcher writes the desired state first and acts on it afterwards. Its actions follow from the
desired state and from what it observes, so a successor resumes wherever its predecessor was killed.
The agents on the VMs read the object too: it has the current attempt and its hosts.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxres.faults import ConfigError, Fenced, StorageUnavailable
from jaxres.launch.capacity_options import Backoff
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.storage import codec, gcs_objects
from jaxres.storage.path import GcsPath

Phase = Literal["placing", "running", "ending", "ended"]
FORMAT = 2
WRITES = 3
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


@dataclass(frozen=True)
class PendingCreate:
    """VMs that one request creates. Repeating the request creates nothing more."""

    names: tuple[str, ...]
    request_id: str


@dataclass(frozen=True)
class HostAddress:
    """A host of the current attempt. Its index in the list is its host id."""

    name: str
    ip: str


@dataclass(frozen=True)
class JobEnd:
    """How the job ended or is about to end."""

    exit: int
    reason: str
    since: float
    """When the end was decided, in seconds since the epoch."""


@dataclass(frozen=True)
class DesiredState:
    """Everything that the launcher remembers of a job."""

    run: str
    """Label of all VMs of the run, and prefix of their names."""
    code: str
    """Digest of the code that every attempt runs."""
    config: str
    """Digest of the resolved config that all agents and controllers use."""
    epoch: int = 0
    """Epoch of the lease under which this was written."""
    serial: int = 0
    """Number of this write; grows by one with every write."""
    phase: Phase = "placing"
    reason: str = ""
    """Why the job is in this phase, for the operator."""
    placement: int = 0
    """Number of placements tried so far."""
    next_name: int = 0
    """Number of VM names used so far."""
    vms: tuple[VmSpec, ...] = ()
    """VMs of the job, by slot; empty: no zone is chosen yet."""
    creation: PendingCreate | None = None
    deleting: tuple[VmSpec, ...] = ()
    """VMs to delete, until they are known to be deleted."""
    backoffs: tuple[Backoff, ...] = ()
    refill_since: float | None = None
    """Since when lost VMs are being replaced in the others' zone, in seconds since the epoch."""
    unready: int = 0
    """Number of times that VMs were lost since the last attempt started."""
    attempt: int = 0
    hosts: tuple[HostAddress, ...] = ()
    """Hosts of the current attempt; empty: no attempt is running."""
    port: int = 0
    step_before: int = 0
    """Newest committed step when the attempt started."""
    seq_before: int = 0
    """Number of the newest record in the run log when the attempt started."""
    not_before: float = 0.0
    """Earliest start of the next attempt, in seconds since the epoch."""
    history: tuple[AttemptOutcome[str], ...] = ()
    started_at: float = 0.0
    """When the job was requested, or requested again after an end, in seconds since the epoch."""
    spent_dollars: float = 0.0
    """Costs of the VMs that are deleted."""
    vm_seconds: float = 0.0
    """Lifetime of the VMs that are deleted."""
    end: JobEnd | None = None

    def with_outcome(self, outcome: AttemptOutcome[str]) -> DesiredState:
        """Returns the state with one more outcome in the history."""
        return dataclasses.replace(self, history=(*self.history, outcome)[-MAX_HISTORY:])

    @property
    def names(self) -> frozenset[str]:
        """Names of the VMs that should exist."""
        return frozenset(vm.name for vm in self.vms)


@dataclass(frozen=True)
class Transition:
    """The next desired state, and the lines to print about the change."""

    desired: DesiredState
    messages: tuple[str, ...] = ()


@dataclass
class StateObject:
    """The desired state in the bucket, and its generation when it was read or written last."""

    path: GcsPath
    desired: DesiredState | None = None
    generation: int = field(default=0)

    def read(self) -> DesiredState | None:
        """Reads the object; None: there is none yet."""
        found = gcs_objects.read_at(self.path)
        if found is None:
            self.desired, self.generation = None, 0
        else:
            self.desired, self.generation = decode_state(found[0], self.path), found[1]
        return self.desired

    def write(self, desired: DesiredState, *, epoch: int) -> DesiredState:
        """Writes the object unless another launcher has written since the read; the serial grows.

        Raises:
          Fenced: another launcher has written in the meantime.
        """
        for _ in range(WRITES):
            if self.desired is not None and self.desired.epoch > epoch:
                break  # It was read after another launcher had taken over.
            serial = 0 if self.desired is None else self.desired.serial
            new = dataclasses.replace(desired, epoch=epoch, serial=serial + 1)
            generation = gcs_objects.write(self.path, encode_state(new), over=self.generation)
            if generation is not None:
                self.desired, self.generation = new, generation
                return new
            current = self.read()
            if current is None or current.epoch != epoch:
                break  # Else the response to an earlier write of this launcher was lost.
        raise Fenced(
            f"{self.path.parent.parent}: another launcher holds the lease of this run now; "
            "this one stops acting, the training continues."
        )


def encode_state(desired: DesiredState) -> bytes:
    """Returns the desired state as JSON."""
    return json.dumps({codec.FORMAT: FORMAT} | codec.encode(desired), sort_keys=True).encode()


def decode_state(data: bytes, path: GcsPath) -> DesiredState:
    """Parses what `encode_state` wrote; unknown fields are skipped.

    Raises:
      ConfigError: it was written in another format.
      StorageUnavailable: it can't be read.
    """
    try:
        fields: dict[str, Any] = json.loads(data)
        codec.require_format(fields, number=FORMAT)
        return codec.decode(DesiredState, fields, ignore_unknown=True)
    except codec.OtherFormat as error:
        raise ConfigError(f"{path}: {error}.") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise StorageUnavailable(
            f"{path}: is not readable as a desired state ({error}). If a newer jaxres "
            "wrote it, use that one."
        ) from error
