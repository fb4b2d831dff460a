"""A run that is started again after its folder was deleted uses new VMs with the new code."""

from __future__ import annotations

import os
import signal

import pytest

from jaxres.storage import gcs_objects
from tests.promises.cloud import Cloud
from tests.promises.trainer import run_history


@pytest.mark.slow
def test_vms_of_a_deleted_run_are_not_adopted(cloud: Cloud) -> None:
    first = cloud.up(cloud.config(env={"PACE": "0.02"}))
    cloud.wait_commit(1)
    first.kill()
    first.process.wait()
    old = cloud.member(0)
    for pid in cloud.gce.pids(old):  # Else it writes into the folder while that is deleted.
        os.kill(pid, signal.SIGSTOP)
    gcs_objects.delete_tree(cloud.run)
    status = cloud.launch(str(cloud.config()), verb="status")
    assert status.wait_exit() == 0, status.printed()
    assert f"{old}: RUNNING in us-central1-a (run id " in status.printed()
    (cloud.root / "package" / "added.py").write_text("ADDED = True\n")
    again = cloud.up(cloud.config(), "train.steps=10")
    assert again.wait_exit() == 0, cloud.describe()
    assert "left by an earlier run here; deleting" in again.printed()
    before, after = cloud.gce.vms_so_far()
    assert (before.name, after.name == old) == (old, False)
    assert len({vm.labels["jaxres-id"] for vm in (before, after)}) == 2
    assert len({vm.labels["jaxres-code"] for vm in (before, after)}) == 2
    assert run_history(cloud.run_dir).step == 10
    cloud.assert_nothing_is_left()
