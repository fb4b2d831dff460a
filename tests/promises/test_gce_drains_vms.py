"""A VM that an operator drains is replaced after a save; its output is followed throughout."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.state.desired_state import LossCount
from jaxres.runlog.metrics import read_attempt
from jaxres.runlog.paths import RunDir
from tests.promises.cloud import Cloud
from tests.promises.trainer import assert_bit_exact, starts

ROWS_OF_A_STEP = 12
"""Rows that each of two hosts reads for a step."""
SAVING = "SIGHUP: saving after the current step, then exit 75"


def held_config(cloud: Cloud, gate: Path) -> Path:
    """Returns a config whose first attempt waits for the gate in about step 40."""
    env = {"FAULT": f"row:{40 * ROWS_OF_A_STEP}:gate", "GATE": str(gate)}
    return cloud.config(num_hosts=2, env=env)


def trained(cloud: Cloud) -> str:
    """Returns the output of the training processes on all VMs."""
    return "".join(path.read_text() for path in cloud.gce.root.rglob("output-*.txt"))


def wait_held(cloud: Cloud) -> None:
    """Waits until the attempt is near the gate; while it is held, it may commit nothing."""
    cloud.wait(
        lambda: any(line.step >= 36 for line in read_attempt(cloud.run_dir, 1)), of="step 36"
    )


def wait_save(cloud: Cloud) -> None:
    """Waits until a supervisor is told to save, and asserts that it was told as at a preemption."""
    cloud.wait(lambda: "saving after the current step" in trained(cloud), of="request of a save")
    assert SAVING in trained(cloud), "the drain is taken for an operator's stop"


def assert_drained(cloud: Cloud, drained: str) -> None:
    """Asserts that a save ended the first attempt, and that the second one ran on another VM."""
    desired = cloud.desired_state()
    assert desired is not None
    first, last = desired.history
    assert (first.code, last.code) == (ExitCode.PREEMPTED, ExitCode.DONE), desired.history
    assert first.planned == "drain", "an operator's drain is counted as a preemption"
    assert starts(cloud.run_dir)[1] == first.step_after > 30, "the steps since the last save"
    assert desired.failures.replacements.losses == (LossCount("excluded by hand", 1),)
    deleted = [name for kind, name in cloud.gce.events(".*") if kind == "delete"]
    assert deleted[0] == drained, deleted


@pytest.mark.slow
def test_a_drained_vm_saves_and_is_replaced_while_its_output_is_followed(
    cloud: Cloud, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    launcher = cloud.up(held_config(cloud, gate := tmp_path / "gate"))
    wait_held(cloud)
    drained, kept = cloud.member(0), cloud.member(1)
    follower = cloud.launch(str(cloud.run), "--follow", verb="logs")
    left = cloud.launch(str(cloud.run), "--follow", "--vm", kept, verb="logs")
    cloud.wait(lambda: f"attempt 1 on {kept} ---" in left.printed(), of="output")
    left.kill(signal.SIGINT)
    assert left.wait_exit() == 128 + signal.SIGINT, left.printed()
    assert "no longer followed; the job continues" in left.printed()
    drain = cloud.launch(str(cloud.run), "--vm", drained, "--reason", "noise", verb="drain")
    wait_save(cloud)
    status = cloud.launch(str(cloud.run), verb="status")
    assert status.wait_exit() == 0
    assert f"{drained}: is drained (noise)" in status.printed()
    gate.touch()
    assert drain.wait_exit() == 0, cloud.describe()
    assert launcher.wait_exit() == 0, cloud.describe()
    assert f"{drained}: is drained; attempt 2 runs" in drain.printed()
    printed = launcher.printed()
    assert printed.count("estimate: 2 devices on 2 hosts") == 1, "`up` does not print the estimate"
    assert f"{drained}: is drained (noise); the attempt saves and ends" in printed
    assert f", {kept}\n" in printed.partition("attempt 2 on ")[2], "the other VM was not kept"
    assert re.search(r"step [0-9]+/60, loss [0-9.]+, .*tok/s.*, spent \$[0-9.]+\n", printed)
    assert_drained(cloud, drained)
    assert follower.wait_exit() == ExitCode.DONE, follower.printed()
    first, _, second = follower.printed().partition(f", which replaces {drained} ---\n")
    assert f"--- attempt 1 on {drained} ---\n" in first
    assert SAVING in first, "the end of the first output"
    assert "resuming from step" in second
    assert second.endswith("the last step, 60, is committed; no VM is left (exit 0 DONE)\n")
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_a_drain_without_a_launcher_leads_the_job_until_the_next_attempt_runs(
    cloud: Cloud, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    config = held_config(cloud, gate := tmp_path / "gate")
    launcher = cloud.up(config)
    wait_held(cloud)
    drained = cloud.member(1)
    launcher.kill(signal.SIGINT)
    assert launcher.wait_exit() == 128 + signal.SIGINT
    drain = cloud.launch(str(cloud.run), "--vm", drained, verb="drain")
    wait_save(cloud)
    gate.touch()
    assert drain.wait_exit() == 0, cloud.describe()
    assert "no launcher holds the lease of this run; this one takes it" in drain.printed()
    assert "`... up` leads it to its end" in drain.printed()
    assert cloud.up(config).wait_exit() == 0, cloud.describe()
    assert_drained(cloud, drained)
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()
