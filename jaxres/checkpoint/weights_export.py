"""Parameters as a safetensors folder, and back, bit for bit. No jax.

An export is written under a temporary name, read back as anyone would import it and compared with
what it was made of; only then does it get its name. One array of the model is in memory at a time.
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

from jaxres.checkpoint import hf_llama, safetensors, weights_mapping, weights_source
from jaxres.checkpoint.content_digest import array_row
from jaxres.checkpoint.manifest import ArrayInfo
from jaxres.checkpoint.weights_source import ABOUT, Facts, Weights, checksum
from jaxres.config.schema import GptModel
from jaxres.config.schema_training import FromSafetensors
from jaxres.faults import ConfigError, StorageUnavailable, UsageError
from jaxres.storage import files

MAX_SHARD_BYTES = 5 * 10**9
"""As transformers has it."""


@dataclass(frozen=True)
class Params:
    """The arrays of a model, by their paths here, read one at a time."""

    infos: Mapping[str, ArrayInfo]
    read: Callable[[str], np.ndarray]

    @property
    def numbers(self) -> int:
        """How many numbers there are."""
        return sum(math.prod(info.shape) for info in self.infos.values())

    def cast(self, dtype: str | None) -> Params:
        """Returns the same arrays in another type; None: as they are."""
        if dtype is None:
            return self
        infos = {path: ArrayInfo(dtype, info.shape) for path, info in self.infos.items()}
        return Params(infos, lambda path: self.read(path).astype(np.dtype(dtype)))


def of_run(source: Weights) -> Params:
    """Returns the parameters of a run's step."""
    return Params(source.tensors, source.read)


def of_folder(place: Path) -> tuple[Params, GptModel | None]:
    """Returns all that a safetensors folder or file holds, and the decoder that it is of.

    None: it goes by jaxres's own names, and could be of any model.

    Raises:
      ConfigError: it is damaged, not a Llama, or one that the decoder here can't compute.
      StorageUnavailable: storage did not let it be read.
    """
    there = weights_source.from_safetensors(place)
    model = None
    wanted = dict(there.tensors)
    facts = there.facts or {}
    if not all(name.startswith(weights_source.PARAMS) for name in wanted):
        model, rows = _llama_of(place)
        found = hf_llama.shapes(model, rows=rows)
        wanted = {path: ArrayInfo("float32", shape) for path, shape in found.items()}
        facts = weights_source.facts_of(model)
    lenient = FromSafetensors(path=place, cast="rounding", allow_changed=("config.json",))
    taken = weights_mapping.bind(there, wanted, facts=facts, section=lenient).taken
    infos = {path: weights_mapping.as_there(there, each) for path, each in taken.items()}
    return Params(infos, lambda path: weights_mapping.assemble(there, taken[path])), model


def _llama_of(place: Path) -> tuple[GptModel, int]:
    folder = place if place.is_dir() else place.parent
    data = files.read(folder / "config.json")
    if data is None:
        raise ConfigError(f"{folder}: no config.json here that would tell of the model.")
    try:
        model, rows, _ = hf_llama.read_config(dict(json.loads(data)))
    except (ValueError, TypeError, ConfigError) as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error
    return model, rows


def digest_of(params: Params) -> str:
    """Returns one word for parameters."""
    return weights_source.params_digest(array_row(path, params.read(path)) for path in params.infos)


