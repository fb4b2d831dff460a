"""A run killed and resumed on fewer devices trains on the samples of an uninterrupted one."""

from __future__ import annotations

import numpy as np
import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import start_of
from tests.promises.trainer import (
    MLP,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    history,
    run_history,
    starts,
)

AXES = {
    "data": {8: (), 4: (), 2: (), 1: ()},
    "fsdp": dict.fromkeys((8, 4, 2, 1), ("mesh.fsdp=-1",)),
    "fsdp x tensor": {
        8: ("mesh.fsdp=4", "mesh.tensor=2"),
        4: ("mesh.fsdp=-1", "mesh.tensor=2", "train.max_rows_per_device=4"),
        2: ("mesh.tensor=2", "train.max_rows_per_device=4"),
        1: ("train.max_rows_per_device=4",),
    },
}
BOUND = 5e-5
"""Relative tolerance of the losses. Devices add the same float32 numbers (24 bits: 6e-8) in other
orders, and 200 steps of Adam propagate that. Measured: at most 2e-6."""


def start(
    workspace: Workspace, name: str, count: int, *arguments: str, commit: int | None = None
) -> TrainingProcess:
    """Starts training on so many devices; it is held soon after a commit that ends it."""
    env, held_after = {"JAX_NUM_CPU_DEVICES": str(count)}, commit and commit + 10
    return workspace.start(name, *MLP, *arguments, env=env, held_after=held_after)


def kill_after_commit(trainer: TrainingProcess, step: int) -> None:
    trainer.wait_commit(step)
    trainer.kill()
    assert trainer.wait_exit() == -9, trainer.printed()


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param("data", marks=pytest.mark.campaign),
        pytest.param("fsdp", marks=pytest.mark.campaign),
        "fsdp x tensor",
    ],
)
def test_the_samples_stay_the_same_on_fewer_devices(
    workspace: Workspace, unbroken: RunDir, axes: str
) -> None:
    for commit, (count, arguments) in zip((40, 80, 120, None), AXES[axes].items(), strict=True):
        trainer = start(workspace, "run", count, *arguments, commit=commit)
        if commit is not None:
            kill_after_commit(trainer, commit)
        else:
            assert trainer.wait_exit() == 0, trainer.printed()
        mesh = run_history(trainer.run_dir).starts[-1].body.computation["mesh"]
        sizes = [int(axis.partition("=")[2]) for axis in mesh.split()]
        assert np.prod(sizes) == count, f"not the mesh that was meant: {mesh}"
        assert (sizes[0] == count) == (axes == "data" or count == 1)
    begun = starts(trainer.run_dir)
    assert begun == sorted(set(begun)), begun
    assert begun[0] == 0
    assert begun[1] >= 40, "nothing was resumed"
    here, there = history(trainer.run_dir), history(unbroken)
    assert [row["step"] for row in here] == [row["step"] for row in there]
    samples = [row["samples"] for row in there]
    assert [row["samples"] for row in here] == samples, "other samples were trained on"
    assert [row["tokens"] for row in here] == [row["tokens"] for row in there]
    np.testing.assert_allclose(
        [row["loss"] for row in here], [row["loss"] for row in there], rtol=BOUND
    )


@pytest.mark.campaign
@pytest.mark.parametrize("count", [8, 4])
def test_back_on_the_original_mesh_the_run_ends_bit_exact(workspace: Workspace, count: int) -> None:
    arguments = AXES["fsdp x tensor"][count]
    assert start(workspace, "unbroken", count, *arguments).wait_exit() == 0
    kill_after_commit(start(workspace, "broken", count, *arguments, commit=100), 100)
    again = start(workspace, "broken", count, *arguments)
    assert again.wait_exit() == 0, again.printed()
    assert starts(again.run_dir)[1] >= 100
    assert_bit_exact(again.run_dir, workspace.run_dir("unbroken"))


@pytest.mark.slow
def test_a_host_with_fewer_devices_than_it_must_have_is_unhealthy(workspace: Workspace) -> None:
    env = {"JAX_NUM_CPU_DEVICES": "2", "JAXRES_MIN_DEVICES": "4"}
    refused = workspace.start("few", *MLP, env=env)
    refused.assert_fails(ExitCode.UNHEALTHY, "4 devices expected, 2 found (JAXRES_MIN_DEVICES)")
    workspace.repaired("few")
    gpu = workspace.start("few", *MLP, env={"JAXRES_PLATFORM": "gpu"})
    gpu.assert_fails(ExitCode.UNHEALTHY, "JAX finds no gpu, only CPUs (JAXRES_PLATFORM)")
    workspace.repaired("few")
    allowed = workspace.start("few", *MLP, "train.steps=1", "hardware.allow_fewer=true", env=env)
    assert allowed.wait_exit() == 0, allowed.printed()
    assert "4 devices expected, 2 found (JAXRES_MIN_DEVICES)" in allowed.printed()
    (start,) = run_history(allowed.run_dir).starts
    assert start_of(start).devices == (2,)
