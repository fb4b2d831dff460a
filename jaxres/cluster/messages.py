"""The messages between supervisors of different hosts: one JSON line each, of bounded size.

Bytes from the network are only data: a line is parsed as JSON within a size limit and checked field
by field, nothing is evaluated, and a line that is not a message ends its connection. No line is
decoded before the other side has proven that it has the run's secret (authentication.py).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import pydantic
import pydantic_core

from jaxres.cluster.host_identity import UNKNOWN, HostIdentity
from jaxres.storage.codec import TaggedCodec

VERSION = 3
MAX_BYTES = 65536
"""Longest line; a heartbeat with the steps of 4,096 hosts fits."""
MAX_VERSIONS, MAX_KEY_LENGTH, MAX_SHOWN_KEYS = 64, 512, 32
MAX_KEYS = 512
"""Most config keys of one message; a config with more is compared as a whole only."""

HostId = Annotated[int, pydantic.Field(ge=0, lt=10**9)]
"""The range of --host-id; large, so that an error message can name a mistyped value."""
HostCount = Annotated[int, pydantic.Field(ge=1, lt=10**9)]
Count = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Code = Annotated[int, pydantic.Field(ge=-255, le=255)]
Seconds = Annotated[float, pydantic.Field(ge=0, le=10**9, allow_inf_nan=False)]
Name = Annotated[str, pydantic.Field(max_length=256)]
"""A name of a machine or a library, a version, a number that is used once."""
Path = Annotated[str, pydantic.Field(max_length=8192)]
Key = Annotated[str, pydantic.Field(max_length=MAX_KEY_LENGTH)]
"""A dotted config key."""
KeyDigest = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{16}$")]
Text = Annotated[str, pydantic.Field(max_length=MAX_BYTES)]


class ProtocolError(ValueError):
    """The line is not a message of this protocol."""


@dataclass(frozen=True)
class Hello:
    """First message of a supervisor: its identity, and all values that must agree on all hosts."""

    host: HostId
    num_hosts: HostCount
    """Number of hosts of the job, as this host was started."""
    name: Name
    """The machine's host name."""
    pid: Count
    nonce: Name
    """Random, one per process: distinguishes a duplicate host from one that reconnects."""
    versions: Annotated[dict[Name, Name], pydantic.Field(max_length=MAX_VERSIONS)]
    python: Name
    trajectory: Name
    """Digest of the config's trajectory."""
    run_dir: Path
    """Absolute path on this host."""
    key_digests: Annotated[dict[Key, KeyDigest], pydantic.Field(max_length=MAX_KEYS)] = (
        dataclasses.field(default_factory=dict)
    )
    """Config key -> keyed digest of its value, so that a message can name a difference; may be
    empty. No value of a config is ever sent: it may be a token."""
    identity: HostIdentity = UNKNOWN
    """Identity of the machine, equal in later attempts."""


@dataclass(frozen=True)
class Admitted:
    """Host 0 has admitted a host, and waits this long for the others."""

    seconds_left: Seconds


@dataclass(frozen=True)
class AllJoined:
    """All hosts have joined; host 0 claims the run next."""


@dataclass(frozen=True)
class AttemptAnnounced:
    """The attempt that host 0 has claimed."""

    attempt: Count
    nonce: Name
    """Nonce of the claim."""
    coordinator: Key
    """host:port of JAX's service, with a new port for each attempt."""


@dataclass(frozen=True)
class ClaimVisible:
    """Whether the claim is visible in the run directory of a host."""

    visible: bool


@dataclass(frozen=True)
class StartWorkers:
    """Every host may start its worker."""


@dataclass(frozen=True)
class Goodbye:
    """The sender exits with this code; if it is host 0, the receiver does too."""

    code: Code
    reason: Text
    keys: Annotated[tuple[Key, ...], pydantic.Field(max_length=MAX_SHOWN_KEYS)] = ()
    """Config keys in which hosts differ: the receiver shows its own values of them."""


@dataclass(frozen=True)
class Heartbeat:
    """A follower's heartbeat: its supervisor runs, and the progress of its worker."""

    step: Count = 0
    """Newest finished step; 0: none yet."""
    phase: Name = "start"
    num_phases: Count = 0
    """Number of messages about phases that the worker has sent."""


