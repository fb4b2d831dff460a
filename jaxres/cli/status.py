"""`jaxres status`: liveness, progress, newest commit, recent failures and the next action."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from jaxres import config as configs
from jaxres.cli import run_state
from jaxres.cli.run_state import LastSupervisorEvent, RunOutlook
from jaxres.clock import Clock
from jaxres.config.schema.data import HELDOUT
from jaxres.exit_codes import ExitCode, exit_name
from jaxres.faults import RunError
from jaxres.operate.report import number_text
from jaxres.runlog import (
    attempt_history,
    faulty_hosts,
    metrics,
    replica_files,
    run_log,
    scrub_progress,
)
from jaxres.runlog.attempt_history import AttemptSummary
from jaxres.runlog.evaluations import EVALUATED
from jaxres.runlog.event_log import read_events
from jaxres.runlog.events import EVENTS, PhaseChanged, RunBuilt
from jaxres.runlog.faulty_hosts import FaultyHost
from jaxres.runlog.guarantee import guarantee_level
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import OWN_LOOP
from jaxres.runlog.run_log import RunHistory
from jaxres.runlog.scrub_progress import StepCheck
from jaxres.storage import files
from jaxres.supervisor import run_lock
from jaxres.telemetry import stdio

RUN_BUILT, PHASE_CHANGED = EVENTS.tag(RunBuilt), EVENTS.tag(PhaseChanged)
NUM_INCIDENTS = 5
"""Number of recent attempts shown."""
LONGEST_EVIDENCE = 160
"""Characters of the evidence of damage that are shown as text."""


@dataclass(frozen=True)
class HostSnapshot:
    """Last known state of one host of the newest attempt."""

    host: int
    phase: str
    detail: str
    step: int | None
    """Newest step in the host's events; None: none."""
    phase_seconds: float
    """Time since the host entered the phase."""
    age_seconds: float
    """Time since the host's last event, measured with the clocks of both machines."""


@dataclass(frozen=True)
class Status:
    """Content of `jaxres status`."""

    run_dir: RunDir
    history: RunHistory
    is_alive: bool
    watched: bool
    """Whether --watch was given: the heartbeat was observed; its time stamp did not decide."""
    heartbeat: Mapping[str, Any] | None
    now: float
    newest: MetricsLine | None
    steps: int | None
    """Number of steps of the whole run; None: unknown."""
    evaluation: Mapping[str, Any] | None
    """Newest evaluation of the last attempt that trained: step, losses, bits_per_byte, epochs."""
    hosts: Sequence[HostSnapshot]
    recent: Sequence[AttemptSummary]
    supervision: LastSupervisorEvent | None
    outlook: RunOutlook
    replica: replica_files.ReplicaProgress | None = None
    """Progress of the replica; None: there is none."""
    marker: replica_files.Marker | None = None
    """If the folder itself is a replica: of which run."""
    damaged: Sequence[StepCheck] = ()
    """Committed steps that the background verification has found damaged or unreadable."""
    faulty: Sequence[FaultyHost] = ()
    """Hosts whose hardware has failed, which the run leaves out."""


