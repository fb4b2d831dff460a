"""Killed and resumed on fewer devices each time, a run trains on the samples of an unbroken one."""

from __future__ import annotations

import numpy as np
import pytest

from jaxres.runlog.paths import RunDir
from tests.promises.trainer import MLP, Place, Trainer, assert_bit_exact, history, line, starts

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
"""Relative, of the losses. Devices add up the same float32 numbers (24 bits: 6e-8) in other orders,
and 200 steps of Adam carry that on. Found: at most 2e-6."""


def start(place: Place, name: str, count: int, *words: str) -> Trainer:
    return place.start(name, *MLP, *words, env={"JAX_NUM_CPU_DEVICES": str(count)})


def kill_after_commit(trainer: Trainer, step: int) -> None:
    trainer.wait_commit(step)
    trainer.kill()
    assert trainer.ended() == -9, trainer.said()


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param("data", marks=pytest.mark.campaign),
        pytest.param("fsdp", marks=pytest.mark.campaign),
        "fsdp x tensor",
    ],
)
def test_the_samples_stay_when_devices_are_lost(place: Place, unbroken: RunDir, axes: str) -> None:
    for commit, (count, words) in zip((40, 80, 120, None), AXES[axes].items(), strict=True):
        trainer = start(place, "run", count, *words)
        if commit is not None:
            kill_after_commit(trainer, commit)
        else:
            assert trainer.ended() == 0, trainer.said()
        mesh = line(trainer.run_dir).starts[-1].body.computation["mesh"]
        sizes = [int(word.partition("=")[2]) for word in mesh.split()]
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


def test_on_the_same_mesh_again_the_run_ends_bit_for_bit(place: Place) -> None:
    words = AXES["fsdp x tensor"][8]
    assert start(place, "unbroken", 8, *words).ended() == 0
    kill_after_commit(start(place, "broken", 8, *words), 100)
    again = start(place, "broken", 8, *words)
    assert again.ended() == 0, again.said()
    assert starts(again.run_dir)[1] >= 100
    assert_bit_exact(again.run_dir, place.run_dir("unbroken"))
