"""A maintenance far ahead and an agent that is silent for a while cost no VM; replacements end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce import command as gce
from jaxres.runlog.paths import RunDir
from tests.promises.cloud import Cloud
from tests.promises.trainer import assert_bit_exact

HELD_STEP = 25
"""The training waits in this step of an attempt, after the commit of step 10."""
SIXTY_DAYS = 60 * 86400.0
SUPERVISOR, AGENT = b"-m\0jaxres.launch.gce.vm.standby\0", b"-m\0jaxres.launch\0agent\0"


def held(cloud: Cloud, *, hosts: int) -> dict[str, str]:
    """Returns an environment in which the training waits in HELD_STEP for `open_gate`."""
    return {"FAULT": f"row:{HELD_STEP * 24 // hosts}:gate", "GATE": str(cloud.root / "gate")}


def open_gate(cloud: Cloud) -> None:
    (cloud.root / "gate").touch()


def signal_process(cloud: Cloud, vm: str, command: bytes, number: signal.Signals) -> None:
    """Sends a signal to the only process of a VM whose command line has `command`."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in cloud.gce.pids(vm)}
    (found,) = (pid for pid, line in lines.items() if command in line)
    os.kill(found, number)


@pytest.mark.campaign
def test_a_maintenance_in_sixty_days_costs_no_vm(cloud: Cloud, fault_free_pair: RunDir) -> None:
    """Not while VMs boot one after another, and not after a crash of a training process."""
    launcher = cloud.up(cloud.config(num_hosts=2, env=held(cloud, hosts=2)))
    cloud.wait(lambda: [*cloud.gce.vms().values()] == ["RUNNING"] * 2, of="VMs")
    first, second = sorted(cloud.gce.vms())
    for name in (first, second):
        cloud.gce.announce_maintenance(name, seconds=SIXTY_DAYS)
    cloud.wait_commit(10)
    text = "scheduled maintenance of this VM's host begins at"

    def noticed() -> list[str]:
        return [name for name, r in cloud.reports().items() if r and text in r.notice]

    cloud.wait(lambda: len(noticed()) == 2, of="notices in the reports")
    signal_process(cloud, second, SUPERVISOR, signal.SIGKILL)
    cloud.wait(lambda: "attempt 2 on " in launcher.printed(), of="second attempt")
    cloud.gce.call_off_maintenance(first)
    cloud.wait(lambda: noticed() == [second], of="report without the notice that was called off")
    open_gate(cloud)
    assert launcher.wait_exit() == 0, cloud.describe()
    desired = cloud.desired_state()
    assert desired is not None
    assert [past.code for past in desired.history] == [128 + signal.SIGKILL, 0], cloud.describe()
    assert sorted(name for _, name in cloud.gce.events("insert")) == [first, second]
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_an_agent_that_is_stopped_for_a_while_costs_no_vm(
    cloud: Cloud, fault_free: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = cloud.up(
        cloud.config(env=held(cloud, hosts=1), lost_seconds=4.0, confirm_lost_seconds=600.0)
    )
    cloud.wait_commit(10)
    name = cloud.member(0)
    signal_process(cloud, name, AGENT, signal.SIGSTOP)
    suspected = f"{name}: its agent has been silent for "
    cloud.wait(lambda: suspected in launcher.printed(), of="suspicion")
    assert gce.main(["status", str(cloud.run)], env=cloud.env) == 0
    assert "may be lost" in capsys.readouterr().out
    assert cloud.gce.vms() == {name: "RUNNING"}
    signal_process(cloud, name, AGENT, signal.SIGCONT)
    cloud.wait(lambda: f"{name}: its agent reports again" in launcher.printed(), of="report")
    open_gate(cloud)
    assert launcher.wait_exit() == 0, cloud.describe()
    desired = cloud.desired_state()
    assert desired is not None
    assert [(past.attempt, past.code) for past in desired.history] == [(1, 0)], cloud.describe()
    assert [one for _, one in cloud.gce.events("insert")] == [name]
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()


@pytest.mark.slow
def test_replacements_without_a_commit_end_the_job_with_what_was_spent(cloud: Cloud) -> None:
    cloud.gce.lose_next_in_creation(times=1000)
    launcher = cloud.up(cloud.config(max_replacements_without_commit=1))
    assert launcher.wait_exit() == ExitCode.NO_PROGRESS, cloud.describe()
    printed = launcher.printed()
    assert "launch.gce.max_replacements_without_commit=1" in printed
    assert "2 VMs were deleted (2 preempted in their creation); they existed for 0." in printed
    assert printed.count("requesting 1 x") == 2
    cloud.assert_nothing_is_left()
