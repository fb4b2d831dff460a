"""Finds where the chunks of a step's arrays lie in its data files. No jax.

TensorStore's index (OCDBT) of a folder says in which data file, and where in it, the value of each
key lies. A chunk that Orbax has written without compression is one such value: its items in C
order, and an index of one entry (the zarr3 codec `sharding_indexed`). With the places known, a data
file is read from its start to its end, once, and checksum, items and digests come from the same
bytes. Arrays that are stored in another way are left to TensorStore (tensorstore_reader.py).

Sources: https://google.github.io/tensorstore/kvstore/ocdbt/index.html (format of the database),
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from jaxres.checkpoint.digests.block_digests import ArrayInfo, Box, dtype_named
from jaxres.checkpoint.read.manifest import FileInfo
from jaxres.checkpoint.read.ocdbt import crc32c
from jaxres.checkpoint.read.tensorstore_reader import ARRAYS, FROZEN, key_of, kvstore
from jaxres.checkpoint.throttle import Throttle
from jaxres.storage.direct_file import DirectReader
from jaxres.storage.path import RunPath

_VALUE = re.compile(r"value:(?P<base>[^:]*):(?P<file>[^:]*):(?P<offset>\d+):(?P<size>\d+)")
"""A place of a value, as TensorStore prints it."""
_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_PLAIN = ([_LITTLE_ENDIAN], [{"name": "bytes"}])
"""Codecs of plain items; those of one byte have no byte order."""
_SUB_BYTE = re.compile(r".*(?:int|float)[1-7](?:_.*)?")
"""Types whose items may be packed."""
INDEX_BYTES = 20
"""Size of the index after the items of a chunk: offset, size, and their CRC32C."""
PART_BYTES = 2**20
"""Size of the parts in which chunks are read, unless their blocks are larger."""
REST_BYTES = 2**16
"""Size of the parts in which the rest of a file is read."""


@dataclass(frozen=True)
class Chunk:
    """One chunk of an array, and its place."""

    path: str
    """Path of the array."""
    info: ArrayInfo
    """Dtype and shape of the array."""
    box: Box
    """The items of the array that are in the chunk."""
    file: str
    """Name of its file in the step directory."""
    offset: int
    """Where its items begin in the file; an index of INDEX_BYTES follows them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the chunk."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def size_bytes(self) -> int:
        """Size of the items."""
        return math.prod(self.shape) * self.info.itemsize

    @property
    def index(self) -> bytes:
        """The bytes that must follow the items."""
        return chunk_index(self.size_bytes)


@functools.lru_cache(maxsize=1024)
def chunk_index(size_bytes: int) -> bytes:
    """Returns the index that the codec `sharding_indexed` appends to a chunk of this size."""
    entry = struct.pack("<QQ", 0, size_bytes)
    return entry + struct.pack("<I", crc32c(entry))


def locate_chunks(
    step_dir: RunPath, arrays: Mapping[str, ArrayInfo], *, frozen: Collection[str]
) -> dict[str, list[Chunk]]:
    """Returns array path -> all its chunks, for arrays that are stored as plain items.

    Args:
      arrays: path -> expected dtype and shape.
      frozen: paths of those arrays that are in the folder of the frozen parameters.

    Raises:
      ValueError: the index can't be read, or an array has another dtype or shape.
    """
    found: dict[str, list[Chunk]] = {}
    for folder in (ARRAYS, FROZEN):
        infos = {p: info for p, info in arrays.items() if (p in frozen) == (folder == FROZEN)}
        found |= locate_below(step_dir, folder, infos) if infos else {}
    return found


def locate_below(
    step_dir: RunPath,
    database: str,
    arrays: Mapping[str, ArrayInfo],
    boxes: Mapping[str, Collection[Box]] | None = None,
) -> dict[str, list[Chunk]]:
    """Returns the chunks as `locate_chunks` does, from one database of the step.

    With `boxes` (path -> boxes of items): only the chunks that are these boxes.
    """
    entries = _entries(step_dir / database)
    found: dict[str, list[Chunk]] = {}
    for path, info in arrays.items():
        chunks = _chunks(path, info, entries, database, boxes[path] if boxes else None)
        if chunks is not None:
            found[path] = chunks
    return found


def by_file(chunks: Mapping[str, Sequence[Chunk]]) -> dict[str, list[Chunk]]:
    """Returns name of a data file -> the chunks in it."""
    files: dict[str, list[Chunk]] = {}
    for chunk in itertools.chain.from_iterable(chunks.values()):
        files.setdefault(chunk.file, []).append(chunk)
    return files


def entries_of(database: RunPath) -> dict[str, str | bytes]:
    """Returns key -> its value, or `FILE:OFFSET:SIZE` of it, of the index of a database."""
    found: dict[str, str | bytes] = {}
    for key, entry in _entries(database).items():
        place = _VALUE.fullmatch(entry.get("indirect_value", ""))
        if place is None:
            found[key] = entry["inline_value"]
        else:
            found[key] = f"{place['base']}{place['file']}:{place['offset']}:{place['size']}"
    return found


def _entries(folder: RunPath) -> dict[str, Any]:
    """Returns key -> its value, or the place of its value, of the index of a folder."""
    import tensorstore

    store = tensorstore.KvStore.open(kvstore(folder)).result()
    versions = tensorstore.ocdbt.dump(store).result().get("versions", ())
    nodes = [("", versions[-1]["root"]["location"])] if versions else []
    entries: dict[str, Any] = {}
    while nodes:
        prefix, location = nodes.pop()
        for entry in tensorstore.ocdbt.dump(store, location).result()["entries"]:
            if "location" in entry:
                below = prefix + entry["subtree_common_prefix"].decode()
                nodes.append((below, entry["location"]))
            else:
                entries[prefix + entry["key"].decode()] = entry
    return entries


