"""Loads a configuration: overlays bases, file and overrides, then checks the result as a whole.

A configuration has layers: the bases, the file, the command line. Later layers override earlier
ones. If a later layer chooses another `kind`, it replaces the section: adamw's learning rate must
not end up in sgd because both have a field of that name.

All problems are reported at once, each with its location, before a device is touched.

Shorthand keys (SHORTHANDS) are expanded in each layer before the layers are overlaid. So of a
shorthand in one layer and the full key in another the later layer wins. Recorded and compared
configurations have full keys only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxres import secret_values
from jaxres.config import builtin_configs, huggingface, programs
from jaxres.config.cross_checks import check
from jaxres.config.errors import Problem, did_you_mean, one_line, raise_all, shorten, show
from jaxres.config.removed_keys import without_removed
from jaxres.config.schema.checkpoint import CheckpointSection
from jaxres.config.schema.fields import ROOT, FieldSpec
from jaxres.config.schema.program import UNUSED_SECTIONS, trainer_keys
from jaxres.config.schema.run_config import RunConfig
from jaxres.config.validate import validate
from jaxres.config.yaml import Node, is_whole, parse, plain
from jaxres.faults import ConfigError, StorageRefused, UsageError
from jaxres.secret_values import redact_words
from jaxres.storage import files
from jaxres.storage.path import RunPath

COMMAND_LINE = "command line"


def read_file(
    path: RunPath, *, named_by: str = "", hint: str = "", is_given: bool = False
) -> tuple[Node, list[Problem]]:
    """Reads one file as a layer.

    Args:
      named_by: the line that names it as a base.
      hint: what may have been meant, if it is absent.
      is_given: on the command line, where it may be a shell's `<(COMMAND)`: a pipe.

    Raises:
      UsageError: it is absent and not named as a base.
      StorageUnavailable, StorageRefused: its storage fails or denies access.
    """
    try:
        if is_given and isinstance(path, Path) and path.is_fifo():
            text = path.read_text("utf-8-sig")
        else:
            text = files.read_whole(path).decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        kind = "is a folder, not a file" if isinstance(error, IsADirectoryError) else "no such file"
        if not named_by:
            raise UsageError(f"{path}: {kind}") from error
        return Node({}, str(path)), [Problem("base", f"{path}: {kind}{hint}", named_by)]
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and files.is_failure(error.errno or 0):
            files.raise_failure(error, path)
            raise StorageRefused(
                f"{path}: can't be read ({error.strerror}). Change its permissions."
            ) from error
        return Node({}, str(path)), [Problem("", f"can't be read: {error}", named_by or str(path))]
    node, problems = parse(text, lambda line: f"{path}:{line + 1}")
    if node is None or not isinstance(node.value, dict):
        if node is not None and node.value is not None:
            wrong = f"contains {_named(node.value)}; sections such as `train:` are expected"
            problems.append(Problem("", wrong, node.where))
        return Node({}, str(path)), problems
    return Node(node.value, str(path)), problems


def file_layers(path: Path) -> tuple[list[Node], list[Problem]]:
    """Returns the layers of a file: its bases in order, then the file itself."""
    layer, problems = read_file(path, is_given=True)
    base = layer.value.pop("base", None)
    layers = []
    for name in _base_names(base, problems):
        found = builtin_configs.find_base(name, path.parent)
        hint = did_you_mean(name, builtin_configs.base_names())
        below, wrong = read_file(found, named_by=base.where if base else "", hint=hint)
        problems += wrong
        again = below.value.pop("base", None)
        if again is not None:
            text = f"a base can't have a base itself; name both files in {path}"
            problems.append(Problem("base", text, again.where))
        layers.append(below)
    return [*layers, layer], problems


def _base_names(base: Node | None, problems: list[Problem]) -> list[str]:
    if base is None:
        return []
    names = base.value if isinstance(base.value, list) else [base.value]
    if all(isinstance(name, str) and name for name in names):
        return names
    got = show(plain(base))
    text = (
        f"must be a path relative to this file, a built-in config, or a list of these (got {got})"
    )
    problems.append(Problem("base", text, base.where))
    return []


def override_layer(overrides: Sequence[str]) -> tuple[Node, list[Problem]]:
    """Reads `section.field=value` arguments as one layer; of equal keys the last one wins.

    Raises UsageError for an argument that is not an override.
    """
    layer, problems = Node({}, COMMAND_LINE), []
    invalid = [argument for argument in overrides if not _is_override(argument)]
    if invalid:
        lines = [
            f"{COMMAND_LINE} ({one_line(shorten(redact_words(argument)))}): no such flag; "
            "settings are given as section.field=value"
            for argument in invalid
        ]
        raise UsageError("\n".join(lines))
    for argument in overrides:
        name, _, raw = argument.removeprefix("--").partition("=")
        path = tuple(name.split("."))
        argument = f"{name}=..." if _is_hidden(path, raw) else f"{name}={raw}"
        node, wrong = _value(path, raw, f"{COMMAND_LINE} ({one_line(shorten(argument))})")
        for key in reversed(path):
            node = Node({key: node}, node.where)
        wrong += shape_problems(node, ROOT)
        problems += wrong
        if not wrong:
            layer = _merge(layer, node)
    return layer, problems


def repeated(overrides: Sequence[str]) -> list[str]:
    """Returns a line for each key that is given again, with another value, by a later override."""
    lines, given = list[str](), dict[str, Node]()
    for argument in filter(_is_override, overrides):
        leaves = _leaves(override_layer([argument])[0])
        for key, node in leaves.items():
            for other, before in given.items():
                is_around = key.startswith(f"{other}.") or other.startswith(f"{key}.")
                if is_around or (key == other and node.value != before.value):
                    lines.append(f"{key}: given twice; {node.where} replaces {before.where}")
        given |= leaves
    return lines


def _leaves(node: Node, path: tuple[str, ...] = ()) -> dict[str, Node]:
    """Returns the values of a layer that are no sections, by their dotted keys."""
    if not isinstance(node.value, dict):
        return {".".join(path): node}
    found: dict[str, Node] = {}
    for key, child in node.value.items():
        found |= _leaves(child, (*path, key))
    return found


def _is_hidden(path: tuple[str, ...], raw: str) -> bool:
    """Returns whether a value is not shown: a secret, also one that was put there by mistake."""
    node, _ = parse(raw, lambda _: "")
    values = [raw] if node is None else [raw, plain(node)]
    return path[0] == "alerts" or any(secret_values.contains(value, path[-1]) for value in values)


def _is_override(argument: str) -> bool:
    name, equals, _ = argument.removeprefix("--").partition("=")
    return bool(equals) and not name.startswith("-") and all(name.split("."))


def _value(path: tuple[str, ...], raw: str, where: str) -> tuple[Node, list[Problem]]:
    """Reads the value of an override as YAML; a text field takes it literally."""
    slot, key = _slot_at(path), ".".join(path)
    empty = Problem(key, "is empty; give a value, or leave it out", where)
    node, problems = parse(raw, lambda line: where)
    value = node.value if node and not problems else ...
    if slot is not None and slot.is_text:
        if not raw and str not in slot.types:
            return Node(None, where), [empty]
        if not is_whole(raw):
            return Node(None, where), [Problem(key, "is not UTF-8 text", where)]
        is_quoted = raw[:1] in ("'", '"') and isinstance(value, str)
        is_null = bool(raw) and value is None and type(None) in slot.types
        return (node if node and (is_quoted or is_null) else Node(raw, where)), []
    if node is None:
        return Node(None, where), [Problem(key, p.text, where) for p in problems] or [empty]
    return node, [Problem(".".join((*path, p.key)).rstrip("."), p.text, where) for p in problems]


def _slot_at(path: tuple[str, ...]) -> FieldSpec | None:
    slot: FieldSpec | None = ROOT
    for key in path:
        slot = slot.child(key) if slot else None
    return slot


def _merge(lower: Node, upper: Node) -> Node:
    if not (isinstance(lower.value, dict) and isinstance(upper.value, dict)):
        return upper
    both = dict(lower.value)
    for key, node in upper.value.items():
        both[key] = _merge(both[key], node) if key in both else node
    return Node(both, lower.where)


def shape_problems(node: Node, slot: FieldSpec | None, path: tuple[str, ...] = ()) -> list[Problem]:
    """Returns and removes sections given for a value, and values given for a section."""
    if slot is None or slot.is_open or slot.is_list:
        return []
    if not slot.sections:
        if not isinstance(node.value, dict):
            return []
        below = ", ".join(f"'{key}'" for key in node.value) or "nothing"
        text = f"is a single value, not a section (got keys below it: {below})"
        return [Problem(".".join(path), text, node.where)]
    if node.value is None and slot.may_be_null:
        return []
    if not isinstance(node.value, dict):
        first = "kind" if slot.by_kind else next(iter(slot.sections[0].model_fields))
        how = f"{'.'.join((*path, first))}=..."
        text = f"is a section (got {show(plain(node))}); set its fields, as in {how}"
        return [Problem(".".join(path), text, node.where)]
    found: list[Problem] = []
    for key in list(node.value):
        if "." in key:
            text = "dotted keys are for the command line; in a file, put the field into its section"
            found.append(Problem(".".join((*path, key)), text, node.value.pop(key).where))
            continue
        wrong = shape_problems(node.value[key], slot.child(key), (*path, key))
        if wrong and any(p.key == ".".join((*path, key)) for p in wrong):
            del node.value[key]
        found += wrong
    return found


def _named(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"a single value ({show(value)})"


def overlay(lower: Node, upper: Node, slot: FieldSpec | None = ROOT) -> Node:
    """Returns the lower layer overlaid with the upper; another `kind` replaces the section."""
    if slot is None or not (isinstance(lower.value, dict) and isinstance(upper.value, dict)):
        return upper
    if slot.is_open:
        return _merge(lower, upper) if upper.value else upper  # `model.args={}` clears them.
    if slot.by_kind and "kind" in upper.value:
        below = lower.value.get("kind")
        kind = below.value if below else slot.default_kind
        if upper.value["kind"].value != kind:
            return upper
    both = dict(lower.value)
    for key, node in upper.value.items():
        both[key] = overlay(both[key], node, slot.child(key)) if key in both else node
    return Node(both, lower.where)


def with_defaults(node: Node, slot: FieldSpec = ROOT) -> dict[str, Any]:
    """Returns plain data for the schema, with default kinds and empty required sections added."""
    data: dict[str, Any] = {}
    section = slot.section(plain(node.value["kind"]) if "kind" in node.value else None)
    if slot.by_kind and slot.default_kind and "kind" not in node.value:
        data["kind"] = slot.default_kind
    for key, child in node.value.items():
        below = slot.child(key)
        is_section = below is not None and below.sections and isinstance(child.value, dict)
        data[key] = with_defaults(child, below) if below and is_section else plain(child)
    for key, info in section.model_fields.items() if section else ():
        below = slot.child(key)
        if key not in data and info.is_required() and below and below.sections:
            data[key] = {} if below.by_kind else with_defaults(Node({}, ""), below)
    return data


def origins(node: Node, path: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns the location of each dotted key that was given, sections included."""
    found = {".".join(path): node.where} if path else {}
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            found |= origins(child, (*path, key))
    return found


