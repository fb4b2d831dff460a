"""Parameters from elsewhere: another run's, or a safetensors folder's, held against a model's.

A model's arrays are found there under their own names (`params/...`) or under those of Hugging
Face's Llama. Whatever does not fit is shown as one table, and is an error unless it is named. Needs
no jax.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (with it NumPy knows bfloat16 by name)
import numpy as np
import xxhash

from jaxres import runlog, storage
from jaxres.checkpoint import llama, safetensors
from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.manifest import ArrayInfo
from jaxres.config.init_from import FromRun, FromSafetensors, FromWeights
from jaxres.config.schema import CustomModel, GptModel, MlpModel
from jaxres.faults import ConfigError, Unrestorable
from jaxres.rundir import RunDir
from jaxres.runlog import Commit, canonical_json

PARAMS = "params/"
ABOUT = "jaxres.json"
"""What an export tells of itself: checksums, model, step."""
EXACT = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""Types all of whose numbers are float32 numbers too."""
ROUNDED = ("float64",)
MAX_ROWS = 40
"""Of a table in a message."""
Facts = Mapping[str, Any]
"""Settings of a model that decide what its arrays mean, and that no shape shows."""


@dataclass(frozen=True)
class Weights:
    """Somebody's parameters, by the names that they have there, read one tensor at a time."""

    where: str
    tensors: Mapping[str, ArrayInfo]
    read: Callable[[str], np.ndarray]
    facts: Facts | None
    """None: nobody tells."""
    step: int | None = None


@dataclass(frozen=True)
class Taken:
    """The tensors that one array of the model is made of."""

    path: str
    info: ArrayInfo
    """Of the model's array."""
    names: tuple[str, ...]
    """There: one, or one a layer."""
    rule: llama.Rule | None
    """How they are laid out there; None: as here."""


@dataclass(frozen=True)
class Binding:
    """What is taken, what stays fresh, and what is left out."""

    taken: Mapping[str, Taken]
    fresh: tuple[str, ...]
    left_out: tuple[str, ...]


def facts_of(model: GptModel | MlpModel | CustomModel) -> Facts:
    """Returns the settings in which the source of a model's parameters must not differ."""
    if isinstance(model, GptModel):
        heads = model.num_heads
        groups = model.num_kv_heads or heads
        numbers = {"num_heads": heads, "num_kv_heads": groups}
        others = {"rope_theta": model.rope_theta, "norm_eps": model.norm_eps}
        return {"kind": "gpt", **numbers, **others}
    return {"kind": model.kind} | ({} if isinstance(model, MlpModel) else {"target": model.target})


def from_run(run_dir: RunDir, model: GptModel | MlpModel | CustomModel, commit: Commit) -> Weights:
    """Returns the parameters of a committed step.

    Raises:
      Unrestorable: the step is damaged.
      StorageUnavailable: storage did not let it be read.
    """
    step_dir = (run_dir.root / commit.path).absolute()
    infos = manifests.read(step_dir, commit).arrays
    tensors = {path: info for path, info in infos.items() if path.startswith(PARAMS)}

    def read(path: str) -> np.ndarray:
        # The one place where weights of a run are read.
        return manifests.read_array(step_dir, commit, path, tensors[path])

    return Weights(
        f"{run_dir.root} step {commit.step}", tensors, read, facts_of(model), commit.step
    )


def from_safetensors(place: Path) -> Weights:
    """Returns what a safetensors folder or file holds, checked as it is read where it tells how.

    Raises:
      ConfigError: there is nothing of the kind, or it is not whole.
      StorageUnavailable: storage did not let it be read.
    """
    found = safetensors.open_place(place)
    folder = place if place.is_dir() else place.parent
    about = read_about(folder)
    sums: Mapping[str, str] = about["tensors"] if about else {}
    if about and sums.keys() != found.keys():
        name = min(sums.keys() ^ found.keys())
        raise safetensors.broken(place, f"{name} is not both in it and in {ABOUT}")

    def read(name: str) -> np.ndarray:
        array = found[name].read()
        if name in sums and checksum(array) != sums[name]:
            raise safetensors.broken(
                found[name].file,
                f"{name} has other numbers than {ABOUT} says (delete that file if you have changed "
                "the numbers yourself)",
            )
        return array

    tensors = {name: tensor.info for name, tensor in found.items()}
    return Weights(str(place), tensors, read, _facts_there(folder, about))


