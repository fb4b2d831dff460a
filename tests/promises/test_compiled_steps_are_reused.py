"""A restart loads the compiled steps of an earlier attempt and computes the same bits with them.

Steps of another program and damaged files are never used; the steps are recompiled instead. Nor are
steps used that another account could have stored, or that were put in the run directory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests.promises.trainer import MLP, TrainingProcess, Workspace, assert_bit_exact


def resumed(workspace: Workspace, *overrides: str, name: str = "run") -> TrainingProcess:
    trainer = workspace.start(name, *MLP, *overrides)
    assert trainer.wait_exit() == 0, trainer.printed()
    return trainer


def own_cache(workspace: Workspace) -> tuple[Path, str]:
    """Returns a folder of compiled steps of this test alone, and the setting for it."""
    cache = workspace.root / "caches"
    files.make_private_dir(cache / "programs")
    return cache / "programs", f"compilation.cache_dir={cache}"


def cached(workspace: Workspace) -> tuple[list[Path], str]:
    """Returns the files of the killed run's compiled steps in a cache of its own."""
    folder, setting = own_cache(workspace)
    for path in (workspace.caches / "xla" / "programs").glob("*.compiled"):
        files.replace(folder / path.name, path.read_bytes())
    return sorted(folder.glob("*.compiled")), setting


@pytest.mark.slow
def test_a_restart_loads_compiled_steps_and_ends_bit_exact(
    workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    workspace.copy(killed, "run")
    trainer = resumed(workspace)
    assert trainer.events_of("compiled_steps_loaded"), trainer.events()
    assert "guarantee: bitwise" in trainer.printed(), "the program of a loaded step is not known"
    assert_bit_exact(trainer.run_dir, unbroken)


@pytest.mark.campaign
def test_a_damaged_file_is_reported_and_the_steps_are_recompiled(
    workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    workspace.copy(killed, "run")
    paths, setting = cached(workspace)
    damaged = {}
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        damaged[path] = bytes(data)
    trainer = resumed(workspace, setting)
    (compiled,) = trainer.events_of("steps_compiled")
    assert "its content does not match its digest" in compiled["reason"]
    assert "the steps are compiled again" in trainer.printed()
    assert_bit_exact(trainer.run_dir, unbroken)
    named = Path(compiled["reason"].partition(": ")[0])
    assert named.read_bytes() != damaged[named], "the next restart finds the same damage"


@pytest.mark.slow
def test_steps_of_another_program_are_not_used(workspace: Workspace, killed: RunDir) -> None:
    """The number of microbatches may change at any restart, and changes the program."""
    workspace.copy(killed, "run")
    workspace.copy(killed, "other")
    folder, setting = own_cache(workspace)
    resumed(workspace, setting)
    first = set(folder.glob("*.compiled"))
    assert len(first) == 2, "under the key of the config, and under that of the text"
    trainer = resumed(workspace, setting, "train.microbatches=2", name="other")
    assert not trainer.events_of("compiled_steps_loaded"), "another program is in use"
    assert trainer.events_of("steps_compiled")
    assert len(set(folder.glob("*.compiled")) - first) == 2


@pytest.mark.slow
def test_a_file_that_others_could_have_planted_is_never_loaded(
    workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    """A valid file under the right name: in the run directory, and in a folder open to others."""
    run_dir = workspace.copy(killed, "run")
    paths, setting = cached(workspace)
    (run_dir.root / "compiled").mkdir(exist_ok=True)
    for path in paths:
        (run_dir.root / "compiled" / path.name).write_bytes(path.read_bytes())
    paths[0].parent.chmod(0o777)
    trainer = resumed(workspace, setting)
    assert trainer.events_of("steps_compiled"), "planted machine code is in use"
    assert "expected a folder of this account" in trainer.printed()
    assert "the compiled training step is not stored" in trainer.printed()
    assert_bit_exact(trainer.run_dir, unbroken)
