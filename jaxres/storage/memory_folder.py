"""Folder of a run in this machine's shared memory: it survives the run's processes.

`checkpoint.memory.folder` may put it on a local disk instead. The supervisor deletes it at its end.
A folder whose supervisor was killed is used, or deleted, by the next start of the same run on this
machine; a restart of the machine removes it from memory. The run directory has a record of every
other place, so that the next start finds the folder there although the setting has changed.
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
    if not _is_own(folder.lstat()):
        raise PermissionError(f"{folder}: not a folder that only this user can write to")


def record(base: Path, *, places: Path) -> None:
    """Records a place that a run begins to use; ignores errors of storage.

    Args:
      base: the folder that will contain the run's folder.
      places: folder of the records in the run directory, a file for each place.
    """
    base = base.expanduser()
    if base != SHARED_MEMORY:  # It is always looked at.
        with contextlib.suppress(RunError, OSError):
            files.make_dir(places)
            name = hashlib.sha256(os.fsencode(base)).hexdigest()[:16]
            files.create(places / name, os.fsencode(base))


def delete_others(root: RunPath, base: Path | None, *, places: Path) -> None:
    """Deletes the folders of a run directory on this machine in all places but one.

    The records stay: another host of the run may not have looked at them yet.

    Args:
      root: the run directory.
      base: the place that is used; None: no place is.
      places: folder of the records in the run directory.
    """
    found = {SHARED_MEMORY}
    with contextlib.suppress(RunError, OSError):
        contents = files.read_all([places / name for name in files.list_names(places)])
        found |= {Path(os.fsdecode(content)) for content in contents if content}
    used = base and base.expanduser().resolve()
    for other in found:
        if other.resolve() != used:  # Two names of one place are not two places.
            delete(root, other)


def delete(root: RunPath, base: Path = SHARED_MEMORY) -> None:
    """Deletes the folder of a run directory in a base, if there is one; ignores errors.

    What another user has put in its place is left: to open a pipe there would never end.
    """
    with contextlib.suppress(RunError, OSError):
        folder = memory_folder(root, base)
        if _is_own(folder.lstat()):
            shutil.rmtree(folder, ignore_errors=True)


def _is_own(found: os.stat_result) -> bool:
    """Returns whether it is a folder that only this user can write to."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
