"""The records of the run log, and the file format of a record."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxres.faults import ConfigError, Unrestorable, command_line
from jaxres.runlog.event_log import is_seconds
from jaxres.storage import codec
from jaxres.storage.checksummed_json import decode_checksummed, encode_checksummed
from jaxres.storage.codec import OtherFormat, TaggedCodec
from jaxres.storage.path import RunPath, require_inside, require_one_name

FORMAT = 2
"""Format number of every record."""
MOST_THREADS = 4096
"""No machine has as many cores; a worker could begin as many threads all the same."""
MOST_HOSTS = 2**20
OWN_LOOP = "own loop"
"""In place of a trajectory's digest in claims without a config, of a loop of the user's own."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An attempt takes ownership of the run."""

    attempt: int
    host: str
    pid: int
    boot_id: str
    nonce: str
    coordinator: str | None
    num_hosts: int
    threads: int
    """XLA's CPU thread count (NPROC): it changes bits, so later attempts use the same."""
    versions: dict[str, str]
    fingerprint: dict[str, str]
    trajectory: str
    started: int = 0
    """When that process started, in clock ticks since the boot; 0: unknown."""
    slots: tuple[int, ...] | None = None
    """The slot of each host of the attempt, by host number; None: the attempt is not restarted."""


PROGRAM_START = "program"
"""`dataset` of the Start of a program. It has no effect once a loop (`jaxres.attempt`) in the
program has written its own Start, which has the step that it has restored."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Training starts at a step: 0, or a restored one."""

    step: int
    path: str | None
    dataset: str
    """Fingerprint of the data set; later attempts must have the same one."""
    computation: dict[str, str]
    """Other inputs that change bits: devices, mesh, microbatches, threads, versions."""
    init: dict[str, str] | None = None
    """Digest, path and, if a run made them, step of the initial weights (`init_from`)."""
    devices: tuple[int, ...] | None = None
    """Number of devices of each host, by host number; None: unknown."""
    looks_back_steps: int | None = None
    """Largest distance from a step that triggers a rollback to its onset, by the guards' settings.
    A commit that is this much older than the newest one is known to be good. None: unknown."""
    tokenizer: str | None = None
    """Name of the tokenizer, whose files are in RunDir.tokenizer; None: unknown."""
    tier: str | None = None
    """`memory`: the step was restored from host memory. It is not committed, so `path` is None."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """The run begins with a step of another run, which the next commit record is a copy of."""

    path: str
    """Directory of that run."""
    step: int
    manifest: str
    """Digest of the step's manifest there."""
    dataset: str
    """Fingerprint of the data set; the attempts of this run must have the same one."""
    tokenizer: str | None = None
    """Name of the tokenizer; None: unknown."""
    lower_rates: tuple[tuple[int, float, int], ...] = ()
    """Result of rollbacks before that step: first step, factor on the learning rate, steps."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A step directory is complete and durable: the step is committed."""

    step: int
    path: str
    manifest: str
    bytes: int
    heldout_loss: float | None = None
    """Loss of the newest evaluation before it; None: there was none, or it was not finite."""
    evaluated_step: int = 0
    """Step of that evaluation."""
    heldout_data: str = ""
    """Identity of the rows that it was computed on; empty: there was none, or it is unknown."""


@dataclass(frozen=True, kw_only=True)
class Skip:
    """Training skips rows of the stream, given as half-open ranges of positions."""

    rows: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Training resumes from an older step: commits above it leave the run history."""

    onset: int
    """First bad step."""
    target: int
    """Newest committed step before the onset; 0: the run starts from the beginning."""
    rows: tuple[tuple[int, int], ...]
    """Half-open ranges of stream positions that training skips from now on."""
    reason: str
    rate_factor: float = 1.0
    """Factor on the learning rate of the steps [onset, onset + rate_steps)."""
    rate_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Steps are no longer committed; written before any byte of them is deleted."""

    steps: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A committed step is proved damaged: it is excluded permanently, and its files are kept."""

    step: int
    path: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class HostFault:
    """The hardware of a host has failed in this attempt: later attempts leave the host out."""

    host: str
    """Name of the machine."""
    reason: str
    """The fault, with the device if it is known."""
    slot: int | None = None
    """Slot of the worker under `launch local`; None: the whole machine."""
    instance: str = ""
    """Id of the VM; empty: unknown, or no VM."""
    physical_host: str = ""
    """The server that the VM runs on; empty: unknown, or no VM."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnded:
    """An attempt ended with an exit record."""

    exit: int
    reason: str
    committed: bool
    culprit: int | None = None
    """Number of the host that is the cause; None: no single host is."""


@dataclass(frozen=True, kw_only=True)
class SupervisorEnded:
    """A supervisor ended voluntarily: no attempt follows until it is started again."""

    exit: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """The place of a record that decided nothing any more when a lost log was rebuilt.

    No process that has owned the run before finds the place free. It has no number of its own: all
    of them can be one file.
    """


