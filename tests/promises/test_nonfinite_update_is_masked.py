"""A batch with a NaN loss is consumed and changes nothing; the run continues and reports it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from jaxres.checkpoint.read import manifest
from jaxres.data import Permutation, sample_ids_at
from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import FAULTY, Workspace, history, run_history
from tests.tiers import slow_but

STEPS = 16
BAD_ROWS = {5: 3, 6: 20, 11: 12}
"""Step -> row of its batch with a planted sample; with two hosts, each has some."""
ITEMS = [
    int(sample_ids_at(Permutation(1800, seed=0), 24 * (n - 1), 24)[0][BAD_ROWS[n]])
    for n in BAD_ROWS
]


def states(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    """Returns step -> the arrays of every commit."""
    return {
        commit.step: manifest.read_arrays((run_dir.root / commit.path).absolute(), commit)
        for commit in run_history(run_dir).committed
    }


@pytest.mark.parametrize(
    ("where", "hosts"), slow_but([("gradient", 1), ("loss", 2)], ("gradient", 1))
)
def test_a_batch_with_a_nan_loss_changes_nothing_and_the_run_continues(
    workspace: Workspace, where: str, hosts: int
) -> None:
    arguments = (
        "model.target=tests.promises.bad_models:poisoned",
        f"model.args={json.dumps({'items': ITEMS, 'where': where})}",
        f"train.steps={STEPS}",
        "checkpoint.save_every_steps=1",
        "checkpoint.keep_last=1000",
    )
    trainer = workspace.launch("run", *arguments, hosts=hosts, config=FAULTY)
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    skipped = [row["step"] for row in history(trainer.run_dir) if row["skipped"]]
    reported = [
        [event for event in trainer.events(host) if event["event"] == "update_skipped"]
        for host in range(hosts)
    ]
    assert all([event["step"] for event in events] == skipped for events in reported)
    assert skipped == list(BAD_ROWS)
    assert f"step {skipped[0]}: loss" in trainer.printed()
    causes = [[event["cause"] for event in events] for events in reported]
    assert causes == hosts * [len(BAD_ROWS) * [f"nonfinite_{where}"]]
    if where == "loss":
        rows = [tuple(row) for event in reported[0] for row in event["rows"]]
        assert rows == [
            (row, item, row // 12, 0) for row, item in zip(BAD_ROWS.values(), ITEMS, strict=True)
        ]
    else:
        assert all(event["params"] == ["bias_V"] and not event["rows"] for event in reported[0])
        assert all(np.isfinite(event["loss"]) for event in reported[0])
    kept = states(trainer.run_dir)
    assert list(kept) == list(range(1, STEPS + 1))
    for (_, before), (step, after) in pairwise(kept.items()):
        names = [name for name in after if name.startswith(("params", "opt"))]
        is_same = all(np.array_equal(before[name], after[name]) for name in names)
        assert is_same == (step in skipped), step
        assert all(np.isfinite(after[name]).all() for name in names), step
        assert not np.array_equal(before["key"], after["key"]), step


@pytest.mark.slow
def test_more_consecutive_skips_than_allowed_end_the_run(workspace: Workspace) -> None:
    arguments = (
        "model.target=tests.promises.bad_models:nan_at",
        "model.args.call=31",
        "optimizer.kind=sgd",
        "optimizer.learning_rate=1",
        "optimizer.momentum=0",
        "optimizer.clip_norm=null",
        "optimizer.schedule.kind=constant",
        "guards.diagnostics=state",
    )
    trainer = workspace.start("run", *arguments, config=FAULTY)
    trainer.assert_fails(
        ExitCode.DIVERGED,
        "step 36: loss nan",
        "6 steps in a row were skipped (guards.max_skips_in_a_row)",
    )
    assert [row["skipped"] for row in history(trainer.run_dir)[29:36]] == [False] + 6 * [True]
    assert run_history(trainer.run_dir).step == 30
    assert_diagnosed(trainer.run_dir)


def assert_diagnosed(run_dir: RunDir) -> None:
    """The last state is dumped into the attempt's folder, which no restore reads."""
    folder = run_dir.diagnostics(1)
    report = json.loads((folder / "report.json").read_text())
    assert "6 steps in a row were skipped" in report["reason"]
    steps = {one["metrics"]["step"]: one for one in report["steps"]}
    assert list(steps) == list(range(22, 38))
    assert steps[30]["grad_norms"]["bias_V"] > 0
    assert steps[31]["metrics"]["loss"] == "nan"
    assert steps[31]["bad_rows"] == list(range(24))
    assert steps[31]["rows"] == [30 * 24, 31 * 24]
    ids = sample_ids_at(Permutation(1800, seed=0), 30 * 24, 24)[0]
    assert steps[31]["samples"] == ids.tolist()
    assert [step for step, _ in report["guards"]["skips"]["skipped"]] == list(range(31, 38))
    with np.load(folder / "state-host000.npz") as state:
        assert state["step[]"] == 37
        assert np.isfinite(state["params/bias_V[0]"]).all()
