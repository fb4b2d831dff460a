"""Downloads a host's data files of a save from their bucket during the save. No jax.

A save in a bucket counts once the bucket has given back what was written. So that the bytes cross
the network once, and beside the upload, each data file is downloaded as soon as it is listed: its
checksum is computed from what the bucket sends, and the read-back takes the arrays from the local
copies. Without them (no space, a request that failed) it reads from the bucket, which takes longer.
"""

from __future__ import annotations

import queue
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from jaxres.checkpoint.read.manifest import FileInfo
from jaxres.checkpoint.throttle import Throttle
from jaxres.faults import RunError
from jaxres.storage import files, gcs_objects
from jaxres.storage.gcs_objects import Stat
from jaxres.storage.path import GcsPath
from jaxres.storage.threads import spawn_thread

THREADS = 4
POLL_SECONDS = 2.0
"""Time between two lists of the step's folder."""
SPARE_BYTES = 2**30
"""Free bytes that the downloads leave on the local disk."""
_DATA_FILE = re.compile(r"(?P<folder>(?:state|frozen)/ocdbt\.process_(?P<process>\d+)/d)/[^/]+")
"""TensorStore gives each of these files a random name, and writes it once."""


@dataclass(frozen=True)
class LocalCopies:
    """The data files of one host, downloaded."""

    files: Mapping[str, FileInfo]
    """Name in the step -> size and checksum of the bytes that the bucket has sent."""
    root: Path
    """Folder with the same names."""
    folders: frozenset[str]
    """Folders of the step whose files are all there."""


class StepDownload:
    """The downloads of one step; a context manager, which deletes them."""

    def __init__(self, step_dir: GcsPath, process: int, folder: Path, pace: Throttle) -> None:
        """Does nothing yet.

        Args:
          step_dir: directory of a step that is being saved.
          process: number of the process whose data files are downloaded.
          folder: local folder of the downloads; nothing else is in it.
        """
        self._step_dir, self._process = step_dir, str(process)
        self._folder = folder
        self._pace = pace
        self._stop = threading.Event()
        self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Files to download; None ends a thread."""
        self._stats: dict[str, Stat] = {}
        """The data files of the last list."""
        self._found: dict[str, tuple[Stat, FileInfo]] = {}
        self._problem = ""
        """Reason why there are no copies; empty if there is none."""
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> StepDownload:
        self._threads = [spawn_thread("download-list", self._watch, daemon=True)]
        for number in range(THREADS):
            name = f"download-{number}"
            self._threads.append(spawn_thread(name, self._download_all, daemon=True))
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the downloads; does not wait for a request that hangs."""
        self._problem = self._problem or "the save has ended"
        self._end_threads()
        shutil.rmtree(self._folder, ignore_errors=True)

    def copies(self) -> LocalCopies | None:
        """Downloads the rest, once the save has ended; None: that has failed.

        Also None if a file was written again after it was listed.
        """
        self._stop.set()
        self._threads[0].join()
        self._attempt(self._list)
        self._end_threads()
        for thread in self._threads:
            thread.join()
        found = {name: stat for name, (stat, _) in self._found.items() if name in self._stats}
        if self._problem or found != self._stats:
            return None
        infos = {name: self._found[name][1] for name in self._stats}
        folders = {name.rpartition("/")[0] for name in infos}
        return LocalCopies(infos, self._folder, frozenset(folders))

    def _end_threads(self) -> None:
        self._stop.set()
        for _ in range(THREADS):
            self._names.put(None)

    def _watch(self) -> None:
        while not self._problem and not self._stop.wait(POLL_SECONDS):
            self._attempt(self._list)

    def _list(self) -> None:
        """Enqueues the data files that are new."""
        stats = {
            name: stat
            for name, stat in gcs_objects.list_stats(self._step_dir).items()
            if (match := _DATA_FILE.fullmatch(name)) and match["process"] == self._process
        }
        new = stats.keys() - self._stats.keys()
        self._stats = stats
        for name in new:
            self._names.put(name)

    def _download_all(self) -> None:
        while (name := self._names.get()) is not None:
            if not self._problem:
                self._attempt(lambda name=name: self._download(name))

    def _download(self, name: str) -> None:
        stat, path = self._stats.get(name), self._folder / name
        if stat is None:  # Deleted since it was listed.
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if files.free_bytes(path.parent) < stat.size + SPARE_BYTES:
            raise OSError(f"{path}: no space left")
        checksum = xxhash.xxh3_128()
        chunks = gcs_objects.iter_generation(self._step_dir / name, stat)
        with path.open("wb") as file:
            for chunk in self._pace.each(chunks):
                checksum.update(chunk)
                file.write(chunk)
        self._found[name] = stat, FileInfo(stat.size, checksum.hexdigest())

    def _attempt(self, act: Callable[[], None]) -> None:
        """Runs an act of a thread; its failure ends the downloads."""
        try:
            act()
        except (RunError, OSError) as error:
            self._problem = self._problem or str(error)
