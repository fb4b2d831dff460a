"""The state before the first step: parameters from the seed, or from elsewhere (init_from).

Weights from elsewhere are part of the trajectory by their content: the start record holds their
digest, and a start anew before the first commit must find the same. Once a step is committed they
are not looked at any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxres import config as configs
from jaxres.checkpoint import weights_mapping, weights_source
from jaxres.checkpoint.content_digest import array_row
from jaxres.checkpoint.manifest import ArrayInfo
from jaxres.checkpoint.weights_mapping import Binding
from jaxres.checkpoint.weights_source import PARAMS, Weights
from jaxres.config.schema import CustomModel, GptModel, MlpModel
from jaxres.config.schema_training import FromRun, FromSafetensors, FromSeed
from jaxres.engine import state as states
from jaxres.engine.state import TrainState
from jaxres.faults import ConfigError, Unrestorable, UsageError
from jaxres.runlog.events import Noted, PhaseChanged
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Line
from jaxres.supervisor.run_config import resolve
from jaxres.train.context import Seat

if TYPE_CHECKING:
    from jaxres.train.build import Parts

Init = Callable[[Line], tuple[TrainState, dict[str, str] | None]]


@dataclass(frozen=True)
class Source:
    """Weights from elsewhere that have been held against the model."""

    weights: Weights
    binding: Binding

    def in_words(self) -> str:
        """Returns what is taken, and what is not."""
        bound = self.binding
        words = [f"{len(bound.taken)} arrays from {self.weights.where}"]
        if bound.fresh:
            words.append(f"from the seed: {', '.join(bound.fresh)}")
        if bound.left_out:
            shown = ", ".join(bound.left_out[:5])
            more = len(bound.left_out) - 5
            words.append(f"left out: {shown}{f' and {more} more' if more > 0 else ''}")
        return "; ".join(words)


def find(
    section: FromRun | FromSafetensors,
    model: GptModel | MlpModel | CustomModel,
    shapes: TrainState,
    *,
    step: int | None,
) -> Source:
    """Finds every array of the model in the weights; reads no numbers yet.

    Raises:
      ConfigError: they are not there, not whole, or differ in what is not allowed.
      StorageUnavailable: storage did not let them be read.
    """
    wanted = {path: ArrayInfo(x.dtype.name, x.shape) for path, x in _flat(shapes.params).items()}
    facts = weights_source.facts_of(model)
    with _source_named():
        found = weights_source.open_source(section, step=step, model_of=_model_of)
        return Source(found, weights_mapping.bind(found, wanted, facts=facts, section=section))


@contextlib.contextmanager
def _source_named() -> Iterator[None]:
    """Says of what is wrong with a source that it is the source: this run has no fault itself."""
    try:
        yield
    except (ConfigError, UsageError, Unrestorable) as error:
        raise ConfigError(f"init_from.path: {error}") from error


def _model_of(run_dir: RunDir) -> GptModel | MlpModel | CustomModel:
    return resolve(run_dir.root, [])[0].config.model


def _flat(params: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {
        PARAMS + jax.tree_util.keystr(keys, simple=True, separator="/"): leaf
        for keys, leaf in leaves
    }


def build(section: FromSeed | FromRun | FromSafetensors, parts: Parts, seat: Seat) -> Init:
    """Returns what makes the state before the first step; refuses at once what can't be had.

    Args:
      section: where the parameters come from.
      parts: what the rest of the state is made of.
      seat: whose log tells whether they are needed, and what was taken before.

    Raises:
      ConfigError: the weights do not fit, or are not there.
      StorageUnavailable: storage did not let them be read.
    """
    if isinstance(section, FromSeed):
        return lambda line: (parts.init(), None)
    line = seat.log.line()
    if line.newest is not None:
        return _not_needed
    step, seconds = None, parts.config.deadlines.compile_seconds
    if isinstance(section, FromRun):
        step = section.at_step or _same_step(section, line, seat, seconds)
    source = find(section, parts.config.model, parts.shapes, step=step)

    def init(line: Line) -> tuple[TrainState, dict[str, str]]:
        state, digest = _take(source, parts, seat)
        _refuse_others(source, digest, line, seat, seconds)
        if seat.peers.member.leads:
            seat.emit(Noted(f"parameters: {source.in_words()} ({digest})"))
        origin = {"params": digest, "path": str(section.path)}
        return state, origin | ({} if step is None else {"step": str(step)})

    return init


def _not_needed(line: Line) -> tuple[TrainState, dict[str, str]]:
    raise AssertionError("a step is committed: it is restored")


def _same_step(section: FromRun, line: Line, seat: Seat, seconds: float) -> int:
    """Returns the step that the run was started from before, else the newest: on all hosts one."""
    if line.init is not None:
        return int(line.init["step"])

    def newest() -> str:
        with _source_named():
            return str(weights_source.committed(RunDir(section.path), step=None).step)

    return int(seat.peers.same("init/step", newest, seconds=seconds))


def _take(source: Source, parts: Parts, seat: Seat) -> tuple[TrainState, str]:
    """Returns the state, each array laid out as it will be trained, and the digest of the taken.

    One array at a time is whole in this host's memory; what is digested is what the devices get.
    """
    shapes = _flat(parts.shapes.params)
    arrays = dict(_fresh_arrays(source.binding.fresh, parts))
    rows = []
    for path, taken in source.binding.taken.items():
        seat.emit(PhaseChanged("init", path))
        with _source_named():
            whole = weights_mapping.assemble(source.weights, taken, dtype="float32")
        rows.append(array_row(path, whole))
        arrays[path] = _laid_out(whole, shapes[path].sharding)
    treedef = jax.tree.structure(parts.shapes.params)
    params = jax.tree.unflatten(treedef, [arrays[path] for path in shapes])
    scale = configs.loss_scale(parts.config)
    seed, shardings = parts.config.run.seed, jax.tree.map(lambda x: x.sharding, parts.shapes)

    def rest(params: Any) -> dict[str, Any]:
        made = states.around(params, parts.tx, seed=seed, loss_scale=scale)
        return states.to_plain(made) | {"params": ()}

    others = jax.jit(
        rest,
        out_shardings=states.to_plain(shardings) | {"params": ()},
        compiler_options=states.INIT_OPTIONS,
    )(params)
    state = states.from_plain(others | {"params": params})
    return state, weights_source.params_digest(rows)


def _laid_out(whole: np.ndarray, sharding: Any) -> jax.Array:
    placed = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    return placed.block_until_ready()


def _fresh_arrays(paths: tuple[str, ...], parts: Parts) -> Mapping[str, jax.Array]:
    """Returns those arrays of the model that stay as the seed draws them."""
    if not paths:
        return {}

    def draw() -> dict[str, Any]:
        params = _flat(states.fresh_params(parts.model, seed=parts.config.run.seed))
        return {path: params[path] for path in paths}

    shapes = _flat(parts.shapes.params)
    shardings = {path: shapes[path].sharding for path in paths}
    return jax.jit(draw, out_shardings=shardings, compiler_options=states.INIT_OPTIONS)()


def _refuse_others(source: Source, digest: str, line: Line, seat: Seat, seconds: float) -> None:
    """Refuses weights that are not those of all hosts, or not those of an earlier start."""
    where = f"init_from.path: {source.weights.where}"
    lead = seat.peers.same("init", lambda: digest, seconds=seconds)
    if lead != digest:
        raise ConfigError(
            f"{where}: this host reads other weights than host 0 ({digest} here, {lead} there). "
            "Is that the same storage?"
        )
    if line.init is not None and line.init["params"] != digest:
        raise ConfigError(
            f"{where}: these are not the weights that this run was started with ({digest} here, "
            f"{line.init['params']} there). Bring the old ones back, or start a new run in another "
            "run.dir."
        )
