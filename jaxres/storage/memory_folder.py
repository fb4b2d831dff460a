"""Folder of a run in this machine's shared memory: it survives the run's processes.

`checkpoint.memory.folder` may put it on a local disk instead. The supervisor deletes it at its end.
A folder whose supervisor was killed is used, or replaced, by the next start of the same run on this
machine; a restart of the machine removes it from memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from pathlib import Path

from jaxres.faults import RunError
from jaxres.storage import files
from jaxres.storage.path import RunPath

SHARED_MEMORY = Path("/dev/shm")
"""Mount point of shared memory on Linux; its files are pages of memory."""


def memory_folder(root: RunPath, base: Path = SHARED_MEMORY) -> Path:
    """Returns the folder of a run directory, which a copy of the run does not share.

    Args:
      root: the run directory.
      base: the folder that contains it.
    """
    identity = hashlib.sha256(files.identity(root).encode()).hexdigest()[:16]
    return base.expanduser() / f"jaxres-memory-{os.getuid()}-{identity}"


def make(folder: Path) -> None:
    """Creates the folder, if necessary, for this user alone.

    Raises:
      OSError: it can't be created, or another user could write there.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder}: not a folder that only this user can write to")


def delete(root: RunPath, base: Path = SHARED_MEMORY) -> None:
    """Deletes the folder of a run directory in a base, if there is one; ignores errors."""
    with contextlib.suppress(RunError, OSError):
        shutil.rmtree(memory_folder(root, base), ignore_errors=True)
