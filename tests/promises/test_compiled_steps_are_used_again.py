"""A restart loads the steps that an attempt has compiled, and computes the same bits with them.

Another program, or a damaged file, is never used; then the steps are compiled, and nothing else.
"""

from __future__ import annotations

from jaxres.runlog.paths import RunDir
from tests.promises.trainer import MLP, Place, Trainer, assert_bit_exact


def resumed(place: Place, *overrides: str) -> Trainer:
    trainer = place.start("run", *MLP, *overrides)
    assert trainer.ended() == 0, trainer.said()
    return trainer


def test_a_restart_loads_them_and_ends_bit_exact(
    place: Place, killed: RunDir, unbroken: RunDir
) -> None:
    place.copy(killed, "run")
    trainer = resumed(place)
    assert trainer.told("StepsLoaded"), trainer.events()
    assert_bit_exact(trainer.run_dir, unbroken)


def test_a_damaged_file_is_said_and_compiled_anew(
    place: Place, killed: RunDir, unbroken: RunDir
) -> None:
    (file,) = place.copy(killed, "run").compiled.glob("*.compiled")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    trainer = resumed(place)
    (compiled,) = trainer.told("StepsCompiled")
    assert "its content is not what was written" in compiled["reason"]
    assert "the steps are compiled anew" in trainer.said()
    assert_bit_exact(trainer.run_dir, unbroken)
    assert file.read_bytes() != bytes(data), "the next restart finds the same damage"


def test_steps_of_another_program_are_not_used(place: Place, killed: RunDir) -> None:
    """The number of microbatches may change at any restart, and changes the program."""
    place.copy(killed, "run")
    trainer = resumed(place, "train.microbatches=2")
    assert not trainer.told("StepsLoaded"), "another program is in use"
    assert trainer.told("StepsCompiled")
    assert len(list(trainer.run_dir.compiled.glob("*.compiled"))) == 2


def test_a_place_that_takes_none_costs_a_compilation_and_no_more(
    place: Place, killed: RunDir, unbroken: RunDir
) -> None:
    (file,) = place.copy(killed, "run").compiled.glob("*.compiled")
    file.unlink()
    file.mkdir()
    trainer = resumed(place)
    assert trainer.told("StepsCompiled"), trainer.events()
    assert "the compiled training step is not kept" in trainer.said()
    assert_bit_exact(trainer.run_dir, unbroken)
