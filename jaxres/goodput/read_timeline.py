"""Reads the inputs of `run_timeline`: log, events, metrics, events of the launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jaxres.goodput import run_timeline
from jaxres.goodput.run_timeline import AFTER_THE_END, Events, RunTimeline
from jaxres.runlog import launch_events, metrics_columns, run_log
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim


def read(
    run_dir: RunDir, *, is_alive: bool, warn: Callable[[str], None] | None = None
) -> RunTimeline:
    """Returns the timeline of a run.

    Args:
      is_alive: whether the owner of its newest attempt is.
      warn: see launch_events.read.
    """
    records = run_log.in_force(run_log.read_records(run_dir.log))
    numbers = [record.attempt for record in records if isinstance(record.body, Claim)]
    return run_timeline.fold(
        records,
        events={n: read_events(run_dir.events(n, 0)) for n in numbers},
        supervisor_events=supervisor_events(run_dir, numbers),
        lines={n: metrics_columns.read_attempt(run_dir, n) for n in numbers},
        is_alive=is_alive,
        launch_events=launch_events.read(run_dir, warn=warn),
    )


def supervisor_events(run_dir: RunDir, attempts: Iterable[int]) -> Mapping[int, Events]:
    """Returns the events of host 0's supervisor and of the restart loop, by attempt."""
    ends = [e for e in read_events(run_dir.supervisor_events) if e["event"] in AFTER_THE_END]
    return {
        n: read_events(run_dir.host_supervisor_events(n, 0))
        + [event for event in ends if event.get("attempt") == n]
        for n in attempts
    }
