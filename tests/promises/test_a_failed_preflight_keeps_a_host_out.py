"""A device with a wrong answer in the tests before a run keeps its host out, at no step's cost."""

from __future__ import annotations

import pytest

from jaxres.exit_codes import ExitCode
from tests.promises.trainer import FAULTY, Workspace, run_history

QUICK = ("hardware.preflight=quick", "train.steps=4")


@pytest.mark.slow
def test_a_device_that_computes_wrongly_is_named_and_no_step_is_computed(
    workspace: Workspace,
) -> None:
    devices = {"JAX_NUM_CPU_DEVICES": "4"}
    trainer = workspace.start("run", *QUICK, config=FAULTY, env=devices | {"WRONG_PRODUCT": "2"})
    wrong = "device 2 (cpu): a product of float32 matrices is wrong at 1 places, first at [7, 9]"
    trainer.assert_fails(ExitCode.UNHEALTHY, wrong, "hardware.preflight")
    assert trainer.steps() == []
    assert run_history(trainer.run_dir).committed == ()
    workspace.repaired("run")
    sound = workspace.finish("run", *QUICK, config=FAULTY, env=devices)
    assert "hardware.preflight=quick: passed in" in sound.printed()
    assert run_history(sound.run_dir).step == 4
