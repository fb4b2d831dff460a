"""Reads stored parameters, from another run or from a safetensors folder. Needs no jax."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

import numpy as np
import xxhash

from jaxres.checkpoint.digests.content_digest import array_digest
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.manifest import ArrayInfo
from jaxres.checkpoint.retention import retention
from jaxres.checkpoint.weights import safetensors
from jaxres.config import huggingface
from jaxres.config.huggingface_keys import QUANTIZATION
from jaxres.config.schema.model import AnyModel, GptModel, MlpModel, VitModel
from jaxres.config.schema.run_config import RunConfig
from jaxres.config.schema.training import FromRun
from jaxres.faults import ConfigError, UsageError
from jaxres.runlog import run_log
from jaxres.runlog.history import RunHistory
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit
from jaxres.secret_values import without_rotatable
from jaxres.storage import files, foreign_json
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.path import RunPath, run_root

PARAMS, EMA, ADAPTERS = "params/", "ema/", "params/lora/"
ABOUT = "jaxres.json"
"""File in which an export describes itself: checksums, model, step."""
Step = SupportsIndex | Literal["newest", "best"]
"""A committed step, as any integer; "best": the step with the lowest held-out loss."""
WeightFacts = Mapping[str, Any]
"""Settings of a model that change its results but not the shapes of its arrays."""


@dataclass(frozen=True)
class Weights:
    """Parameters of a source, under the source's names, read one tensor at a time."""

    where: str
    """Name of the source in messages."""
    tensors: Mapping[str, ArrayInfo]
    """Name -> dtype and shape of every tensor."""
    read: Callable[[str], np.ndarray]
    """Reads the tensor of a name."""
    facts: WeightFacts | None
    """Settings of the source's model; None: unknown."""
    step: int | None = None
    """Step of the run that the parameters are from; None: not from a run."""


def facts_of(model: AnyModel) -> WeightFacts:
    """Returns the settings of a model that must equal the settings of the parameters' source."""
    if isinstance(model, GptModel):
        heads = model.num_heads
        groups = model.num_kv_heads or heads
        numbers = {"num_heads": heads, "num_kv_heads": groups}
        others = {"rope_theta": model.rope_theta, "norm_eps": model.norm_eps}
        dumped = model.model_dump(
            mode="json", include=set(huggingface.FACTS), exclude_defaults=True
        )
        return {"kind": "gpt", **numbers, **others, **dumped}
    if isinstance(model, VitModel):
        return {"kind": "vit", "num_heads": model.num_heads, "patch_size": model.patch_size}
    if isinstance(model, MlpModel):
        return {"kind": model.kind}
    args = without_rotatable(model.args)  # Secrets change no number.
    return {"kind": model.kind, "target": model.target, "args": args}


def from_run(
    run_dir: RunDir, config: RunConfig, commit: Commit, *, only_adapters: bool = False
) -> Weights:
    """Returns the parameters of a committed step; `read` verifies each array.

    Of a run with a moving average (optimizer.ema_decay) these are the averaged ones, which it
    evaluates too; those of adapters (lora) are added to their matrices, or returned alone.

    Raises:
      Unrestorable: the step is damaged; `read` raises it too.
      StorageUnavailable: storage could not be read.
    """
    step_dir = run_dir.root / commit.path
    manifest = manifests.read(step_dir, commit)
    tensors = {
        path: info
        for path, info in manifest.arrays.items()
        if path.startswith(PARAMS) and path.startswith(ADAPTERS) == only_adapters
    }

    def read(path: str) -> np.ndarray:
        array, pair = read_one(path), ADAPTERS + path.removeprefix(PARAMS)
        if only_adapters or f"{pair}/a" not in manifest.arrays:
            return array
        assert config.lora is not None
        a, b = read_one(f"{pair}/a"), read_one(f"{pair}/b")
        layers, rank = a.ndim + b.ndim - 2 - array.ndim, a.shape[-1]
        stacked = array.shape[:layers]
        change = a.reshape(*stacked, -1, rank) @ b.reshape(*stacked, rank, -1)
        scale = np.float32(config.lora.alpha / config.lora.rank)
        return array + scale * change.reshape(array.shape)

    def read_one(path: str) -> np.ndarray:
        averaged = EMA + path.removeprefix(PARAMS)
        stored = averaged if averaged in manifest.arrays else path
        array = manifests.read_array(step_dir, commit, stored, manifest)
        if array_digest(stored, array) != manifest.digests[stored]:
            what = f"the data read for {stored} has another digest than was committed"
            raise manifests.damaged(step_dir, commit.step, what)
        return array

    return Weights(
        f"{run_dir.root} step {commit.step}", tensors, read, facts_of(config.model), commit.step
    )


