"""Hanging or failing storage and a jumping wall clock for real processes, by preloaded libraries.

The test process itself is not affected.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


def built(name: str, folder: Path) -> str:
    """Builds a library; needs a C compiler, and fails without one."""
    library = folder / f"{name}.so"
    arguments = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library)]
    arguments += [str(HERE / f"{name}.c"), "-ldl"]
    built = subprocess.run(arguments, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return str(library)


@dataclass(frozen=True)
class Mount:
    """A folder whose storage can hang, for processes that are started with `env`.

    Like a hard NFS mount without its server: calls block and continue when it is back.
    """

    flag: Path
    env: dict[str, str]

    @classmethod
    def over(cls, folder: Path, *, built_in: Path) -> Mount:
        flag = built_in / "hangs"
        env = {"HANG_UNDER": str(folder), "HANG_WHILE": str(flag)}
        return cls(flag, env | {"LD_PRELOAD": built("hanging", built_in)})

    def has_held(self, pid: int) -> bool:
        """Returns whether a call of a process has waited."""
        return Path(f"{self.flag}.{pid}").exists()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Makes storage hang within the block, by a flag file."""
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
        return cls(offset, {"JUMP_BY": str(offset), "LD_PRELOAD": built("jumping", folder)})

    def jump(self, seconds: int) -> None:
        """Sets the error of the clock in seconds."""
        self.offset.with_suffix(".new").write_text(str(seconds))
        self.offset.with_suffix(".new").rename(self.offset)


@dataclass(frozen=True)
class Lockless:
    """A folder like on a mount without locks whose server's responses get lost, for processes that
    are started with `env`.
    """

    seen: Path
    env: dict[str, str]

    @classmethod
    def under(cls, folder: Path, *, built_in: Path) -> Lockless:
        seen = built_in / "lockless-seen"
        env = {"LOCKLESS_UNDER": str(folder), "LOCKLESS_SEEN": str(seen)}
        return cls(seen, env | {"LD_PRELOAD": built("lockless", built_in)})

    def refusals(self) -> tuple[int, int]:
        """Returns the number of rejected locks and of lost responses."""
        seen = self.seen.read_text() if self.seen.exists() else ""
        return seen.count("l"), seen.count("a")


@dataclass(frozen=True)
class FailingReads:
    """Folders of which one read fails once with EIO, for processes that are started with `env`."""

    count: Path
    calls: Path
    env: dict[str, str]

    @classmethod
    def of(
        cls, *folders: Path, library: str, root: Path, call: str = "*", number: int = 0
    ) -> FailingReads:
        """Fails call `number`, from 1, of those that match `call`; 0: none, all are only listed.

        Args:
          folders: the folders.
          library: `failing.c`, built.
          root: where the calls are listed.
          call: pattern of "FUNCTION PATH"; the function is open, read, stat, access or list.
          number: the call that fails.
        """
        count, calls = root / "reads", root / "reads.txt"
        count.write_bytes(bytes(8))
        calls.write_bytes(b"")
        prefix = "JAXRES_TEST_FAIL_"  # A fork may have other values: no import reads them.
        env = {
            f"{prefix}UNDER": ":".join(map(str, folders)),
            f"{prefix}CALL": call,
            f"{prefix}NUMBER": str(number),
            f"{prefix}COUNT": str(count),
            f"{prefix}CALLS": str(calls),
            "LD_PRELOAD": library,
        }
        return cls(count, calls, env)

    def failed(self) -> list[str]:
        """Returns the calls that have failed: one, or none."""
        return [line[1:] for line in self.seen() if line.startswith("!")]

    def seen(self) -> list[str]:
        """Returns all calls that match, in order; the failed one begins with "!"."""
        return self.calls.read_text().splitlines()
