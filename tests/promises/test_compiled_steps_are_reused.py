"""A restart loads the compiled steps of an earlier attempt and computes the same bits with them.

Steps of another program and damaged files are never used; the steps are recompiled instead.
"""

from __future__ import annotations

import pytest

from jaxres.runlog.paths import RunDir
from tests.promises.trainer import MLP, TrainingProcess, Workspace, assert_bit_exact


def resumed(workspace: Workspace, *overrides: str) -> TrainingProcess:
    trainer = workspace.start("run", *MLP, *overrides)
    assert trainer.wait_exit() == 0, trainer.printed()
    return trainer


def test_a_restart_loads_compiled_steps_and_ends_bit_exact(
    workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    workspace.copy(killed, "run")
    trainer = resumed(workspace)
    assert trainer.events_of("compiled_steps_loaded"), trainer.events()
    assert_bit_exact(trainer.run_dir, unbroken)


@pytest.mark.slow
def test_a_damaged_file_is_reported_and_the_steps_are_recompiled(
    workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    (file,) = workspace.copy(killed, "run").compiled.glob("*.compiled")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    trainer = resumed(workspace)
    (compiled,) = trainer.events_of("steps_compiled")
    assert "its content does not match its digest" in compiled["reason"]
    assert "the steps are compiled again" in trainer.printed()
    assert_bit_exact(trainer.run_dir, unbroken)
    assert file.read_bytes() != bytes(data), "the next restart finds the same damage"


@pytest.mark.slow
def test_steps_of_another_program_are_not_used(workspace: Workspace, killed: RunDir) -> None:
    """The number of microbatches may change at any restart, and changes the program."""
    workspace.copy(killed, "run")
    trainer = resumed(workspace, "train.microbatches=2")
    assert not trainer.events_of("compiled_steps_loaded"), "another program is in use"
    assert trainer.events_of("steps_compiled")
    assert len(list(trainer.run_dir.compiled.glob("*.compiled"))) == 2


@pytest.mark.slow
def test_an_unwritable_folder_costs_only_a_compilation(
    workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    (file,) = workspace.copy(killed, "run").compiled.glob("*.compiled")
    file.unlink()
    file.mkdir()
    trainer = resumed(workspace)
    assert trainer.events_of("steps_compiled"), trainer.events()
    assert "the compiled training step is not stored" in trainer.printed()
    assert_bit_exact(trainer.run_dir, unbroken)