@dataclass(frozen=True)
class Loaded:
    """A checked configuration and the locations of its values."""

    config: RunConfig
    name: str
    """The config's name: the file without its suffix, or the run directory of a recorded one."""
    origins: Mapping[str, str]
    """Dotted key to `file:line` or `command line (key=value)`; keys at their default are absent."""


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Loads a config file with its bases and `section.field=value` overrides.

    Args:
      path: the file, or the name of a built-in config (builtin_configs.py).

    Raises:
      UsageError: 64, an absent file or an argument that is no override.
      ConfigError: 78, an unknown name, or a line for each problem of the config.
    """
    above, wrong_above = override_layer(overrides)
    path = builtin_configs.find(path)
    layers, wrong = file_layers(path)
    loaded = _load(path, [*layers, above], wrong + wrong_above, name=path.stem)
    config, unreadable = programs.with_digests(loaded.config)
    raise_all(_with_location(problem, loaded.origins, path) for problem in unreadable)
    return replace(loaded, config=config)


def load_recorded(path: RunPath, overrides: Sequence[str] = ()) -> Loaded:
    """Loads the resolved config.yaml of a run directory, which has no bases."""
    above, wrong_above = override_layer(overrides)
    layer, wrong = read_file(path)
    return _load(path, [layer, above], wrong + wrong_above, name=path.absolute().parent.name)


def load_checkpoint(settings: Mapping[str, Any], *, where: str) -> CheckpointSection:
    """Returns the section `checkpoint` with the given keys, without a config around it.

    Raises:
      ConfigError: 78, a line for each problem.
    """
    try:
        node, problems = parse(json.dumps(dict(settings)), lambda _: where)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: no value of a config: {error}") from error
    layer = Node({SECTION: node or Node({}, where)}, where)
    problems += shape_problems(layer, ROOT)
    layer, wrong = written_out(without_removed(layer)[0])
    data = with_defaults(layer)
    problems += wrong + [p for p in validate(data)[1] if p.key.startswith(SECTION)]
    raise_all(replace(problem, where=where) for problem in problems)
    return CheckpointSection.model_validate_json(json.dumps(data[SECTION]), strict=True)


def _load(path: RunPath, layers: list[Node], wrong: list[Problem], *, name: str) -> Loaded:
    expanded: list[Node] = []
    for layer in layers:
        wrong = wrong + shape_problems(layer, ROOT)
        layer, removed = without_removed(layer)
        wrong = wrong + removed
        long, contradictions = written_out(layer)
        expanded.append(long)
        wrong = wrong + contradictions
    for layer in expanded:
        secret_values.hide(plain(layer))
    whole, of_folder = huggingface.resolve(functools.reduce(overlay, expanded))
    wrong = wrong + of_folder
    locations = origins(whole)
    data, program = with_defaults(whole), whole.value.get("program")
    if program is not None and program.value is not None:
        data |= UNUSED_SECTIONS
        # A program may commit nothing: by default no alert is sent for that.
        data["alerts"] = {"no_commit_minutes": None} | data.get("alerts", {})
        wrong = wrong + [
            Problem(key, "is for the trainer, which `program` replaces; leave it out", where)
            for key, where in locations.items()
            if trainer_keys([key])
        ]
    config, problems = validate(data)
    if config is not None and not of_folder:
        problems = check(config)
    raise_all(
        wrong
        + [_with_location(p, locations, path) for p in problems if not _is_consequence(p, wrong)]
    )
    assert config is not None
    return Loaded(config=config, name=name, origins=locations)


def _with_location(problem: Problem, locations: Mapping[str, str], path: RunPath) -> Problem:
    """Returns the problem with its location, which is the command line's if that is involved."""
    given = [locations[key] for key in (problem.key, *problem.others) if key in locations]
    from_command = [where for where in given if where.startswith(COMMAND_LINE)]
    around = _location(problem.key, locations) or str(path)
    return replace(problem, where=[*from_command, *given, around][0])


