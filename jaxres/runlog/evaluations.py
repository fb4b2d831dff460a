"""Reads the evaluations of a run's attempts from their events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxres.runlog.event_log import read_events, read_json_lines_since
from jaxres.runlog.events import EVENTS, Evaluated
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import RunPath

EVALUATED = EVENTS.tag(Evaluated)
FIELDS = ("losses", "bits_per_byte", "epochs", "metrics")


def of_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an Evaluated event that are not empty."""
    return {
        name: event[name] for name in FIELDS if isinstance(event.get(name), dict) and event[name]
    }


def read(run_dir: RunDir, attempts: Collection[int]) -> dict[tuple[int, int], dict[str, Any]]:
    """Returns (attempt, step) -> the fields of its evaluation."""
    return of_attempts({number: read_events(run_dir.events(number, 0)) for number in attempts})


def of_attempts(
    events: Mapping[int, Iterable[Mapping[str, Any]]],
) -> dict[tuple[int, int], dict[str, Any]]:
    """Returns (attempt, step) -> the fields of its evaluation, from the events of attempts."""
    return {
        (attempt, event.get("step", 0)): of_event(event)
        for attempt, own in events.items()
        for event in own
        if event["event"] == EVALUATED
    }


def read_since(path: RunPath, start: int) -> tuple[dict[int, dict[str, Any]], int]:
    """Reads step -> evaluation from a byte of a host's events on; returns also where they end."""
    rows, end = read_json_lines_since(path, start)
    found = {row.get("step", 0): of_event(row) for row in rows if row.get("event") == EVALUATED}
    return found, end


def curves(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of an evaluation by the names of their curves, `SET/loss` and so on."""
    points = {f"{name}/loss": value for name, value in evaluation.get("losses", {}).items()}
    for part in ("bits_per_byte", "epochs"):
        points |= {f"{name}/{part}": value for name, value in evaluation.get(part, {}).items()}
    for name, means in evaluation.get("metrics", {}).items():
        points |= {f"{name}/{metric}": value for metric, value in means.items()}
    return points
