"""What doors of different hosts tell each other: one JSON line a word, of bounded size.

What comes from the network is only ever data: lines are parsed as JSON within a size limit and
checked field by field, nothing is evaluated, and a line that is no word ends its connection. There
is no shared secret: whoever reaches the coordinator's port can take a host's place while the roll
is called, or stop the job, so that port belongs inside the cluster's network.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pydantic
import pydantic_core

VERSION = 1
MAX_BYTES = 65536
"""Longest line; a beat of 4,096 hosts' steps fits."""
MAX_FIELDS_BYTES = 16384


class NoWord(ValueError):
    """A line that is no word of this protocol."""


@dataclass(frozen=True)
class Hello:
    """Who a door is, and all that must be equal on every host."""

    host: int
    num_hosts: int
    """How many hosts it believes in."""
    name: str
    """The machine's host name."""
    pid: int
    nonce: str
    """Random, one for each process: tells a doubled host from one that connects again."""
    versions: dict[str, str]
    python: str
    trajectory: str
    """Digest of the config's trajectory."""
    run_dir: str
    """Absolute, as this host sees it."""
    boot_id: str = ""
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    """The trajectory's keys and values as text, so that a difference can be named; may be empty."""


@dataclass(frozen=True)
class Welcome:
    """The lead has written a host down, and waits so long for the rest."""

    seconds_left: float


@dataclass(frozen=True)
class Gathered:
    """All hosts are there; the lead claims the run now."""


@dataclass(frozen=True)
class Announcement:
    """The attempt that begins, as the lead has claimed it."""

    attempt: int
    nonce: str
    """The claim's."""
    coordinator: str
    """Where JAX's own service will be: host:port, a fresh port for each attempt."""
    threads: int
    """NPROC, which decides bits."""


@dataclass(frozen=True)
class Seen:
    """Whether a host finds the claim in its own view of the run directory."""

    seen: bool


@dataclass(frozen=True)
class Go:
    """Every host may start its worker."""


@dataclass(frozen=True)
class Farewell:
    """Its sender ends with this code; from the lead: so does who hears it."""

    code: int
    reason: str


@dataclass(frozen=True)
class Here:
    """A host's beat: its door is awake, and how far its worker is."""

    step: int = 0
    """Newest finished step; 0: none yet."""
    phase: str = "start"


@dataclass(frozen=True)
class Standing:
    """The lead's beat: the newest finished step of every host."""

    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class StopAsked:
    """A host was asked to stop, by a signal or a notice."""

    code: int
    reason: str
    step: int = 0
    """Its newest finished step; from the first on the hosts agree inside the step by themselves."""


@dataclass(frozen=True)
class WorkerEnded:
    """How a host's worker ended."""

    code: int
    reason: str
    committed: bool
    said: bool
    """Whether the worker itself said why before it ended."""
    step: int = 0


@dataclass(frozen=True)
class Verdict:
    """How the attempt ends on every host, and whose fault it is."""

    code: int
    culprit: int | None
    reason: str
    step: int
    committed: bool = False
    is_hang: bool = False
    """Whether a deadline has passed: then every host's stacks are of interest."""


@dataclass(frozen=True)
class Over:
    """The attempt is over; this host may leave."""


@dataclass(frozen=True)
class Lost:
    """The other door is gone: never sent, always the last word of a connection."""

    reason: str


Word = (
    Hello
    | Welcome
    | Gathered
    | Announcement
    | Seen
    | Go
    | Farewell
    | Here
    | Standing
    | StopAsked
    | WorkerEnded
    | Verdict
    | Over
    | Lost
)
_SENT: tuple[type[Any], ...] = (
    Hello,
    Welcome,
    Gathered,
    Announcement,
    Seen,
    Go,
    Farewell,
    Here,
    Standing,
    StopAsked,
    WorkerEnded,
    Verdict,
    Over,
)
_KINDS = {kind.__name__: kind for kind in _SENT}


def encode(word: Word) -> bytes:
    """Returns the line that stands for a word; a reason that is too long loses its end."""
    body = dataclasses.asdict(word)
    while True:
        text = json.dumps({"jaxres": VERSION, type(word).__name__: body}, ensure_ascii=False)
        line = text.encode("utf-8", "replace") + b"\n"
        if len(line) <= MAX_BYTES:
            return line
        assert body.get("reason"), f"{type(word).__name__} of {len(line)} bytes"
        body["reason"] = body["reason"][: len(body["reason"]) * 3 // 4]


def decode(line: bytes) -> Word:
    """Reads a word back.

    >>> decode(encode(Here(7, "train")))
    Here(step=7, phase='train')

    Raises:
      NoWord: it is none.
    """
    try:
        parsed = pydantic_core.from_json(line)
    except ValueError as error:
        raise NoWord(f"not JSON: {line[:40]!r}") from error
    if not isinstance(parsed, dict) or "jaxres" not in parsed:
        raise NoWord(f"not a word of jaxres: {line[:40]!r}")
    if (version := parsed.pop("jaxres")) != VERSION:
        raise NoWord(
            f"it speaks version {version!r:.20} of the roll call, this host {VERSION}: install the "
            "same jaxres on all hosts"
        )
    for name, body in parsed.items():
        if name in _KINDS:
            try:
                return _schema(_KINDS[name]).validate_python(body)
            except pydantic.ValidationError as error:
                raise NoWord(f"a {name} that lacks or confuses fields") from error
    raise NoWord(f"not a word of jaxres: {line[:40]!r}")


@cache
def _schema(kind: type[Any]) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def fields_of(trajectory: dict[str, Any]) -> dict[str, str]:
    """Returns a nested config as dotted keys and short texts; empty if that would be too much.

    >>> fields_of({"train": {"lr": 0.1}, "seed": 3})
    {'train.lr': '0.1', 'seed': '3'}
    """
    found: dict[str, str] = {}

    def walk(section: dict[str, Any], prefix: str) -> None:
        for key, value in section.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                found[prefix + key] = json.dumps(value)[:80]

    walk(trajectory, "")
    return found if len(json.dumps(found)) <= MAX_FIELDS_BYTES else {}
