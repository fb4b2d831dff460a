"""Ways to damage one file, each of which changes it for certain."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

PAGE = 4096


def flip_bit(path: Path, chance: random.Random) -> None:
    """Flips one bit somewhere."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def flip_byte(path: Path, chance: random.Random) -> None:
    """Inverts one byte somewhere."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 0xFF
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random) -> None:
    """Cuts the file short."""
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def delete(path: Path, chance: random.Random) -> None:
    """Deletes the file."""
    path.unlink()


def append(path: Path, chance: random.Random) -> None:
    """Makes the file longer."""
    path.write_bytes(path.read_bytes() + b"\0" * chance.choice((1, 100)))


def zero_page(path: Path, chance: random.Random) -> None:
    """Zeroes a page, or all of a file that is smaller."""
    data = bytearray(path.read_bytes())
    starts = [start for start in range(0, len(data), PAGE) if any(data[start : start + PAGE])]
    start = chance.choice(starts)
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    path.write_bytes(data)


def swap(path: Path, chance: random.Random) -> None:
    """Puts the file and another one in each other's place."""
    others = [
        other
        for other in sorted(path.parent.parent.rglob("*"))
        if other.is_file() and other.read_bytes() != path.read_bytes()
    ]
    other = chance.choice(others)
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_bit,
    flip_byte,
    truncate,
    delete,
    append,
    zero_page,
    swap,
)
