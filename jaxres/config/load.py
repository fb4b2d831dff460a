"""Reads a configuration: files, bases and overrides, checked as a whole before a device is touched.

Everything that is wrong is reported at once, each with its place.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxres.config.checks import check
from jaxres.config.fields import ROOT
from jaxres.config.layers import (
    COMMAND_LINE,
    file_layers,
    lay_over,
    origins,
    override_layer,
    read_file,
    resolved,
    shape_problems,
)
from jaxres.config.problems import Problem, raise_all
from jaxres.config.schema import RunConfig
from jaxres.config.shorthands import written_out
from jaxres.config.validate import validate
from jaxres.config.yaml12 import Node
from jaxres.place import Place


@dataclass(frozen=True)
class Loaded:
    """A checked configuration and where its values were given."""

    config: RunConfig
    name: str
    """The config's name: the file without its suffix, or the run directory of a recorded one."""
    origins: Mapping[str, str]
    """Dotted key to `file:line` or `command line (key=value)`; keys left at default are absent."""


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Reads a config file with its bases, and `section.field=value` words over it.

    Raises UsageError (64) for an absent file or a word that is no override, ConfigError (78) with
    a line for each problem otherwise.
    """
    above, wrong_above = override_layer(overrides)
    layers, wrong = file_layers(path)
    return _load(path, [*layers, above], wrong + wrong_above, name=path.stem)


def load_recorded(path: Place, overrides: Sequence[str] = ()) -> Loaded:
    """Reads the resolved config.yaml of a run directory, which stands alone: no bases."""
    above, wrong_above = override_layer(overrides)
    layer, wrong = read_file(path)
    return _load(path, [layer, above], wrong + wrong_above, name=path.absolute().parent.name)


def _load(path: Place, layers: list[Node], wrong: list[Problem], *, name: str) -> Loaded:
    expanded: list[Node] = []
    for layer in layers:
        wrong = wrong + shape_problems(layer, ROOT)
        long, contradictions = written_out(layer)
        expanded.append(long)
        wrong = wrong + contradictions
    whole = functools.reduce(lay_over, expanded)
    places = origins(whole)
    config, problems = validate(resolved(whole))
    if config is not None:
        problems = check(config)
    raise_all(wrong + [_placed(p, places, path) for p in problems if not _follows(p, wrong)])
    assert config is not None
    return Loaded(config=config, name=name, origins=places)


def _placed(problem: Problem, places: Mapping[str, str], path: Place) -> Problem:
    """Returns the problem with its place; the command line, where it takes part, is to blame."""
    given = [places[key] for key in (problem.key, *problem.others) if key in places]
    from_command = [place for place in given if place.startswith(COMMAND_LINE)]
    around = _place(problem.key, places) or str(path)
    return replace(problem, where=[*from_command, *given, around][0])


def _place(key: str, places: Mapping[str, str]) -> str:
    """Returns the place of the key, or of the innermost section around it."""
    key = key.partition("[")[0]
    while key and key not in places:
        key = key.rpartition(".")[0]
    return places.get(key, "")


def _follows(problem: Problem, earlier: list[Problem]) -> bool:
    """Whether something is missing only because of an earlier problem: a bad file, base or key."""
    if any(p.key in ("", "base") for p in earlier):
        return "missing" in problem.text
    heads = tuple(f"{p.key}." for p in earlier if p.key)
    return "missing" in problem.text and f"{problem.key}.".startswith(heads)
