"""Reads JSON of other programs; an object that has a key twice is refused.

Python keeps the last value of such a key, other readers the first: which is meant is not known.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def loads(data: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
      ValueError: it is not JSON, or an object in it has a key twice.
    """
    return json.loads(data, object_pairs_hook=_once_each)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    item = dict(pairs)
    if len(item) != len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} occurs twice in one object: which is meant is not known")
    return item
