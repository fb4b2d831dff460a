"""NVIDIA's management library without a GPU: a libnvidia-ml.so.1 that reads a text file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"
COMPILERS = ("cc", "gcc", "clang")


def compiler() -> str | None:
    """Returns the C compiler of this machine; None: there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


class FakeNvml:
    """The library in a folder, and the state of its GPUs; `fake_nvml.c` lists the keys."""

    def __init__(self, folder: Path) -> None:
        """Compiles the library."""
        folder.mkdir(parents=True, exist_ok=True)
        self._state = folder / "state"
        command = [compiler() or "cc", "-shared", "-fPIC", "-o", str(folder / LIBRARY), str(SOURCE)]
        subprocess.run(command, check=True)
        self.env = {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(self._state)}
        self.set()

    def set(self, *lines: str) -> None:
        """Sets the state of all GPUs; without lines they are healthy."""
        new = self._state.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self._state)
