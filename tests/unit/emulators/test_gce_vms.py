"""An emulated VM is a process tree with a metadata server of its own, and dies as one.

Real GCE can't be reached by tests: what the launcher does is proved against this emulator, and
these tests hold the emulator to what is known of GCE, with Google's own client.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.api_core import exceptions
from google.auth.exceptions import InvalidOperation
from google.cloud import compute_v1 as compute

from jaxres.supervisor.preemption import gce_metadata
from jaxres.supervisor.preemption.gce_metadata import Response
from jaxres_emulators.gce import GceEmulator
from jaxres_emulators.gce.vms import keeper
from jaxres_emulators.metadata import EVENT, PREEMPTED, UPCOMING
from tests.unit.emulators.gce_requests import PROJECT, ZONE, Clients, spot
from tests.waiting import SURE_SECONDS, wait_until

SPEED = 60.0
STANDS_STILL = 0.001
"""A speed at which only `skip` makes come what is scheduled."""
NOTICE = spot(preemption_notice_duration=compute.Duration(seconds=120))
DAEMON = "setsid nohup sleep 1000 >/dev/null 2>&1 &\n"
SAYS_TERM = "trap 'echo asked to end; exit' TERM; echo ready; while true; do sleep 0.02; done\n"
IGNORES_TERM = f"trap '' TERM\n{DAEMON}echo ready; while true; do sleep 0.02; done\n"
CURL = "curl -sf -H 'Metadata-Flavor: Google' http://$GCE_METADATA_HOST/computeMetadata/v1"


@pytest.fixture
def gce() -> Iterator[GceEmulator]:
    with GceEmulator(speed=SPEED, env={"PASSED_THROUGH": "yes"}) as gce:
        yield gce
    assert gce.bugs == []
    assert gce.pids() == []
    assert not gce.root.exists()


def asked(gce: GceEmulator, name: str, key: str, **words: str) -> Response:
    guest = gce.vm(name).guest
    assert guest is not None
    server = gce_metadata.detect(guest.metadata.env, product="")
    assert server is not None
    reported = gce_metadata.get(server, key, **words)
    assert isinstance(reported, Response), reported
    return reported


def test_a_vm_has_metadata_a_home_an_address_and_an_environment(
    gce: GceEmulator, clients: Clients
) -> None:
    script = f"{CURL}/instance/name; echo; echo $PASSED_THROUGH $HOME; pwd\n"
    operation = clients.insert("one", script=script, items={"role": "worker"})
    assert clients.wait(operation).status == compute.Operation.Status.DONE
    vm = clients.get("one")
    assert vm.status == "RUNNING"
    assert str(vm.id) == asked(gce, "one", "instance/id").text
    assert vm.network_interfaces[0].network_i_p.startswith("127.")
    assert (
        vm.network_interfaces[0].network_i_p
        == asked(gce, "one", "instance/network-interfaces/0/ip").text
    )
    assert asked(gce, "one", "instance/attributes/role").text == "worker"
    assert asked(gce, "one", "instance/attributes/").text == "role\nstartup-script"
    assert asked(gce, "one", "instance/zone").text.endswith(f"/zones/{ZONE}")
    assert asked(gce, "one", "instance/hostname").text == f"one.{ZONE}.c.{PROJECT}.internal"
    assert asked(gce, "one", "instance/scheduling/preemptible").text == "TRUE"
    found = json.loads(asked(gce, "one", "instance/?recursive=true").text)
    assert found["attributes"]["role"] == "worker"
    assert found["networkInterfaces"][0]["ip"] == vm.network_interfaces[0].network_i_p
    gce.wait_for(lambda: gce.pids("one") == [])
    home = f"{gce.vm('one').folder}/home"
    assert gce.output("one").splitlines() == ["one", f"yes {home}", home]
    reported = clients.instances.get_serial_port_output(project=PROJECT, zone=ZONE, instance="one")
    assert reported.contents == gce.output("one")


def test_vms_connect_to_each_other_at_their_own_addresses(
    gce: GceEmulator, clients: Clients
) -> None:
    listener = (
        "import socket, os, urllib.request as u\n"
        "at = 'http://' + os.environ['GCE_METADATA_HOST'] + '/computeMetadata/v1/instance/'\n"
        "ask = lambda key: u.urlopen(u.Request(at + key, headers={'Metadata-Flavor': 'Google'}))\n"
        "ip = ask('network-interfaces/0/ip').read().decode()\n"
        "server = socket.create_server((ip, 47077))\n"
        "print('listens', flush=True)\n"
        "print('met', server.accept()[0].recv(99).decode(), flush=True)\n"
    )
    clients.wait(clients.bulk("left", "right", script=f"#!{sys.executable}\n{listener}"))
    for name in ("left", "right"):  # The same port on both.
        gce.wait_for(lambda name=name: "listens" in gce.output(name))
    script = f"exec 3<>/dev/tcp/{gce.vm('left').ip}/47077; echo -n third >&3\n"
    clients.wait(clients.insert("third", script=script))
    gce.wait_for(lambda: "met third" in gce.output("left"))
    assert len({gce.vm(name).ip for name in ("left", "right", "third")}) == 3


def test_a_preemption_with_notice_sends_sigterm_and_then_deletes_the_vm(
    gce: GceEmulator, clients: Clients
) -> None:
    clients.wait(clients.insert("one", script=DAEMON + SAYS_TERM, scheduling=NOTICE))
    gce.wait_for(lambda: gce.output("one") == "ready\n")
    seen = asked(gce, "one", PREEMPTED)
    assert seen.text == "FALSE"
    gce.scheduler.speed = STANDS_STILL
    gce.preempt("one")
    assert asked(gce, "one", PREEMPTED, after=str(seen.etag)).text == "TRUE"
    gce.scheduler.skip(119)
    assert clients.get("one").status == "RUNNING"
    assert "asked to end" not in gce.output("one")
    gce.scheduler.skip(1)
    gce.wait_for(lambda: "asked to end" in gce.output("one"))
    gce.scheduler.speed = SPEED
    gce.scheduler.skip(30 * SPEED / STANDS_STILL)
    gce.wait_for(lambda: gce.vms() == {})
    asked_for = compute.ListZoneOperationsRequest(
        project=PROJECT, zone=ZONE, filter='operationType="compute.instances.preempted"'
    )
    (event,) = clients.operations.list(asked_for)
    assert event.target_link.endswith("/instances/one")
    assert event.user == "system"
    with pytest.raises(exceptions.NotFound):
        clients.get("one")


def test_a_process_that_ignores_sigterm_is_killed_after_thirty_seconds(
    gce: GceEmulator, clients: Clients
) -> None:
    stops = spot(instance_termination_action="STOP")
    clients.wait(clients.insert("one", script=IGNORES_TERM, scheduling=stops))
    gce.wait_for(lambda: gce.output("one") == "ready\n")
    begun = time.monotonic()
    gce.preempt("one")
    gce.wait_for(lambda: gce.vms() == {"one": "TERMINATED"})
    assert time.monotonic() - begun >= 30 / SPEED
    assert gce.pids() == []
    # It is off, but it is there, and so is its name.
    with pytest.raises(exceptions.Conflict):
        clients.insert("one")
    first = clients.get("one").id
    clients.wait(clients.instances.start_unary(project=PROJECT, zone=ZONE, instance="one"))
    gce.wait_for(lambda: len(gce.pids("one")) >= 2)
    assert clients.get("one").id == first


def test_a_preemption_without_notice_kills_at_once(gce: GceEmulator, clients: Clients) -> None:
    clients.wait(clients.insert("one", script=DAEMON + SAYS_TERM))
    gce.wait_for(lambda: gce.output("one") == "ready\n")
    gce.preempt("one", notice=False)
    assert gce.vms() == {}
    assert gce.pids() == []
    assert gce.output("one") == "ready\n"
    assert gce.events() == [("compute.instances.preempted", "one")]


def test_a_vm_may_be_listed_as_running_long_after_a_host_error(
    gce: GceEmulator, clients: Clients
) -> None:
    clients.wait(clients.bulk("one", "two", "three", script=DAEMON))
    gce.wait_for(lambda: len(gce.pids()) == 3)
    gce.host_error("one", shows_running_seconds=60)
    gce.die_silently("two")
    gce.host_error("three", shows_running_seconds=36000)
    assert gce.pids() == []
    gce.wait_for(lambda: gce.vms()["one"] == "TERMINATED")
    assert gce.vms() == {"one": "TERMINATED", "two": "RUNNING", "three": "RUNNING"}
    assert gce.events() == [("compute.instances.hostError", "one")]


def test_a_vm_with_automatic_restart_is_restarted_after_a_host_error(
    gce: GceEmulator, clients: Clients
) -> None:
    on_demand = compute.Scheduling(provisioning_model="STANDARD", on_host_maintenance="TERMINATE")
    clients.wait(clients.insert("one", script="echo boot\n", scheduling=on_demand))
    gce.wait_for(lambda: gce.output("one") == "boot\n")
    gce.host_error("one")
    gce.wait_for(lambda: gce.output("one") == "boot\nboot\n")
    assert clients.get("one").status == "RUNNING"


def test_a_vm_is_deleted_at_the_end_of_its_maximum_run_duration(
    gce: GceEmulator, clients: Clients
) -> None:
    ends = spot(max_run_duration=compute.Duration(seconds=36000))
    clients.wait(clients.insert("one", script=f"{DAEMON}echo up\n", scheduling=ends))
    gce.wait_for(lambda: gce.output("one") == "up\n")
    gce.scheduler.skip(36000)
    gce.wait_for(lambda: gce.vms() == {})
    assert gce.output("one") == "up\n"
    assert gce.pids() == []


def test_a_metadata_change_wakes_long_polls_and_guest_attributes_are_readable(
    gce: GceEmulator, clients: Clients
) -> None:
    allowed = {"enable-guest-attributes": "TRUE"}
    put = f"{CURL}/instance/guest-attributes/jaxres/ready -X PUT -d yes\n"
    clients.wait(clients.insert("one", script=put, items=allowed))
    gce.wait_for(lambda: gce.pids("one") == [])
    request = compute.GetGuestAttributesInstanceRequest(
        project=PROJECT, zone=ZONE, instance="one", query_path="jaxres/"
    )
    (item,) = clients.instances.get_guest_attributes(request).query_value.items
    assert (item.namespace, item.key, item.value) == ("jaxres", "ready", "yes")
    seen = asked(gce, "one", "instance/attributes/enable-guest-attributes")
    changed = compute.Metadata(
        fingerprint=clients.get("one").metadata.fingerprint,
        items=[compute.Items(key="enable-guest-attributes", value="FALSE")],
    )
    words = {"project": PROJECT, "zone": ZONE, "instance": "one"}
    clients.instances.set_metadata_unary(**words, metadata_resource=changed)
    key = "instance/attributes/enable-guest-attributes"
    assert asked(gce, "one", key, after=str(seen.etag)).text == "FALSE"
    with pytest.raises(exceptions.PreconditionFailed):
        clients.instances.set_metadata_unary(**words, metadata_resource=changed)


@pytest.mark.slow
def test_a_process_of_a_vm_with_a_service_account_has_googles_credentials(
    gce: GceEmulator, clients: Clients
) -> None:
    deletes_itself = (
        f"#!{sys.executable}\n"
        "import google.auth, google.auth.transport.requests as t, os, urllib.request as u\n"
        "credentials, project = google.auth.default()\n"
        "credentials.refresh(t.Request())\n"
        f"url = '{gce.url}/compute/v1/projects/' + project + '/zones/{ZONE}/instances/one'\n"
        "head = {'Authorization': 'Bearer ' + credentials.token}\n"
        "u.urlopen(u.Request(url, method='DELETE', headers=head))\n"
    )
    gce.api.needs_token = True
    with pytest.raises(InvalidOperation, match="Anonymous"):  # What Google's client makes of 401.
        clients.insert("one")
    gce.api.needs_token = False
    account = compute.ServiceAccount(
        email="worker@emulated.iam.gserviceaccount.com",
        scopes=["https://www.googleapis.com/auth/cloud-platform"],
    )
    clients.wait(clients.insert("one", script=deletes_itself, service_accounts=[account]))
    gce.wait_for(lambda: gce.vms() == {})
    (deletion,) = [one for one in gce.operations.all.values() if one.type == "delete"]
    assert deletion.user.endswith("-compute@developer.gserviceaccount.com")


def test_maintenance_is_announced_warned_of_and_carried_out(
    gce: GceEmulator, clients: Clients
) -> None:
    on_demand = compute.Scheduling(
        provisioning_model="STANDARD", on_host_maintenance="TERMINATE", automatic_restart=True
    )
    gce.delays.warning = gce.delays.standard_off = 6.0
    clients.wait(clients.insert("one", script="echo boot\n" + DAEMON, scheduling=on_demand))
    quiet = asked(gce, "one", EVENT)
    assert quiet.text == "NONE"
    gce.scheduler.speed = STANDS_STILL
    gce.announce_maintenance("one", seconds=120)
    assert json.loads(asked(gce, "one", UPCOMING).text)["maintenance_status"] == "PENDING"
    assert clients.get("one").resource_status.upcoming_maintenance.maintenance_status == "PENDING"
    gce.scheduler.skip(115)
    warned = asked(gce, "one", EVENT, after=str(quiet.etag))
    assert warned.text == "TERMINATE_ON_HOST_MAINTENANCE"
    gce.scheduler.speed = SPEED
    gce.scheduler.skip(6 * SPEED / STANDS_STILL)
    gce.wait_for(lambda: gce.output("one") == "boot\nboot\n")
    assert [kind for kind, _ in gce.events()] == [
        "compute.instances.terminateOnHostMaintenance",
        "compute.instances.automaticRestart",
    ]


def test_a_maintenance_that_is_called_off_is_announced_no_more_and_stops_nothing(
    gce: GceEmulator, clients: Clients
) -> None:
    gce.delays.warning = 0.0
    clients.wait(clients.insert("one"))
    gce.scheduler.speed = STANDS_STILL
    gce.announce_maintenance("one", seconds=20)
    pending = asked(gce, "one", UPCOMING)
    gce.call_off_maintenance("one")
    assert "error" in json.loads(asked(gce, "one", UPCOMING, after=str(pending.etag)).text)
    assert not clients.get("one").resource_status.upcoming_maintenance.maintenance_status
    gce.scheduler.skip(20)
    gce.scheduler.speed = SPEED
    gce.announce_maintenance("one", seconds=40)  # It comes after the one that was called off.
    gce.wait_for(lambda: gce.vms() == {})
    assert gce.events() == [("compute.instances.preempted", "one")]


def test_a_simulated_maintenance_preempts_a_spot_vm_but_not_every_machine_type(
    gce: GceEmulator, clients: Clients
) -> None:
    clients.wait(clients.insert("one"))
    words = {"project": PROJECT, "zone": ZONE}
    clients.instances.simulate_maintenance_event_unary(**words, instance="one")
    gce.wait_for(lambda: gce.vms() == {})
    assert gce.events() == [("compute.instances.preempted", "one")]
    clients.wait(clients.insert("two", machine="a3-ultragpu-8g", disk="hyperdisk-balanced"))
    with pytest.raises(exceptions.BadRequest):
        clients.instances.simulate_maintenance_event_unary(**words, instance="two")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_vms_of_a_killed_emulator_die_with_it(number: int) -> None:
    words = [sys.executable, "-m", "jaxres_emulators.gce", "--speed", "60"]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(7)]
        url = lines[0].strip().partition("=")[2]
        folder = Path(lines[2].strip().rpartition(" ")[2])
        with Clients(_RemoteEmulator(url)) as clients:
            clients.wait(clients.insert("one", script="echo $GCE_EMULATOR; " + DAEMON))
            log = clients.instances.get_serial_port_output
            mark = ""
            while not mark.endswith("\n"):
                mark = log(project=PROJECT, zone=ZONE, instance="one").contents
        mark = f"GCE_EMULATOR={mark.strip()}"
        # The daemon, once its script has ended.
        wait_until(lambda: len(keeper.marked(mark)) == 1, lambda: keeper.marked(mark))
        process.send_signal(number)
        process.wait(timeout=SURE_SECONDS)
    wait_until(lambda: not keeper.marked(mark) and not folder.exists(), "end of all processes")


def test_vms_of_an_emulator_with_a_bucket_reach_it() -> None:
    words = [sys.executable, "-m", "jaxres_emulators.gce", "--speed", "60", "--bucket", "mine"]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        printed = itertools.takewhile(lambda line: not line.startswith("#"), lines)
        variables = (line.strip().removeprefix("export ").partition("=") for line in printed)
        env = {name: value for name, _, value in variables}
        url = f"{env['STORAGE_EMULATOR_HOST']}/storage/v1/b/mine/o"
        with urllib.request.urlopen(url, timeout=SURE_SECONDS) as response:
            assert json.load(response)["kind"] == "storage#objects"
        with Clients(_RemoteEmulator(env["JAXRES_GCE_ENDPOINT"])) as clients:
            clients.wait(clients.insert("one", script="echo $STORAGE_EMULATOR_HOST"))
            log = clients.instances.get_serial_port_output
            seen = ""
            while not seen.endswith("\n"):
                seen = log(project=PROJECT, zone=ZONE, instance="one").contents
        assert seen.strip() == env["STORAGE_EMULATOR_HOST"]


class _RemoteEmulator:
    """Where an emulator in another process is."""

    def __init__(self, url: str) -> None:
        self.url = url