def _chunks(
    path: str,
    info: ArrayInfo,
    entries: Mapping[str, Any],
    folder: str,
    boxes: Collection[Box] | None,
) -> list[Chunk] | None:
    """Returns the chunks of an array, or of some boxes of it; None if they are not plain items."""
    key = key_of(path)
    described = entries.get(f"{key}zarr.json", {}).get("inline_value")
    if described is None:
        return None
    metadata = json.loads(described)
    if tuple(metadata["shape"]) != info.shape or metadata["data_type"] != info.dtype:
        raise ValueError(f"{path} is {metadata['data_type']}{metadata['shape']}, not {info}")
    shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    if not _is_plain(metadata, shape) or any(n % m for n, m in zip(info.shape, shape, strict=True)):
        return None
    chunks: list[Chunk] = []
    size_bytes = math.prod(shape) * info.itemsize
    counts = [range(n // m) for n, m in zip(info.shape, shape, strict=True)]
    for position in itertools.product(*counts):
        box = tuple((p * m, (p + 1) * m) for p, m in zip(position, shape, strict=True))
        if boxes is not None and box not in boxes:
            continue
        value = entries.get(f"{key}{'/'.join(['c', *map(str, position)])}", {})
        match = _VALUE.fullmatch(value.get("indirect_value", ""))
        if match is None or int(match["size"]) != size_bytes + INDEX_BYTES:
            return None
        name = f"{folder}/{match['base']}{match['file']}"
        chunks.append(Chunk(path, info, box, name, int(match["offset"])))
    return chunks


def _is_plain(metadata: Mapping[str, Any], chunk_shape: list[int]) -> bool:
    """Returns whether a chunk is its items in C order, followed by an index of one entry."""
    found = dict(metadata["codecs"][0].get("configuration", {}))
    items, is_at_end = found.pop("codecs", None), found.pop("index_location", "end") == "end"
    return (
        [each["name"] for each in metadata["codecs"]] == ["sharding_indexed"]
        and found
        == {"chunk_shape": chunk_shape, "index_codecs": [_LITTLE_ENDIAN, {"name": "crc32c"}]}
        and items in _PLAIN
        and is_at_end
        and metadata["chunk_key_encoding"] == {"name": "default"}
        and not _SUB_BYTE.fullmatch(metadata["data_type"])
    )


def scan(
    path: Path,
    chunks: Sequence[Chunk],
    visit: Callable[[Chunk, Box, np.ndarray], None],
    pace: Throttle,
) -> FileInfo:
    """Reads a data file once, from its start to its end; returns its size and checksum.

    Args:
      visit: is called with each chunk, a box of items in it and these items, which are valid until
        it returns. A chunk is cut along its first dim, between blocks of its digests.

    Raises:
      ValueError: the file is too short, or the index of a chunk is wrong.
      OSError: it can't be read.
    """
    longest = max(REST_BYTES, *(size for chunk in chunks for _, size in _parts(chunk)))
    with DirectReader(path, longest=longest) as file:
        return scan_opened(file, path, chunks, visit, pace)


class Opened(Protocol):
    """A file that is read once, from its start to its end."""

    size_bytes: int

    @property
    def position(self) -> int: ...

    def take(self, num_bytes: int) -> np.ndarray: ...


def scan_opened(
    file: Opened,
    path: RunPath,
    chunks: Sequence[Chunk],
    visit: Callable[[Chunk, Box, np.ndarray], None],
    pace: Throttle,
) -> FileInfo:
    """Reads a data file as `scan` does, from a reader that is at its start."""
    checksum = xxhash.xxh3_128()

    def read(num_bytes: int) -> np.ndarray:
        part = file.take(num_bytes)
        checksum.update(part.data)
        pace.spend(num_bytes)
        return part

    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        _read_rest(read, chunk.offset - file.position)
        for box, size_bytes in _parts(chunk):
            with pace.piece():
                items = read(size_bytes).view(dtype_named(chunk.info.dtype))
                visit(chunk, box, items.reshape([stop - start for start, stop in box]))
        if read(INDEX_BYTES).tobytes() != chunk.index:
            raise ValueError(f"{path}: the index of a chunk of {chunk.path} is wrong")
    with pace.piece():
        _read_rest(read, file.size_bytes - file.position)
    return FileInfo(file.size_bytes, checksum.hexdigest())


def _read_rest(read: Callable[[int], np.ndarray], num_bytes: int) -> None:
    """Reads bytes that belong to no chunk."""
    while num_bytes > 0:
        num_bytes -= len(read(min(REST_BYTES, num_bytes)))


def _parts(chunk: Chunk) -> Iterator[tuple[Box, int]]:
    """Yields the boxes of items that are read one after the other, with their sizes in bytes."""
    if not chunk.box:
        yield chunk.box, chunk.size_bytes
        return
    (first, last), *others = chunk.box
    row_bytes = chunk.size_bytes // (last - first)
    block_rows = chunk.info.block[0]
    rows = block_rows * max(1, PART_BYTES // (block_rows * row_bytes))
    for start in range(first, last, rows):
        stop = min(start + rows, last)
        yield ((start, stop), *others), (stop - start) * row_bytes


def fill(part: np.ndarray, file: io.FileIO) -> None:
    """Fills an array of bytes from an unbuffered file; ValueError: the file ends before."""
    filled = 0
    while filled < len(part):
        count = file.readinto(part[filled:].data)
        if not count:
            raise ValueError(f"{file.name} ends after {file.tell()} bytes")
        filled += count
