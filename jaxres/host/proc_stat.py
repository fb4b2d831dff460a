"""Reads /proc/PID/stat, the kernel's report about a process (man 5 proc_pid_stat)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcStat:
    """The fields that jaxres uses; the number in each comment is the field's in the man page."""

    state: str
    """Field 3: R, S, D, Z (zombie), T or t (stopped), X (dead)."""
    parent: int
    """Field 4: the parent's pid."""
    flags: int
    """Field 9: the kernel's PF_* flags."""
    start_ticks: int
    """Field 22: when the process started, in clock ticks since boot."""
    arg_start: int
    """Field 48: the address at which the command line begins."""
    arg_end: int
    """Field 49: the address after the command line."""
    env_start: int
    """Field 50: the address at which the environment begins."""
    env_end: int
    """Field 51: the address after the environment; equal to `env_start` if there is none."""


def read_proc_stat(pid: int | str = "self") -> ProcStat:
    """Returns the status of a process; raises OSError if it does not exist.

    >>> import os
    >>> read_proc_stat().parent == os.getppid()
    True
    """
    return parse_proc_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))


def parse_proc_stat(text: str) -> ProcStat:
    """Parses the content of /proc/PID/stat.

    Field 2 is the process name in parentheses. It may contain spaces and parentheses, so the
    fields after it are counted from the last closing parenthesis.
    """
    fields = text.rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    return ProcStat(
        state=fields[0],
        parent=int(fields[1]),
        flags=int(fields[6]),
        start_ticks=int(fields[19]),
        arg_start=arg_start,
        arg_end=arg_end,
        env_start=env_start,
        env_end=env_end,
    )


def process_id(pid: int) -> str | None:
    """Returns an id that is unique over machines and boots; None: the process is gone."""
    try:
        started = read_proc_stat(pid).start_ticks
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{pid}/{started}"
    except OSError:
        return None


def process_exists(identity: str) -> bool | None:
    """Returns whether the process of an id exists.

    None: unknown, on another machine or in another container.
    """
    own, parts = process_id(os.getpid()), identity.split("/")
    if own is None or len(parts) != 4 or parts[:2] != own.split("/")[:2]:
        return None
    return parts[2].isdecimal() and process_id(int(parts[2])) == identity
