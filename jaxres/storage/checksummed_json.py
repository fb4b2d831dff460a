"""Canonical JSON, and JSON objects with a digest of their other fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from jaxres.storage.codec import require_format

DIGEST = "digest"


def canonical_json(value: Any) -> bytes:
    """Returns the canonical JSON text of a value: sorted keys, no spaces, finite numbers."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def encode_checksummed(fields: Mapping[str, Any]) -> bytes:
    """Returns an object as canonical JSON with the digest of its fields: xxh3-128, in hex."""
    return canonical_json({**fields, DIGEST: digest_of(fields)})


def decode_checksummed(data: bytes, *, number: int) -> dict[str, Any]:
    """Returns the fields of an object with the given format number.

    Raises:
      OtherFormat: the object has another format, and its digest is not wrong.
      ValueError: the data is not an object, or its digest is missing or wrong.
    """
    try:
        fields = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    digest = fields.pop(DIGEST, None)
    if digest is not None and digest != digest_of(fields):
        raise ValueError("its digest does not match its fields")
    require_format(fields, number=number)
    if digest is None:
        raise ValueError("it has no digest")
    return fields


def digest_of(fields: Mapping[str, Any]) -> str:
    """Returns xxh3-128 of the canonical JSON of an object."""
    return xxhash.xxh3_128_hexdigest(canonical_json(fields))
