"""Parts of a GPU check for its tests: one that passes, and some that do not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.gpu.runs import every


def fine(folder: Path) -> dict[str, Any]:
    """Passes."""
    (folder / "a").touch()
    return {"speed": 1.5, "device": "a|b"}


def fails(folder: Path) -> dict[str, Any]:
    """Raises."""
    raise AssertionError("on purpose")


def partly(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields a figure of its own type, then those of two measurements, one of which fails."""
    yield {"where": folder / "x"}
    yield from every(bad=lambda: fails(folder), good=lambda: {"speed": 2.0})


def hangs(folder: Path) -> dict[str, Any]:
    """Never ends."""
    print("hangs", flush=True)
    time.sleep(3600)
    return {}


def leaves(folder: Path) -> dict[str, Any]:
    """Leaves a process in a session of its own."""
    command = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    return {"pid": child.pid}
