"""Initial parameters: from the seed, or from other weights (init_from).

Other weights are part of the trajectory by their content: the start record has their digest, and
a restart before the first commit must find the same digest. Once a step is committed they are read
only if init_from.path has changed, to compare their digest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxres import config as configs
from jaxres.checkpoint.digests.content_digest import array_row
from jaxres.checkpoint.read.manifest import ArrayInfo
from jaxres.checkpoint.weights import mapping as weights_mapping
from jaxres.checkpoint.weights import source as weights_source
from jaxres.checkpoint.weights.mapping import WeightMapping
from jaxres.checkpoint.weights.orbax_weights import from_orbax
from jaxres.checkpoint.weights.source import ADAPTERS, PARAMS, Weights
from jaxres.config.schema.model import AnyModel
from jaxres.config.schema.training import FromOrbax, FromRun, FromSafetensors, FromSeed, FromStored
from jaxres.data.dataset import Dataset
from jaxres.data.tokens import hf_bytes_tokenizer, tokenizer_names
from jaxres.data.tokens.tokenizer import BYTES, FILE_NAME, Tokenizer
from jaxres.data.tokens.tokenizer_names import Likeness
from jaxres.engine import mesh as meshes
from jaxres.engine import state as states
from jaxres.engine.state import TrainState
from jaxres.faults import ConfigError, StorageRefused, Unrestorable, UsageError
from jaxres.runlog import run_log
from jaxres.runlog.events import Noted, PhaseChanged
from jaxres.runlog.run_log import RunHistory, recorded_tokenizer
from jaxres.storage import files
from jaxres.storage.path import normalized
from jaxres.supervisor.run_config import newest_config, resolve_run
from jaxres.train.components import Components
from jaxres.train.context import AttemptContext

TOKENIZER = "tokenizer"
"""Name in init_from.allow_changed."""
Init = Callable[[RunHistory], tuple[TrainState, dict[str, str] | None]]


@dataclass(frozen=True)
class InitSource:
    """Weights that have been mapped to the model."""

    weights: Weights
    binding: WeightMapping

    def summary(self) -> str:
        """Returns which arrays are taken and which are not, as a line of text."""
        mapping = self.binding
        parts = [f"{len(mapping.taken)} arrays from {self.weights.where}"]
        if mapping.fresh:
            parts.append(f"from the seed: {', '.join(mapping.fresh)}")
        if mapping.left_out:
            shown = ", ".join(mapping.left_out[:5])
            more = len(mapping.left_out) - 5
            parts.append(f"left out: {shown}{f' and {more} more' if more > 0 else ''}")
        return "; ".join(parts)


def resolve_source(
    section: FromStored,
    model: AnyModel,
    shapes: TrainState,
    *,
    step: int | None,
) -> InitSource:
    """Maps every array of the model to the weights; reads no array yet.

    Raises:
      ConfigError: the weights don't exist, are damaged, or differ in a way that is not allowed.
      StorageUnavailable: storage did not answer.
    """
    missing = (*section.allow_missing, f"{ADAPTERS}*")  # Adapters always begin from the seed.
    changed = section.allow_changed
    if isinstance(section, FromOrbax):  # Nothing there says which settings its model has.
        changed = (*changed, "config.json")
    section = section.model_copy(update={"allow_missing": missing, "allow_changed": changed})
    wanted = {path: ArrayInfo(x.dtype.name, x.shape) for path, x in _flat(shapes.params).items()}
    facts = weights_source.facts_of(model)
    with _name_source():
        found = _open_source(section, step=step)
        return InitSource(
            found, weights_mapping.map_weights(found, wanted, facts=facts, section=section)
        )


@contextlib.contextmanager
def _name_source() -> Iterator[None]:
    """Names init_from.path in errors of the source, which are a ConfigError."""
    try:
        yield
    except StorageRefused as error:
        raise StorageRefused(f"init_from.path: {error}") from error
    except (ConfigError, UsageError, Unrestorable) as error:
        raise ConfigError(f"init_from.path: {error}") from error


def _open_source(section: FromStored, *, step: int | None) -> Weights:
    """Returns the parameters of a source.

    Args:
      section: the source, as configured.
      step: step of the source run; None: its newest.

    Raises:
      ConfigError: the source does not exist, or its files are damaged.
      Unrestorable: the run's step is damaged.
      StorageUnavailable: storage could not be read.
    """
    if isinstance(section, FromSafetensors):
        return weights_source.from_safetensors(normalized(section.path))
    if isinstance(section, FromOrbax):
        return from_orbax(normalized(section.path))
    run_dir = weights_source.source_run_dir(section)
    commit = weights_source.committed(run_dir, step=step)
    config = resolve_run(run_dir.root, [])[0].config
    return weights_source.from_run(run_dir, config, commit)


def _flat(params: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {
        PARAMS + jax.tree_util.keystr(keys, simple=True, separator="/"): leaf
        for keys, leaf in leaves
    }


def build(section: FromSeed | FromStored, parts: Components, context: AttemptContext) -> Init:
    """Returns a function that creates the state before the first step; checks its source at once.

    Args:
      section: where the parameters come from.
      parts: components, for the rest of the state.
      context: context, whose log decides whether parameters are needed and which were taken before.

    Raises:
      ConfigError: the weights don't exist or don't fit the model.
      StorageUnavailable: storage did not answer.
    """
    if isinstance(section, FromSeed):
        return lambda line: (_from_seed(parts), None)
    history = context.log.history()
    if history.newest is None:
        return _from_source(section, parts, context)
    if context.peers.member.leads:
        _check_moved_weights(section, parts, context, history)
    # Only a rollback to before the first committed step needs the weights again.
    resolved = functools.cache(lambda: _from_source(section, parts, context))
    return lambda history: resolved()(history)


def _from_seed(parts: Components) -> TrainState:
    """Returns the state that the seed makes; raises ConfigError if a user's model is not finite."""
    state = parts.init()
    if parts.config.model.kind != "custom":  # The models of this package make finite values.
        return state
    paths = _flat(state.params)
    count = jax.jit(states.count_nonfinite, out_shardings=meshes.replicated(parts.mesh))
    counts = np.asarray(count([*paths.values()])).tolist()
    bad = [
        f"{number:,} of {paths[path].size:,} values of {path}"
        for path, number in zip(paths, counts, strict=True)
        if number
    ]
    if bad:
        raise ConfigError(
            f"model.target: of the model's initial parameters {_shortened(bad)} are not finite "
            f"(NaN or infinite; run.seed={parts.config.run.seed}): no step could be trained from "
            "them. Correct the model's `init`."
        )
    return state


