"""The one JSON text of a value, and JSON objects that carry the digest of all else in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

DIGEST = "digest"


def canonical_json(value: Any) -> bytes:
    """Returns the one JSON text of a value: sorted keys, no spaces, finite numbers."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def sealed(fields: Mapping[str, Any]) -> bytes:
    """Returns an object as canonical JSON with the digest of itself: xxh3-128, in hex."""
    return canonical_json({**fields, DIGEST: _digest(fields)})


def opened(data: bytes) -> tuple[dict[str, Any], bool]:
    """Reads an object back, and says whether it had a digest; the first versions wrote none.

    Raises:
      ValueError: it is none, or not the one that was sealed.
    """
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    digest = fields.pop(DIGEST, None)
    if digest is not None and digest != _digest(fields):
        raise ValueError("its digest is another one than that of its fields")
    return fields, digest is not None


def _digest(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json(fields))
