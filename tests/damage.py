"""Ways to damage one file, each of which changes it for certain."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxres.storage import files
from jaxres.storage.path import RunPath

PAGE = 4096


def flip_bit(path: Path, chance: random.Random) -> None:
    """Flips one bit somewhere."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def flip_bit_at(path: Path, byte: int, bit: int = 0) -> None:
    """Flips one bit in place; the size and the time of the file stay the same."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(byte)
        (old,) = file.read(1)
        file.seek(byte)
        file.write(bytes([old ^ 1 << bit]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def change_meta(folder: Path, **fields: Any) -> None:
    """Changes fields of a token folder's meta.json; None removes one."""
    meta = json.loads((folder / "meta.json").read_text()) | fields
    kept = {name: value for name, value in meta.items() if value is not None}
    (folder / "meta.json").write_text(json.dumps(kept))


def remove_digests(folder: Path) -> None:
    """Makes a token folder one of the format without digests."""
    (folder / "digests.npy").unlink()
    change_meta(folder, block_bytes=None, checksum=None)


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


def to_pipe(path: Path, chance: random.Random) -> None:
    """Puts a pipe in the file's place: who opens it waits for a writer."""
    path.unlink()
    os.mkfifo(path)


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


def harm(
    folder: RunPath, name: str, how: Callable[[Path, random.Random], None], chance: random.Random
) -> None:
    """Damages one file of a folder: in a bucket its object has other bytes then, or is gone."""
    if isinstance(folder, Path):
        how(folder / name, chance)
        return
    before = {name: files.read_whole(folder / name) for name in files.sizes(folder)}
    with tempfile.TemporaryDirectory() as scratch:
        # A swap takes the other file from two levels up: these must not be those of other tests.
        step = Path(scratch, "checkpoints", "step")
        for one, data in before.items():
            (step / one).parent.mkdir(parents=True, exist_ok=True)
            (step / one).write_bytes(data)
        how(step / name, chance)
        for one, data in before.items():
            if not (step / one).exists():
                files.delete(folder / one)
            elif (harmed := (step / one).read_bytes()) != data:
                files.replace(folder / one, harmed)
