"""What all workers of a session share: the first one that needs it makes it."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns a folder of the session; `make` writes it if no worker has.

    Copy it, do not change it.
    """
    folder = factory.getbasetemp() / "shared"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / f"{name}.whole").exists():
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir()
            make(folder / name)
            (folder / f"{name}.whole").touch()
    return folder / name
