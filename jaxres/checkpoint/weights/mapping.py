"""Maps the tensors of stored weights to the arrays of a model, and reports all mismatches.

A model's arrays are looked up under their own names (`params/...`) and under those of Hugging
Face's decoders. All mismatches are listed in one table; each is an error unless the config allows
it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxres.checkpoint.read.manifest import ArrayInfo
from jaxres.checkpoint.weights import hf_tensors
from jaxres.checkpoint.weights.hf_tensors import Rule
from jaxres.checkpoint.weights.source import WeightFacts, Weights
from jaxres.config.huggingface import FIXED
from jaxres.config.huggingface_keys import QUANTIZATION, cannot_compute
from jaxres.config.schema.training import FromWeights
from jaxres.faults import ConfigError

EXACT = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""Types that convert to float32 without rounding."""
ROUNDED = ("float64",)
_SCALE = re.compile(r"scale|absmax|zero_?point|qzeros|quant", re.IGNORECASE)
"""Pattern in a tensor's last name part that marks it as a factor of the numbers beside it."""
EMBEDDING, HEAD = "params/embedding", "params/head"
TIED = ". Of a tied model: model.tie_embeddings=true"
UNTIED = ", or equal to the embedding, since the model is tied: model.tie_embeddings=false"
MAX_ROWS = 40
"""Number of mismatches that a message lists."""


@dataclass(frozen=True)
class TensorSource:
    """The tensors that one array of the model is read from."""

    path: str
    info: ArrayInfo
    """Dtype and shape of the model's array."""
    names: tuple[str, ...]
    """Names of the tensors in the source: one, or one for each layer."""
    rule: Rule | None
    """Layout of the tensors in the source; None: the same as in jaxres."""


@dataclass(frozen=True)
class WeightMapping:
    """The result of mapping stored weights to a model."""

    taken: Mapping[str, TensorSource]
    """Path -> source tensors of the arrays that are loaded."""
    fresh: tuple[str, ...]
    """Paths of the arrays that keep their fresh initialization."""
    left_out: tuple[str, ...]
    """Names of the source tensors that are not used."""


def map_weights(
    weights: Weights,
    wanted: Mapping[str, ArrayInfo],
    *,
    facts: WeightFacts,
    section: FromWeights,
) -> WeightMapping:
    """Maps stored weights to the arrays of a model.

    Args:
      wanted: path -> dtype and shape of the model's arrays.
      facts: settings of the model that must match.
      section: differences that are allowed, and names to replace.

    Raises:
      ConfigError: differences that are not allowed, all in one message; or quantized tensors.
    """
    _refuse_quantized(weights)
    names = _renamed(weights, section.rename)
    rules = hf_tensors.rules_for(names)
    rows = _changed_facts(weights.facts, facts, section.allow_changed)
    taken: dict[str, TensorSource] = {}
    fresh: list[str] = []
    listed: set[str] = set()  # Source tensors that a row already lists.
    for path, info in wanted.items():
        rule = rules.get(path)
        source, part = find(path, info, names, rule), _layers(info, names, rule)
        if source is None:
            problem = f"{len(part)} of {info.shape[0]} layers" if part else "absent"
        elif (problem := _misfit(weights, source, cast=section.cast)) is None:
            taken[path] = source
            continue
        fresh.append(path)
        if not _matches(path, section.allow_missing):
            hint = TIED if path == HEAD and problem == "absent" else ""
            rows.append(f"{_names_of(path, rule)}: {problem}, expected {info}{hint}")
            listed.update(source.names if source else part)
    used = {name for each in taken.values() for name in each.names}
    left_out = tuple(name for name in weights.tensors if name not in used)
    _refuse_scales(weights, taken, left_out)
    if _is_copy(weights, names, rules, taken):
        listed.add(names[rules[HEAD].name])
    head = names.get(rules[HEAD].name) if HEAD in rules else None
    rows += _rows_of_unused(weights, left_out, listed, allowed=section.allow_extra, head=head)
    if rows:
        raise ConfigError(_table(weights.where, rows))
    if not taken:
        raise ConfigError(f"{weights.where}: none of its tensors matches an array of the model.")
    return WeightMapping(taken, tuple(fresh), left_out)


def _rows_of_unused(
    weights: Weights,
    names: Sequence[str],
    listed: Collection[str],
    *,
    allowed: Sequence[str],
    head: str | None,
) -> list[str]:
    """Returns a row for each tensor without an array of the model, if it needs one.

    `listed` are in other rows; `head` is the tensor of the output layer, if the weights have one.
    """
    return [
        f"{name}: {weights.tensors[name]}, expected absent{UNTIED if name == head else ''}"
        for name in names
        if name not in listed and not _matches(name, (*allowed, *hf_tensors.NOT_PARAMETERS))
    ]


def _refuse_quantized(weights: Weights) -> None:
    """Raises ConfigError if the config.json beside the tensors says that they are quantized."""
    quantized = {key: value for key, value in (weights.facts or {}).items() if key in QUANTIZATION}
    if quantized:
        raise ConfigError(f"{weights.where}: config.json: {cannot_compute(quantized)}.")


def _refuse_scales(
    weights: Weights, taken: Mapping[str, TensorSource], left_out: Sequence[str]
) -> None:
    """Raises ConfigError if a tensor that is taken has scales beside it.

    allow_extra does not allow that: without its scale a tensor has other numbers.
    """
    beside: dict[str, str] = {}
    for source in taken.values():
        for name in source.names:
            if source.rule is not None or weights.tensors[name].dtype.startswith("float8"):
                beside |= {_module(name): name, name: name}
    for name in left_out:
        last = re.split(r"[./]", name)[-1]
        scaled = beside.get(_module(name))
        if scaled is not None and _SCALE.search(last):
            raise ConfigError(
                f"{weights.where}: {name}: {weights.tensors[name]} is a scale of {scaled}, whose "
                "numbers mean nothing without it, and jaxres does not apply it "
                "(init_from.allow_extra can't leave it out). Convert the model to bfloat16 with "
                "the program that quantized it, or take the original."
            )


