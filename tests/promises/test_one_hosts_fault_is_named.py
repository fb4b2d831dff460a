"""A fault of one host ends all hosts with its code and message; no other host is blamed."""

from __future__ import annotations

import pytest

from jaxres.exit_codes import ExitCode
from tests.promises.trainer import FAULTY, Workspace

ENDLESS = ("train.steps=1000000", "checkpoint.save_every_steps=1000000")


def test_an_error_on_one_host_is_one_traceback_with_its_name(workspace: Workspace) -> None:
    trainer = workspace.launch(
        "run", *ENDLESS, hosts=2, config=FAULTY, env={"FAULT": "row:300:fail:1"}
    )
    assert trainer.wait_exit() == ExitCode.BUG, trainer.printed()
    printed = trainer.printed()
    assert printed.count("Traceback") == 1, printed
    assert "host 1 (" in printed, printed
    assert "): tests.promises.faulty.OnPurpose: requested by the test" in printed, printed


@pytest.mark.slow
def test_out_of_memory_on_one_host_names_it(workspace: Workspace) -> None:
    env = {"FAULT": "row:300:exhaust_host:1"}
    trainer = workspace.launch("run", *ENDLESS, hosts=2, config=FAULTY, env=env)
    trainer.assert_fails(ExitCode.OUT_OF_MEMORY, "host 1 (", "train.microbatches=")


@pytest.mark.slow
def test_a_host_that_waits_for_data_is_named_instead_of_the_others(workspace: Workspace) -> None:
    limits = ("deadlines.step_seconds=10", "data.timeout_seconds=15")
    env = {"FAULT": "row:300:sleep:1"}
    trainer = workspace.launch("run", *ENDLESS, *limits, hosts=2, config=FAULTY, env=env)
    trainer.assert_fails(
        ExitCode.HUNG, "host 1 (", "did not come within 15 s (data.timeout_seconds)"
    )
