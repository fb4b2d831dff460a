"""Reads the history rows of W&B's offline files, which its package only writes and syncs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES, BLOCK_BYTES, RECORD_HEADER_BYTES = 7, 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
"""Types of a record's parts. (LevelDB's log format, which the file has after its header)"""


def rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of one .wandb file."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append(
                {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            )
    return found


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = HEADER_BYTES, b""
    while at + RECORD_HEADER_BYTES <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < RECORD_HEADER_BYTES:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + RECORD_HEADER_BYTES])
        at += RECORD_HEADER_BYTES
        part, at = data[at : at + size], at + size
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts
