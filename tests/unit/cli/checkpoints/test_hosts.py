"""Tests of `jaxres hosts`, and of the hosts that `jaxres status` shows as left out."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.cli.checkpoints import hosts as hosts_cli
from jaxres.exit_codes import ExitCode
from jaxres.faults import UnhealthyHost, UsageError
from jaxres.runlog import faulty_hosts, run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, HostFault
from jaxres.storage import files
from jaxres.supervisor import host_exclusion
from tests.unit.cli.test_status import FakeClock, claimed

END = AttemptEnded(exit=ExitCode.UNHEALTHY, reason="Xid 79", committed=False)


def test_a_faulty_host_is_listed_with_its_evidence_until_it_is_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, log = claimed(tmp_path, FakeClock())
    log.append(HostFault(host="vm-7", reason="GPU 3: Xid 79", physical_host="/a/b/c"))
    log.append(END)

    def run(*arguments: str, code: int = 0) -> str:
        verb, *rest = arguments
        assert checkpoints_cli.main([verb, str(tmp_path), *rest], usage="") == code
        return "".join(capsys.readouterr())

    def status(*arguments: str) -> str:
        return run("status", *arguments, code=3)

    listed = run("hosts")
    assert "vm-7" in listed
    assert "1970-01-12 13:46:40" in listed
    assert listed.endswith("GPU 3: Xid 79 (on /a/b/c)\n")
    fields = json.loads(run("hosts", "--json"))
    assert (fields["name"], fields["count"], fields["physical_host"]) == ("vm-7", 1, "/a/b/c")
    assert "left out   vm-7 (failed once since 1970-01-12 13:46 UTC; in attempt 1" in status()
    assert json.loads(status("--json"))["left_out"] == ["vm-7"]
    assert "(left out: vm-7)" in run("hosts", "--forget", "vm-8", code=ExitCode.USAGE)
    assert "vm-7 is used again" in run("hosts", "--forget", "vm-7")
    assert run("hosts") == "no host is left out\n"
    assert "left out" not in status()


def command(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert checkpoints_cli.main(["hosts", *arguments], usage="") == code
    return "".join(capsys.readouterr())


def test_a_host_that_is_excluded_by_hand_is_not_used_until_it_is_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = claimed(tmp_path, FakeClock())
    here, run = socket.gethostname(), str(tmp_path)

    def refused(name: str) -> str:
        try:
            host_exclusion.on_this_machine(
                run_dir, run_log.read_records(run_dir.log), env={"JAXRES_HOST_NAME": name}
            )
        except UnhealthyHost as error:
            return str(error)
        return ""

    assert "is left out from the next start on" in command(
        capsys, run, "--exclude", here, "--reason", "slow since Monday"
    )
    assert "it is excluded from this run" in refused(here)
    assert f"--forget {here}" in refused(here)
    assert not refused("another")
    (row,) = [json.loads(line) for line in command(capsys, run, "--json").splitlines()]
    assert (row["name"], row["count"], row["is_excluded"]) == (here, 0, True)
    assert "excluded by hand: slow since Monday" in command(capsys, run)
    for twice in (["--exclude", here], ["--reason", "x"], ["--exclude", "a b"]):
        command(capsys, run, *twice, code=ExitCode.USAGE)
    command(capsys, run, "--forget", here)
    assert not refused(here)
    command(capsys, run, "--exclude", here)
    assert refused(here), "an exclusion after it counts again"


def test_a_slot_is_excluded_beside_a_fault_and_a_damaged_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, log = claimed(tmp_path, FakeClock())
    log.append(HostFault(host="vm-7", reason="Xid 79", slot=0))
    command(capsys, str(tmp_path), "--exclude", "vm-7:1")
    files.create(run_dir.excluded_hosts / "damaged", b"{}")
    hosts = faulty_hosts.read(run_dir, warn=list[str]().append)
    found = [(host.name, host.slot, host.is_excluded) for host in hosts]
    assert found == [("vm-7:0", 0, False), ("vm-7:1", 1, True)]
    warning = f"WARNING: {run_dir.excluded_hosts / 'damaged'}: can't be understood"
    assert warning in command(capsys, str(tmp_path))
    checkpoints_cli.main(["status", str(tmp_path)], usage="")
    assert warning in capsys.readouterr().err
    host_exclusion.on_this_machine(run_dir, [], env={})
    assert warning in capsys.readouterr().err, "at a start"


@pytest.mark.parametrize("name", ["", ":1", "a:b", "a:", "a b", "a\n", "x" * 300])
def test_what_is_no_name_of_a_host_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not HOST"):
        hosts_cli.parse_name(name)


def straggler(kind: str, host: int, *devices: int, step: int = 9) -> dict[str, Any]:
    times = {"time": 1.0, "monotonic": 1.0}
    return {**times, "event": kind, "host": host, "devices": devices, "step": step, "reason": kind}


def test_a_slow_host_is_listed_with_the_command_that_excludes_it_until_it_recovers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = claimed(tmp_path, FakeClock())
    write_events(
        run_dir,
        straggler("straggler_found", 0, 3, 4),
        straggler("straggler_found", 1),
        straggler("straggler_recovered", 1),
        straggler("straggler_recovered", 0, 3),
    )
    text = command(capsys, str(tmp_path))
    assert text.startswith("no host is left out\nslow in attempt 1: step 9: straggler_found\n")
    assert text.count("slow in attempt") == 1
    name = hosts_cli.slow_hosts(run_dir, run_log.fold(run_log.read_records(run_dir.log)))[0].name
    assert f"--exclude {name}\n" in text
    (row,) = [json.loads(line) for line in command(capsys, str(tmp_path), "--json").splitlines()]
    assert (row["number"], row["step"], row["is_left_out"]) == (0, 9, False)
    write_events(run_dir, straggler("straggler_recovered", 0, 4))
    assert command(capsys, str(tmp_path)) == "no host is left out\n"


def write_events(run_dir: RunDir, *events: dict[str, Any]) -> None:
    path = run_dir.events(1, 0)
    assert isinstance(path, Path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
