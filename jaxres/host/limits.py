"""Errors of what this machine gives a process: threads, open files, memory, its directory."""

from __future__ import annotations

import errno
import os

from jaxres.faults import ConfigError, OutOfMemory, RunError, UnhealthyHost

NO_THREAD = "can't start new thread"
NO_MEMORY = ("failed to map segment", "cannot allocate memory")
"""Of an ImportError, by the dynamic linker."""


def error_of_limit(error: BaseException) -> RunError | None:
    """Returns the fault of an exception by which a limit of this machine shows; None: another."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOENT and getattr(error, "filename", None) is None and not _has_folder():
        return ConfigError(
            "the current directory does not exist any more, and a relative path begins there. "
            "Change to one that does (cd), or give absolute paths"
        )
    if number == errno.ENAMETOOLONG:
        return ConfigError(f"{str(error)[:300]}: give a shorter path")
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        return UnhealthyHost(
            f"this host starts no more threads ({error}): the limit of processes and threads of "
            "the account or its control group is reached. Raise it (ulimit -u, pids.max, "
            "TasksMax of the service), or end other processes"
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return UnhealthyHost(
            f"this host opens no more files ({error}): the limit of open files of a process or of "
            "the machine is reached. Raise it (ulimit -n, LimitNOFILE of the service, fs.file-max)"
        )
    is_of_linker = isinstance(error, ImportError) and any(text in str(error) for text in NO_MEMORY)
    if number == errno.ENOMEM or is_of_linker or isinstance(error, MemoryError):
        return OutOfMemory(
            f"this host gives the process no more memory ({error}): raise the limit (ulimit -v, "
            "memory.max), or use a machine with more"
        )
    return None


def _has_folder() -> bool:
    """Returns whether the working directory of this process exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
