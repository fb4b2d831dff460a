"""`jaxres status`: alive or not, where it is, what stands, what happened, what happens next."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jaxres.cli import run_health
from jaxres.cli.run_health import Outlook, Supervision
from jaxres.clock import Clock
from jaxres.faults import Exit
from jaxres.runlog import attempt_history, metrics, run_log
from jaxres.runlog.attempt_history import Attempt
from jaxres.runlog.event_log import read_events, read_json_lines
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Line
from jaxres.supervisor import run_lock

NUM_INCIDENTS = 5
"""Attempts that are told of."""
WATCH_SECONDS = 3.0
"""How long --watch looks at the beat, which moves every second."""


@dataclass(frozen=True)
class HostSeen:
    """What one host of the newest attempt was last heard to do."""

    host: int
    phase: str
    detail: str
    step: int | None
    """Newest step that it has spoken of."""
    phase_seconds: float
    """For how long it is in the phase, or was when it was last heard of."""
    age_seconds: float
    """Since its last event, by the clocks of the two machines."""


@dataclass(frozen=True)
class Status:
    """All that `jaxres status` tells."""

    run_dir: RunDir
    line: Line
    is_alive: bool
    watched: bool
    """Whether the owner's beat was watched; else its age by the wall clock decides."""
    beat: Mapping[str, Any] | None
    now: float
    newest: MetricsLine | None
    steps: int | None
    """Steps of the whole run."""
    hosts: Sequence[HostSeen]
    recent: Sequence[Attempt]
    supervision: Supervision | None
    outlook: Outlook


def look(run_dir: RunDir, line: Line, *, clock: Clock, watch: bool = False) -> Status:
    """Reads what there is to be told.

    Args:
      run_dir: the run; its processes may be on another machine.
      line: its log, folded.
      clock: this machine's.
      watch: look for some seconds whether the owner's beat moves, rather than at its time stamp,
        which another machine's clock has made.
    """
    if watch:
        is_alive = run_lock.moves(run_dir, clock=clock, seconds=WATCH_SECONDS)
    else:
        is_alive = run_lock.is_alive(run_dir, clock=clock)
    history = metrics.read_history(run_dir, line)
    trained = line.starts[-1].attempt if line.starts else line.attempt
    events = read_events(run_dir.events(trained, 0))
    steps = next((e["steps"] for e in reversed(events) if e["event"] == "RunBuilt"), None)
    recent = attempt_history.read(run_dir, is_alive=is_alive, last=NUM_INCIDENTS)
    last_exit = recent[-1].exit if recent else None
    told = run_health.supervision(read_events(run_dir.supervisor_events))
    becomes = run_health.outlook(
        is_alive=is_alive,
        is_done=last_exit == Exit.DONE or (steps is not None and line.step >= steps),
        attempt=line.attempt,
        last_exit=last_exit,
        is_supervised=bool(line.claims) and line.claims[-1].places is not None,
        supervision=told,
        root=str(run_dir.root),
        stacks=str(run_dir.stacks(line.attempt, 0)),
    )
    return Status(
        run_dir=run_dir,
        line=line,
        is_alive=is_alive and becomes.state in ("running", "restarting"),
        watched=watch,
        beat=run_lock.read(run_dir),
        now=clock.wall(),
        newest=history[-1] if history else None,
        steps=steps,
        hosts=_hosts(run_dir, line, now=clock.wall()),
        recent=recent,
        supervision=told,
        outlook=becomes,
    )


def _hosts(run_dir: RunDir, line: Line, *, now: float) -> list[HostSeen]:
    found = []
    for host in range(line.claims[-1].num_hosts if line.claims else 0):
        events = read_events(run_dir.events(line.attempt, host))
        steps = [event["step"] for event in events if isinstance(event.get("step"), int)]
        if host == 0:
            steps += [row["step"] for row in read_json_lines(run_dir.metrics(line.attempt))[-1:]]
        if events:
            found.append(_seen(host, events, step=max(steps, default=None), now=now))
    return found


def _seen(host: int, events: list[dict[str, Any]], *, step: int | None, now: float) -> HostSeen:
    phase = next((e for e in reversed(events) if e["event"] == "PhaseChanged"), events[0])
    return HostSeen(
        host=host,
        phase=phase.get("phase", "start"),
        detail=phase.get("detail", ""),
        step=step,
        phase_seconds=now - phase["time"],
        age_seconds=now - events[-1]["time"],
    )


