"""Damages files of a run that has stopped, each so that something of value is lost for certain."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read import stored_chunks
from jaxres.data.tokens.token_digests import BLOCK_BYTES
from jaxres.runlog.run_log import Commit

INDEX = "state/d"
"""Folder of the index of a step's arrays; of tiny ones it has the items too."""


def flip_bit(root: Path, commit: Commit, chance: random.Random) -> str:
    """Flips one bit of an array's items, in place; returns a description."""
    path, start, stop = _items(root, commit, chance)
    where, bit = chance.randrange(start, stop), chance.randrange(8)
    with path.open("r+b") as file:
        file.seek(where)
        (old,) = file.read(1)
        file.seek(where)
        file.write(bytes([old ^ 1 << bit]))
    return f"step {commit.step}: bit {bit} of byte {where} of {path.name} is flipped"


def flip_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> int:
    """Flips one bit in each block of a file, in place; returns the number of blocks."""
    count = 0
    with path.open("r+b") as file:
        for start in range(0, path.stat().st_size, block_bytes):
            file.seek(start)
            (old,) = file.read(1)
            file.seek(start)
            file.write(bytes([old ^ 1]))
            count += 1
    return count


def delete_file(root: Path, commit: Commit, chance: random.Random) -> str:
    """Deletes the file with an array's items; returns a description."""
    path, _, _ = _items(root, commit, chance)
    path.unlink()
    return f"step {commit.step}: {path.name} is deleted"


DAMAGES: dict[str, Callable[[Path, Commit, random.Random], str]] = {
    "bit-flip": flip_bit,
    "lost-file": delete_file,
}
"""Scenario -> the damage to a step."""


def _items(root: Path, commit: Commit, chance: random.Random) -> tuple[Path, int, int]:
    """Returns a file with items of an array that a restore reads, and the bytes they are in."""
    step_dir = root / commit.path
    manifest = manifests.read(step_dir, commit)
    found = stored_chunks.locate_chunks(step_dir, manifest.arrays, frozen=manifest.frozen)
    chunks = list(itertools.chain.from_iterable(found.values()))
    if chunks:
        chunk = chance.choice([c for c in chunks if c.path.startswith("params/")] or chunks)
        return step_dir / chunk.file, chunk.offset, chunk.offset + chunk.size_bytes
    largest = max((step_dir / INDEX).iterdir(), key=lambda path: (path.stat().st_size, path.name))
    return largest, 0, largest.stat().st_size


def tear_last_line(path: Path) -> int | None:
    """Appends the first half of the last line; returns where it ends, or None: there is no line."""
    with contextlib.suppress(FileNotFoundError):
        lines = path.read_bytes().splitlines()
        if lines and len(lines[-1]) > 1:
            with path.open("ab") as file:
                file.write(lines[-1][: len(lines[-1]) // 2])
            return path.stat().st_size
    return None


def is_merged(path: Path, end: int) -> bool:
    """Returns whether something other than a new line follows a torn one."""
    with path.open("rb") as file:
        file.seek(end)
        return file.read(1) not in (b"", b"\n")