def _shortened(parts: list[str]) -> str:
    return ", ".join([*parts[:5], *([f"and {len(parts) - 5} more"] if len(parts) > 5 else [])])


def _from_source(section: FromStored, parts: Components, context: AttemptContext) -> Init:
    """Returns a function that takes the parameters from a source, which exists and fits."""
    step, seconds = None, parts.config.deadlines.compile_seconds
    if isinstance(section, FromRun):
        step = section.at_step or _same_step(section, context.log.history(), context, seconds)
    source = resolve_source(section, parts.config.model, parts.shapes, step=step)
    note = check_tokenizer(section, parts.dataset)
    calls = itertools.count()

    def init(history: RunHistory) -> tuple[TrainState, dict[str, str]]:
        state, digest = _load_params(source, parts, context)
        topic = f"init/{next(calls)}"  # Of each call: a rollback to step 0 is another one.
        _check_same_weights(source, digest, history, context, topic=topic, seconds=seconds)
        if context.peers.member.leads:
            context.emit(Noted(f"parameters: {source.summary()} ({digest})"))
            if note is not None:
                context.emit(Noted(f"init_from: {note}"))
        origin = {"params": digest, "path": str(section.path)}
        return state, origin | ({} if step is None else {"step": str(step)})

    return init


def check_tokenizer(section: FromStored, dataset: Dataset) -> str | None:
    """Refuses weights of another tokenizer than the data's, and a run's of an unknown one.

    Returns what is to be told if one of both is not known. A config whose weights have no tokenizer
    beside them, and that names none, is refused when it is read.

    Raises:
      ConfigError: the weights' tokenizer is another one, or no run has recorded it.
    """
    tokenizer = dataset.tokenizer
    if TOKENIZER in section.allow_changed:
        return None
    names = dataset.tokenizer_names if tokenizer is None else (tokenizer.name,)
    compare = _comparison(section, tokenizer)
    names_by_likeness = {compare(each): each for each in names}
    if (name := names_by_likeness.get("other")) is not None:
        raise ConfigError(
            f"init_from.path: the model of {section.path} has another tokenizer than the data "
            f"({name}), so its embedding is of other tokens. Set data.tokenizer to its "
            f"tokenizer, or accept that: init_from.allow_changed=[{TOKENIZER}]."
        )
    if (name := names_by_likeness.get("unknown")) is None:
        return None
    if name == BYTES and isinstance(section, FromRun):
        raise ConfigError(
            f"init_from.path: {section.path}: the run has not recorded the tokenizer of its "
            "tokens. Give the model's tokenizer by data.tokenizer, or, if its tokens are bytes, "
            f"accept that: init_from.allow_changed=[{TOKENIZER}]."
        )
    if tokenizer is not None:
        return f"{section.path} has no tokenizer beside it: its tokens are taken for {name}"
    return (
        f"WARNING: whether the tokens of the data ({name}) are those of {section.path} is not "
        "known. Give the tokenizer of the data by data.tokenizer, or accept that they are: "
        f"init_from.allow_changed=[{TOKENIZER}]."
    )


