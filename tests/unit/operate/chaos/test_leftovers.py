"""A port that a process of a run has opened must be closed when the run has ended."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from jaxres.clock import SystemClock
from jaxres.operate.chaos import leftovers
from jaxres.runlog.paths import RunDir


def test_an_open_port_of_an_ended_run_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "GONE_POLLS", 0)
    run_dir = RunDir(tmp_path / "run")
    (tmp_path / "run" / "log").mkdir(parents=True)
    before = leftovers.ports_of([os.getpid()])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        seen = leftovers.ports_of([os.getpid()])
        assert set(seen.values()) - set(before.values()) == {f"port {port}"}
        new = {inode: text for inode, text in seen.items() if inode not in before}
        found = leftovers.find(run_dir, SystemClock(), ports=new)
        assert found == (f"port {port}, still open",)
    assert leftovers.find(run_dir, SystemClock(), ports=new) == ()


def test_a_process_that_is_gone_has_no_ports() -> None:
    assert leftovers.ports_of([2**22 + 1]) == {}
