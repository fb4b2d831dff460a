"""Converts dataclasses to JSON objects and back.

The field names of a dataclass are the keys of its object. If an object may be of one of several
classes, it also has a tag, which a `TaggedCodec` assigns to each class. Class names are not part of
any format, so that renaming a class needs no new format number.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
FORMAT = "format"
FIRST_RELEASE = "0.1.0"
"""The first version of jaxres whose formats can be read."""
_SCALARS: Mapping[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
}
"""Type of a field -> types that its value may have; bool is not accepted as int."""


class OtherFormat(ValueError):
    """The data has a format that this version does not read."""


def require_format(fields: Mapping[str, Any], *, number: int, older: int | None = None) -> None:
    """Checks the format number of a parsed object; an object without one has format 1.

    `older` is another number that is read as well.

    Raises:
      OtherFormat: the number differs; the message names the version that wrote the data.
    """
    written = fields.get(FORMAT, 1)
    if type(written) is int and written in (number, older):
        return
    is_newer = isinstance(written, int) and written > number
    writer = "a newer version of jaxres" if is_newer else f"a jaxres before {FIRST_RELEASE}"
    remedy = "use that version" if is_newer else "use that version, or start a new run"
    read = number if older is None else f"{older} or {number}"
    raise OtherFormat(
        f"it has format {written!r:.20}, written by {writer}; this version reads format {read} "
        f"only: {remedy}"
    )


class TaggedCodec(Generic[T]):
    """Encodes and decodes the classes of a union, each under its own tag."""

    def __init__(self, key: str, kinds: Mapping[str, type[T]]) -> None:
        """Takes the name of the field that holds the tag, and the class of every tag."""
        self.key = key
        self.kinds = kinds
        self._tags = {kind: tag for tag, kind in kinds.items()}

    def tag(self, kind: type[T]) -> str:
        """Returns the tag of a class."""
        return self._tags[kind]

    def encode(self, value: T, *, omit_defaults: bool = False) -> dict[str, Any]:
        """Returns the tag and the fields of a value."""
        return {self.key: self.tag(type(value))} | encode(value, omit_defaults=omit_defaults)

    def decode(self, fields: Mapping[str, Any], *, ignore_unknown: bool = False) -> T:
        """Returns the value of an encoded object: the inverse of `encode`.

        Args:
          fields: parsed JSON.
          ignore_unknown: see `codec.decode`.

        Raises:
          ValueError: the tag is missing or unknown, or the fields do not match its class.
        """
        tag = fields.get(self.key)
        if not isinstance(tag, str) or tag not in self.kinds:
            raise ValueError(f"unknown {self.key} {tag!r:.60}")
        rest = {name: value for name, value in fields.items() if name != self.key}
        return decode(self.kinds[tag], rest, ignore_unknown=ignore_unknown)


def encode(value: Any, *, omit_defaults: bool = False) -> dict[str, Any]:
    """Returns the fields of a dataclass, nested dataclasses as objects, enums as values.

    Args:
      value: a dataclass instance.
      omit_defaults: whether to leave out fields of `value` that are equal to their default.
    """
    fields = dataclasses.asdict(value, dict_factory=_plain)
    if omit_defaults:
        for field in dataclasses.fields(value):
            if fields[field.name] == field.default:
                del fields[field.name]
    return fields


def _plain(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    enums = enum.IntEnum, enum.StrEnum
    return {name: v.value if isinstance(v, enums) else v for name, v in fields}


def decode(kind: type[T], fields: Any, *, ignore_unknown: bool = False) -> T:
    """Returns the dataclass instance of an encoded object; lists become tuples.

    Args:
      kind: a dataclass.
      fields: parsed JSON, checked field by field.
      ignore_unknown: whether fields that `kind` does not have are skipped, at every level.

    Raises:
      ValueError: `fields` is not an object, has an unknown field, lacks one, or a value has a type
        that the field does not allow.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"not an object: {fields!r:.60}")
    given = cast(Mapping[str, Any], fields)
    hints = _hints(kind)
    unknown = sorted(given.keys() - hints.keys())
    if unknown and not ignore_unknown:
        raise ValueError(f"unknown field {unknown[0]!r:.60}")
    values = {
        name: _value(hint, given[name], name=name, ignore_unknown=ignore_unknown)
        for name, hint in hints.items()
        if name in given
    }
    missing = sorted(_required(kind) - values.keys())
    if missing:
        raise ValueError(f"field {missing[0]!r} is missing")
    return kind(**values)


def to_text(value: Any) -> str:
    """Returns a dataclass as JSON text: a message between processes."""
    return json.dumps(encode(value))


def from_text(kind: type[T], text: str) -> T:
    """Returns the dataclass instance of a JSON text: the inverse of `to_text`.

    Raises:
      ValueError: the text is no JSON object with the fields of `kind`.
    """
    return decode(kind, json.loads(text))


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Returns field name -> type; for `Pair[int]` with the type variables replaced."""
    origin = get_origin(kind) or kind
    filled: dict[Any, Any] = dict(
        zip(getattr(origin, "__parameters__", ()), get_args(kind), strict=True)
    )
    hints = get_type_hints(origin)

    def fill(hint: Any) -> Any:
        if parameters := getattr(hint, "__parameters__", ()):
            return hint[tuple(filled[parameter] for parameter in parameters)]
        return filled.get(hint, hint) if isinstance(hint, TypeVar) else hint

    return {field.name: fill(hints[field.name]) for field in dataclasses.fields(origin)}


@functools.cache
def _required(kind: type[Any]) -> frozenset[str]:
    absent = dataclasses.MISSING
    fields = dataclasses.fields(get_origin(kind) or kind)
    return frozenset(f.name for f in fields if f.default is absent and f.default_factory is absent)


def _value(hint: Any, value: Any, *, name: str, ignore_unknown: bool) -> Any:
    """Converts a parsed JSON value to the declared type of a field."""
    if type(value) in _SCALARS.get(hint, ()):  # Most fields, each step's message included.
        return value

    if hint is Any:
        return value

    def item(item_hint: Any, element: Any) -> Any:
        return _value(item_hint, element, name=name, ignore_unknown=ignore_unknown)

    origin, args, is_dataclass = _parts(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (only,) = (arg for arg in args if arg is not type(None))
        return item(only, value)
    if is_dataclass:
        return decode(cast(type[Any], hint), value, ignore_unknown=ignore_unknown)
    if origin in (tuple, Sequence) and isinstance(value, list | tuple):
        items = cast(Sequence[Any], value)
        if origin is Sequence or args[-1] is Ellipsis:
            return tuple(item(args[0], element) for element in items)
        if len(items) == len(args):
            return tuple(item(arg, element) for arg, element in zip(args, items, strict=True))
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        return {
            key: item(args[1], element) for key, element in cast(Mapping[str, Any], value).items()
        }
    elif _is_scalar(hint, value):
        return value
    elif isinstance(hint, type) and issubclass(hint, enum.StrEnum) and value in list(hint):
        return hint(value)
    raise ValueError(f"field {name!r} has the value {value!r:.60}")


@functools.cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Returns the origin and the arguments of a type, and whether it is a dataclass."""
    origin = get_origin(hint)
    return origin, get_args(hint), dataclasses.is_dataclass(origin or hint)


def _is_scalar(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    return type(value) in _SCALARS.get(hint, ())