def read_status(
    run_dir: RunDir, history: RunHistory, *, clock: Clock, watch: bool = False
) -> Status:
    """Reads the status of a run.

    Args:
      run_dir: directory of the run, whose processes may be on another machine.
      watch: observe whether the lock holder's heartbeat advances, instead of comparing its time
        stamp, which may come from another machine's clock.
    """
    liveness = run_lock.liveness(run_dir, clock=clock, watch=watch)
    heartbeat = run_lock.read(run_dir)
    trained = history.starts[-1].attempt if history.starts else history.attempt
    events = read_events(run_dir.events(trained, 0))
    built = _built_steps(events)
    is_known = built is not None and trained == history.attempt
    steps = built if is_known else _configured_steps(run_dir, history.attempt) or built
    recent = attempt_history.read(
        run_dir, is_alive=liveness != "gone", last=NUM_INCIDENTS, warn=stdio.warn
    )
    last_exit = recent[-1].exit if recent else None
    supervision = run_state.supervision(read_events(run_dir.supervisor_events))
    outlook = run_state.outlook(
        run_state.OutlookFacts(
            liveness=liveness,
            pid=None if heartbeat is None else heartbeat["pid"],
            is_done=last_exit == ExitCode.DONE or (steps is not None and history.step >= steps),
            attempt=history.attempt,
            last_exit=last_exit,
            is_supervised=bool(history.claims) and history.claims[-1].slots is not None,
            supervision=supervision,
            root=str(run_dir.root),
            is_slurm_job=files.exists(run_dir.root / "slurm" / "job.sh"),
            changed_steps=steps if built is not None and steps != built else None,
            stacks=str(run_dir.stacks(history.attempt, 0)),
            own_loop=_own_loop(history),
        )
    )
    return Status(
        run_dir=run_dir,
        history=history,
        is_alive=outlook.state in ("running", "restarting"),
        watched=watch,
        heartbeat=heartbeat,
        now=clock.wall(),
        newest=metrics.newest_of(run_dir, history),
        steps=steps,
        evaluation=_newest_evaluation(events),
        hosts=_hosts(run_dir, history, now=clock.wall()),
        recent=recent,
        supervision=supervision,
        outlook=outlook,
        replica=replica_files.read_progress(run_dir),
        marker=replica_files.read_marker(run_dir),
        damaged=scrub_progress.damaged_steps(history.committed, scrub_progress.read(run_dir)),
        faulty=faulty_hosts.read(run_dir, warn=stdio.warn),
    )


def _own_loop(history: RunHistory) -> Literal["", "checkpoints", "attempt"]:
    if not history.claims or history.claims[-1].trajectory != OWN_LOOP:
        return ""
    is_attempt = bool(history.starts) and history.starts[-1].attempt == history.attempt
    return "attempt" if is_attempt else "checkpoints"


