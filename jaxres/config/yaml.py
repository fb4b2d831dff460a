"""Reads and writes YAML 1.2, refuses duplicate keys, and keeps the line of every key.

PyYAML alone reads 3e-4 as text, 010 as 8, 12:30 as 750, `no` as false, and keeps the last of two
equal keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.composer import Composer

from jaxres.config.errors import Problem, shorten

Where = Callable[[int], str]
"""Returns the location of a line (counted from 0) for messages."""

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"^(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_NOT_WHOLE = "contains a character that is not allowed (NUL or an unpaired surrogate)"
_HIDDEN_LINE_END = re.compile("[\x85\u2028\u2029]|\r(?!\n)")
"""Characters that end a line, and so a comment, for libyaml, and that few editors show as one."""
_YAML_1_1 = yaml.resolver.Resolver()


@dataclass(frozen=True)
class Node:
    """A value and its location; the value of a mapping is a dict of nodes."""

    value: Any
    where: str


class _Loader(Composer, yaml.CSafeLoader):
    """Follows the rules of this module and keeps line numbers; libyaml gives the events."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's name and type)

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuses aliases, so that each value has one location and a small file stays small."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            mark = None if event is None else event.start_mark
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not supported", problem_mark=mark
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes block style; quotes text that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Writes an object that is there twice twice, because `parse` refuses aliases."""
        return True


for _name, _pattern, _first in (
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", _NULL, ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, list(_first))

_SIGNS = frozenset("*&%@`!")
"""Signs that YAML gives a meaning at the beginning of a text, such as a pattern of files."""


def parse(text: str, where: Where) -> tuple[Node | None, list[Problem]]:
    """Reads one YAML document; returns None if it is empty or can't be read, and the problems."""
    if end := _HIDDEN_LINE_END.search(text):
        what = f"has U+{ord(end[0]):04X}, which ends a line in YAML and is not shown as one"
        problem = f"{what}; delete it, or write it as an escape in double quotes"
        return None, [Problem("", problem, where(text.count("\n", 0, end.start())))]
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        problems: list[Problem] = []
        return (None if root is None else _node(root, (), where, problems)), problems
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        found = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        near = text[max(0, mark.index - 1) : mark.index + 1] if mark else ""
        hint = "; a text that begins with * & % @ ` or ! needs quotes" if {*near} & _SIGNS else ""
        problem = Problem("", f"not valid YAML: {found}{hint}", where(mark.line if mark else 0))
        return None, [problem]
    except UnicodeEncodeError as error:  # libyaml reads UTF-8, which has no half of a pair.
        return None, [Problem("", _NOT_WHOLE, where(text.count("\n", 0, error.start)))]
    except RecursionError:
        return None, [Problem("", "is nested too deeply", where(0))]
    finally:
        if loader is not None:
            loader.dispose()


def dump(data: dict[str, Any]) -> str:
    """Writes plain data as YAML that `parse` reads back to the same values."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def _node(node: yaml.Node, path: tuple[str, ...], where: Where, problems: list[Problem]) -> Node:
    """Converts a parsed node; a mapping's value becomes a dict of nodes, all others are plain."""
    location = where(node.start_mark.line)
    if not isinstance(node, yaml.ScalarNode) and node.tag not in (_TAG + "map", _TAG + "seq"):
        problems.append(Problem(".".join(path), f"the tag {node.tag} is not supported", location))
        return Node(None, location)
    if isinstance(node, yaml.MappingNode):
        return Node(_mapping(node, path, where, problems), location)
    if isinstance(node, yaml.SequenceNode):
        return Node([plain(_node(n, path, where, problems)) for n in node.value], location)
    assert isinstance(node, yaml.ScalarNode)
    try:
        return Node(_scalar(node), location)
    except ValueError as error:
        problems.append(Problem(".".join(path), str(error), location))
        return Node(None, location)


def _mapping(
    node: yaml.MappingNode, path: tuple[str, ...], where: Where, problems: list[Problem]
) -> dict[str, Node]:
    children: dict[str, Node] = {}
    for key_node, value_node in node.value:
        location = where(key_node.start_mark.line)
        if key_node.tag != _TAG + "str":
            shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or section"
            text = f"a key must be text (got {shorten(shown)}); put it in quotes"
            problems.append(Problem(".".join(path), text, location))
            continue
        key = key_node.value
        if key in children:
            text = f"given twice (first at {children[key].where})"
            problems.append(Problem(".".join((*path, key)), text, location))
        value = _node(value_node, (*path, key), where, problems)
        children[key] = Node(value.value, location)
    return children


def _scalar(node: yaml.ScalarNode) -> Any:
    """Returns the value of a scalar; raises ValueError if it is invalid."""
    kind, text = node.tag.removeprefix(_TAG), node.value
    if kind == "str":
        if not is_whole(text):
            raise ValueError(_NOT_WHOLE)
        return text
    if kind == "int" and _INT.match(text):
        if len(text) > 1000:
            raise ValueError("is a number of more than 1000 digits")
        return int(text, 0)
    if kind == "float" and (_FLOAT.match(text) or _INT.match(text)):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if kind == "bool" and _BOOL.match(text):
        return text.lower() == "true"
    if kind == "null" and _NULL.match(text):
        return None
    raise ValueError(f"the tag {node.tag} is not supported with {shorten(text)!r}")


def is_whole(text: str) -> bool:
    """Returns whether the text holds neither NUL nor half of a surrogate pair."""
    return not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text)


def plain(node: Node) -> Any:
    """Returns the values of a node without their locations."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    return node.value


def is_plain_text(text: str) -> bool:
    """Returns whether the text, unquoted, is read as text both by YAML 1.1 and 1.2.

    PyYAML does not know that y and n are true and false in YAML 1.1, as kubectl reads them.
    """
    if text in ("y", "Y", "n", "N"):
        return False
    ours = any(p.match(text) for p in (_INT, _FLOAT, _BOOL, _NULL))
    theirs = _YAML_1_1.resolve(yaml.ScalarNode, text, (True, False))
    return not ours and theirs == _TAG + "str"


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if is_plain_text(text) else "'"
    if any(end in text for end in "\x85\u2028\u2029"):  # Line ends of YAML 1.1: as escapes.
        style = '"'
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)