def _comparison(section: FromStored, tokenizer: Tokenizer | None) -> Callable[[str], Likeness]:
    """Returns the comparison of the weights' tokenizer with that of a name, the data's."""
    if isinstance(section, FromRun):
        recorded = recorded_tokenizer(
            run_log.read_records(weights_source.source_run_dir(section).log)
        )
        if recorded is None:
            return lambda name: "unknown"
        return functools.partial(tokenizer_names.compare, recorded)
    folder = files.folder_of(normalized(section.path))
    there, where = files.read(folder / FILE_NAME), f"init_from.path: {folder / FILE_NAME}"
    files.refuse_lfs_pointer(there or b"", where)
    if there is None:
        return lambda name: "unknown"
    if tokenizer is None:
        return lambda name: tokenizer_names.compare_with_file(name, there, where)
    own = tokenizer.files or hf_bytes_tokenizer.bytes_tokenizer(seq_len=1)
    return lambda name: "same" if there == own[FILE_NAME] else "other"


def _check_moved_weights(
    section: FromStored,
    parts: Components,
    context: AttemptContext,
    history: RunHistory,
) -> None:
    """Raises ConfigError if other weights are behind a changed path; they may be gone."""
    init, recorded = history.init, newest_config(context.run_dir)
    moved = [key for key, _, _ in configs.moved_content(recorded, parts.config)]
    if init is None or "init_from.path" not in moved:
        return
    place = normalized(section.path)
    if not (files.exists(place) or files.list_names(place)):
        context.emit(
            Noted(
                f"init_from.path: {section.path} does not exist. It is not needed: the run has "
                f"committed steps, and started from {init['path']} ({init['params']})"
            )
        )
        return
    step = int(init["step"]) if isinstance(section, FromRun) else None
    source = resolve_source(section, parts.config.model, parts.shapes, step=step)
    rows = [array_row(path, array) for path, array in _arrays_taken(source, context)]
    _check_recorded(source, weights_source.params_digest(rows), history)


def _arrays_taken(source: InitSource, context: AttemptContext) -> Iterator[tuple[str, np.ndarray]]:
    """Yields path and values of each array that is taken from the source, one at a time."""
    for path, taken in source.binding.taken.items():
        context.emit(PhaseChanged("init", path))
        with _name_source():
            array = weights_mapping.assemble(source.weights, taken, dtype="float32")
        yield path, array


def _same_step(
    section: FromRun, history: RunHistory, context: AttemptContext, seconds: float
) -> int:
    """Returns the step of an earlier start of this run, else the newest one; equal on all hosts."""
    if history.init is not None:
        return int(history.init["step"])

    def newest() -> str:
        with _name_source():
            run_dir = weights_source.source_run_dir(section)
            return str(weights_source.committed(run_dir, step=None).step)

    return int(context.peers.broadcast("init/step", newest, seconds=seconds))