def _built_steps(events: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns the steps of the run that a worker has announced last; None: none has."""
    numbers = (event.get("steps") for event in reversed(events) if event["event"] == RUN_BUILT)
    return next((number for number in numbers if isinstance(number, int)), None)


def _configured_steps(run_dir: RunDir, attempt: int) -> int | None:
    """Returns the steps of the run in an attempt's config; None: it can't be read.

    A complete run may be extended, and the attempt end before it trains.
    """
    try:
        return configs.load_recorded(run_dir.attempt(attempt) / "config.yaml").config.last_step
    except RunError:
        return None


def _newest_evaluation(events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    event = next((each for each in reversed(events) if each["event"] == EVALUATED), None)
    if event is None:
        return None
    losses = event.get("losses") or {HELDOUT: event.get("loss")}
    return {
        "step": event.get("step"),
        "losses": losses,
        "bits_per_byte": event.get("bits_per_byte") or {},
        "epochs": event.get("epochs") or {},
        "metrics": event.get("metrics") or {},
    }


def _hosts(run_dir: RunDir, history: RunHistory, *, now: float) -> list[HostSnapshot]:
    snapshots = []
    for host in range(history.claims[-1].num_hosts if history.claims else 0):
        events = read_events(run_dir.events(history.attempt, host))
        steps = [event["step"] for event in events if isinstance(event.get("step"), int)]
        if host == 0:
            steps += [line.step for line in metrics.read_newest(run_dir, history.attempt)]
        if events:
            snapshots.append(_snapshot(host, events, step=max(steps, default=None), now=now))
    return snapshots


def _snapshot(
    host: int, events: list[dict[str, Any]], *, step: int | None, now: float
) -> HostSnapshot:
    phase = next((e for e in reversed(events) if e["event"] == PHASE_CHANGED), events[0])
    return HostSnapshot(
        host=host,
        phase=str(phase.get("phase", "start")),
        detail=str(phase.get("detail", "")),
        step=step,
        phase_seconds=now - phase["time"],
        age_seconds=now - events[-1]["time"],
    )


def as_text(status: Status) -> str:
    """Returns the status as lines of text."""
    history = status.history
    rows = [("run", str(status.run_dir.root)), ("alive", _alive(status))]
    if (
        status.is_alive
        and status.hosts
        and len(history.claims)
        and history.claims[-1].num_hosts == 1
    ):
        host = status.hosts[0]
        detail = f" ({host.detail})" if host.detail else ""
        rows.append(("phase", f"{host.phase}{detail}, for {host.phase_seconds:.0f} s"))
    if status.newest is not None:
        newest, steps = status.newest, "?" if status.steps is None else status.steps
        rows.append(
            (
                "step",
                f"{newest.step} of {steps}, loss {_number(newest.loss)}, {newest.tokens:,} tokens",
            )
        )
    if status.evaluation is not None:
        losses = [f"{name} {_number(loss)}" for name, loss in status.evaluation["losses"].items()]
        rows.append(("evaluated", f"step {status.evaluation['step']}, loss: {', '.join(losses)}"))
        for name, means in status.evaluation["metrics"].items():
            shown = ", ".join(f"{metric} {_number(mean)}" for metric, mean in means.items())
            rows.append(("metrics", f"{name}: {shown}"))
        epochs = [f"{name} {count:.2f}" for name, count in status.evaluation["epochs"].items()]
        if epochs:
            rows.append(("epochs", f"at step {status.evaluation['step']}: {', '.join(epochs)}"))
    if history.commits:
        age = status.now - history.commits[-1].time
        rows.append(("committed", f"step {history.step}, {number_text.duration(age)} ago"))
    else:
        rows.append(("committed", "nothing yet"))
    rows += _replica(status)
    rows += [
        (check.damage.kind, f"step {check.step}: {check.damage.evidence[:LONGEST_EVIDENCE]}")
        for check in status.damaged
        if check.damage is not None
    ]
    if history.starts:
        rows.append(("guarantee", guarantee_level(history.starts)))
    if history.claims and history.claims[-1].num_hosts > 1:
        rows += [(f"host {host.host}", _host(host)) for host in status.hosts]
    rows += [("left out", str(host)) for host in status.faulty]
    rows += [("incident", _incident(attempt)) for attempt in _incidents(status)]
    rows += _ending(status)
    return "".join(f"{name:<11}{value}\n" for name, value in rows)


def _number(value: float | None) -> str:
    """Returns a loss or a metric as `history` shows it; all digits are in the JSON.

    >>> _number(2.232686996459961), _number(None)
    ('2.233', 'not finite')
    """
    return f"{value:.4g}" if isinstance(value, float | int) else "not finite"


def _replica(status: Status) -> list[tuple[str, str]]:
    """Returns the rows on the replica of the run and, in a replica, on its source."""
    rows = []
    if status.replica is not None:
        behind = _lag_seconds(status)
        lag = "up to date" if behind is None else f"{number_text.duration(behind)} behind"
        error = f": {status.replica.error.splitlines()[0]}" if status.replica.error else ""
        rows.append(
            ("replica", f"step {status.replica.step} in {status.replica.path}, {lag}{error}")
        )
    if status.marker is not None:
        rows.append(("copy of", f"{status.marker.source}, through step {status.marker.step}"))
    return rows


def _lag_seconds(status: Status) -> float | None:
    """Returns the age of the oldest committed step that the replica lacks; None: it lacks none."""
    assert status.replica is not None
    missing = [r.time for r in status.history.commits if r.seq > status.replica.seq]
    return status.now - min(missing) if missing else None


def _alive(status: Status) -> str:
    heartbeat = status.heartbeat
    if heartbeat is None:
        return f"no (attempt {status.history.attempt})"
    holder = f"attempt {status.history.attempt}, host {heartbeat['host']}, pid {heartbeat['pid']}"
    at = datetime.fromtimestamp(heartbeat["time"]).isoformat(sep=" ", timespec="seconds")
    text = f"yes: {holder}" if status.is_alive else f"no: {holder}, last heartbeat {at}"
    if status.watched:
        return f"{text} (heartbeat {'advances' if status.is_alive else 'does not advance'})"
    if heartbeat["host"] != socket.gethostname():
        age = status.now - heartbeat["time"]
        text += f" ({age:.0f} s ago by its clock, which may differ from this one's: try --watch)"
    return text


def _host(snapshot: HostSnapshot) -> str:
    step = "" if snapshot.step is None else f", step {snapshot.step}"
    detail = f" ({snapshot.detail})" if snapshot.detail else ""
    age = number_text.duration(snapshot.age_seconds)
    return f"{snapshot.phase}{detail}{step}, last event {age} ago"


def _incidents(status: Status) -> list[AttemptSummary]:
    """Returns the recent attempts that have ended, without one that `_ending` shows."""
    ended = [attempt for attempt in status.recent if attempt.cause != attempt_history.RUNNING]
    is_shown = not status.is_alive and bool(ended) and ended[-1] is status.recent[-1]
    return ended[:-1] if is_shown else ended


def _incident(summary: AttemptSummary) -> str:
    code = "" if summary.exit is None else f" (exit {summary.exit})"
    steps = "no step"
    if summary.start_step is not None:
        steps = f"step {summary.start_step} to {summary.finished_step}"
    reason = summary.reason.splitlines()[0] if summary.reason else ""
    outcome = f"attempt {summary.attempt}: {summary.cause}{code}, {steps}"
    return f"{outcome}, {summary.steps_kept} kept: {reason}"


def _ending(status: Status) -> list[tuple[str, str]]:
    """Returns the rows on the end of the newest attempt, if it has ended, and the next action."""
    rows = []
    stop = status.history.last_stop
    if not status.is_alive:
        is_newest = stop is not None and stop.attempt == status.history.attempt
        unknown = "no exit record: the process was killed or the machine went down"
        if status.outlook.state == "suspended":
            unknown = "no: the process exists on this machine, suspended or waiting for storage"
        elif status.recent and status.recent[-1].cause != attempt_history.KILLED:
            unknown = f"{status.recent[-1].cause}: {status.recent[-1].reason}"
        rows.append(("ended", _format_exit(stop) if stop is not None and is_newest else unknown))
    if status.outlook.restarts:
        rows.append(("restarts", status.outlook.restarts))
    return [*rows, ("next", status.outlook.next)]


def _format_exit(stop: run_log.Record) -> str:
    assert isinstance(stop.body, run_log.AttemptEnded)
    code = stop.body.exit
    return f"exit {exit_name(code)} (attempt {stop.attempt}): {stop.body.reason}"


def as_json(status: Status) -> str:
    """Returns the status as one JSON object."""
    history, supervision = status.history, status.supervision
    owner = None
    if status.heartbeat is not None:
        owner = {"host": status.heartbeat["host"], "pid": status.heartbeat["pid"]}
        owner["age_seconds"] = status.now - status.heartbeat["time"]
    committed = None
    if history.commits:
        committed = {"step": history.step, "age_seconds": status.now - history.commits[-1].time}
    fields = {
        "run": str(status.run_dir.root),
        "state": status.outlook.state,
        "code": status.outlook.code,
        "alive": status.is_alive,
        "owner": owner,
        "attempt": history.attempt,
        "step": None if status.newest is None else status.newest.step,
        "steps": status.steps,
        "loss": None if status.newest is None else status.newest.loss,
        "evaluation": status.evaluation,
        "committed": committed,
        "replica": None if status.replica is None else _replica_fields(status),
        "damaged": [dataclasses.asdict(check) for check in status.damaged],
        "guarantee": guarantee_level(history.starts) if history.starts else None,
        "hosts": [dataclasses.asdict(host) for host in status.hosts],
        "left_out": [host.name for host in status.faulty],
        "attempts": [dataclasses.asdict(attempt) for attempt in status.recent],
        "supervisor": None if supervision is None else dataclasses.asdict(supervision),
        "restarts": status.outlook.restarts,
        "next": status.outlook.next,
    }
    return json.dumps(fields) + "\n"


def _replica_fields(status: Status) -> dict[str, Any]:
    assert status.replica is not None
    return {
        "path": status.replica.path,
        "step": status.replica.step,
        "lag_seconds": _lag_seconds(status),
        "error": status.replica.error,
    }
