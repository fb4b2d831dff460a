"""Metrics as columns are the metrics that `jaxres history` has."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from jaxres.runlog import metrics, metrics_columns, run_log
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.metrics_columns import MetricsColumns, of_lines
from jaxres.runlog.paths import RunDir
from tests.unit.goodput.simulated_run import random_run

LINE = MetricsLine(
    seq=3,
    step=7,
    attempt=1,
    loss=2.5,
    grad_norm=None,
    learning_rate=0.1,
    tokens=70,
    step_seconds=0.25,
    skipped=False,
    samples="s",
)


def assert_equal(found: MetricsColumns, wanted: MetricsColumns) -> None:
    for field in dataclasses.fields(MetricsColumns):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(wanted, field.name))


def written(path: Path, *lines: str) -> MetricsColumns:
    run_dir = RunDir(path)
    file = path / "attempts" / "0001" / "metrics.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(line + "\n" for line in lines))
    found = metrics_columns.read_attempt(run_dir, 1)
    assert_equal(found, of_lines(metrics.read_attempt(run_dir, 1)))
    return found


def test_numbers_are_read_bit_for_bit_and_null_is_nan(tmp_path: Path):
    loss = 0.1 + 0.2
    line = dataclasses.replace(LINE, loss=loss)
    found = written(tmp_path, json.dumps(line.fields()), json.dumps(LINE.fields()))
    assert found.loss.tolist() == [loss, 2.5]
    assert np.isnan(found.grad_norm).all()


@pytest.mark.parametrize(
    "damaged",
    [
        '{"seq": 3, "step',
        "[]",
        "null",
        "1",
        "",
        '{"step": 1}',
        json.dumps(LINE.fields() | {"step": "7"}),
        json.dumps(LINE.fields() | {"skipped": 1}),
        json.dumps(LINE.fields() | {"seq": 2.5}),
        json.dumps(LINE.fields() | {"loss": "2"}),
        json.dumps(LINE.fields() | {"step": 10**30}),
        json.dumps(LINE.fields() | {"loss": 10**400}),
        json.dumps(LINE.fields() | {"step_seconds": math.nan}),
        json.dumps(LINE.fields() | {"step_seconds": 1e308}),
    ],
)
def test_a_damaged_line_is_left_out_and_the_others_stay(damaged: str, tmp_path: Path):
    good = json.dumps(LINE.fields())
    assert len(written(tmp_path, good, damaged, good)) == 2


def test_an_attempt_without_metrics_has_no_lines(tmp_path: Path):
    assert len(metrics_columns.read_attempt(RunDir(tmp_path), 1)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_surviving_steps_are_those_of_the_history(seed: int):
    run = random_run(seed, jumps=False)
    lines = [line for own in run.lines.values() for line in own]
    lines += random.Random(seed).sample(lines, len(lines) // 4)  # A line that is there twice.
    history = run_log.fold(run.records)
    wanted = metrics.surviving_metrics(history, lines)
    assert_equal(metrics_columns.surviving(history, of_lines(lines)), of_lines(wanted))
