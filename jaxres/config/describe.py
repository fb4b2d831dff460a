"""Renders the settings as the text of --help, and a configuration as YAML."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from jaxres import secret_values
from jaxres.config import yaml
from jaxres.config.errors import show, show_limit
from jaxres.config.load import SECTION, SHORTHANDS
from jaxres.config.schema import field_docs
from jaxres.config.schema.fields import (
    ITEMS,
    ROOT,
    FieldSpec,
    LeafField,
    is_free,
    iter_fields,
    kinds,
)
from jaxres.config.schema.program import without_trainer_keys
from jaxres.config.schema.run_config import RunConfig, Section

_NAMES = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "Path": "path",
    "GcsPath": "gs:// path",
    "NoneType": "null",
}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
HEAD = """\
Settings, given in the file as sections or on the command line as section.field=value.
Those marked (free) may change whenever a run is restarted; all others belong to its trajectory.
"""


def describe() -> str:
    """Returns every setting with its type, default, meaning, and whether it is free."""
    lines = [HEAD]
    last: tuple[str, ...] | None = None
    for leaf in _ordered():
        heading = (_top(leaf), *(f"{key}.kind={kind}" for key, kind in leaf.under))
        if heading != last:
            lines += list(_heading(leaf, last))
            last = heading
        lines.append(_line(leaf))
    return "\n".join(lines) + "\n"


def _top(leaf: LeafField) -> str:
    """Returns the top-level section of a setting."""
    return leaf.key.split(".")[0].removesuffix(ITEMS)


def _ordered() -> Iterator[LeafField]:
    """Yields each setting once, also where its section exists under several outer kinds."""
    seen: set[tuple[str, Any]] = set()
    tops = list(RunConfig.model_fields)

    def position(leaf: LeafField) -> tuple[int, bool, int]:
        return tops.index(_top(leaf)), bool(leaf.under), leaf.key.count(".")

    for leaf in sorted(iter_fields(), key=position):
        innermost = leaf.under[-1:] if leaf.under else ()
        if (leaf.key, innermost) in seen:
            continue
        seen.add((leaf.key, innermost))
        yield LeafField(leaf.key, leaf.info, leaf.section, innermost)


def _heading(leaf: LeafField, last: tuple[str, ...] | None) -> Iterator[str]:
    top = _top(leaf)
    if last is None or last[0] != top:
        yield f"{top}: {field_docs.of_section(RunConfig)[top]}"
    for key, kind in leaf.under:
        yield f"  with {key}.kind={kind}{_choice(key, kind)}:"


def _choice(key: str, kind: str) -> str:
    slot: FieldSpec | None = ROOT
    for part in key.split("."):
        slot = slot.child(part.removesuffix(ITEMS)) if slot else None
    assert slot is not None
    others = [name for name in kinds(slot) if name != kind]
    default = " (default)" if kind == slot.default_kind else ""
    return f"{default}; or {', '.join(others)}" if others else default


def _line(leaf: LeafField) -> str:
    info = leaf.info
    default = "required" if info.is_required() else f"default {_default(info)}"
    mark = " (free)" if is_free(info) else ""
    meaning = [line for line in leaf.docstring.splitlines() if line.strip()]
    first = f"    {leaf.key}: {_type(info.annotation, info.metadata)}; {default}{mark}"
    return "\n".join([first, *(f"        {line.strip()}" for line in meaning)])


def _default(info: FieldInfo) -> str:
    value = info.default
    plain = value if isinstance(value, int | float | str | None | dict) else None
    if plain is None and value is not None:
        plain = list(value) if isinstance(value, tuple) else str(value)
    return show(plain)


def _type(annotation: Any, metadata: typing.Sequence[Any] = ()) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        extra = [m for item in parts[1:] for m in getattr(item, "metadata", [item])]
        return _type(parts[0], [*metadata, *extra])
    if origin is typing.Literal:
        return " | ".join(str(part) for part in parts)
    if origin is tuple:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return "section of free keys"
    if parts:
        return " or ".join(dict.fromkeys(_type(part) for part in parts))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        names = [] if "kind" in annotation.model_fields else list(annotation.model_fields)
        return "{kind: ...}" if not names else f"{{{': ..., '.join(names)}: ...}}"
    bounds = [
        f"{sign} {show_limit(getattr(item, name))}"
        for item in metadata
        for name, sign in _SIGNS.items()
        if getattr(item, name, None) is not None
    ]
    name = _NAMES.get(annotation.__name__, annotation.__name__)
    return f"{name} {' and '.join(bounds)}".strip()


def dump_yaml(config: RunConfig) -> str:
    """Returns the resolved config as YAML that reloads to an equal config, except for run.dir.

    run.dir is left out because a run directory may be moved. Shorthand keys are left out because
    a loaded config has none.
    """
    data = config.model_dump(mode="json")
    data["run"].pop("dir")
    for short in SHORTHANDS:
        data[SECTION].pop(short)
    if config.program is not None:
        data = without_trainer_keys(data)
    return yaml.dump(_kind_first(data))


def file_mode(text: str) -> int:
    """Returns the permissions, less the umask, of a file with this config (`dump_yaml`).

    Only its owner may read one with a secret, or with arguments of custom data or the environment
    of a program, which may be one that is not known as such. Others stay readable: hosts may run as
    different users.
    """
    node, problems = yaml.parse(text, lambda _: "")
    if node is None or problems or secret_values.contains(found := yaml.plain(node)):
        return secret_values.PRIVATE
    sections = found if isinstance(found, dict) else {}
    is_private = _has_args(sections.get("data", {})) or (sections.get("program") or {}).get("env")
    return secret_values.PRIVATE if is_private else 0o666


def _has_args(data: Any) -> bool:
    """Returns whether a part of the section `data` has arguments."""
    if isinstance(data, list):
        return any(map(_has_args, data))
    return isinstance(data, dict) and (bool(data.get("args")) or any(map(_has_args, data.values())))


def _kind_first(data: dict[str, Any]) -> dict[str, Any]:
    ordered = {key: data[key] for key in ("kind",) if key in data} | data
    return {k: _kind_first(v) if isinstance(v, dict) else v for k, v in ordered.items()}
