"""Exports parameters as a safetensors folder and reads them back, bit for bit. No jax.

An export is written under a temporary name, imported again and compared with its source; only then
is it renamed to its final name. One array of the model is in memory at a time.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxres.checkpoint.digests.content_digest import array_row
from jaxres.checkpoint.read.manifest import ArrayInfo
from jaxres.checkpoint.weights import hf_tensors, safetensors
from jaxres.checkpoint.weights import mapping as weights_mapping
from jaxres.checkpoint.weights import source as weights_source
from jaxres.checkpoint.weights.hf_tensors import Rule
from jaxres.checkpoint.weights.source import ABOUT, Weights, checksum
from jaxres.config import huggingface, huggingface_keys
from jaxres.config.schema.model import GptModel
from jaxres.config.schema.training import FromSafetensors
from jaxres.faults import ConfigError, StorageUnavailable, UsageError
from jaxres.storage import files, foreign_json

MODEL, ADAPTER = "model", "adapter_model"
"""Beginnings of the names of weight files; the package peft uses the second one."""
MAX_SHARD_BYTES = 5 * 10**9
"""Default of transformers."""


@dataclass(frozen=True)
class ExportedParams:
    """The parameter arrays of a model, under jaxres's paths, read one at a time."""

    infos: Mapping[str, ArrayInfo]
    """Path -> dtype and shape of every array."""
    read: Callable[[str], np.ndarray]
    """Reads the array of a path."""

    @property
    def numbers(self) -> int:
        """Total number of parameters."""
        return sum(math.prod(info.shape) for info in self.infos.values())

    def cast(self, dtype: str | None) -> ExportedParams:
        """Returns the arrays converted to another dtype; None: unchanged."""
        if dtype is None:
            return self
        infos = {path: ArrayInfo(dtype, info.shape) for path, info in self.infos.items()}
        return ExportedParams(infos, lambda path: self.read(path).astype(np.dtype(dtype)))


def of_run(source: Weights) -> ExportedParams:
    """Returns the parameters of a step of a run."""
    return ExportedParams(source.tensors, source.read)


def of_folder(place: Path) -> tuple[ExportedParams, GptModel | None]:
    """Returns the parameters of a safetensors folder or file, and its decoder's model section.

    The model is None if the tensors have jaxres's own names, which any model may have.

    Raises:
      ConfigError: the files are damaged, or of a model that the decoder can't compute.
      StorageUnavailable: storage could not be read.
    """
    stored = weights_source.from_safetensors(place)
    model = None
    expected = dict(stored.tensors)
    facts = stored.facts or {}
    if not all(name.startswith(weights_source.PARAMS) for name in expected):
        model = _model_of(place)
        assert model.vocab_size is not None
        shapes = hf_tensors.shapes(model, rows=model.vocab_size)
        expected = {path: ArrayInfo("float32", shape) for path, shape in shapes.items()}
        facts = weights_source.facts_of(model)
    lenient = FromSafetensors(path=place, cast="rounding", allow_changed=("config.json",))
    taken = weights_mapping.map_weights(stored, expected, facts=facts, section=lenient).taken
    infos = {path: weights_mapping.source_info(stored, each) for path, each in taken.items()}
    return ExportedParams(infos, lambda path: weights_mapping.assemble(stored, taken[path])), model


def _model_of(place: Path) -> GptModel:
    folder = files.folder_of(place)
    data = files.read(folder / "config.json")
    if data is None:
        raise ConfigError(f"{folder}: no config.json here that describes the model.")
    try:
        model, unsupported = huggingface.model_of(
            huggingface.of_text(dict(foreign_json.loads(data)))
        )
    except (ValueError, TypeError, ConfigError) as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error
    if unsupported:
        what = huggingface_keys.cannot_compute(unsupported)
        raise ConfigError(f"{folder / 'config.json'}: {what}.")
    return model


def check_finite(params: ExportedParams, *, where: Path) -> ExportedParams:
    """Returns the parameters with a check of each array that is read, as a start of a run has it.

    Raises at a read:
      ConfigError: the array has values that are not finite, as float32.
    """

    def read(path: str) -> np.ndarray:
        array = params.read(path)
        with np.errstate(over="ignore"):
            number = array.size - np.count_nonzero(np.isfinite(array.astype(np.float32)))
        if number:
            raise ConfigError(
                f"{where}: {number:,} of {array.size:,} values of {path} are not finite (NaN, or "
                "beyond the range of float32): no run can start from them. Take the weights of an "
                "earlier step or of another copy."
            )
        return array

    return ExportedParams(params.infos, read)


def digest_of(params: ExportedParams) -> str:
    """Returns the digest of parameters."""
    return weights_source.params_digest(array_row(path, params.read(path)) for path in params.infos)


