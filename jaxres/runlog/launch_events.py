"""Events of the launcher of `launch gce`: losses, requests for VMs, boots and attempts, with times.

The launcher writes new events with the desired state, in one atomic write, and later moves them to
`RUN/launch/events`. Each has a number, so a reader that finds one in both places counts it once,
whenever a launcher was killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from jaxres.faults import ConfigError, RunError, warn_or_raise
from jaxres.runlog.event_log import is_seconds, json_objects
from jaxres.runlog.paths import RunDir
from jaxres.storage import codec, files

INCOMPLETE = "Events of the launcher are missing in what follows."
LaunchEventKind = Literal[
    "attempt_started",
    "attempt_ended",
    "vm_lost",
    "vms_requested",
    "request_failed",
    "vms_created",
    "agent_reported",
    "shrunk",
    "grown",
    "moved",
    "job_ending",
    "job_ended",
    "commits_stalled",
    "commits_resumed",
    "no_capacity",
    "capacity_found",
    "spend_exceeded",
    "spare_lost",
    "spares_ready",
]


@dataclass(frozen=True)
class LaunchEvent:
    """One event of a job on VMs."""

    number: int
    """Number of the event since the job's desired state began."""
    kind: str
    """A LaunchEventKind; a newer version may have others."""
    time: float
    """When the launcher saw it, in seconds since the epoch; `agent_reported`: the first report."""
    attempt: int = 0
    """Newest attempt of the launcher then."""
    vms: tuple[str, ...] = ()
    zone: str = ""
    """Zone of a request."""
    cause: str = ""
    """Kind of a loss, kind of a failed request (stockout, quota, ...), or exit code of an end."""
    reason: str = ""
    """The cause, for the operator."""
    since: float | None = None
    """Of a loss and of the end of an attempt: the last sign of life, in seconds since the epoch."""
    step: int = 0
    """Newest committed step then."""
    replaced_by: str = ""
    """Of a loss: the VM that was requested at the notice, or was a spare; empty: there is none."""
    is_last: bool = False
    """Whether no other attempt follows the one that has ended."""
    planned: str = ""
    """Of the end of an attempt: why the launcher has ended it (attempt_result.PLANNED_ENDS)."""
    lacking: int = 0
    """Of `shrunk` and `grown`: hosts that the job has less than its range allows."""
    dollars_per_hour: float | None = None
    """Of the start of an attempt: the price of its VMs together; None: unknown."""


def encode(events: Iterable[LaunchEvent]) -> bytes:
    """Returns events as JSON lines."""
    return b"".join(json.dumps(codec.encode(event)).encode() + b"\n" for event in events)


def read_stored(run_dir: RunDir, *, job: str, first: int) -> list[LaunchEvent]:
    """Reads the events of a job from a number on that are no longer in its desired state.

    Raises:
      StorageUnavailable: some can't be read.
    """
    found: dict[tuple[str, int], LaunchEvent] = {}
    folder = run_dir.launch_events
    begins: list[tuple[int, str]] = []
    for name in files.list_names(folder):
        of, _, number = name.removesuffix(".jsonl").rpartition("-")
        if of == job and number.isdecimal():
            begins.append((int(number), name))
    needed_from = max((number for number, _ in begins if number <= first), default=0)
    for _, name in (one for one in sorted(begins) if one[0] >= needed_from):
        for fields in json_objects((files.read(folder / name) or b"").splitlines()):
            _add(found, job, fields)
    return sorted((e for e in found.values() if e.number >= first), key=lambda e: e.number)


def read(run_dir: RunDir, *, warn: Callable[[str], None] | None = None) -> list[LaunchEvent]:
    """Reads all events of a run in the order of time.

    Args:
      warn: gets the cause if some events can't be read; the others are returned.

    Raises:
      RunError: some can't be read, and there is no `warn`.
    """
    found: dict[tuple[str, int], LaunchEvent] = {}
    folder = run_dir.launch_events
    try:
        for name in files.list_names(folder):
            job = name.rpartition("-")[0]
            for fields in json_objects((files.read(folder / name) or b"").splitlines()):
                _add(found, job, fields)
        state = json.loads(files.read(run_dir.launch_state) or b"{}")
        for fields in state.get("events", ()):
            _add(found, state.get("id", ""), fields)
    except (ValueError, AttributeError, TypeError) as error:
        damage = ConfigError(f"{run_dir.launch_state}: is damaged ({error}).")
        warn_or_raise(damage, warn, follows=INCOMPLETE)
    except RunError as error:
        warn_or_raise(error, warn, follows=INCOMPLETE)
    return sorted(found.values(), key=lambda event: (event.time, event.number))


def _add(found: dict[tuple[str, int], LaunchEvent], job: str, fields: dict[str, Any]) -> None:
    try:
        event = codec.decode(LaunchEvent, fields, ignore_unknown=True)
    except (ValueError, TypeError, AttributeError):
        return  # Of a kind that this version does not know.
    if is_seconds(event.time) and is_seconds(event.since or 0.0):
        found.setdefault((job, event.number), event)
