"""The records of the decision log: what can be decided, and the file of one decision."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

from jaxres.faults import ConfigError, Unrestorable
from jaxres.storage.checksummed_json import opened, sealed
from jaxres.storage.path import Place


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An attempt takes the run over."""

    attempt: int
    host: str
    pid: int
    boot_id: str
    nonce: str
    coordinator: str | None
    num_hosts: int
    threads: int
    """XLA's CPU thread count (NPROC): it decides bits, so every later attempt uses the first's."""
    versions: dict[str, str]
    fingerprint: dict[str, str]
    trajectory: str
    places: tuple[int, ...] | None = None
    """Where each host of the attempt sits, by its number; None: no supervisor has started it."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Training begins at a step: 0, or a committed one that was restored."""

    step: int
    path: str | None
    dataset: str
    """Fingerprint of the rows; a later attempt must have the same."""
    computation: dict[str, str]
    """What decides bits besides the trajectory: devices, mesh, microbatches, threads, versions."""
    init: dict[str, str] | None = None
    """Of a start from other weights (`init_from`): their digest, path and, of a run, step."""
    looks_back_steps: int | None = None
    """By how many steps a rollback may begin before the step that shows it, as the guards are set:
    a commit that is so much older than the newest is known to be good. None: nobody can say."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A step directory is whole and durable, and counts from now on."""

    step: int
    path: str
    manifest: str
    bytes: int
    known_good: bool
    """Whether it was when it was committed; by its age it becomes so (Line.good_through)."""
    heldout_loss: float | None = None
    """Of the newest evaluation by then; None: there was none, or it was not finite."""
    evaluated_step: int = 0
    """Step of that evaluation."""


@dataclass(frozen=True, kw_only=True)
class Skip:
    """Rows of the stream, as half-open ranges of positions, that training leaves out."""

    rows: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Training goes on from an older step: commits above it are off the line from here on."""

    onset: int
    """The first step that was not as it should be."""
    target: int
    """The newest committed step before it; 0: the run begins anew."""
    rows: tuple[tuple[int, int], ...]
    """Of the stream, as half-open ranges of positions, that training leaves out from now on."""
    reason: str
    rate_factor: float = 1.0
    """On the learning rate of the steps [onset, onset + rate_steps)."""
    rate_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Steps are dead for everyone, before a byte of them is deleted."""

    steps: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A committed step is proved damaged: it never counts again, and its files stay for people."""

    step: int
    path: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Stop:
    """An attempt ended by itself."""

    exit: int
    reason: str
    committed: bool
    culprit: int | None = None
    """The host that is the cause, by its number in the attempt, where one is."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """A supervisor ended by itself: no attempt follows until somebody starts it again."""

    exit: int
    reason: str


Body = Claim | Start | Commit | Skip | Rollback | Prune | Quarantine | Stop | Leave
_KINDS: dict[str, type[Body]] = {kind.__name__.lower(): kind for kind in get_args(Body)}


@dataclass(frozen=True)
class Record:
    """A numbered decision: what was decided, by which attempt, and when.

    The time is for people, and for policies that keep one step a day; nothing else goes by it.
    """

    seq: int
    attempt: int
    time: float
    body: Body

    def encode(self) -> bytes:
        """Returns the record as canonical JSON with its own digest."""
        common = {
            "seq": self.seq,
            "kind": type(self.body).__name__.lower(),
            "attempt": self.attempt,
            "time": self.time,
        }
        fields = dataclasses.asdict(self.body)
        for field in dataclasses.fields(self.body):  # Those that came later have a default.
            if fields[field.name] == field.default:
                del fields[field.name]
        return sealed(common | fields)

    @staticmethod
    def decode(data: bytes, *, path: Place) -> Record:
        """Reads a record back; one that can't be read is never passed over."""
        try:
            fields, _ = opened(data)
        except ValueError as error:
            raise Unrestorable(
                f"{path}: this record of the run's log is damaged ({error}). The log says which "
                "checkpoints count, so nothing is restored, and the run does not start again from "
                "step 0. Restore the file from a copy. Nothing was changed."
            ) from error
        try:
            kind = _KINDS[fields.pop("kind")]
            seq, attempt, time = fields.pop("seq"), fields.pop("attempt"), fields.pop("time")
            if kind is Claim:
                fields["attempt"] = attempt
            body = kind(**{name: _frozen(value) for name, value in fields.items()})
            if path.name != file_name(seq):
                raise ValueError(f"it says that it is record {seq}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: not a record that this version of jaxres can read ({error!r}). "
                "Was the run written by a newer version, or the file edited? Nothing was changed."
            ) from error
        return Record(seq=seq, attempt=attempt, time=time, body=body)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def file_name(seq: int) -> str:
    """Returns the name of a record's file."""
    return f"{seq:08d}.json"
