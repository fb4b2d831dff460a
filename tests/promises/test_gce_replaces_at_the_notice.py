"""The replacement of a VM is requested at its preemption notice, and the next attempt uses it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import launch_events
from jaxres.runlog.metrics import read_attempt
from jaxres.runlog.paths import RunDir
from tests.promises.cloud import Cloud
from tests.promises.trainer import assert_bit_exact, starts

CREATED = "instances.bulkInsert"
ROWS_OF_A_STEP = 12
"""Rows that each of two hosts reads for a step."""
LONG = 36000.0
"""Seconds of emulated time until the VM is stopped: the test decides how long the save takes."""


@pytest.mark.slow
def test_the_vm_requested_at_the_notice_trains_in_the_next_attempt(
    cloud: Cloud, fault_free_pair: RunDir, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    env = {"FAULT": f"row:{40 * ROWS_OF_A_STEP}:gate", "GATE": str(gate)}
    launcher = cloud.up(cloud.config(num_hosts=2, env=env))
    cloud.wait(
        lambda: any(line.step >= 36 for line in read_attempt(cloud.run_dir, 1)), of="step 36"
    )
    kept, taken = cloud.member(0), cloud.member(1)
    cloud.gce.preempt(taken, notice=True, seconds=LONG)
    # The agent of the VM or the list of the service's operations tells it, whichever is first.
    requested = re.compile(
        f"{taken}: (this VM is being|it was) preempted; requesting its replacement "
    )
    cloud.wait(lambda: requested.search(launcher.printed()), of="request at the notice")
    desired = cloud.desired_state()
    assert desired is not None
    assert (desired.phase, desired.attempt.number) == ("running", 1), "the attempt has ended"
    (early,) = desired.early_vms
    status = cloud.launch(str(cloud.run), verb="status")
    assert status.wait_exit() == 0
    assert f"; replaces {taken}, requested at its notice" in status.printed()
    gate.touch()
    assert launcher.wait_exit() == 0, cloud.describe()
    printed = launcher.printed()
    assert f"attempt 2 on {kept}, {early.name}\n" in printed, "it is not used"
    assert cloud.gce.calls().calls[CREATED] == 2, "another VM was requested"
    desired = cloud.desired_state()
    assert desired is not None
    assert desired.failures.replacements.times <= 1
    assert len(desired.history) == 2, (desired.history, cloud.describe())
    first, last = desired.history
    assert (first.code, last.code) == (ExitCode.PREEMPTED, ExitCode.DONE), desired.history
    assert starts(cloud.run_dir)[1] == first.step_after > 30, "the steps since the last save"
    events = launch_events.read(cloud.run_dir)
    asked = next(e for e in events if e.kind == "vms_requested" and early.name in e.vms)
    ended = next(e for e in events if e.kind == "attempt_ended")
    lost = next(e for e in events if e.kind == "vm_lost")
    assert asked.number < ended.number
    assert (lost.vms, lost.replaced_by) == ((taken,), early.name)
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()
