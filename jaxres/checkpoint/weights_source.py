"""Parameters from elsewhere: another run's, or a safetensors folder's. Needs no jax."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxres.checkpoint import hf_llama, safetensors
from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.content_digest import array_digest
from jaxres.checkpoint.manifest import ArrayInfo
from jaxres.config.schema import CustomModel, GptModel, MlpModel
from jaxres.config.schema_training import FromRun, FromSafetensors
from jaxres.faults import ConfigError
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit
from jaxres.storage import files
from jaxres.storage.checksummed_json import canonical_json

PARAMS = "params/"
ABOUT = "jaxres.json"
"""What an export tells of itself: checksums, model, step."""
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
    """Returns the parameters of a committed step, each verified as it is read.

    Raises:
      Unrestorable: the step is damaged; so does `read`.
      StorageUnavailable: storage did not let it be read.
    """
    step_dir = (run_dir.root / commit.path).absolute()
    manifest = manifests.read(step_dir, commit)
    tensors = {path: info for path, info in manifest.arrays.items() if path.startswith(PARAMS)}

    def read(path: str) -> np.ndarray:
        array = manifests.read_array(step_dir, commit, path, tensors[path])
        if manifest.tells_content and array_digest(path, array) != manifest.digests[path]:
            what = f"what was read of {path} has another digest than was committed"
            raise manifests.damaged(step_dir, commit.step, what)
        return array

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
    data = files.read(folder / ABOUT)
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
    data = files.read(folder / "config.json")
    if data is None:
        return about["facts"] if about else None
    try:
        fields = dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{folder / 'config.json'}: can't be read ({error}).") from error
    try:
        model, _, differing = hf_llama.read_config(fields)
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
    line = run_log.fold(run_log.read_records(run_dir.log))
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
      Unrestorable: the run's step is damaged.
      StorageUnavailable: storage did not let them be read.
    """
    if isinstance(section, FromSafetensors):
        assert isinstance(section.path, Path), "config/cross_checks.py refuses buckets"
        return from_safetensors(section.path)
    run_dir = RunDir(section.path)
    commit = committed(run_dir, step=step)
    return from_run(run_dir, model_of(run_dir), commit)
