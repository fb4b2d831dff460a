"""Storage that hangs and a wall clock that jumps, for real processes, by a preloaded library each.

What a test itself reads is as it is.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


def _built(name: str, folder: Path) -> str:
    """Builds a library; needs a C compiler, and fails without one."""
    library = folder / f"{name}.so"
    words = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library)]
    words += [str(HERE / f"{name}.c"), "-ldl"]
    built = subprocess.run(words, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return str(library)


@dataclass(frozen=True)
class Mount:
    """What is below a folder, for processes that are started with `env`.

    As a hard mount whose server is away: no call returns, none fails, all go on when it is back.
    """

    flag: Path
    env: dict[str, str]

    @classmethod
    def over(cls, folder: Path, *, built_in: Path) -> Mount:
        flag = built_in / "hangs"
        env = {"HANG_UNDER": str(folder), "HANG_WHILE": str(flag)}
        return cls(flag, env | {"LD_PRELOAD": _built("hanging", built_in)})

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Hangs until the end of the block, by a file that is there for so long."""
        self.flag.touch()
        try:
            yield
        finally:
            self.flag.unlink()


@dataclass(frozen=True)
class Jumping:
    """The wall clock of processes that are started with `env`."""

    offset: Path
    env: dict[str, str]

    @classmethod
    def built(cls, folder: Path) -> Jumping:
        offset = folder / "offset"
        return cls(offset, {"JUMP_BY": str(offset), "LD_PRELOAD": _built("jumping", folder)})

    def jump(self, seconds: int) -> None:
        """From now on the clock is wrong by so much."""
        self.offset.with_suffix(".new").write_text(str(seconds))
        self.offset.with_suffix(".new").rename(self.offset)


@dataclass(frozen=True)
class Lockless:
    """A folder as on a mount without locks, whose server's answers are lost, for processes that
    are started with `env`.
    """

    seen: Path
    env: dict[str, str]

    @classmethod
    def under(cls, folder: Path, *, built_in: Path) -> Lockless:
        seen = built_in / "lockless-seen"
        env = {"LOCKLESS_UNDER": str(folder), "LOCKLESS_SEEN": str(seen)}
        return cls(seen, env | {"LD_PRELOAD": _built("lockless", built_in)})

    def refusals(self) -> tuple[int, int]:
        """Returns how many locks were refused, and how many answers were lost."""
        seen = self.seen.read_text() if self.seen.exists() else ""
        return seen.count("l"), seen.count("a")
