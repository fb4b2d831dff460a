"""A lost VM is exchanged for a spare, which has waited without training; no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import launch_events
from jaxres.runlog.metrics import read_attempt
from jaxres.runlog.paths import RunDir
from tests.promises.cloud import Cloud
from tests.promises.trainer import assert_bit_exact

ROWS_OF_A_STEP = 12
"""Rows that each of two hosts reads for a step."""


@pytest.mark.slow
def test_a_vm_that_is_lost_without_a_notice_is_exchanged_for_the_spare(
    cloud: Cloud, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    env = {"FAULT": f"row:{40 * ROWS_OF_A_STEP}:gate", "GATE": str(gate)}
    launcher = cloud.up(cloud.config(num_hosts=2, spares=1, env=env))
    cloud.wait(
        lambda: any(line.step >= 36 for line in read_attempt(cloud.run_dir, 1)), of="step 36"
    )

    def spares() -> list[str]:
        desired = cloud.desired_state()
        return [] if desired is None else [vm.name for vm in desired.spares if vm.created]

    cloud.wait(lambda: spares() and spares()[0] in cloud.reports(), of="report of the spare")
    (spare,) = spares()
    report = cloud.reports()[spare]
    assert report is not None
    assert (report.state, report.attempt) == ("ready", 0), "the spare trains"
    kept, taken = cloud.member(0), cloud.member(1)
    status = cloud.launch(str(cloud.run), verb="status")
    assert status.wait_exit() == 0
    assert f"  {spare}: a2-highgpu-1g (spot) in us-central1-a: ready" in status.printed()
    assert "; a spare\n" in status.printed()
    cloud.gce.preempt(taken, notice=False)
    cloud.wait(
        lambda: f"attempt 2 on {kept}, {spare}\n" in launcher.printed(), of="attempt with the spare"
    )
    before, _, _ = launcher.printed().partition("attempt 2 on ")
    assert before.count("requesting") == 2, f"another VM was requested before it:\n{before}"
    gate.touch()
    assert launcher.wait_exit() == 0, cloud.describe()
    assert f"{spare}, a spare, replaces {taken}" in launcher.printed()
    desired = cloud.desired_state()
    assert desired is not None
    assert [outcome.code for outcome in desired.history][-1] == ExitCode.DONE, desired.history
    assert len(desired.history) == 2, desired.history
    lost = next(e for e in launch_events.read(cloud.run_dir) if e.kind == "vm_lost")
    assert (lost.vms, lost.replaced_by) == ((taken,), spare)
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()