def as_text(status: Status) -> str:
    """Returns a few lines for a person."""
    line = status.line
    rows = [("run", str(status.run_dir.root)), ("alive", _alive(status))]
    if status.is_alive and status.hosts and len(line.claims) and line.claims[-1].num_hosts == 1:
        seen = status.hosts[0]
        detail = f" ({seen.detail})" if seen.detail else ""
        rows.append(("phase", f"{seen.phase}{detail}, for {seen.phase_seconds:.0f} s"))
    if status.newest is not None:
        newest, steps = status.newest, "?" if status.steps is None else status.steps
        rows.append(
            ("step", f"{newest.step} of {steps}, loss {newest.loss}, {newest.tokens:,} tokens")
        )
    if line.commits:
        age = status.now - line.commits[-1].time
        rows.append(("committed", f"step {line.step}, {_age(age)} ago"))
    else:
        rows.append(("committed", "nothing yet"))
    if line.claims and line.claims[-1].num_hosts > 1:
        rows += [(f"host {seen.host}", _host(seen)) for seen in status.hosts]
    rows += [("incident", _incident(one)) for one in _incidents(status)]
    rows += _ending(status)
    return "".join(f"{name:<11}{value}\n" for name, value in rows)


def _alive(status: Status) -> str:
    beat = status.beat
    if beat is None:
        return f"no (attempt {status.line.attempt})"
    who = f"attempt {status.line.attempt}, host {beat['host']}, pid {beat['pid']}"
    at = datetime.fromtimestamp(beat["time"]).isoformat(sep=" ", timespec="seconds")
    told = f"yes: {who}" if status.is_alive else f"no: {who}, last seen {at}"
    if status.watched:
        return f"{told} (the beat {'moves' if status.is_alive else 'stands still'})"
    if beat["host"] != socket.gethostname():
        age = status.now - beat["time"]
        told += f" ({age:.0f} s ago by its clock, which may differ from this one's: try --watch)"
    return told


def _host(seen: HostSeen) -> str:
    step = "" if seen.step is None else f", step {seen.step}"
    detail = f" ({seen.detail})" if seen.detail else ""
    return f"{seen.phase}{detail}{step}, last heard of {_age(seen.age_seconds)} ago"


def _incidents(status: Status) -> list[Attempt]:
    """Returns the recent attempts that have ended; how the newest one has is told by itself."""
    ended = [one for one in status.recent if one.cause != attempt_history.RUNNING]
    is_told = not status.is_alive and bool(ended) and ended[-1] is status.recent[-1]
    return ended[:-1] if is_told else ended


def _incident(one: Attempt) -> str:
    code = "" if one.exit is None else f" (exit {one.exit})"
    steps = "no step" if one.start_step is None else f"step {one.start_step} to {one.finished_step}"
    why = one.reason.splitlines()[0] if one.reason else ""
    return f"attempt {one.attempt}: {one.cause}{code}, {steps}, {one.steps_kept} kept: {why}"


def _ending(status: Status) -> list[tuple[str, str]]:
    """Returns how the newest attempt ended, if it has, and what next."""
    rows = []
    stop = status.line.last_stop
    if not status.is_alive:
        is_newest = stop is not None and stop.attempt == status.line.attempt
        without = "without a word: killed, or the machine went down"
        rows.append(("ended", _words(stop) if stop is not None and is_newest else without))
    if status.outlook.restarts:
        rows.append(("restarts", status.outlook.restarts))
    return [*rows, ("next", status.outlook.next)]


def _words(stop: run_log.Record) -> str:
    assert isinstance(stop.body, run_log.Stop)
    code = stop.body.exit
    return f"exit {code} {attempt_history.exit_name(code)} (attempt {stop.attempt}): {stop.body.reason}"


def as_json(status: Status) -> str:
    """Returns one object."""
    line, told = status.line, status.supervision
    owned = None
    if status.beat is not None:
        owned = {"host": status.beat["host"], "pid": status.beat["pid"]}
        owned["age_seconds"] = status.now - status.beat["time"]
    committed = None
    if line.commits:
        committed = {"step": line.step, "age_seconds": status.now - line.commits[-1].time}
    fields = {
        "run": str(status.run_dir.root),
        "state": status.outlook.state,
        "code": status.outlook.code,
        "alive": status.is_alive,
        "owner": owned,
        "attempt": line.attempt,
        "step": None if status.newest is None else status.newest.step,
        "steps": status.steps,
        "loss": None if status.newest is None else status.newest.loss,
        "committed": committed,
        "hosts": [dataclasses.asdict(seen) for seen in status.hosts],
        "attempts": [dataclasses.asdict(one) for one in status.recent],
        "supervisor": None if told is None else dataclasses.asdict(told),
        "restarts": status.outlook.restarts,
        "next": status.outlook.next,
    }
    return json.dumps(fields) + "\n"


def _age(seconds: float) -> str:
    """Returns a duration in the largest unit that fits.

    >>> _age(59), _age(3700), _age(200000)
    ('59 s', '62 min', '56 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
