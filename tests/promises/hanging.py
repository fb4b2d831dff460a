"""Storage that hangs, for real processes: a preloaded library holds their calls.

As a hard mount whose server is away: no call returns, none fails, and all go on when it is back.
What a test itself reads is not held.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True)
class Mount:
    """What is below a folder, for processes that are started with `env`."""

    flag: Path
    env: dict[str, str]

    @classmethod
    def over(cls, folder: Path, *, built_in: Path) -> Mount:
        """Builds the library; needs a C compiler, and fails without one."""
        library, flag = built_in / "hanging.so", built_in / "hangs"
        words = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, SOURCE, "-ldl"]
        built = subprocess.run([*map(str, words)], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        env = {"LD_PRELOAD": str(library), "HANG_UNDER": str(folder), "HANG_WHILE": str(flag)}
        return cls(flag, env)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Hangs until the end of the block, by a file that is there for so long."""
        self.flag.touch()
        try:
            yield
        finally:
            self.flag.unlink()
