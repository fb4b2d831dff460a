"""A float16 run finds its loss scale, ends finite, and resumes with the same scale."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxres.checkpoint.read import manifest
from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import FAULTY, ROOT, Workspace, assert_bit_exact, history, run_history

STEPS = 60
OVERRIDES = (
    "model.target=tests.promises.bad_models:in_float16",
    f"train.steps={STEPS}",
    "train.loss_scale.when=always",
    "train.loss_scale.first=16777216",
    "train.loss_scale.grow_every_steps=13",
    "evaluation.every_steps=0",
)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> Callable[[], RunDir]:
    """Returns the unbroken run; the first call, within a test, trains it."""
    workspace = Workspace(tmp_path_factory.mktemp("float16"), caches)
    return functools.cache(lambda: workspace.finish("unbroken", *OVERRIDES, config=FAULTY).run_dir)


def newest(run_dir: RunDir) -> dict[str, Any]:
    commit = run_history(run_dir).committed[-1]
    return manifest.read_arrays((run_dir.root / commit.path).absolute(), commit)


def assert_found(run_dir: RunDir) -> None:
    """The scale is halved more often in a row than skips are allowed, grows, and overflows."""
    rows = history(run_dir)
    scales = [row["loss_scale"] for row in rows]
    first = [row["skipped"] for row in rows].index(False)
    assert first > 5, "skips in a row that guards.max_skips_in_a_row does not bear"
    assert scales[: first + 1] == [2.0 ** (24 - n) for n in range(first + 1)]
    assert scales[first] < max(scales[first:]), "it has grown"
    assert any(row["skipped"] for row in rows[first:]), "and was too large again"
    assert all(np.isfinite(row["loss"]) for row in rows)


@pytest.mark.slow
def test_the_scale_is_found_and_training_ends_finite(unbroken: Callable[[], RunDir]) -> None:
    assert_found(unbroken())
    arrays = newest(unbroken())
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert arrays["loss_scale/factor"] == history(unbroken())[-1]["loss_scale"]


@pytest.mark.slow
def test_a_killed_run_resumes_with_its_loss_scale(
    workspace: Workspace, unbroken: Callable[[], RunDir]
) -> None:
    trainer = workspace.start("run", *OVERRIDES, config=FAULTY, env={"HELD": "25"})
    trainer.wait_commit(20)
    trainer.kill()
    assert trainer.wait_exit() == -signal.SIGKILL
    arrays = newest(trainer.run_dir)
    assert run_history(trainer.run_dir).step < STEPS
    assert arrays["loss_scale/factor"] < 2**24
    assert arrays["loss_scale/good_steps"] > 0, "in the middle of a row of good steps"
    workspace.finish("run", *OVERRIDES, config=FAULTY)
    assert_bit_exact(trainer.run_dir, unbroken())


@pytest.mark.campaign
def test_two_hosts_halve_the_scale_at_the_same_steps(workspace: Workspace) -> None:
    trainer = workspace.launch("pair", *OVERRIDES, hosts=2, config=FAULTY)
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    assert_found(trainer.run_dir)
    reported = [
        {
            event["step"]: event["overflowed_scale"]
            for event in trainer.events_of("update_skipped", host)
        }
        for host in range(2)
    ]
    assert reported[0] == reported[1]
    assert all(reported[0].values())
    assert "the gradient overflows under loss scale" in trainer.printed()


@pytest.mark.campaign
def test_replay_of_an_overflowed_step_names_the_parameters(unbroken: Callable[[], RunDir]) -> None:
    command = ["replay", str(unbroken().root), "--step", "1", "--explain"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxres", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "(as recorded), gradient norm inf" in done.stdout
    assert "its update was skipped (gradient overflows under the loss scale, " in done.stdout
    assert "gradient of bias_V: not finite" in done.stdout
    found = done.stdout.partition("first number that is not finite: backward: ")[2]
    assert "convert_element_type of [64]" in found, done.stdout
    assert "bad_models.py" in found
