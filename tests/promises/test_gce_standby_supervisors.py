"""A restart on the same VM takes the supervisor and the fork server that have waited for it."""

from __future__ import annotations

import os
import signal

import pytest

from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from tests.promises.cloud import Cloud
from tests.promises.interrupted_job import wait_held, worker
from tests.promises.trainer import assert_bit_exact, run_history

READY = "a supervisor is ready for the next attempt"


def is_forked(cloud: Cloud, attempt: int, host: int = 0) -> bool:
    """Returns whether a worker was forked, from its first event."""
    events = read_events(cloud.run_dir.events(attempt, host))
    (opened,) = (event for event in events if event["event"] == "run_opened")
    return opened["forked"]


@pytest.mark.slow
def test_the_worker_of_the_next_attempt_on_a_vm_is_a_fork(cloud: Cloud, fault_free: RunDir) -> None:
    gate = cloud.root / "gate"
    launcher = cloud.up(cloud.config(env={"FAULT": "row:360:gate", "GATE": str(gate)}))
    wait_held(cloud, attempt=1)
    vm = cloud.member(0)
    cloud.wait(lambda: READY in cloud.gce.output(vm), of="standby")
    os.kill(worker(cloud), signal.SIGKILL)
    cloud.wait(lambda: run_history(cloud.run_dir).attempt == 2, of="next attempt")
    gate.touch()
    assert launcher.wait_exit() == 0, cloud.describe()
    desired = cloud.desired_state()
    assert desired is not None
    assert desired.history[0].code == 128 + signal.SIGKILL, desired.history
    assert f"attempt 2 on {vm}" in launcher.printed(), "it was not the same VM"
    assert not is_forked(cloud, 1)
    assert is_forked(cloud, 2), "the worker has imported everything again"
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()


@pytest.mark.slow
def test_the_workers_of_a_kept_host_and_of_a_spare_are_forks(
    cloud: Cloud, fault_free_pair: RunDir
) -> None:
    gate = cloud.root / "gate"
    config = cloud.config(num_hosts=2, spares=1, env={"FAULT": "row:360:gate", "GATE": str(gate)})
    launcher = cloud.up(config)
    cloud.wait_commit(10)
    cloud.wait(lambda: len(cloud.gce.vms()) == 3, of="spare")
    lost = cloud.member(1)
    (kept, spare) = (vm for vm in cloud.gce.vms() if vm != lost)
    for vm in (kept, spare):
        cloud.wait(lambda vm=vm: READY in cloud.gce.output(vm), of=f"standby on {vm}")
    cloud.gce.preempt(lost, notice=False)
    cloud.wait(lambda: run_history(cloud.run_dir).attempt == 2, of="next attempt")
    gate.touch()
    assert launcher.wait_exit() == 0, cloud.describe()
    assert f"attempt 2 on {kept}, {spare}" in launcher.printed(), "the spare was not used"
    assert [is_forked(cloud, 2, host) for host in (0, 1)] == [True, True]
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()
