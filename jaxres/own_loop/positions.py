"""Positions in the data: JSON, or the state of an object with `get_state` and `set_state`."""

from __future__ import annotations

import base64
import copy
from typing import Any

from jaxres.faults import ConfigError
from jaxres.own_loop.trees import require_json

BYTES = "jaxres.bytes"
"""Key of a state of bytes (as of grain's DataLoader), which JSON has not, in base64."""


def position_of(position: Any) -> Any:
    """Returns a copy of a position as JSON, which does not follow it any more.

    Raises:
      ConfigError: it is no JSON; the message names where.
    """
    value = position
    if _is_iterator(position):
        value = position.get_state()
        if isinstance(value, bytes):
            return {BYTES: base64.b64encode(value).decode()}
    require_json(value)
    return copy.deepcopy(value)


def set_position(position: Any, saved: Any) -> Any:
    """Sets an object to a saved position and returns it; returns a saved position of JSON."""
    if not _is_iterator(position):
        return saved
    if saved is None:
        raise ConfigError(
            "position: the step was saved without one, so the data would begin again. Give "
            "attempt.finished the object of attempt.restore_or too."
        )
    is_bytes = isinstance(saved, dict) and saved.keys() == {BYTES}
    position.set_state(base64.b64decode(saved[BYTES]) if is_bytes else saved)
    return position


def _is_iterator(position: Any) -> bool:
    return hasattr(position, "get_state") and hasattr(position, "set_state")
