"""Encodes the index of a database of TensorStore (OCDBT) whose values lie in data files. No jax.

Such a database is a folder with data files, a file with the index, which is one leaf node of a
B+tree, and a manifest, which says where that node is. TensorStore reads it as one of its own.

Source: https://google.github.io/tensorstore/kvstore/ocdbt/index.html, "Storage format".
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DATA_FILE, INDEX_FILE, MANIFEST_FILE = "d/values", "d/index", "manifest.ocdbt"
"""Names of the files of a database, in its folder."""
MAX_INLINE_BYTES = 1024
"""Largest value that is inside the index. As in Orbax's databases."""
MAX_NODE_BYTES = 100_000_000
"""Largest node of the B+tree. As in Orbax's databases."""
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_VERSIONS_PER_NODE_LOG2 = 4
_INLINE, _IN_DATA_FILE = 0, 1


@dataclass(frozen=True)
class ValuePlace:
    """Place of a value in a data file, in bytes."""

    offset: int
    size: int
    file: str = DATA_FILE
    """Name of the data file in the database's folder."""


def write_index(database: Path, values: Mapping[str, bytes | ValuePlace]) -> None:
    """Writes index and manifest of a database whose data file exists; both are not yet durable.

    Args:
      database: its folder.
      values: key -> the value, or its place in the data file; at least one.
    """
    for name, content in encode_index(values).items():
        (database / name).write_bytes(content)


def encode_index(values: Mapping[str, bytes | ValuePlace]) -> dict[str, bytes]:
    """Returns name -> content of the index and the manifest of a database."""
    node = encode_node(values)
    return {INDEX_FILE: node, MANIFEST_FILE: _encode_manifest(node, values)}


def encode_node(values: Mapping[str, bytes | ValuePlace]) -> bytes:
    """Returns a leaf node of the B+tree: all keys, with their values or places."""
    keys = sorted(key.encode() for key in values)
    found = [values[key.decode()] for key in keys]
    places = [value for value in found if isinstance(value, ValuePlace)]
    names = sorted({place.file for place in places})
    numbers = {name: number for number, name in enumerate(names)}
    body = [
        b"\0",  # Height of the node.
        _files(names),
        _varints([len(keys)]),
        _keys(keys),
        _varints(v.size if isinstance(v, ValuePlace) else len(v) for v in found),
        bytes(_IN_DATA_FILE if isinstance(v, ValuePlace) else _INLINE for v in found),
        _varints(numbers[place.file] for place in places),
        _varints(place.offset for place in places),
        *(value for value in found if isinstance(value, bytes)),
    ]
    return _framed(_NODE_MAGIC, b"".join(body))


def _encode_manifest(node: bytes, values: Mapping[str, bytes | ValuePlace]) -> bytes:
    """Returns a manifest with one version, whose index is a node in a file of its own."""
    in_data_file = sum(v.size for v in values.values() if isinstance(v, ValuePlace))
    body = [
        os.urandom(16),  # The name of the database.
        b"\0",  # All versions are in this file.
        _varints([MAX_INLINE_BYTES, MAX_NODE_BYTES]),
        bytes([_VERSIONS_PER_NODE_LOG2, 1]) + struct.pack("<i", 0),  # Zstandard, level 0.
        _files([INDEX_FILE]),
        _varints([1, 1]),  # One version, the first.
        b"\0",  # Height of the node.
        _varints([0, 0, len(node)]),  # Number of the file, offset, size.
        _varints([len(values), len(node), in_data_file]),
        struct.pack("<Q", 0),  # Time of the version, which nothing reads.
        _varints([0]),  # No older versions.
    ]
    return _framed(_MANIFEST_MAGIC, b"".join(body))


def _framed(magic: int, body: bytes) -> bytes:
    """Returns an uncompressed node or manifest; the database's default does not matter."""
    size = 4 + 8 + 2 + len(body) + 4
    data = struct.pack(">I", magic) + struct.pack("<Q", size) + b"\0\0" + body
    return data + struct.pack("<I", crc32c(data))


def _files(names: Sequence[str]) -> bytes:
    """Returns a table of sorted data files, which are found below the database's folder."""
    no_base = [0 for _ in names]
    return _varints([len(names)]) + _keys([name.encode() for name in names], no_base)


def _keys(keys: Sequence[bytes], lengths: Sequence[int] = ()) -> bytes:
    """Returns sorted keys, each without the prefix that it shares with the key before.

    Further numbers, one for each key, follow the lengths.
    """
    common = [_common_length(one, other) for one, other in itertools.pairwise(keys)]
    suffixes = [key[n:] for key, n in zip(keys, [0, *common], strict=True)] if keys else []
    return _varints([*common, *map(len, suffixes), *lengths]) + b"".join(suffixes)


def _common_length(one: bytes, other: bytes) -> int:
    differs = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


def _varints(numbers: Iterable[int]) -> bytes:
    """Returns numbers as LEB128.

    >>> _varints([1, 300]).hex()
    '01ac02'
    """
    encoded = bytearray()
    for number in numbers:
        while number > 0x7F:
            encoded.append(number & 0x7F | 0x80)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


def _crc32c_table() -> tuple[int, ...]:
    table = list[int]()
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
        table.append(crc)
    return tuple(table)


_CRC32C = _crc32c_table()


def crc32c(data: bytes) -> int:
    """Returns the CRC32C of some bytes, at about 10 MB/s (RFC 3720, appendix B.4).

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC32C[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