def _location(key: str, locations: Mapping[str, str]) -> str:
    """Returns the location of the key, or of the innermost section around it."""
    key = key.partition("[")[0]
    while key and key not in locations:
        key = key.rpartition(".")[0]
    return locations.get(key, "")


def _is_consequence(problem: Problem, earlier: list[Problem]) -> bool:
    """Returns whether a key is missing only because of an earlier problem of a file or key."""
    if any(p.key in ("", "base") for p in earlier):
        return "missing" in problem.text
    heads = tuple(f"{p.key}." for p in earlier if p.key)
    return "missing" in problem.text and f"{problem.key}.".startswith(heads)


SECTION = "checkpoint"
SHORTHANDS: Mapping[str, tuple[str, str | None, str]] = {
    "save_every_steps": ("when", "steps", "every_steps"),
    "keep_last": ("keep", None, "last"),
}
"""Shorthand key in `checkpoint` -> the section it sets, the section's kind, and the field."""


def written_out(layer: Node) -> tuple[Node, list[Problem]]:
    """Returns a layer with its shorthand keys expanded, and contradictions within the layer.

    The layer's values have the shape that the schema requires; its sections may be absent.
    """
    top = layer.value if isinstance(layer.value, dict) else {}
    given = top.get(SECTION)
    if given is None or not isinstance(given.value, dict):
        return layer, []
    fields, problems = dict(given.value), []
    for shorthand, (section, kind, field) in SHORTHANDS.items():
        node = fields.pop(shorthand, None)
        if node is None or node.value is None:
            continue
        section_node = fields.get(section, Node({}, node.where))
        if not isinstance(section_node.value, dict):
            continue  # Wrong, and reported as such.
        implied = {} if kind is None else {"kind": Node(kind, node.where)}
        implied[field] = node
        problems += _contradictions(shorthand, node, section, section_node, implied)
        fields[section] = Node({**section_node.value, **implied}, section_node.where)
    return replace(layer, value={**top, SECTION: replace(given, value=fields)}), problems


def _contradictions(
    shorthand: str, node: Node, section: str, section_node: Node, implied: Mapping[str, Node]
) -> list[Problem]:
    return [
        Problem(
            f"{SECTION}.{shorthand}",
            f"is short for {SECTION}.{section}.{name}={plain(value)}, and "
            f"{SECTION}.{section}.{name}={plain(section_node.value[name])} is given too; "
            "leave one of them out",
            node.where,
        )
        for name, value in implied.items()
        if name in section_node.value and plain(section_node.value[name]) != plain(value)
    ]
