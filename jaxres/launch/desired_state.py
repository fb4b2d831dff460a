"""What a job on VMs is meant to be: one object in the run's bucket, changed by the leader alone.

Everything that a launcher does follows from it and from what can be seen, so that a successor goes
on wherever the one before was killed: first it is written, then done. Agents on the VMs read it,
too: it tells which attempt is on and who takes part.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jaxres.faults import Fenced, StorageUnavailable
from jaxres.launch.capacity_options import Cooling
from jaxres.storage import gcs_objects
from jaxres.storage.path import BucketPath

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

Phase = Literal["placing", "running", "ending", "ended"]
WRITES = 3
MAX_HISTORY = 200
"""Attempts of which the ends are kept."""


@dataclass(frozen=True)
class Vm:
    """A VM that is meant to be, or that is meant to be gone."""

    name: str
    """Never used again."""
    zone: str
    rung: int
    """Of the ladder."""
    asked: float
    """When, in seconds since the epoch: for the bill, and for people; 0: not yet."""
    made: bool = False
    """Whether its creation is known to have gone well."""
    doomed: float = 0.0
    """Since when it is meant to be gone; 0: it is not."""


@dataclass(frozen=True)
class Creation:
    """VMs that are being created by one request; it does no more when it is made again."""

    names: tuple[str, ...]
    request_id: str


@dataclass(frozen=True)
class Member:
    """A host of the attempt that is on; its place in the list is its id."""

    name: str
    ip: str


@dataclass(frozen=True)
class Past:
    """How one attempt has ended."""

    attempt: int
    code: int
    reason: str
    step_before: int
    step_after: int
    culprit: str | None = None
    """The VM that is the cause."""


@dataclass(frozen=True)
class End:
    """How the job is to end, or has ended."""

    exit: int
    reason: str
    since: float
    """When that was decided, in seconds since the epoch."""


@dataclass(frozen=True)
class Intent:
    """The whole of it."""

    run: str
    """Label of all its VMs, and the beginning of their names."""
    code: str
    """Digest of the code that every attempt runs."""
    config: str
    """Digest of the resolved config, which the agents and every leader go by."""
    epoch: int = 0
    """Of the lease under which this was written."""
    serial: int = 0
    """Grows with every write."""
    phase: Phase = "placing"
    why: str = ""
    """What led here, for a person."""
    placement: int = 0
    """Counts the places that were tried."""
    next_name: int = 0
    """Counts the names that were given."""
    vms: tuple[Vm, ...] = ()
    """By slot; empty: a place is still to be found."""
    creation: Creation | None = None
    doomed: tuple[Vm, ...] = ()
    """VMs to be deleted, until they are known to be gone."""
    cooling: tuple[Cooling, ...] = ()
    refill_since: float | None = None
    """Since when lost VMs are being replaced where the others are; seconds since the epoch."""
    unready: int = 0
    """How often VMs were lost since the last attempt began, before another could."""
    attempt: int = 0
    members: tuple[Member, ...] = ()
    """Hosts of the attempt that is on; empty: none is."""
    port: int = 0
    step_before: int = 0
    """Newest committed step when the attempt began."""
    seq_before: int = 0
    """Number of the newest record in the run's log at that time."""
    not_before: float = 0.0
    """Earliest start of the next attempt, in seconds since the epoch."""
    history: tuple[Past, ...] = ()
    began: float = 0.0
    """When the job was first asked for, or again after an end."""
    spent_dollars: float = 0.0
    """On VMs that are gone."""
    vm_seconds: float = 0.0
    """Of VMs that are gone."""
    end: End | None = None

    def with_past(self, past: Past) -> Intent:
        """Returns it with one more end."""
        return dataclasses.replace(self, history=(*self.history, past)[-MAX_HISTORY:])

    @property
    def names(self) -> frozenset[str]:
        """The VMs that are meant to be."""
        return frozenset(vm.name for vm in self.vms)


@dataclass(frozen=True)
class Next:
    """What is to be from now on, and what a person is to be told of it."""

    intent: Intent
    words: tuple[str, ...] = ()


@dataclass
class Record:
    """The object in the bucket, and the generation that is known of it."""

    path: BucketPath
    intent: Intent | None = None
    generation: int = field(default=0)

    def read(self) -> Intent | None:
        """Returns what stands there; None: nothing yet."""
        found = gcs_objects.read_at(self.path)
        if found is None:
            self.intent, self.generation = None, 0
        else:
            self.intent, self.generation = unpacked(found[0], self.path), found[1]
        return self.intent

    def write(self, intent: Intent, *, epoch: int) -> Intent:
        """Writes it over what was read; the next number is its serial.

        Raises:
          Fenced: another launcher has written meanwhile.
        """
        for _ in range(WRITES):
            if self.intent is not None and self.intent.epoch > epoch:
                break  # It was read after another had taken over.
            serial = 0 if self.intent is None else self.intent.serial
            new = dataclasses.replace(intent, epoch=epoch, serial=serial + 1)
            generation = gcs_objects.write(self.path, packed(new), over=self.generation)
            if generation is not None:
                self.intent, self.generation = new, generation
                return new
            there = self.read()
            if there is None or there.epoch != epoch:
                break  # Else an earlier write of ours stands there, whose answer was lost.
        raise Fenced(
            f"{self.path.parent.parent}: another launcher leads this run by now; this one acts no "
            "more, the training goes on."
        )


def packed(intent: Intent) -> bytes:
    """Returns it as JSON."""
    return json.dumps(dataclasses.asdict(intent), sort_keys=True).encode()


def _known(kind: type[T], fields: dict[str, Any]) -> T:
    """Makes one of a kind by the fields that it has."""
    names = {f.name for f in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in fields.items() if name in names})


def unpacked(data: bytes, path: BucketPath) -> Intent:
    """Reads what `packed` has written; what a newer version has added is left out."""
    try:
        fields: dict[str, Any] = json.loads(data)
        creation, end = fields["creation"], fields["end"]
        return _known(
            Intent,
            fields
            | {
                "vms": tuple(_known(Vm, vm) for vm in fields["vms"]),
                "doomed": tuple(_known(Vm, vm) for vm in fields["doomed"]),
                "cooling": tuple(_known(Cooling, one) for one in fields["cooling"]),
                "members": tuple(_known(Member, one) for one in fields["members"]),
                "history": tuple(_known(Past, one) for one in fields["history"]),
                "creation": creation and Creation(tuple(creation["names"]), creation["request_id"]),
                "end": end and _known(End, end),
            },
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageUnavailable(
            f"{path}: can't be read as what the launcher has written ({error}). If a newer jaxres "
            "has written it, use that one."
        ) from error
