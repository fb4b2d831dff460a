"""Reads Xid errors of GPUs from the kernel's log: /dev/kmsg, else the journal of systemd.

The driver writes each Xid error there, also while NVIDIA's library hangs. Only what is written
after the log was opened counts: older lines are of earlier programs. No call here waits.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from jaxres.host.processes import kill_me_with_parent

PATH = Path("/dev/kmsg")
JOURNAL = ("journalctl", "--dmesg", "--quiet", "--no-pager", "--output=cat")
JOURNAL_SECONDS = 10.0
"""Longest time until journalctl has shown that it can read the kernel's messages."""
XID = re.compile(
    rb"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})\b[^)\n]*\): (\d+),"
)
"""A message of the driver: address of the GPU, number. A line that is cut off has no comma."""
READ_BYTES = 65536
"""More than a record of /dev/kmsg has, which is read as a whole or not at all."""
MAX_READS = 1000
"""Most reads of one call of `KernelLog.read`."""


class KernelLogUnreadable(Exception):
    """No source of the kernel's messages can be read here; the message says why."""


class KernelLog:
    """The messages of the kernel from now on; a context manager."""

    def __init__(self, file: IO[bytes], process: subprocess.Popen[bytes] | None = None) -> None:
        """Takes a file that is read without waiting, and the process that writes to it."""
        self._file, self._process = file, process
        self._partial = b""

    def __enter__(self) -> KernelLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def read(self) -> list[tuple[str, int]]:
        """Returns address (see `pci_address`) and number of each new Xid error.

        Raises:
          KernelLogUnreadable: the log has ended.
        """
        found: list[tuple[str, int]] = []
        for _ in range(MAX_READS):
            try:
                data = os.read(self._file.fileno(), READ_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # The kernel has overwritten records before they were read.
                continue
            except OSError as error:
                if found:
                    break
                raise KernelLogUnreadable(error.strerror or str(error)) from None
            if not data:
                if self._process is not None and not found:
                    raise KernelLogUnreadable("journalctl has ended")
                break
            *lines, partial = (self._partial + data).split(b"\n")
            self._partial = partial[-READ_BYTES:]
            found += xids(lines)
        return found


def xids(lines: Sequence[bytes]) -> list[tuple[str, int]]:
    """Returns the Xid errors of whole lines.

    >>> xids([b"4,1,2,-;NVRM: Xid (PCI:0000:65:00): 79, pid=7, GPU has fallen off", b"usb 1"])
    [('0000:65:00', 79)]
    >>> xids([b"NVRM: Xid (0000:0A:00): 13, Graphics", b"NVRM: Xid (PCI:0000:65:00): 7"])
    [('0000:0a:00', 13)]
    """
    found = [match for line in lines if (match := XID.search(line)) is not None]
    return [(pci_address(match[1].decode()), int(match[2])) for match in found]


def pci_address(text: str) -> str:
    """Returns domain, bus and device of a PCI address, as the driver writes them.

    >>> pci_address("00000000:65:00.0"), pci_address("00010000:0A:00.0")
    ('0000:65:00', '10000:0a:00')
    """
    domain, bus, device = text.lower().partition(".")[0].split(":")
    return f"{int(domain, 16):04x}:{bus}:{device}"


def open_log(path: Path = PATH) -> KernelLog:
    """Returns the kernel's messages from now on; called by the main thread.

    Args:
      path: the log; where it can't be opened, the journal is read.

    Raises:
      KernelLogUnreadable: neither can be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        reason = f"{path}: {error.strerror}"
    else:
        with contextlib.suppress(OSError):  # A pipe has no older lines.
            os.lseek(descriptor, 0, os.SEEK_END)
        return KernelLog(open(descriptor, "rb", buffering=0))
    try:
        newest = subprocess.run(
            [*JOURNAL, "--lines=1"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=JOURNAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelLogUnreadable(f"{reason}; journalctl: {error}") from None
    if newest.returncode or not newest.stdout.strip():
        raise KernelLogUnreadable(f"{reason}; journalctl shows no messages of the kernel")
    return _followed_journal()


def _followed_journal() -> KernelLog:
    process = subprocess.Popen(
        [*JOURNAL, "--lines=0", "--follow"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=functools.partial(kill_me_with_parent, os.getpid()),
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return KernelLog(process.stdout, process)
