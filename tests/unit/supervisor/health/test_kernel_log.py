"""Xid errors are read from the kernel's log, once each, and no other line is taken for one."""

import os
import subprocess
import sys

import pytest

from jaxres.supervisor.health import kernel_log
from jaxres.supervisor.health.kernel_log import KernelLogUnreadable, open_log, pci_address, xids
from tests.promises.trainer import ROOT
from tests.waiting import SURE_SECONDS

LOST = b"4,812,99,-;NVRM: Xid (PCI:0000:65:00): 79, pid=7, name=python, GPU has fallen off the bus"
OTHER = b"6,813,99,-;usb 1-1: new device; Xid 48"
FOUND = ("0000:65:00", 79)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (LOST, [FOUND]),
        (b"NVRM: Xid (0000:0A:00): 13, Graphics SM Warp Exception", [("0000:0a:00", 13)]),
        (b"NVRM: Xid (PCI:0000:65:00 GPU-I:05): 43, pid=7", [("0000:65:00", 43)]),
        (b"NVRM: Xid (PCI:00010000:65:00): 48, pid=7", [("10000:65:00", 48)]),
        (LOST[: LOST.index(b"9, pid")], []),
        (LOST[: LOST.index(b"):")], []),
        (b"NVRM: GPU 0000:65:00.0: GPU has fallen off the bus.", []),
        (b"NVRM: Xid (PCI:\xff\xfe65:00): 79, pid=7", []),
        (OTHER, []),
    ],
)
def test_whole_messages_of_the_driver_are_understood_and_parts_of_them_are_none(line, found):
    assert xids([line]) == found


def test_an_address_is_the_same_in_each_way_of_writing_it():
    assert {pci_address(text) for text in ("0000:65:00", "00000000:65:00.0")} == {"0000:65:00"}


def test_only_what_is_written_after_the_start_counts_and_each_line_once(tmp_path):
    path = tmp_path / "kmsg"
    path.write_bytes(LOST + b"\n")
    with open_log(path) as log, path.open("ab", buffering=0) as file:
        assert log.read() == [], "a line of before the start is a finding"
        file.write(OTHER + b"\n" + LOST[:60])
        assert log.read() == [], "half a line is a finding"
        file.write(LOST[60:] + b"\n" + OTHER + b"\n")
        assert (log.read(), log.read()) == ([FOUND], [])


def test_records_that_the_kernel_has_overwritten_do_not_end_the_log(monkeypatch, tmp_path):
    (tmp_path / "kmsg").touch()
    results = iter([BrokenPipeError(), LOST + b"\n", BlockingIOError(), OSError(5, "I/O error")])

    def read(descriptor, size):
        match next(results):
            case OSError() as error:
                raise error
            case data:
                return data

    with open_log(tmp_path / "kmsg") as log:
        monkeypatch.setattr(kernel_log.os, "read", read)
        assert log.read() == [FOUND]
        with pytest.raises(KernelLogUnreadable, match="I/O error"):
            log.read()


def journalctl(tmp_path, monkeypatch, script):
    """Puts a journalctl with this script before the system's."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "journalctl"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def test_without_access_to_the_log_the_journal_is_read(tmp_path, monkeypatch):
    line = LOST.partition(b";")[2].decode()
    old = line.replace("79", "48")
    journalctl(
        tmp_path,
        monkeypatch,
        f'case "$*" in *--follow*) echo "{line}"; exit 0;; *--lines=1*) echo "{old}";; esac',
    )
    # In a process of its own, as in production: this one may have started JAX, which forbids forks.
    program = f"""
import time
from pathlib import Path
from jaxres.supervisor.health.kernel_log import KernelLogUnreadable, open_log
with open_log(Path({str(tmp_path / "missing")!r})) as log:
    try:
        while True:
            for one in log.read():
                print(*one, flush=True)
            time.sleep(0.005)
    except KernelLogUnreadable as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
        check=False,
    )
    assert done.stdout.splitlines() == ["0000:65:00 79", "journalctl has ended"], done.stderr


@pytest.mark.parametrize("script", ["exit 1", "exit 0"])
def test_a_log_that_can_not_be_read_is_an_error_with_the_reason(tmp_path, monkeypatch, script):
    journalctl(tmp_path, monkeypatch, script)
    with pytest.raises(KernelLogUnreadable, match=r"No such file.*journalctl shows no messages"):
        open_log(tmp_path / "missing")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelLogUnreadable, match=r"No such file.*journalctl"):
        open_log(tmp_path / "missing")
