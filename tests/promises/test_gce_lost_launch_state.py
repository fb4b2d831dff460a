"""A run that is started again after its folder was deleted uses new VMs with the new code."""

from __future__ import annotations

import os
import signal

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.storage import gcs_objects
from tests.promises.cloud import Cloud


@pytest.mark.campaign
def test_vms_of_a_deleted_run_are_not_adopted(cloud: Cloud) -> None:
    first = cloud.up(cloud.config())
    cloud.wait(cloud.reports, of="report of an agent")
    first.kill()
    first.process.wait()
    (old,) = cloud.gce.vms()
    for pid in cloud.gce.pids(old):  # Else it writes into the folder while that is deleted.
        os.kill(pid, signal.SIGSTOP)
    gcs_objects.delete_tree(cloud.run)
    status = cloud.launch(str(cloud.config()), verb="status")
    assert status.wait_exit() == 0, status.printed()
    assert f"{old}: RUNNING in us-central1-a (run id " in status.printed()
    (cloud.root / "package" / "added.py").write_text("ADDED = True\n")
    again = cloud.up(cloud.config())
    cloud.wait(lambda: len(cloud.gce.vms_so_far()) == 2, of="new VM")
    assert f"{old}: RUNNING in us-central1-a" in again.printed()
    assert "left by an earlier run here; deleting" in again.printed()
    assert old not in cloud.gce.vms(), "the old one was not deleted first"
    before, after = cloud.gce.vms_so_far()
    assert before.name == old != after.name
    assert before.labels["jaxres-run"] == after.labels["jaxres-run"]
    assert before.labels["jaxres-id"] != after.labels["jaxres-id"]
    assert before.labels["jaxres-code"] != after.labels["jaxres-code"]
    assert cloud.launch(str(cloud.config()), verb="down").wait_exit() == 0, cloud.describe()
    assert again.wait_exit() == ExitCode.STOPPED, cloud.describe()
    cloud.assert_nothing_is_left()
