"""An outage of the control plane and the bucket, or denied access, does not affect running VMs."""

from __future__ import annotations

import pytest

from jaxres.runlog.paths import RunDir
from tests.promises.cloud import Cloud
from tests.promises.trainer import assert_bit_exact, run_history


@pytest.mark.campaign
@pytest.mark.parametrize(("seconds", "pace"), [(10.0, "0.02"), (120.0, "0.08")])
def test_a_control_plane_and_bucket_outage_restarts_nothing(
    cloud: Cloud, fault_free_pair: RunDir, seconds: float, pace: str
) -> None:
    launcher = cloud.up(cloud.config(num_hosts=2, env={"PACE": pace, "HELD": "20"}))
    cloud.wait_commit(10)
    members = [cloud.member(0), cloud.member(1)]
    silent = cloud.gce.fail("503", times=25)
    away = cloud.gcs.fail("503", times=None, seconds=seconds)
    told = "the Compute API does not answer; training continues"
    cloud.wait(
        lambda: launcher.has_exited or (away.hits > 5 and told in launcher.printed()), of="outages"
    )
    cloud.go_on()
    assert launcher.wait_exit() == 0, cloud.describe()
    assert silent.times == 0, "the control plane has failed too few times"
    assert away.hits > 5
    printed = launcher.printed()
    assert told in printed
    assert "the Compute API answers again" in printed
    desired = cloud.desired_state()
    assert desired is not None
    assert [(p.attempt, p.code) for p in desired.history] == [(1, 0)], cloud.describe()
    assert run_history(cloud.run_dir).attempt == 1
    assert sorted(name for _, name in cloud.gce.events("insert")) == sorted(members)
    assert cloud.gce.calls().calls["instances.bulkInsert"] == 1
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()


@pytest.mark.slow
def test_access_to_the_control_plane_and_the_bucket_denied_for_a_while_ends_nothing(
    cloud: Cloud, fault_free: RunDir
) -> None:
    """Neither the launcher, the agent, the supervisor nor the worker."""
    launcher = cloud.up(cloud.config(env={"PACE": "0.02", "HELD": "20"}))
    cloud.wait_commit(10)
    bucket = cloud.gcs.fail("403", times=None)
    denied = "the bucket does not answer"
    cloud.wait(
        lambda: launcher.has_exited or (bucket.hits > 5 and denied in launcher.printed()),
        of="denials",
    )
    control_plane = cloud.gce.fail("403", times=5)  # While the bucket denies, none is asked.
    cloud.gcs.faults.clear()
    cloud.go_on()
    assert launcher.wait_exit() == 0, cloud.describe()
    assert control_plane.times == 0, "the control plane has denied nothing"
    printed = launcher.printed()
    assert "the bucket answers again" in printed
    assert "the Compute API answers again" in printed
    assert run_history(cloud.run_dir).attempt == 1
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()
