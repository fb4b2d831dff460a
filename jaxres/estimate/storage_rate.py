"""Measured rates of the place of a run, kept in data.cache_dir/storage-rates.

A rate belongs to a place, which is a bucket or a mounted file system, and to the machine that has
measured it: one is kept for each pair.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.storage import codec, files
from jaxres.storage.path import RunPath, is_remote
from jaxres.storage.probe import Probed

FOLDER = "storage-rates"


@dataclass(frozen=True, kw_only=True)
class StorageRate:
    """What a probe has measured."""

    place: str
    machine: str
    """Name of the machine, or the machine type of a VM."""
    write_mb_per_second: float
    read_mb_per_second: float
    date: str
    """Day in UTC, as in 2026-11-26."""

    def __str__(self) -> str:
        """Returns the rates, and where and when they were measured."""
        rates = self.write_mb_per_second, self.read_mb_per_second
        write, read = (f"{r:,.0f}" if r >= 10 else f"{r:.2g}" for r in rates)
        return f"{write} and {read} MB/s a host, measured on {self.machine}, {self.date}"


def place_of(root: RunPath) -> str:
    """Returns the bucket of a run directory, or the mounted file system that it is on."""
    if is_remote(root):
        return f"gs://{root.bucket}"
    folder = existing(root).resolve()
    return str(next(path for path in (folder, *folder.parents) if path.is_mount()))


def existing(path: Path) -> Path:
    """Returns the nearest folder above a path, or the path, that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def of_probe(found: Probed, *, root: RunPath, machine: str, clock: Clock) -> StorageRate:
    """Returns the rate that a probe of a run directory has measured today."""
    return StorageRate(
        place=place_of(root),
        machine=machine,
        write_mb_per_second=found.write_bytes_per_second / 1e6,
        read_mb_per_second=found.read_bytes_per_second / 1e6,
        date=day_of(clock.wall()),
    )


def day_of(wall: float) -> str:
    """Returns the day of a time in seconds since the epoch.

    >>> day_of(1_795_651_200.0)
    '2026-11-26'
    """
    return datetime.fromtimestamp(wall, UTC).date().isoformat()


def path_of(config: RunConfig, *, place: str, machine: str) -> Path:
    """Returns the file of a place and a machine."""
    name = hashlib.sha256(f"{place}\0{machine}".encode()).hexdigest()[:16]
    return config.data.cache_dir.expanduser() / FOLDER / f"{name}.json"


def store(config: RunConfig, rate: StorageRate) -> Path:
    """Writes a rate over an earlier one; returns its file.

    Raises:
      StorageRefused, StorageUnavailable: the cache folder can't be written.
    """
    path = path_of(config, place=rate.place, machine=rate.machine)
    files.make_dir(path.parent)
    files.replace(path, json.dumps(dataclasses.asdict(rate), indent=1).encode() + b"\n")
    return path


def read(config: RunConfig, root: RunPath, *, machine: str) -> StorageRate | None:
    """Returns the rate of a run directory as a machine has measured it; None: it never has.

    A file that can't be understood is no measurement: the rate is assumed then, which is printed.
    """
    try:
        path = path_of(config, place=place_of(root), machine=machine)
        found = codec.decode(StorageRate, json.loads(files.read_whole(path)))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    rates = found.write_mb_per_second, found.read_mb_per_second
    return found if all(0 < rate < math.inf for rate in rates) else None
