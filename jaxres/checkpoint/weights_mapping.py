"""Weights held against a model: which tensors make up which of its arrays, and what does not fit.

A model's arrays are found under their own names (`params/...`) or under those of Hugging Face's
Llama. Whatever does not fit is shown as one table, and is an error unless it is named.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxres.checkpoint import hf_llama
from jaxres.checkpoint.manifest import ArrayInfo
from jaxres.checkpoint.weights_source import Facts, Weights
from jaxres.config.schema_training import FromWeights
from jaxres.faults import ConfigError

EXACT = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""Types all of whose numbers are float32 numbers too."""
ROUNDED = ("float64",)
MAX_ROWS = 40
"""Of a table in a message."""


@dataclass(frozen=True)
class Taken:
    """The tensors that one array of the model is made of."""

    path: str
    info: ArrayInfo
    """Of the model's array."""
    names: tuple[str, ...]
    """There: one, or one a layer."""
    rule: hf_llama.Rule | None
    """How they are laid out there; None: as here."""


@dataclass(frozen=True)
class Binding:
    """What is taken, what stays fresh, and what is left out."""

    taken: Mapping[str, Taken]
    fresh: tuple[str, ...]
    left_out: tuple[str, ...]


def bind(
    weights: Weights,
    wanted: Mapping[str, ArrayInfo],
    *,
    facts: Facts,
    section: FromWeights,
) -> Binding:
    """Finds every array of a model in the weights.

    Args:
      weights: of the source.
      wanted: path -> the model's array.
      facts: of the model.
      section: which differences are allowed, and what is called otherwise.

    Raises:
      ConfigError: they differ in what is not allowed; with all differences as a table.
    """
    there = _renamed(weights, section.rename)
    rows = _changed_facts(weights.facts, facts, section.allow_changed)
    taken: dict[str, Taken] = {}
    fresh: list[str] = []
    told: set[str] = set()
    """Tensors there of which a row tells already."""
    for path, info in wanted.items():
        found, part = find(path, info, there), _layers(path, info, there)
        if found is not None:
            problem = _misfit(weights, found, cast=section.cast)
        else:
            problem = f"{len(part)} of {info.shape[0]} layers" if part else "absent"
        if found is not None and problem is None:
            taken[path] = found
            continue
        fresh.append(path)
        if not _matches(path, section.allow_missing):
            rows.append(f"{_names_of(path, info)}: {problem} there, {info} here")
            told.update(found.names if found else part)
    used = {name for each in taken.values() for name in each.names}
    left_out = tuple(name for name in weights.tensors if name not in used)
    rows += [
        f"{name}: {weights.tensors[name]} there, absent here"
        for name in left_out
        if name not in told and not _matches(name, section.allow_extra)
    ]
    if rows:
        raise ConfigError(_table(weights.where, rows))
    if not taken:
        raise ConfigError(f"{weights.where}: nothing of it is taken.")
    return Binding(taken, tuple(fresh), left_out)


def _renamed(weights: Weights, rename: Mapping[str, str]) -> dict[str, str]:
    """Returns the name by which a tensor is looked up -> its name there; the longest rule wins."""
    found: dict[str, str] = {}
    for name in weights.tensors:
        new = name
        for old in sorted(rename, key=len, reverse=True):
            if name == old or name.startswith((f"{old}.", f"{old}/")):
                new = rename[old] + name[len(old) :]
                break
        if new in found:
            raise ConfigError(
                f"{weights.where}: {found[new]} and {name} would both be {new} (init_from.rename). "
                "Name one of them otherwise."
            )
        found[new] = name
    return found


def find(path: str, info: ArrayInfo, there: Mapping[str, str]) -> Taken | None:
    """Returns what an array of the model is made of; `there`: name to look up -> name there."""
    if path in there:
        return Taken(path, info, (there[path],), None)
    rule = hf_llama.RULES.get(path)
    if rule is None or len(info.shape) < rule.inputs + 1:
        return None
    names = rule.names(info.shape)
    if not all(name in there for name in names):
        return None
    return Taken(path, info, tuple(there[name] for name in names), rule)


def _layers(path: str, info: ArrayInfo, there: Mapping[str, str]) -> list[str]:
    """Returns the tensors there that are layers of an array of the model."""
    rule = hf_llama.RULES.get(path)
    if rule is None or not info.shape:
        return []
    return [there[name] for name in rule.names(info.shape) if name in there]


def _misfit(weights: Weights, taken: Taken, *, cast: str) -> str | None:
    """Returns what is wrong with the tensors that an array is to be made of."""
    shape = taken.info.shape
    if taken.rule is not None:
        shape = taken.rule.theirs(shape[1:] if "{}" in taken.rule.name else shape)
    for name in taken.names:
        info = weights.tensors[name]
        allowed = EXACT + (ROUNDED if cast == "rounding" else ())
        if info.shape != shape:
            return f"{name} is {info}, not of shape [{','.join(map(str, shape))}],"
        if info.dtype in ROUNDED and info.dtype not in allowed:
            return f"{name} is {info}, which init_from.cast=rounding rounds,"
        if info.dtype not in allowed:
            return f"{name} is {info}, of a type that is not taken,"
    return None


def _changed_facts(there: Facts | None, here: Facts, allowed: Sequence[str]) -> list[str]:
    if there is None:
        told = "config.json: absent there; it would tell of heads, rope_theta and the like"
        return [] if _matches("config.json", allowed) else [told]
    if "kind" not in there:
        return [f"config.json: model_type {there['model_type']} there, a Llama is needed"]
    ours = {**hf_llama.NO_CHOICE, **here}
    return [
        f"{name}: {there.get(name)} there, {ours.get(name)} here"
        for name in dict.fromkeys([*here, *there])
        if there.get(name) != here.get(name) and not _matches(name, allowed)
    ]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _names_of(path: str, info: ArrayInfo) -> str:
    rule = hf_llama.RULES.get(path)
    return path if rule is None else f"{path} ({rule.name.replace('{}', 'N')})"


def _table(where: str, rows: Sequence[str]) -> str:
    shown = [f"  {row}" for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        shown.append(f"  and {len(rows) - MAX_ROWS} more")
    return "\n".join(
        [
            f"{where}: these weights are not this model's",
            *shown,
            "Change the model, or name what may differ: init_from.allow_missing (arrays here that "
            "stay fresh), allow_extra (there, left out), allow_changed (settings), rename.",
        ]
    )


def as_there(weights: Weights, taken: Taken) -> ArrayInfo:
    """Returns an array as it would be in the type that it has there; float32 if it has several."""
    dtypes = {weights.tensors[name].dtype for name in taken.names}
    return ArrayInfo(dtypes.pop() if len(dtypes) == 1 else "float32", taken.info.shape)


def assemble(weights: Weights, taken: Taken, *, dtype: str | None = None) -> np.ndarray:
    """Reads one array of the model as it is laid out here; `dtype` None: as there."""
    whole = np.empty(taken.info.shape, np.dtype(dtype or as_there(weights, taken).dtype))
    if taken.rule is None:
        whole[...] = weights.read(taken.names[0])
        return whole
    layers = whole if "{}" in taken.rule.name else whole[np.newaxis]
    for layer, name in zip(layers, taken.names, strict=True):
        layer[...] = taken.rule.take(weights.read(name), layer.shape)
    return whole
