"""`jaxres status`: alive or not, where it is, what stands, how it ended, what to do next."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from jaxres import metrics, runlog
from jaxres.clock import Clock
from jaxres.events import read_events
from jaxres.faults import Exit
from jaxres.rundir import RunDir
from jaxres.runlog import Line
from jaxres.supervise import owner

NEXT = {
    Exit.DONE: "nothing; a new run: another run.seed, run.dir or config",
    Exit.PREEMPTED: "start it again, here or elsewhere: python -m jaxres.train {root}",
    Exit.STOPPED: "to go on: python -m jaxres.train {root}",
    Exit.STORAGE: "free some space or mend the storage, then: python -m jaxres.train {root}",
    Exit.CONFIG: "mend what the message names, then start it again",
    Exit.HUNG: "look into {stacks}, then: python -m jaxres.train {root}",
    Exit.BUG: "look into the traceback, then: python -m jaxres.train {root}",
    Exit.DIVERGED: "lower the learning rate or look at the rows, then start a new run",
    Exit.FENCED: "nothing: another attempt owns the run",
    Exit.UNRESTORABLE: "restore the checkpoint from a copy, or start a new run",
    Exit.OUT_OF_MEMORY: "change one of the settings named, then start it again",
}


def text(run_dir: RunDir, line: Line, *, clock: Clock) -> str:
    """Returns a few lines for a person."""
    events = read_events(run_dir.events(line.attempt, 0))
    history = metrics.read_history(run_dir, line)
    alive = owner.is_alive(run_dir, clock=clock)
    rows = [("run", str(run_dir.root)), ("alive", _alive(run_dir, line, alive=alive))]
    if alive and (phase := _newest(events, "PhaseChanged")) is not None:
        since = clock.wall() - phase["time"]
        detail = f" ({phase['detail']})" if phase["detail"] else ""
        rows.append(("phase", f"{phase['phase']}{detail}, for {since:.0f} s"))
    if history:
        newest = history[-1]
        steps = (_newest(events, "RunBuilt") or {}).get("steps", "?")
        rows.append(
            ("step", f"{newest.step} of {steps}, loss {newest.loss}, {newest.tokens:,} tokens")
        )
    if line.commits:
        age = clock.wall() - line.commits[-1].time
        rows.append(("committed", f"step {line.step}, {_age(age)} ago"))
    else:
        rows.append(("committed", "nothing yet"))
    rows += _ending(run_dir, line, alive=alive)
    return "".join(f"{name:<11}{value}\n" for name, value in rows)


def _alive(run_dir: RunDir, line: Line, *, alive: bool) -> str:
    beat = owner.read(run_dir)
    if beat is None:
        return f"no (attempt {line.attempt})"
    who = f"attempt {line.attempt}, host {beat['host']}, pid {beat['pid']}"
    at = datetime.fromtimestamp(beat["time"]).isoformat(sep=" ", timespec="seconds")
    return f"yes: {who}" if alive else f"no: {who}, last seen {at}"


def _newest(events: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] == kind), None)


def _ending(run_dir: RunDir, line: Line, *, alive: bool) -> list[tuple[str, str]]:
    """Returns how the newest attempt ended (or, while it runs, the one before), and what next."""
    stop = line.last_stop
    if alive:
        rows = [] if stop is None else [("before", _words(stop))]
        return [*rows, ("next", f"to stop and save: touch {run_dir.request('stop')}")]
    if stop is None or stop.attempt != line.attempt:
        return [
            ("ended", "without a word: killed, or the machine went down"),
            ("next", f"python -m jaxres.train {run_dir.root}"),
        ]
    assert isinstance(stop.body, runlog.Stop)
    advice = NEXT.get(stop.body.exit, "look at the output, then: python -m jaxres.train {root}")  # type: ignore[call-overload]
    told = advice.format(root=run_dir.root, stacks=run_dir.stacks(line.attempt, 0))
    return [("ended", _words(stop)), ("next", told)]


def _words(stop: runlog.Record) -> str:
    assert isinstance(stop.body, runlog.Stop)
    code = stop.body.exit
    name = Exit(code).name if code in set(Exit) else f"signal {code - 128}"
    return f"exit {code} {name} (attempt {stop.attempt}): {stop.body.reason}"


def _age(seconds: float) -> str:
    """Returns a duration in the largest unit that fits.

    >>> _age(59), _age(3700), _age(200000)
    ('59 s', '62 min', '56 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