def write(
    params: Params,
    out: Path,
    *,
    names: str,
    max_shard_bytes: int,
    facts: Facts,
    about: Mapping[str, Any],
    beside: Mapping[str, bytes],
) -> str:
    """Writes the arrays as a folder that appears whole or not at all; returns their digest.

    Args:
      params: what to write, in their types.
      out: the folder; must not be there.
      names: `llama` or `jaxres`.
      max_shard_bytes: of one file, unless one tensor alone is larger.
      facts: of the model.
      about: what else jaxres.json tells.
      beside: name -> content of further files.

    Raises:
      UsageError: the folder is there already.
      ConfigError: it can't be written there.
      StorageUnavailable: storage is full or fails, or what is read back is something else.
    """
    if out.exists():
        raise UsageError(f"{out}: is there already. Delete it, or choose another place with --out.")
    files.make_dir(out.parent)
    building = out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp")
    files.make_dir(building)
    try:
        digests, sums = _write_files(params, building, names, max_shard_bytes)
        digest = weights_source.params_digest(digests.values())
        told = {"format": 1, "names": names, "params": digest, "facts": dict(facts), **about}
        for name, data in {
            **beside,
            ABOUT: json.dumps({**told, "tensors": sums}, indent=1).encode(),
        }.items():
            files.replace(building / name, data)
        _read_back(params, building, digests)
        files.sync_tree(building)
        files.move(building, out)
        files.sync_tree(out)
    finally:
        files.delete_tree(building)
    return digest


def _write_files(
    params: Params, folder: Path, names: str, max_shard_bytes: int
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Returns the digest's row of every array, and the checksum of every tensor."""
    infos = {
        name: info
        for path, array in params.infos.items()
        for name, info in _tensor_infos(path, array, names)
    }
    shards = _shards(infos, max_shard_bytes)
    digests: dict[str, list[Any]] = {}
    sums: dict[str, str] = {}

    def contents() -> Iterator[tuple[str, np.ndarray]]:
        for path in params.infos:
            array = params.read(path)
            digests[path] = array_row(path, array)
            for name, piece in _pieces(path, array, names):
                sums[name] = checksum(piece)
                yield name, piece

    ready = contents()
    for file, part in shards.items():
        safetensors.write_file(folder / file, part, ready)
    if len(shards) > 1:
        total = sum(_size(info) for info in infos.values())
        places = {name: file for file, part in shards.items() for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        files.replace(folder / safetensors.INDEX, json.dumps(index, indent=1).encode())
    return digests, sums


def _size(info: ArrayInfo) -> int:
    return math.prod(info.shape) * np.dtype(info.dtype).itemsize


def _tensor_infos(path: str, array: ArrayInfo, names: str) -> Iterator[tuple[str, ArrayInfo]]:
    if names == "jaxres":
        yield path, array
        return
    rule = hf_llama.RULES.get(path)
    if rule is None:
        raise ConfigError(
            f"{path}: an array that no Llama has. Export this model with --names jaxres."
        )
    shape = rule.theirs(array.shape[1:] if "{}" in rule.name else array.shape)
    for name in rule.names(array.shape):
        yield name, ArrayInfo(array.dtype, shape)


def _pieces(path: str, array: np.ndarray, names: str) -> Iterator[tuple[str, np.ndarray]]:
    if names == "jaxres":
        yield path, array
    else:
        yield from hf_llama.pieces(path, array)


def _shards(infos: Mapping[str, ArrayInfo], limit: int) -> dict[str, dict[str, ArrayInfo]]:
    """Returns file -> tensors, in order, as many as fit."""
    parts: list[dict[str, ArrayInfo]] = [{}]
    held = 0
    for name, info in infos.items():
        if parts[-1] and held + _size(info) > limit:
            parts.append({})
            held = 0
        parts[-1][name] = info
        held += _size(info)
    if len(parts) == 1:
        return {safetensors.WHOLE: parts[0]}
    return {
        f"model-{number:05d}-of-{len(parts):05d}.safetensors": part
        for number, part in enumerate(parts, start=1)
    }


def _read_back(params: Params, folder: Path, digests: Mapping[str, Sequence[Any]]) -> None:
    """Imports what was written, and compares it with what it was written from."""
    there = weights_source.from_safetensors(folder)
    for path, info in params.infos.items():
        taken = weights_mapping.find(path, info, {name: name for name in there.tensors})
        found = None if taken is None else array_row(path, weights_mapping.assemble(there, taken))
        if found != digests[path]:
            raise StorageUnavailable(
                f"{folder}: {path} was written and read back as something else. Nothing of the "
                "export was kept. Is the disk or the memory bad? Try another place with --out."
            )