def read_about(folder: Path) -> dict[str, Any] | None:
    """Returns what an export tells of itself; None for a folder that is none."""
    data = storage.read(folder / ABOUT)
    if data is None:
        return None
    try:
        about = json.loads(data)
        if about["format"] != 1:
            raise ValueError(f"format {about['format']}, this version reads 1")
        return {**about, "tensors": dict(about["tensors"]), "facts": dict(about["facts"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / ABOUT}: can't be read ({error!r}).") from error


def _facts_there(folder: Path, about: Mapping[str, Any] | None) -> Facts | None:
    data = storage.read(folder / "config.json")
    if data is None:
        return about["facts"] if about else None
    try:
        fields = dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{folder / 'config.json'}: can't be read ({error}).") from error
    try:
        model, _, differing = llama.read_config(fields)
    except ConfigError:  # Of another kind of model altogether.
        return {"model_type": fields.get("model_type")}
    return {**facts_of(model), **differing}


def checksum(array: np.ndarray) -> str:
    """Returns xxh3-128, in hex, of the numbers as they are stored."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(np.uint8).data)


def params_digest(rows: Iterable[Sequence[Any]]) -> str:
    """Returns one word for parameters, from the rows that the content digest has of them."""
    ordered = sorted(list(row) for row in rows)
    return "sha256:" + hashlib.sha256(canonical_json({"params": ordered})).hexdigest()


def committed(run_dir: RunDir, *, step: int | None) -> Commit:
    """Returns the commit of a step, by default of the newest.

    Raises:
      ConfigError: there is no run, or no such step.
    """
    line = runlog.fold(runlog.read_records(run_dir.log))
    for commit in reversed(line.committed):
        if step in (None, commit.step):
            return commit
    steps = ", ".join(str(commit.step) for commit in line.committed) or "none"
    what = "no step" if step is None else f"step {step} is not"
    if not line.claims:
        raise ConfigError(f"{run_dir.root}: no run here (no log/).")
    raise ConfigError(f"{run_dir.root}: {what} committed (committed: {steps}).")


def open_source(
    section: FromRun | FromSafetensors,
    *,
    step: int | None,
    model_of: Callable[[RunDir], GptModel | MlpModel | CustomModel],
) -> Weights:
    """Returns the parameters that a new run is to start from.

    Args:
      section: what the config says.
      step: of a run; None: its newest.
      model_of: returns the model of the run in a directory.

    Raises:
      ConfigError: they are not there, or not whole.
      StorageUnavailable: storage did not let them be read.
    """
    try:
        if isinstance(section, FromSafetensors):
            return from_safetensors(section.path)
        run_dir = RunDir(section.path)
        commit = committed(run_dir, step=step)
        return from_run(run_dir, model_of(run_dir), commit)
    except (ConfigError, Unrestorable) as error:
        raise ConfigError(f"init_from.path: {error}") from error


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
    taken, fresh = {}, []
    for path, info in wanted.items():
        found = find(path, info, there)
        problem = "absent" if found is None else _misfit(weights, found, cast=section.cast)
        if found is not None and problem is None:
            taken[path] = found
            continue
        fresh.append(path)
        if not _matches(path, section.allow_missing):
            rows.append(f"{_names_of(path, info)}: {problem} there, {info} here")
    used = {name for each in taken.values() for name in each.names}
    left_out = tuple(name for name in weights.tensors if name not in used)
    rows += [
        f"{name}: {weights.tensors[name]} there, absent here"
        for name in left_out
        if not _matches(name, section.allow_extra)
        and not any(name in row for row in rows)  # Of another shape: one row is enough.
    ]
    if rows:
        raise ConfigError(_table(weights.where, rows))
    if not taken:
        raise ConfigError(f"init_from.path: {weights.where}: nothing of it is taken.")
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
                f"init_from.rename: {found[new]} and {name} would both be {new}. Name one of them "
                "otherwise."
            )
        found[new] = name
    return found


def find(path: str, info: ArrayInfo, there: Mapping[str, str]) -> Taken | None:
    """Returns what an array of the model is made of; `there`: name to look up -> name there."""
    if path in there:
        return Taken(path, info, (there[path],), None)
    rule = llama.RULES.get(path)
    if rule is None or len(info.shape) < rule.inputs + 1:
        return None
    names = rule.names(info.shape)
    if not all(name in there for name in names):
        return None
    return Taken(path, info, tuple(there[name] for name in names), rule)


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
    ours = {**llama.NO_CHOICE, **here}
    return [
        f"{name}: {there.get(name)} there, {ours.get(name)} here"
        for name in dict.fromkeys([*here, *there])
        if there.get(name) != here.get(name) and not _matches(name, allowed)
    ]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _names_of(path: str, info: ArrayInfo) -> str:
    rule = llama.RULES.get(path)
    return path if rule is None else f"{path} ({rule.name.replace('{}', 'N')})"


def _table(where: str, rows: Sequence[str]) -> str:
    shown = [f"  {row}" for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        shown.append(f"  and {len(rows) - MAX_ROWS} more")
    return "\n".join(
        [
            f"init_from.path: {where}: these weights are not this model's",
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
