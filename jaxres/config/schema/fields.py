"""Describes each key of the schema: a section, a choice of sections by `kind`, or a value."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from jaxres.config.schema import field_docs
from jaxres.config.schema.run_config import RunConfig, Section
from jaxres.storage.path import GcsPath

ITEMS = "[]"
"""Suffix of a key that means the items of its list."""


@dataclass(frozen=True)
class FieldSpec:
    """What the schema accepts at one key."""

    sections: tuple[type[Section], ...] = ()
    """The section, or the sections that `kind` selects from; empty for a value."""
    default_kind: str | None = None
    """The kind if none is given."""
    is_open: bool = False
    """Whether any keys are accepted below, as in `args`."""
    types: tuple[Any, ...] = ()
    """The plain types of a value, without constraints."""
    by_kind: bool = False
    """Whether `kind` selects one of the sections."""
    is_list: bool = False
    """Whether the key takes a list of the sections."""
    may_be_null: bool = False
    """Whether the section can be null, which turns off what it describes."""

    @property
    def is_text(self) -> bool:
        """Whether the value is text or a path (or null)."""
        plain = {t for t in self.types if t is not type(None)}
        return bool(plain) and plain <= {str, Path, GcsPath}

    def section(self, kind: Any) -> type[Section] | None:
        """Returns the section of this kind; None for an unknown kind or a plain value."""
        if not self.by_kind:
            return self.sections[0] if self.sections else None
        wanted = self.default_kind if kind is None else kind
        return next((s for s in self.sections if kind_of(s) == wanted), None)

    def child(self, key: str) -> FieldSpec | None:
        """Returns the description of a key in any of these sections; None for an unknown key."""
        return _child(self.sections, key)


@functools.lru_cache(4096)
def _child(sections: tuple[type[Section], ...], key: str) -> FieldSpec | None:
    infos = [s.model_fields[key] for s in sections if key in s.model_fields]
    return slot_of(infos[0]) if infos else None


def kind_of(section: type[Section]) -> str:
    """Returns the `kind` of a section that has one."""
    return typing.get_args(section.model_fields["kind"].annotation)[0]


def kinds(slot: FieldSpec) -> tuple[str, ...]:
    """Returns the kinds that can be selected."""
    return tuple(kind_of(s) for s in slot.sections) if slot.by_kind else ()


def is_free(info: FieldInfo) -> bool:
    """Returns whether the field was declared with `free()`."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and extra.get("free") is True


def is_later(info: FieldInfo) -> bool:
    """Returns whether the field was declared with `later()`."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and extra.get("later") is True


def is_content_path(info: FieldInfo) -> bool:
    """Returns whether the field was declared with `content_path()`."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and extra.get("content_path") is True


def slot_of(info: FieldInfo) -> FieldSpec:
    """Returns the description of a field."""
    plain = tuple(_plain_types(info.annotation))
    items = _sections_of_list(plain)
    if items:
        by_kind = all("kind" in section.model_fields for section in items)
        return FieldSpec(sections=items, by_kind=by_kind, is_list=True)
    sections = tuple(t for t in plain if isinstance(t, type) and issubclass(t, Section))
    if not sections:
        is_open = any(typing.get_origin(t) is dict for t in plain)
        return FieldSpec(is_open=is_open, types=plain)
    default = info.default
    kind = getattr(default, "kind", None) if isinstance(default, Section) else None
    return FieldSpec(
        sections=sections,
        default_kind=kind,
        by_kind=info.discriminator == "kind",
        may_be_null=type(None) in plain,
    )


def _sections_of_list(plain: tuple[Any, ...]) -> tuple[type[Section], ...]:
    lists = [t for t in plain if typing.get_origin(t) is tuple]
    inner = [t for each in lists for t in _plain_types(typing.get_args(each)[0])]
    return tuple(t for t in inner if isinstance(t, type) and issubclass(t, Section))


def _plain_types(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _plain_types(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _plain_types(part)
    else:
        yield annotation


ROOT = FieldSpec(sections=(RunConfig,))


@dataclass(frozen=True)
class LeafField:
    """One value that can be set: its dotted key and field, and the kinds under which it exists."""

    key: str
    info: FieldInfo
    section: type[Section]
    under: tuple[tuple[str, str], ...] = ()
    """Pairs (dotted key of the section, its kind), outermost first."""

    @property
    def docstring(self) -> str:
        """What the value means; empty: its field has no docstring."""
        name = self.key.rpartition(".")[2].removesuffix(ITEMS)
        return field_docs.of_section(self.section).get(name, "")


@functools.cache
def iter_fields() -> tuple[LeafField, ...]:
    """Returns every value of every kind, in schema order; a `kind` with a choice is left out.

    The keys of a data source in a list are left out too: they are those of data.source.
    """
    leaves = _leaves(ROOT, (), ())
    return tuple(leaf for leaf in leaves if f"{ITEMS}.source." not in leaf.key)


def _leaves(
    slot: FieldSpec, path: tuple[str, ...], under: tuple[tuple[str, str], ...]
) -> Iterator[LeafField]:
    for section in slot.sections:
        below = (*under, (".".join(path), kind_of(section))) if slot.by_kind else under
        for key, info in section.model_fields.items():
            child = slot_of(info)
            if child.is_list:
                yield LeafField(".".join((*path, key)), info, section, below)
                yield from _leaves(child, (*path, key + ITEMS), below)
            elif child.sections:
                yield from _leaves(child, (*path, key), below)
            elif key != "kind" or not slot.by_kind:
                yield LeafField(".".join((*path, key)), info, section, below)
