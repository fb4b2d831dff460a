"""Desired states for tests, changed by the keys of the object in the bucket."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.state_object import KEYS

PATHS = {key: path for path, key in KEYS.items()}


def changed(desired: DesiredState, **values: Any) -> DesiredState:
    """Returns the state with other values, each by its key: `changed(desired, hosts=())`."""
    for key, value in values.items():
        desired = _with(desired, PATHS.get(key, (key,)), value)
    return desired


def _with(record: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *rest = path
    new = _with(getattr(record, name), tuple(rest), value) if rest else value
    return replace(record, **{name: new})


def value_of(desired: DesiredState, key: str) -> Any:
    """Returns the value that a key of the object has."""
    return functools.reduce(getattr, PATHS.get(key, (key,)), desired)
