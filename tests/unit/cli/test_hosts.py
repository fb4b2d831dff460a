"""Tests of `jaxres hosts`, and of the hosts that `jaxres status` shows as left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxres.cli import checkpoints as checkpoints_cli
from jaxres.exit_codes import ExitCode
from jaxres.runlog.run_log import AttemptEnded, HostFault
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