def write(
    params: ExportedParams,
    out: Path,
    *,
    names: str,
    rules: Mapping[str, Rule] | None,
    max_shard_bytes: int,
    about: Mapping[str, Any],
    beside: Mapping[str, bytes],
    stem: str = MODEL,
) -> str:
    """Writes an export folder atomically; returns the digest of the parameters.

    Args:
      params: the arrays to write, in their dtypes.
      out: path of the folder; must not exist.
      names: what the names of the tensors are called.
      rules: path -> rule of the names; None: jaxres's own.
      max_shard_bytes: size limit of one file, unless a single tensor is larger.
      about: further fields of jaxres.json, such as `facts`, the settings of the model.
      beside: name -> content of further files.
      stem: beginning of the files' names.

    Raises:
      UsageError: the folder exists already.
      ConfigError: the model can't be written with these names.
      StorageUnavailable: storage is full or fails, or the export reads back differently.
    """
    if out.exists():
        raise UsageError(f"{out}: exists already. Delete it, or choose another path with --out.")
    files.make_dir(out.parent)
    building = out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp")
    files.make_dir(building)
    try:
        groups = _groups(params, rules)
        digests, sums = _write_files(params, building, groups, max_shard_bytes, stem)
        digest = weights_source.params_digest(digests.values())
        fields = {"format": 1, "names": names, "params": digest, "facts": {}, **about}
        own = {ABOUT: json.dumps({**fields, "tensors": sums}, indent=1).encode()}
        for name, data in {**beside, **own}.items():
            files.replace(building / name, data)
        place = building if stem == MODEL else building / f"{stem}.safetensors"
        _read_back(params, place, digests, rules or {})
        files.sync_tree(building)
        files.move(building, out)
        files.sync_tree(out)
    finally:
        files.delete_tree(building)
    return digest


def _write_files(
    params: ExportedParams,
    folder: Path,
    groups: Sequence[tuple[Rule, ...]],
    max_shard_bytes: int,
    stem: str,
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Writes the safetensors files; returns the digest row of every array and the checksum of
    every tensor.
    """
    infos = {
        name: ArrayInfo(params.infos[group[0].path].dtype, shape)
        for group in groups
        for name, shape in _tensor_shapes(group, params.infos[group[0].path].shape)
    }
    shards = _shards(infos, max_shard_bytes, stem)
    digests: dict[str, list[Any]] = {}
    sums: dict[str, str] = {}

    def contents() -> Iterator[tuple[str, np.ndarray]]:
        for group in groups:
            arrays = [params.read(rule.path) for rule in group]
            for rule, array in zip(group, arrays, strict=True):
                digests[rule.path] = array_row(rule.path, array)
            for name, piece in hf_tensors.pieces(group, arrays):
                sums[name] = checksum(piece)
                yield name, piece

    iterator = contents()
    for file, part in shards.items():
        safetensors.write_file(folder / file, part, iterator)
    if len(shards) > 1:
        total = sum(_size(info) for info in infos.values())
        places = {name: file for file, part in shards.items() for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        files.replace(folder / safetensors.INDEX, json.dumps(index, indent=1).encode())
    return digests, sums


def _size(info: ArrayInfo) -> int:
    return math.prod(info.shape) * np.dtype(info.dtype).itemsize


def _groups(params: ExportedParams, rules: Mapping[str, Rule] | None) -> list[tuple[Rule, ...]]:
    """Returns the rules of the arrays; arrays that share their tensors are in one group."""
    if rules is None:
        return [(Rule(path, path),) for path in params.infos]
    groups = list(hf_tensors.groups(params.infos, rules))
    for group in groups:
        if len(group) != group[0].part[1] or len({params.infos[r.path] for r in group}) != 1:
            paths = ", ".join(rule.path for rule in group)
            raise ConfigError(
                f"{paths}: {group[0].part[1]} arrays of one shape are stored in one tensor. "
                "Export this model with --names jaxres."
            )
    return groups


def _tensor_shapes(
    group: Sequence[Rule], shape: Sequence[int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    rule = group[0]
    stored = rule.hf_shape(shape[1:] if "{}" in rule.name else shape)
    for name in rule.names(shape):
        yield name, stored


def _shards(
    infos: Mapping[str, ArrayInfo], limit: int, stem: str
) -> dict[str, dict[str, ArrayInfo]]:
    """Distributes tensors, in order, over files; returns file name -> its tensors."""
    parts: list[dict[str, ArrayInfo]] = [{}]
    size_bytes = 0
    for name, info in infos.items():
        if parts[-1] and size_bytes + _size(info) > limit:
            parts.append({})
            size_bytes = 0
        parts[-1][name] = info
        size_bytes += _size(info)
    if len(parts) == 1:
        return {f"{stem}.safetensors": parts[0]}
    return {
        f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors": part
        for number, part in enumerate(parts, start=1)
    }


def _read_back(
    params: ExportedParams,
    folder: Path,
    digests: Mapping[str, Sequence[Any]],
    rules: Mapping[str, Rule],
) -> None:
    """Imports the written export and compares it with the digests of its source."""
    stored = weights_source.from_safetensors(folder)
    names = {name: name for name in stored.tensors}
    for path, info in params.infos.items():
        source = weights_mapping.find(path, info, names, rules.get(path))
        row = None if source is None else array_row(path, weights_mapping.assemble(stored, source))
        if row != digests[path]:
            raise StorageUnavailable(
                f"{folder}: {path} reads back differently from what was written. Nothing of the "
                "export was kept. Is the disk or the memory faulty? Try another path with --out."
            )
