"""Results that tests of a config keep for `jaxres doctor`: one file a trajectory in data.cache_dir.

A result counts only with the versions with which it was found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxres import config as configs
from jaxres.config import RunConfig
from jaxres.faults import RunError
from jaxres.storage import files
from jaxres.supervisor.process.worker_group import versions

DRIVER = "nvidia driver"
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def path_of(config: RunConfig, folder: str) -> Path:
    """Returns the file of a config's result in a folder of data.cache_dir."""
    return config.data.cache_dir.expanduser() / folder / f"{configs.digest(config)[:16]}.json"


def write(path: Path, fields: Mapping[str, Any]) -> Path:
    """Writes a result over an earlier one; returns its file.

    Raises:
      StorageRefused, StorageUnavailable: the folder can't be written.
    """
    files.make_dir(path.parent)
    files.replace(path, json.dumps(fields, indent=1).encode() + b"\n")
    return path


def kept(store: Callable[[], Path]) -> str:
    """Stores a result; returns where it is, or why it is not there: it is known all the same."""
    try:
        return f"kept in {store()}"
    except RunError as error:
        return f"not kept for jaxres doctor: {error}"


def versions_here() -> dict[str, str]:
    """Returns the versions of the libraries and, if there is one, of the driver."""
    try:
        text = DRIVER_FILE.read_text(errors="replace")
    except OSError:
        return versions()
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return versions() | ({DRIVER: found[0]} if found else {})


def version_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the versions that differ, as in `jax 0.9 -> 0.10`."""
    return [
        f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