DROPPED = encode_checksummed({codec.FORMAT: FORMAT, "kind": "dropped"})
"""The file of a Dropped."""

Body = (
    Claim
    | Start
    | Branch
    | Commit
    | Skip
    | Rollback
    | Prune
    | Quarantine
    | HostFault
    | AttemptEnded
    | SupervisorEnded
)
RECORDS: TaggedCodec[Body] = TaggedCodec(
    "kind",
    {
        "claim": Claim,
        "start": Start,
        "branch": Branch,
        "commit": Commit,
        "skip": Skip,
        "rollback": Rollback,
        "prune": Prune,
        "quarantine": Quarantine,
        "host_fault": HostFault,
        "attempt_ended": AttemptEnded,
        "supervisor_ended": SupervisorEnded,
    },
)
"""The name of each record in the log; a Dropped has one form (DROPPED)."""


@dataclass(frozen=True)
class Record:
    """A numbered record: its body, the attempt that wrote it, and the time.

    The time is for display, for policies that keep one step a day, and for the launcher's estimates
    of how long steps and commits take; nothing else uses it.
    """

    seq: int
    attempt: int
    time: float
    body: Body | Dropped

    def encode(self) -> bytes:
        """Returns the record as canonical JSON with its own digest."""
        if isinstance(self.body, Dropped):
            return DROPPED
        common = {codec.FORMAT: FORMAT, "seq": self.seq, "attempt": self.attempt, "time": self.time}
        return encode_checksummed(common | RECORDS.encode(self.body, omit_defaults=True))

    @staticmethod
    def seq_of(data: bytes) -> int:
        """Returns the number that an encoded record says it has; raises ValueError without one."""
        fields = json.loads(data)
        if not isinstance(fields, dict) or not isinstance(number := fields.get("seq"), int):
            raise ValueError("a record without a number")
        return number

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> Record:
        """Returns the record of decoded JSON, whose digest was compared.

        Raises:
          ValueError, KeyError, TypeError, AttributeError: it is none of this version.
        """
        del fields[codec.FORMAT]
        seq, attempt, time = fields.pop("seq"), fields.pop("attempt"), fields.pop("time")
        if fields.get("kind") == RECORDS.tag(Claim):
            fields["attempt"] = attempt
        body = RECORDS.decode(fields)
        _require_names(body)
        if not is_seconds(time):
            raise ValueError(f"its time is {time!r:.60}")
        return Record(seq=seq, attempt=attempt, time=time, body=body)

    @staticmethod
    def decode(data: bytes, *, path: RunPath) -> Record:
        """Returns the record of a file; raises if it can't be read, so that none is skipped."""
        if data == DROPPED:
            return Record(int(path.name.partition(".")[0]), 0, 0.0, Dropped())
        try:
            fields = decode_checksummed(data, number=FORMAT)
        except OtherFormat as error:
            raise ConfigError(
                f"{path}: this record of the run's log can't be read: {error}. Nothing was changed."
            ) from error
        except ValueError as error:
            raise Unrestorable(
                f"{path}: this record of the run's log is damaged ({error}). The log decides which "
                "steps are committed, so nothing is restored, and the run does not start again "
                "from step 0. Restore the file from a copy, or rebuild the log: "
                f"{command_line('jaxres checkpoints adopt', path.parent.parent)}. Nothing was "
                "changed."
            ) from error
        try:
            record = Record.from_fields(fields)
            if path.name != file_name(record.seq):
                raise ValueError(f"its number is {record.seq}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: not a record that this version of jaxres can read ({error!r}). "
                "Was the run written by a newer version, or the file edited? Nothing was changed."
            ) from error
        return record


def _require_names(body: Body) -> None:
    """Raises ValueError if a name that readers join to a folder would leave it."""
    match body:
        case Commit(path=path) | Quarantine(path=path) | Start(path=str(path)):
            require_inside(path)
        case Claim(nonce=nonce):
            require_one_name(nonce)
            _require_bounds(body)
        case _:
            pass
    if isinstance(body, Start | Branch) and (digest := (body.tokenizer or "").partition(":")[2]):
        require_one_name(digest)


def _require_bounds(claim: Claim) -> None:
    """Raises ValueError for a number of threads or hosts that later attempts can't begin with."""
    for name, number, most in (
        ("threads", claim.threads, MOST_THREADS),
        ("num_hosts", claim.num_hosts, MOST_HOSTS),
    ):
        if not 1 <= number <= most:
            raise ValueError(f"{name} is {number!r:.60}, not from 1 to {most:,}")


def file_name(seq: int) -> str:
    """Returns the name of a record's file."""
    return f"{seq:08d}.json"


def by_attempt(records: Iterable[Record]) -> dict[int, list[Record]]:
    """Returns the records of each attempt, in their order."""
    found: dict[int, list[Record]] = {}
    for record in records:
        found.setdefault(record.attempt, []).append(record)
    return found
