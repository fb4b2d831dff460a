"""Cache on the local disk of blocks of objects in a bucket: bounded, shared by all processes.

Each block is a file, which a rename creates at once. The reader checks its content, so that a
machine that loses power needs no fsync here. The least recently used blocks are removed first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import uuid
from pathlib import Path

from jaxres.storage import files
from jaxres.storage.gcs_objects import Stat
from jaxres.storage.path import GcsPath
from jaxres.storage.threads import spawn_thread

LOCK = ".lock"
FOLDER_BLOCKS = 4096
TRIM_SHARE = 1 / 16
"""Share of the limit that a process adds before it looks at the size, and that is then freed."""


class BlockCache:
    """Reads and writes blocks below a folder; thread-safe."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        """Creates the folder. All processes that share it should have the same limit."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._counting = threading.Lock()
        self._trimming = threading.Lock()
        self._added_bytes = limit_bytes  # The first block that is written makes it look.

    def read(self, name: str, block: int) -> bytes | None:
        """Returns the cached bytes of an object's block, unchecked; None: it is not cached."""
        path = self._path(name, block)
        try:
            data = files.read_whole(path)
            os.utime(path)
        except OSError:  # Absent, removed meanwhile, no file, or an unreadable sector.
            return None
        return data

    def write(self, name: str, block: int, data: bytes) -> None:
        """Keeps a block, if the disk takes it: a full disk costs time only."""
        path = self._path(name, block)
        part = path.with_name(f".part-{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            return
        with self._counting:
            self._added_bytes += len(data)
            is_due = self._added_bytes >= TRIM_SHARE * self._limit_bytes
            if is_due:
                self._added_bytes = 0
        if is_due:
            spawn_thread("block-cache", self.trim, daemon=True)

    def remove(self, name: str, block: int) -> None:
        """Removes a block."""
        with contextlib.suppress(OSError):
            self._path(name, block).unlink(missing_ok=True)

    def trim(self) -> None:
        """Removes the least recently used blocks, if all blocks together exceed the limit.

        A folder that is gone, or a disk that fails, costs time only.
        """
        with contextlib.suppress(OSError), self._trimming:
            self._trim()

    def _trim(self) -> None:
        with open(self._folder / LOCK, "wb", opener=files.only_files) as lock:
            with contextlib.suppress(OSError):  # File systems without locks: both remove blocks.
                fcntl.flock(lock, fcntl.LOCK_EX)
            found = sorted(_files_below(self._folder))
            size_bytes = sum(size for _, size, _ in found)
            if size_bytes <= self._limit_bytes:
                return
            for _, size, path in found:
                if size_bytes <= (1 - TRIM_SHARE) * self._limit_bytes:
                    return
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    size_bytes -= size

    def _path(self, name: str, block: int) -> Path:
        return self._folder / name / f"{block // FOLDER_BLOCKS:x}" / f"{block:x}"


def name_of(path: GcsPath, stat: Stat) -> str:
    """Returns the name of one generation of an object in the cache."""
    identity = f"{path}\0{stat.generation}\0{stat.crc32c}"
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def _files_below(folder: Path) -> list[tuple[int, int, str]]:
    """Returns the time of last use, the size and the path of each block."""
    found: list[tuple[int, int, str]] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found += _files_below(Path(entry.path))
            elif entry.name != LOCK:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
    return found