@dataclass(frozen=True)
class LeaderHeartbeat:
    """Host 0's heartbeat: the newest finished step of every host."""

    steps: tuple[Count, ...] = ()


@dataclass(frozen=True)
class StopMessage:
    """A host was asked to stop by a signal or a preemption notice."""

    code: Code
    reason: Text
    step: Count = 0
    """Newest finished step; from step 1 on, the workers agree on the stop inside the step."""


@dataclass(frozen=True)
class WorkerExited:
    """How a host's worker ended."""

    code: Code
    reason: Text
    committed: bool
    announced: bool
    """Whether the worker itself sent its exit before it ended."""
    step: Count = 0
    culprit: HostId | None = None
    """Another host that is the cause; None: this one is, or no single host is."""


@dataclass(frozen=True)
class JobResult:
    """The result of the attempt for every host, and the host that caused it."""

    code: Code
    culprit: HostId | None
    reason: Text
    step: Count
    committed: bool = False
    is_hang: bool = False
    """Whether a deadline has passed: then every host writes its stacks."""


@dataclass(frozen=True)
class Disconnected:
    """The other supervisor is gone. Local only: the last message of a connection, never sent."""

    reason: str


Message = (
    Hello
    | Admitted
    | AllJoined
    | AttemptAnnounced
    | ClaimVisible
    | StartWorkers
    | Goodbye
    | Heartbeat
    | LeaderHeartbeat
    | StopMessage
    | WorkerExited
    | JobResult
    | Disconnected
)
MESSAGES: TaggedCodec[Message] = TaggedCodec(
    "message",
    {
        "hello": Hello,
        "admitted": Admitted,
        "all_joined": AllJoined,
        "attempt_announced": AttemptAnnounced,
        "claim_visible": ClaimVisible,
        "start": StartWorkers,
        "goodbye": Goodbye,
        "heartbeat": Heartbeat,
        "leader_heartbeat": LeaderHeartbeat,
        "stop_requested": StopMessage,
        "worker_exited": WorkerExited,
        "attempt_result": JobResult,
    },
)
"""The name of each message on the connection."""


def encode(message: Message) -> bytes:
    """Returns the line of a message; a reason that is too long is cut at the end."""
    fields: dict[str, Any] = {"jaxres": VERSION} | MESSAGES.encode(message)
    while True:
        text = json.dumps(fields, ensure_ascii=False)
        line = text.encode("utf-8", "replace") + b"\n"
        if len(line) <= MAX_BYTES:
            return line
        assert fields.get("reason"), f"{fields[MESSAGES.key]} of {len(line)} bytes"
        fields["reason"] = fields["reason"][: len(fields["reason"]) * 3 // 4]


def parse_fields(line: bytes) -> dict[str, Any]:
    """Returns the fields of a line of this protocol version, without the version.

    Raises:
      ProtocolError: the line is not a message of this version.
    """
    try:
        parsed = pydantic_core.from_json(line)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {line[:40]!r}") from error
    if not isinstance(parsed, dict) or "jaxres" not in parsed:
        raise ProtocolError(f"not a jaxres message: {line[:40]!r}")
    if (version := parsed.pop("jaxres")) != VERSION:
        raise ProtocolError(
            f"it uses protocol version {version!r:.20}, this host {VERSION}: install the same "
            "jaxres on all hosts"
        )
    return parsed


def decode(line: bytes) -> Message:
    """Returns the message of a line.

    >>> decode(encode(Heartbeat(7, "train")))
    Heartbeat(step=7, phase='train', num_phases=0)

    Raises:
      ProtocolError: the line is not a message.
    """
    parsed = parse_fields(line)
    try:
        message = MESSAGES.decode(parsed, ignore_unknown=True)
        return _schema(type(message)).validate_python(dataclasses.asdict(message))
    except ValueError as error:
        raise ProtocolError(f"not a jaxres message ({error}): {line[:40]!r}") from error


@cache
def _schema(kind: type[Any]) -> pydantic.TypeAdapter[Any]:
    """Returns the validator of a message's types and numeric ranges."""
    return pydantic.TypeAdapter(kind)