def _module(name: str) -> str:
    """Returns the name of a tensor without its last part."""
    return name[: max(name.rfind("."), name.rfind("/"), 0)]


def _is_copy(
    weights: Weights,
    names: Mapping[str, str],
    rules: Mapping[str, Rule],
    taken: Mapping[str, TensorSource],
) -> bool:
    """Returns whether the source stores a tied embedding a second time, as its head."""
    if HEAD in taken or EMBEDDING not in taken or HEAD not in rules:
        return False
    head, embedding = names.get(rules[HEAD].name), taken[EMBEDDING].names[0]
    if head is None or weights.tensors[head] != weights.tensors[embedding]:
        return False
    return weights.read(head).tobytes() == weights.read(embedding).tobytes()


def _renamed(weights: Weights, rename: Mapping[str, str]) -> dict[str, str]:
    """Returns replaced name -> name in the source of every tensor; the longest rule wins."""
    names: dict[str, str] = {}
    for name in weights.tensors:
        replaced = name
        for old in sorted(rename, key=len, reverse=True):
            if name == old or name.startswith((f"{old}.", f"{old}/")):
                replaced = rename[old] + name[len(old) :]
                break
        if replaced in names:
            raise ConfigError(
                f"{weights.where}: {names[replaced]} and {name} would both be {replaced} "
                "(init_from.rename). Rename one of them differently."
            )
        names[replaced] = name
    return names


def find(
    path: str, info: ArrayInfo, names_there: Mapping[str, str], rule: Rule | None
) -> TensorSource | None:
    """Returns the source tensors of an array of the model, None if they are not all in the source.

    `names_there` is replaced name -> name in the source; `rule` that of the source's family.
    """
    if path in names_there:
        return TensorSource(path, info, (names_there[path],), None)
    if rule is None or len(info.shape) < rule.inputs + 1:
        return None
    names = rule.names(info.shape)
    if not all(name in names_there for name in names):
        return None
    return TensorSource(path, info, tuple(names_there[name] for name in names), rule)


def _layers(info: ArrayInfo, names: Mapping[str, str], rule: Rule | None) -> list[str]:
    """Returns the source tensors that are layers of an array of the model."""
    if rule is None or not info.shape:
        return []
    return [names[name] for name in rule.names(info.shape) if name in names]


def _misfit(weights: Weights, taken: TensorSource, *, cast: str) -> str | None:
    """Returns why an array can't be read from its source tensors; None if it can."""
    shape = taken.info.shape
    if taken.rule is not None:
        shape = taken.rule.hf_shape(shape[1:] if "{}" in taken.rule.name else shape)
    for name in taken.names:
        info = weights.tensors[name]
        allowed = EXACT + (ROUNDED if cast == "rounding" else ())
        if info.shape != shape:
            return f"{name} is {info}, not of shape [{','.join(map(str, shape))}]"
        if info.dtype in ROUNDED and info.dtype not in allowed:
            return f"{name} is {info}, which init_from.cast=rounding rounds"
        if info.dtype not in allowed:
            return f"{name} is {info}, of an unsupported type"
    return None


def _changed_facts(
    there: WeightFacts | None, here: WeightFacts, allowed: Sequence[str]
) -> list[str]:
    if there is None:
        row = "config.json: absent; it defines heads, rope_theta and other settings"
        return [] if _matches("config.json", allowed) else [row]
    if "kind" not in there:
        return [f"config.json: {there['model_type']}"]
    if "args" not in there:  # Of a custom model; exports of earlier versions do not have them.
        here = {name: value for name, value in here.items() if name != "args"}
    shown = {**FIXED, **here}
    return [
        f"{name}: {there.get(name)}, expected {shown.get(name)}"
        for name in dict.fromkeys([*here, *there])
        if there.get(name) != here.get(name) and not _matches(name, allowed)
    ]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _names_of(path: str, rule: Rule | None) -> str:
    return path if rule is None else f"{path} ({rule.name.replace('{}', 'N')})"


def _table(where: str, rows: Sequence[str]) -> str:
    shown = [f"  {row}" for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        shown.append(f"  and {len(rows) - MAX_ROWS} more")
    return "\n".join(
        [
            f"{where}: these weights do not match the model:",
            *shown,
            "Change the model, or allow the differences: init_from.allow_missing (arrays that keep "
            "their values from the seed), allow_extra (tensors that are not used), allow_changed "
            "(settings), rename.",
        ]
    )


def source_info(weights: Weights, taken: TensorSource) -> ArrayInfo:
    """Returns an array's info with its dtype in the source; float32 if that has several."""
    dtypes = {weights.tensors[name].dtype for name in taken.names}
    return ArrayInfo(dtypes.pop() if len(dtypes) == 1 else "float32", taken.info.shape)


def assemble(weights: Weights, taken: TensorSource, *, dtype: str | None = None) -> np.ndarray:
    """Reads one array of the model in our layout; `dtype` None: the dtype of the source."""
    array = np.empty(taken.info.shape, np.dtype(dtype or source_info(weights, taken).dtype))
    if taken.rule is None:
        array[...] = weights.read(taken.names[0])
        return array
    layers = array if "{}" in taken.rule.name else array[np.newaxis]
    for layer, name in zip(layers, taken.names, strict=True):
        layer[...] = taken.rule.from_hf(weights.read(name), layer.shape)
    return array
