"""`jaxres history`: the metrics of every step over all attempts, or the attempts themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxres.clock import SystemClock
from jaxres.runlog import attempt_history, evaluations, metrics, skip_causes
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunHistory
from jaxres.supervisor import run_lock
from jaxres.telemetry import stdio


def steps_text(run_dir: RunDir, history: RunHistory, *, as_json: bool) -> str:
    """Returns one line for each step of the run's history: a table, or JSON lines.

    A step with an evaluation has the loss of each validation set, a skipped step its cause.
    """
    metric_lines = metrics.read_history(run_dir, history)
    events = {n: read_events(run_dir.events(n, 0)) for n in {m.attempt for m in metric_lines}}
    evaluated = evaluations.of_attempts(events)
    causes = {number: skip_causes.of_events(own) for number, own in events.items()}
    if as_json:
        rows = [
            {k: v for k, v in m.fields().items() if k != "seq"}
            | ({"skip_cause": causes[m.attempt].get(m.step)} if m.skipped else {})
            | evaluated.get((m.attempt, m.step), {})
            for m in metric_lines
        ]
        return "".join(json.dumps(row) + "\n" for row in rows)
    head = (
        f"{'step':>8} {'attempt':>7} {'loss':>10} {'grad norm':>10} {'rate':>10} {'tokens':>14}"
        f"{'  evaluated' if evaluated else ''}\n"
    )
    return head + "".join(
        f"{m.step:>8} {m.attempt:>7} {_cell(m.loss)} {_cell(m.grad_norm)} "
        f"{_cell(m.learning_rate)} {m.tokens:>14,}"
        f"{_losses(evaluated.get((m.attempt, m.step)))}"
        f"{f'  skipped: {skip_causes.text(causes[m.attempt].get(m.step))}' if m.skipped else ''}\n"
        for m in metric_lines
    )


def _losses(evaluation: Mapping[str, Any] | None) -> str:
    losses = {} if evaluation is None else evaluation.get("losses", {})
    text = ", ".join(
        f"{name} {_cell(loss if isinstance(loss, float) else None).strip()}"
        for name, loss in losses.items()
    )
    return f"  {text}" if text else ""


def attempts_text(run_dir: RunDir, _: RunHistory, *, as_json: bool) -> str:
    """Returns every attempt with its cause, steps and seconds by phase: text, or JSON."""
    is_alive = run_lock.liveness(run_dir, clock=SystemClock()) != "gone"
    attempts = attempt_history.read(run_dir, is_alive=is_alive, warn=stdio.warn)
    return attempt_history.as_json(attempts) if as_json else attempt_history.as_text(attempts)


def _cell(value: float | None) -> str:
    return f"{'null' if value is None else f'{value:.4g}':>10}"
