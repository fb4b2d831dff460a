"""A host whose hardware has failed is left out by every later start, until it is repaired."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import faulty_hosts
from jaxres.runlog.run_log import start_of
from jaxres_emulators.nvml import FakeNvml
from tests.promises.cloud import Cloud
from tests.promises.test_sick_gpus_are_left import OFTEN, faults
from tests.promises.test_supervisor_restarts_the_worker import start
from tests.promises.trainer import FAULTY, PACED, Workspace, free_address, run_history
from tests.unit.telemetry.webhook_server import served

FAULT = {"FAULT": "build:1:unhealthy"}
"""Host 1 finds that a device has failed, before the first step."""
SHORT = "train.steps=2"
HOOK = "alerts.targets=[{kind: generic, url_env: HOOK}]"


@pytest.mark.slow
def test_a_slot_with_a_fault_is_left_out_by_every_later_supervisor(workspace: Workspace) -> None:
    first = start(workspace, SHORT, hosts=2, **FAULT)
    assert first.wait_exit() == ExitCode.UNHEALTHY, first.printed()
    (faulty,) = faulty_hosts.read(first.run_dir)
    assert (faulty.name, faulty.count) == (f"{socket.gethostname()}:1", 1)
    assert "a device has failed, requested by the test" in faulty.reason
    command = f"jaxres hosts {first.run_dir.root} --forget {faulty.name}"
    with served() as hook:
        for _ in range(2):
            start(workspace, SHORT, HOOK, hosts=2, HOOK=hook.url).assert_fails(
                ExitCode.UNHEALTHY, "too few hosts are left (at least 2)", str(faulty), command
            )
    refusals = [(body["kind"], body["attempt"], body["code"]) for body in hook.accepted]
    assert refusals == [("gave_up", 1, ExitCode.UNHEALTHY)], "not alerted, or not once"
    assert str(faulty) in hook.accepted[0]["reason"]
    assert run_history(first.run_dir).attempt == 1, "a start that is refused claims no attempt"
    second = start(workspace, SHORT, hosts="1..2")
    second.wait(lambda: run_history(first.run_dir).attempt == 2, what="an attempt without it")
    slots = [claim.slots for claim in run_history(first.run_dir).claims]
    assert slots == [(0, 1), (0,)], "the faulty host was used again"
    second.wait_printed(f"slot 1 is left out: {faulty}")


@pytest.mark.slow
def test_a_machine_with_a_fault_is_refused_in_any_role_until_it_is_forgotten(
    workspace: Workspace,
) -> None:
    at, node_a, node_b = free_address(), {"JAXRES_HOST_NAME": "a"}, {"JAXRES_HOST_NAME": "b"}
    lead, sick = (
        workspace.start_host(
            "run", SHORT, host=host, hosts=2, at=at, config=FAULTY, env=env | FAULT
        )
        for host, env in enumerate([node_a, node_b])
    )
    assert sick.wait_exit() == ExitCode.UNHEALTHY, sick.printed()
    assert lead.wait_exit() == ExitCode.PEER_LOST, lead.printed()
    (faulty,) = faulty_hosts.read(lead.run_dir)
    assert (faulty.name, faulty.slot, faulty.count) == ("b", None, 1), "recorded by the leader"
    roles = [
        workspace.start("run", SHORT, config=FAULTY, env=node_b),
        workspace.start_host("run", host=1, hosts=2, at=at, config=FAULTY, env=node_b),
    ]
    for refused in roles:
        refused.assert_fails(ExitCode.UNHEALTHY, "this host is not used", str(faulty), "--forget b")
    hosts = workspace.command(lead.run_dir, ["hosts", str(lead.run_dir.root)], verb=("jaxres",))
    assert hosts.wait_exit() == 0
    assert faulty.reason in hosts.printed()
    workspace.repaired("run", host="b")
    workspace.finish("run", SHORT, config=FAULTY, env=node_b)


@pytest.mark.slow
def test_a_fault_is_remembered_although_the_leader_is_killed_before_it_records_it(
    workspace: Workspace, tmp_path: Path
) -> None:
    gpus, at = FakeNvml(tmp_path / "nvml"), free_address()
    node_b = {"JAXRES_HOST_NAME": "b"}
    lead, sick = (
        workspace.start_host(
            "run", OFTEN, host=host, hosts=2, at=at, config=FAULTY, env=PACED | env
        )
        for host, env in enumerate([{}, gpus.env | node_b])
    )
    sick.attempt = lead.attempt
    lead.wait_step(3)
    lead.kill(signal.SIGSTOP, target="supervisor")
    gpus.set("lost 15")
    sick.wait(lambda: bool(faults(sick, host=1)), what="a fault")
    lead.kill()
    assert sick.wait_exit() == ExitCode.UNHEALTHY, sick.printed()
    assert lead.end_record() is None, "the leader has recorded it"
    (faulty,) = faulty_hosts.read(lead.run_dir)
    assert (faulty.name, faulty.slot, faulty.count, faulty.attempt) == ("b", None, 1, 1)
    assert "the driver has lost it" in faulty.reason
    gpus.set()
    refused = workspace.start_host("run", host=1, hosts=2, at=at, config=FAULTY, env=node_b)
    refused.assert_fails(ExitCode.UNHEALTHY, "this host is not used", str(faulty), "--forget b")
    workspace.repaired("run", host="b")
    assert faulty_hosts.read(lead.run_dir) == ()


@pytest.mark.slow
def test_no_attempt_runs_on_the_physical_host_of_a_faulty_vm_under_any_later_launcher(
    cloud: Cloud, tmp_path: Path
) -> None:
    bad = "/block/sub/bad"
    cloud.gce.place(bad, bad, "/block/sub/good")
    fault = {"FAULT": "build:1:unhealthy_place", "GATE": str(gate := tmp_path / "gate")}
    config = cloud.config(env=fault | {"BAD_HOST": bad})
    first = cloud.up(config, SHORT)
    cloud.wait(lambda: run_history(cloud.run_dir).claims, of="attempt")
    first.kill()  # Before it could replace the VM.
    gate.touch()
    cloud.wait(lambda: faulty_hosts.read(cloud.run_dir), of="fault")
    (faulty,) = faulty_hosts.read(cloud.run_dir)
    (vm,) = (vm for vm in cloud.gce.vms() if vm == faulty.identity.name)
    assert (faulty.identity.physical_host, faulty.slot) == (bad, None)
    second = cloud.up(config, SHORT)
    assert second.wait_exit() == 0, cloud.describe()
    refused = f"its hardware (physical host {bad}) has failed before, as {faulty.name} (failed once"
    assert refused in second.printed(), "the VM at the same place was used"
    desired = cloud.desired_state()
    assert desired is not None
    ends = [(outcome.code, outcome.culprit) for outcome in desired.history]
    assert ends == [(ExitCode.UNHEALTHY, vm), (ExitCode.DONE, None)]
    assert len(faulty_hosts.read(cloud.run_dir)) == 1
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_vm_that_comes_up_with_fewer_devices_is_replaced_also_if_it_is_the_only_one(
    cloud: Cloud, num_hosts: int
) -> None:
    good, bad = [f"/block/sub/good{host}" for host in range(num_hosts)], "/block/sub/bad"
    cloud.gce.place(*good[1:], bad, good[0])
    devices = {"JAX_NUM_CPU_DEVICES": "2", "JAXRES_MIN_DEVICES": "2"}
    env = devices | {"FAULT": "build:1:fewer_at_place", "BAD_HOST": bad}
    launcher = cloud.up(cloud.config(num_hosts=num_hosts, env=env), SHORT)
    assert launcher.wait_exit() == 0, cloud.describe()
    (faulty,) = faulty_hosts.read(cloud.run_dir)
    assert "2 devices expected, 1 found (JAXRES_MIN_DEVICES)" in faulty.reason
    assert faulty.identity.physical_host == bad
    desired = cloud.desired_state()
    assert desired is not None
    ends = [(outcome.code, outcome.culprit) for outcome in desired.history]
    assert ends == [(ExitCode.UNHEALTHY, faulty.name), (ExitCode.DONE, None)]
    trained = [start_of(start).devices for start in run_history(cloud.run_dir).starts]
    assert trained == [(2,) * num_hosts], "an attempt has trained with fewer devices"
    cloud.assert_nothing_is_left()
