"""Folder of a run in this machine's shared memory: it survives the run's processes.

`checkpoint.memory.folder` may put it on a local disk instead. The supervisor deletes it at its end.
A folder whose supervisor was killed is used, or deleted, by the next start of the same run on this
machine; a restart of the machine removes it from memory. The run directory has a record of every
other place, so that the next start finds the folder there although the setting has changed. The
folder has a record of its owner: where a copy of the run has taken the place of the run directory,
it has another folder, and finds by that record the one which nothing uses any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxres.faults import RunError
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote

SHARED_MEMORY = Path("/dev/shm")
"""Mount point of shared memory on Linux; its files are pages of memory."""
OWNER = "owner"
"""File in the folder with its `Owner`."""


@dataclass(frozen=True)
class Owner:
    """Whose states a folder has."""

    root: str
    """Path of the run directory."""
    run: str
    """Nonce of the first claim in its log, which a copy of the run has too."""
    process: str
    """Id of the supervisor, over machines and boots."""


def memory_folder(root: RunPath, base: Path = SHARED_MEMORY) -> Path:
    """Returns the folder of a run directory, which a copy of the run does not share.

    Args:
      root: the run directory.
      base: the folder that contains it.
    """
    identity = hashlib.sha256(files.identity(root).encode()).hexdigest()[:16]
    return base.expanduser() / f"{_prefix()}{identity}"


def _prefix() -> str:
    return f"jaxres-memory-{os.getuid()}-"


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
    used = base and base.expanduser().resolve()
    for other in _all_places(places):
        if other.resolve() != used:  # Two names of one place are not two places.
            delete(root, other)


def mark(root: RunPath, base: Path, owner: Owner) -> None:
    """Records the owner of the states in a run's memory folder; ignores errors, as the tier does.

    Args:
      root: the run directory.
      base: the folder that contains its folder, which is made if necessary.
      owner: whose states they are from now on.
    """
    with contextlib.suppress(RunError, OSError):
        folder = memory_folder(root, base)
        make(folder)
        files.replace(folder / OWNER, json.dumps(dataclasses.asdict(owner)).encode())


def delete_replaced(
    root: RunPath, owner: Owner, *, places: Path, has_ended: Callable[[str], bool]
) -> None:
    """Deletes the folders of run directories whose place a copy of the same run has taken.

    Args:
      root: the run directory, which is that copy.
      owner: its path, run and process.
      places: folder of the records in the run directory.
      has_ended: whether a process, by its id, has surely ended.
    """
    if is_remote(root):
        return
    for base in _all_places(places):
        with contextlib.suppress(RunError, OSError):
            own = memory_folder(root, base)
            for folder in base.glob(f"{_prefix()}*"):
                if folder == own or not _is_own(folder.lstat()):
                    continue
                found = _owner(folder)
                is_same = found is not None and (found.root, found.run) == (owner.root, owner.run)
                if found is not None and is_same and has_ended(found.process):
                    shutil.rmtree(folder, ignore_errors=True)


def _owner(folder: Path) -> Owner | None:
    """Returns whose states a folder has; None: it has no record that can be read."""
    try:
        found = Owner(**json.loads(files.read_whole(folder / OWNER)))
    except (OSError, ValueError, TypeError):
        return None
    return found if all(isinstance(text, str) for text in dataclasses.astuple(found)) else None


def _all_places(places: Path) -> set[Path]:
    """Returns shared memory, and the places of the records in a folder."""
    found = {SHARED_MEMORY}
    with contextlib.suppress(RunError, OSError):
        contents = files.read_all([places / name for name in files.list_names(places)])
        found |= {Path(os.fsdecode(content)) for content in contents if content}
    return found


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
