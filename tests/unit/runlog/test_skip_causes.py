"""The cause of a skipped update: recorded once, shown by all that show the step."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxres.cli.checkpoints.history import steps_text
from jaxres.clock import SystemClock
from jaxres.config.schema.alert_kinds import Kind
from jaxres.jax_cli import replay
from jaxres.operate.report.page import run_page
from jaxres.runlog import skip_causes
from jaxres.runlog.event_log import EventLog, read_events
from jaxres.runlog.events import EVENTS, UpdateSkipped
from jaxres.runlog.paths import RunDir
from jaxres.runlog.skip_causes import SkipCause
from jaxres.telemetry.console import ConsoleLog
from jaxres.telemetry.heartbeat import StatusWriter, TrainingReport, decode
from jaxres.telemetry.masked_steps import MaskedSteps
from tests.unit.operate.report.parsed_page import parse
from tests.unit.operate.report.test_page import contents, crashed_run
from tests.unit.runlog.test_metrics import LINE, claim, log_of, start, written

SKIPPED = UpdateSkipped(1, 1.0, 1.0, 12.3, (), 0, ())


def skipped(step: int, cause: SkipCause | None) -> UpdateSkipped:
    scale = 2.0 if cause is SkipCause.LOSS_SCALE else None
    return dataclasses.replace(SKIPPED, step=step, cause=cause, overflowed_scale=scale)


def run_with(root: Path, *events: UpdateSkipped) -> RunDir:
    """Returns a run whose steps were all skipped, with these events; a step may have none."""
    run_dir = RunDir(root)
    with EventLog(run_dir.events(1, 0), clock=SystemClock()) as log:
        for event in events:
            log.emit(event)
    steps = range(1, 5)
    written(run_dir, *(dataclasses.replace(LINE, step=step, skipped=True) for step in steps))
    return run_dir


def test_an_event_of_an_earlier_version_is_read_and_has_no_cause() -> None:
    fields = EVENTS.encode(skipped(3, SkipCause.NORM_SPIKE))
    earlier = {name: value for name, value in fields.items() if name != "cause"}
    assert EVENTS.decode(earlier) == skipped(3, None)
    later = fields | {"step": 4, "cause": "of a later version"}
    read = skip_causes.of_events([earlier, later, {"event": "note"}, fields | {"step": 5}])
    assert read == {3: None, 4: None, 5: "norm_spike"}


def test_history_has_the_cause_of_each_skipped_step(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path, skipped(1, SkipCause.NONFINITE_LOSS), skipped(2, None))
    history = log_of(claim(1), start(0))
    rows = [json.loads(row) for row in steps_text(run_dir, history, as_json=True).splitlines()]
    assert [row["skip_cause"] for row in rows] == ["nonfinite_loss", None, None, None]
    _, *lines = steps_text(run_dir, history, as_json=False).splitlines()
    assert [line.partition("  skipped: ")[2] for line in lines] == [
        "loss not finite",
        *(3 * ["cause not recorded"]),
    ]


def test_the_report_has_the_causes_of_masked_updates() -> None:
    run = crashed_run()
    assert "step 4: update masked (cause not recorded)" in titles(run)
    run.event(UpdateSkipped, step=4, cause="norm_spike")
    assert "step 4: update masked (spike of the gradient norm)" in titles(run)


def titles(run: Any) -> list[str]:
    return parse(run_page(contents(run))).titles()


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (skipped(3, None), "cause not recorded"),
        (skipped(3, SkipCause.NORM_SPIKE), "the gradient norm is 12.3 deviations above the usual"),
        (skipped(3, SkipCause.NONFINITE_LOSS), "loss not finite"),
        (
            dataclasses.replace(
                skipped(3, SkipCause.NONFINITE_LOSS),
                rows=((3, 812, 0, 0),),
                num_rows=1,
                params=("w",),
            ),
            "loss of row 3 (sample 812, host 0) not finite",
        ),
        (skipped(3, SkipCause.NONFINITE_GRADIENT), "gradient not finite"),
        (
            dataclasses.replace(skipped(3, SkipCause.NONFINITE_GRADIENT), params=("w",)),
            "gradient of w not finite",
        ),
        (
            skipped(3, SkipCause.LOSS_SCALE),
            "the gradient overflows under loss scale 2; it is 1 from now on",
        ),
    ],
)
def test_the_console_prints_the_cause(event: UpdateSkipped, why: str, tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    with ConsoleLog(path, attempt=1, log_every_seconds=9, clock=SystemClock()) as log:
        log.on_event(event)
    assert f"its update was skipped ({why})" in path.read_text()


def test_the_alert_counts_each_cause_and_no_step_that_halves_the_loss_scale() -> None:
    read_end, write_end = os.pipe()
    with StatusWriter(write_end, masked=MaskedSteps(2, window_steps=10)) as writer:
        for step in (1, 2):
            writer.on_event(skipped(step, SkipCause.LOSS_SCALE))
        for step, cause in (
            (3, SkipCause.NORM_SPIKE),
            (4, SkipCause.NONFINITE_LOSS),
            (5, SkipCause.NORM_SPIKE),
        ):
            writer.on_event(skipped(step, cause))
            writer.on_step(dataclasses.replace(LINE, step=step, skipped=True))
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        messages = [decode(line) for line in pipe]
    reports = [one for one in messages if isinstance(one, TrainingReport)]
    (report,) = (one for one in reports if one.kind is not Kind.NORM_SPIKE)
    assert report.reason == (
        "3 of the last 10 steps were masked (spike of the gradient norm: 2, loss not finite: 1)"
    )


def test_the_events_file_has_the_cause(tmp_path: Path) -> None:
    run_dir = run_with(tmp_path, skipped(2, SkipCause.NONFINITE_GRADIENT))
    (row,) = read_events(run_dir.events(1, 0))
    assert row["cause"] == "nonfinite_gradient"


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        (SkipCause.NORM_SPIKE, []),
        (
            SkipCause.LOSS_SCALE,
            ["recorded: its update was skipped (gradient overflows under the loss scale)"],
        ),
        (None, ["recorded: its update was skipped (cause not recorded)"]),
    ],
)
def test_a_replay_tells_the_cause_and_another_one_that_is_recorded(
    recorded: SkipCause | None, told: list[str]
) -> None:
    computed = "its update was skipped (spike of the gradient norm, score 12.3)"
    lines = replay.skip_lines(SkipCause.NORM_SPIKE, recorded, is_skipped=True, spike_score=12.3)
    assert lines == [computed, *told]
    assert replay.skip_lines(None, None, is_skipped=False, spike_score=0.0) == []