def _load_params(
    source: InitSource, parts: Components, context: AttemptContext
) -> tuple[TrainState, str]:
    """Returns the state, sharded as in training, and the digest of the arrays that were taken.

    Only one array at a time is unsharded in this host's memory. The digest is computed over the
    values that are placed on the devices.

    Raises:
      ConfigError: one of the arrays has values that are not finite.
    """
    shapes = _flat(parts.shapes.params)
    arrays = dict(_fresh_arrays(source.binding.fresh, parts))
    rows = []
    for path, array in _arrays_taken(source, context):
        rows.append(array_row(path, array))
        arrays[path] = _place(array, shapes[path].sharding)
    treedef = jax.tree.structure(parts.shapes.params)
    params = jax.tree.unflatten(treedef, [arrays[path] for path in shapes])
    scale = configs.loss_scale(parts.config)
    seed, shardings = parts.config.run.seed, jax.tree.map(lambda x: x.sharding, parts.shapes)

    def rest(params: Any) -> tuple[dict[str, Any], jax.Array]:
        state = states.state_from_params(
            params,
            parts.model,
            parts.tx,
            seed=seed,
            loss_scale=scale,
            trainable=parts.trainable,
            ema_decay=parts.config.optimizer.ema_decay,
        )
        return states.to_plain(state) | {"params": ()}, states.count_nonfinite(params)

    others, counts = jax.jit(
        rest,
        out_shardings=(
            states.to_plain(shardings) | {"params": ()},
            meshes.replicated(parts.mesh),
        ),
        compiler_options=states.INIT_OPTIONS,
    )(params)
    numbers = dict(zip(shapes, np.asarray(counts).tolist(), strict=True))
    _refuse_nonfinite(source, [path for path in source.binding.taken if numbers[path]])
    state = states.from_plain(others | {"params": params})
    return state, weights_source.params_digest(rows)


def _refuse_nonfinite(source: InitSource, paths: list[str]) -> None:
    """Raises ConfigError for arrays with values that are not finite; reads their tensors again."""
    bad = list[str]()
    for name in (name for path in paths for name in source.binding.taken[path].names):
        with _name_source(), np.errstate(over="ignore"):
            array = np.asarray(source.weights.read(name)).astype(np.float32)
        if number := array.size - np.count_nonzero(np.isfinite(array)):
            bad.append(f"{number:,} of {array.size:,} values of {name}")
    if paths:
        raise ConfigError(
            f"init_from.path: {source.weights.where}: {_shortened(bad or paths)} are not finite "
            "(NaN, or beyond the range of float32): training from them would end as diverged. Take "
            "the weights of an earlier step or of another copy."
        )


def _place(array: np.ndarray, sharding: Any) -> jax.Array:
    placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return placed.block_until_ready()


def _fresh_arrays(paths: tuple[str, ...], parts: Components) -> Mapping[str, jax.Array]:
    """Returns the arrays of the model that are initialised from the seed."""
    if not paths:
        return {}

    def draw() -> dict[str, Any]:
        params = _flat(states.fresh_params(parts.model, seed=parts.config.run.seed))
        return {path: params[path] for path in paths}

    shapes = _flat(parts.shapes.params)
    shardings = {path: shapes[path].sharding for path in paths}
    return jax.jit(draw, out_shardings=shardings, compiler_options=states.INIT_OPTIONS)()


def _check_same_weights(
    source: InitSource,
    digest: str,
    history: RunHistory,
    context: AttemptContext,
    *,
    topic: str,
    seconds: float,
) -> None:
    """Raises if the weights differ from host 0's or from an earlier start's of this run."""
    where = f"init_from.path: {source.weights.where}"
    expected = context.peers.broadcast(topic, lambda: digest, seconds=seconds)
    if expected != digest:
        raise ConfigError(
            f"{where}: this host reads other weights than host 0 ({digest} here, {expected} "
            "on host 0)."
            " Check that both read the same storage."
        )
    _check_recorded(source, digest, history)


def _check_recorded(source: InitSource, digest: str, history: RunHistory) -> None:
    """Raises ConfigError if the weights are not the ones that the run was started with."""
    where = f"init_from.path: {source.weights.where}"
    if history.init is not None and history.init["params"] != digest:
        raise ConfigError(
            f"{where}: these are not the weights that this run was started with ({digest} now, "
            f"{history.init['params']} recorded). Restore the old ones, or start a new run in "
            "another run.dir."
        )
