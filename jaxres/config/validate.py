"""Validates plain data against the schema; problems are worded for the user of the config."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jaxres.config import other_names
from jaxres.config.errors import Problem, did_you_mean, show, show_limit
from jaxres.config.schema.alerts import NOT_A_NAME
from jaxres.config.schema.base import OTHER_FORM
from jaxres.config.schema.fields import ROOT, FieldSpec, LeafField, iter_fields, kind_of, kinds
from jaxres.config.schema.run_config import RunConfig

_MUST_BE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text (in quotes, where it looks like something else)",
    "path_type": "a path (in quotes, where it looks like something else)",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a section of free keys",
    "model_type": "a section",
    "model_attributes_type": "a section",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def validate(data: dict[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """Returns the configuration, or None, and all problems of the data."""
    problems = [
        Problem(key, f"must be a finite number (got {value})")
        for key, value in _not_finite(data, "")
        if ".args." in key  # The values in `args` have no schema.
    ]
    try:
        # JSON: in this form pydantic's strict mode accepts lists for tuples and text for paths.
        config = RunConfig.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        return None, problems + [_explain(details, data) for details in error.errors()]
    return (None if problems else config), problems


def _not_finite(value: Any, key: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield key, value
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from _not_finite(child, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _not_finite(child, f"{key}[{index}]")


def _explain(details: ErrorDetails, data: dict[str, Any]) -> Problem:
    """Converts one of pydantic's errors to a problem with the key as the user writes it."""
    key, slot, kind = _locate(details["loc"], data)
    what, context, given = details["type"], details.get("ctx", {}), details["input"]
    # The value may be a secret that was put here by mistake, so it is not shown.
    got = "" if key.startswith("alerts.targets") else f" (got {show(given)})"
    if what == "extra_forbidden":
        return Problem(key, _unknown_key(key, slot, kind))
    if what == "missing":
        return Problem(key, f"missing; give it in the file or as {key}=...")
    if what in ("union_tag_not_found", "union_tag_invalid"):
        allowed = kinds(slot)
        choices = _one_of(allowed)
        if what == "union_tag_not_found":
            text = f"missing; choose {choices} in the file or as {key}.kind=..."
            return Problem(f"{key}.kind", text)
        tag = given["kind"] if isinstance(given, dict) else given
        return Problem(
            f"{key}.kind", f"must be {choices} (got {show(tag)}){did_you_mean(str(tag), allowed)}"
        )
    if what == NOT_A_NAME:
        return Problem(key, details["msg"])
    if what == OTHER_FORM:
        return Problem(key, f"{details['msg']}{got}")
    if what in _BOUNDS:
        relation, name = _BOUNDS[what]
        return Problem(key, f"must be {relation} {show_limit(context[name])}{got}")
    if what == "string_type" and Path in (slot.child(key.rpartition(".")[2]) or slot).types:
        what = "path_type"
    if what in _MUST_BE:
        return Problem(key, f"must be {_MUST_BE[what]}{got}")
    if what == "literal_error":
        expected = context["expected"].replace("'", "")
        expected = expected.replace("True", "true").replace("False", "false")  # As YAML has them.
        near = did_you_mean(str(given), expected.split(" "))
        return Problem(key, f"must be {expected}{got}{near}")
    return Problem(key, f"{details['msg'][0].lower()}{details['msg'][1:]}{got}")


def _one_of(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _locate(loc: tuple[int | str, ...], data: Any) -> tuple[str, FieldSpec, str | None]:
    """Returns the dotted key of pydantic's location, the slot of its innermost section, its kind.

    pydantic's location includes the kind (`optimizer`, `adamw`, `b1`); the user's key does not.
    """
    key, slot, kind = "", ROOT, None
    rest = list(loc)
    while rest:
        part = rest.pop(0)
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else part
        if isinstance(part, int) and slot.is_list and isinstance(data, list):
            data, kind = data[part], str(rest.pop(0)) if rest and slot.by_kind else None
            continue
        data = data.get(part) if isinstance(data, dict) else None
        child = slot.child(str(part)) if slot.sections else None
        if child is None or not child.sections:
            continue
        slot, kind = child, None
        if slot.by_kind and rest and not slot.is_list:
            kind = str(rest.pop(0))
    return key, slot, kind


def _unknown_key(key: str, slot: FieldSpec, kind: str | None) -> str:
    """Returns the message on an unknown key, with the key that was probably meant."""
    parent, _, name = key.rpartition(".")
    section = slot.section(kind)
    known = list(section.model_fields) if section else []
    others = [kind_of(s) for s in slot.sections if s is not section and name in s.model_fields]
    if others:
        return f"unknown key for kind {kind}; {_one_of(tuple(others))} has it ({_keys(known)})"
    if other := other_names.hint(name):
        return f"unknown key{other} ({_keys(known)})"
    leaves = [leaf for leaf in iter_fields() if leaf.key.rpartition(".")[0] != parent]
    here, elsewhere = did_you_mean(name, known), _similar_keys(name, leaves)
    # Likelier than a similar name in this section is only the same name in another one.
    if elsewhere and (not here or elsewhere[0].rpartition(".")[2] == name):
        here = f"; did you mean {_one_of(elsewhere)}?"
    return f"unknown key{here} ({_keys(known)})"


def _similar_keys(name: str, known: list[LeafField]) -> tuple[str, ...]:
    """Returns the dotted keys of other sections whose last part is the name, or similar to it."""
    last = {leaf.key: leaf.key.rpartition(".")[2] for leaf in known}
    near = difflib.get_close_matches(name, set(last.values()), n=1, cutoff=0.75)
    nearest = name if name in last.values() else near[0] if near else None
    return tuple(key for key, end in last.items() if end == nearest)[:3]


def _keys(known: list[str]) -> str:
    return f"keys here: {', '.join(known)}"