def from_safetensors(place: RunPath) -> Weights:
    """Returns the tensors of a safetensors folder or file; `read` verifies recorded checksums.

    A folder or an object of a bucket is read in parts, without a copy on this machine.

    Raises:
      ConfigError: the files do not exist, or are damaged.
      StorageUnavailable: storage could not be read.
    """
    stored = safetensors.open_path(place)
    folder = place.parent if safetensors.is_one_file(place) else place
    about = read_about(folder)
    sums: Mapping[str, str] = about["tensors"] if about else {}
    if about and sums.keys() != stored.keys():
        name = min(sums.keys() ^ stored.keys())
        raise safetensors.broken(place, f"{name} is missing in it or in {ABOUT}")

    def read(name: str) -> np.ndarray:
        array = stored[name].read()
        if name in sums and checksum(array) != sums[name]:
            raise safetensors.broken(
                stored[name].file,
                f"{name} has other numbers than {ABOUT} records (delete that file if you have "
                "changed the numbers yourself)",
            )
        return array

    tensors = {name: tensor.info for name, tensor in stored.items()}
    return Weights(str(place), tensors, read, _facts_there(folder, about))


def read_about(folder: RunPath) -> dict[str, Any] | None:
    """Returns an export's description of itself; None if the folder is not an export."""
    data = files.read(folder / ABOUT)
    if data is None:
        return None
    files.refuse_lfs_pointer(data, folder / ABOUT)
    try:
        about = json.loads(data)
        if about["format"] != 1:
            raise ValueError(f"format {about['format']}, this version reads 1")
        return {**about, "tensors": dict(about["tensors"]), "facts": dict(about["facts"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / ABOUT}: can't be read ({error!r}).") from error


def _facts_there(folder: RunPath, about: Mapping[str, Any] | None) -> WeightFacts | None:
    data = files.read(folder / "config.json")
    if data is None:
        return about["facts"] if about else None
    files.refuse_lfs_pointer(data, folder / "config.json")
    try:
        fields = dict(foreign_json.loads(data))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{folder / 'config.json'}: can't be read ({error}).") from error
    try:
        model, unsupported = huggingface.model_of(huggingface.of_text(fields))
    except ConfigError as error:
        quantized = {key: fields[key] for key in QUANTIZATION if fields.get(key)}
        return {"model_type": str(error).removeprefix("config.json: "), **quantized}
    facts = {**facts_of(model), **unsupported}
    recorded = about["facts"] if about else {}
    if changed := [key for key in recorded.keys() & facts.keys() if recorded[key] != facts[key]]:
        key = min(changed)
        raise ConfigError(
            f"{folder / 'config.json'}: gives {key} {facts[key]!r}, and {ABOUT} beside it, which "
            f"jaxres wrote with these weights, {recorded[key]!r}. Restore config.json from a copy, "
            f"or delete {ABOUT} if you have changed the model on purpose."
        )
    return facts


def checksum(array: np.ndarray) -> str:
    """Returns xxh3-128, in hex, of an array's numbers as they are stored."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(np.uint8).data)


def params_digest(rows: Iterable[Sequence[Any]]) -> str:
    """Returns the digest of parameters, from their rows of the content digest."""
    ordered = sorted(list(row) for row in rows)
    return "sha256:" + hashlib.sha256(canonical_json({"params": ordered})).hexdigest()


def committed(run_dir: RunDir, *, step: int | None) -> Commit:
    """Returns the commit record of a step; None: of the newest committed step.

    Raises:
      ConfigError: the run does not exist, or the step is not committed.
    """
    return _committed(run_dir, run_log.fold(run_log.read_records(run_dir.log)), step)


def _committed(run_dir: RunDir, history: RunHistory, step: int | None) -> Commit:
    for commit in reversed(history.committed):
        if step in (None, commit.step):
            return commit
    steps = ", ".join(str(commit.step) for commit in history.committed) or "none"
    what = "no step" if step is None else f"step {step} is not"
    if not history.claims:
        raise ConfigError(f"{run_dir.root}: no run here (no log/).")
    raise ConfigError(f"{run_dir.root}: {what} committed (committed: {steps}).")


def parse_step(text: str | None) -> Step:
    """Returns the step that an option names: a number, `best`, or `newest`, also for None."""
    if text in (None, "newest"):
        return "newest"
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise UsageError(f"--step {text}: must be a number, `newest` or `best`")
    return int(text)


def commit_of(run_dir: RunDir, step: Step) -> Commit:
    """Returns the record of a committed step. Raises ConfigError if there is none."""
    if step == "newest":
        return committed(run_dir, step=None)
    if step != "best":
        try:
            return committed(run_dir, step=operator.index(step))
        except TypeError as error:
            what = "must be an integer, 'newest' or 'best'"
            raise ConfigError(f"{run_dir.root}: step {step!r}: {what}.") from error
    history = run_log.fold(run_log.read_records(run_dir.log))
    best = retention.best(1)(retention.steps_of(history))
    if not best:
        raise ConfigError(f"{run_dir.root}: no committed step has a held-out loss.")
    return _committed(run_dir, history, next(iter(best)))


def source_run_dir(section: FromRun) -> RunDir:
    """Returns the run directory of the weights; raises ConfigError if its path can't be one."""
    try:
        return RunDir(run_root(section.path))
    except ValueError as error:
        raise ConfigError(f"{section.path}: {error}") from error
