"""Torn lines and what a run leaves behind, as `jaxres chaos` sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxres.operate.chaos import damage, leftovers
from jaxres.storage.path import GcsPath, RunPath


def test_a_line_that_continues_a_torn_one_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert damage.tear_last_line(path) is None
    path.write_bytes(b'{"a": 1}\n')
    end = damage.tear_last_line(path)
    assert end is not None
    assert path.read_bytes() == b'{"a": 1}\n{"a"'
    assert not damage.is_merged(path, end)
    for added, is_merged in ((b'\n{"b": 2}\n', False), (b'{"b": 2}\n', True)):
        path.write_bytes(b'{"a": 1}\n{"a"' + added)
        assert damage.is_merged(path, end) == is_merged


def test_a_bit_of_each_block_is_flipped(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(10))
    assert damage.flip_blocks(path, block_bytes=4) == 3
    assert path.read_bytes() == bytes([1, 0, 0, 0, 1, 0, 0, 0, 1, 0])


@pytest.mark.parametrize("parent", [Path("/no/runs"), GcsPath("bucket", "no-runs")])
def test_a_process_of_the_run_is_found_and_that_of_another_is_not(parent: RunPath) -> None:
    parent /= str(os.getpid())  # Another test on this machine may have the other ones.
    command = [sys.executable, "-c", "input()", f"run.dir={parent / 'run-1'}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            assert leftovers.processes(parent / "run-1") == [process.pid]
            assert leftovers.processes(parent / "run") == []
        finally:
            process.kill()
    assert leftovers.processes(parent / "run-1") == []
