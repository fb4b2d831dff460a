"""Recomputes a step of a run on this machine's devices, and finds its first non-finite number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxres import data
from jaxres.checkpoint.restore.restore import restore
from jaxres.config import RunConfig
from jaxres.data import Batch
from jaxres.data.mixture import SOURCE_KEY
from jaxres.engine import mesh as meshes
from jaxres.engine import schedule
from jaxres.engine.loss_scale import value_and_grad
from jaxres.engine.mesh_plan import BatchPart
from jaxres.engine.state import Progress, TrainState, from_plain, to_plain
from jaxres.engine.step import StepMetrics
from jaxres.models import Model
from jaxres.models.interface import compute_loss
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, RunHistory
from jaxres.train.checks.nonfinite_trace import NonFinite, first_nonfinite
from jaxres.train.compiled import assemble, compile_cache, jitted_steps
from jaxres.train.components import Components
from jaxres.train.resume import check_dataset


@dataclass(frozen=True)
class ReplayResult:
    """Result of a recomputed step."""

    measured: StepMetrics
    batch: Batch
    explained: list[str]
    """Lines about the first non-finite number; empty if no explanation was requested."""


def replay_step(
    config: RunConfig,
    run_dir: RunDir,
    history: RunHistory,
    commit: Commit | None,
    *,
    step: int,
    explain: bool,
) -> ReplayResult:
    """Recomputes the steps from a committed one up to `step`; with `explain` traces that step."""
    compile_cache.set_determinism(config.run.determinism)
    dataset = data.open_dataset(config.data, bad_records=config.guards.bad_records)
    dataset = dataset.for_model(config.model, has_64_bits=jax.config.read("jax_enable_x64"))
    check_dataset(dataset.fingerprint, history)
    plan, mesh, _ = assemble.devices_here(config)
    parts = assemble.components(
        config, dataset, plan=plan, mesh=mesh, platform=jax.default_backend()
    )
    state, progress = _begin(parts, run_dir, commit)
    function = jitted_steps.compile_alone(parts)
    peak_rate = schedule.rate_arrays(config.optimizer.learning_rate, mesh)
    rows = parts.rows_per_batch
    order = dataset.order(seed=config.run.seed, rows_per_step=rows)
    batch_at = data.batch_at(
        dataset.train,
        order,
        global_batch_size=rows,
        skips=data.skip_ranges(order, history.skips, history.bad_rows, num_served=step * rows),
    )
    cursor, explained = progress.cursor, list[str]()
    form = parts.metrics_layout()
    for number in range(progress.step + 1, step):
        batch = batch_at(cursor)
        placed = meshes.place_batch(mesh, meshes.pack(batch.arrays))
        state, _ = function(state, placed, None, peak_rate(history.rate_factor(number)))
        cursor = batch.next_cursor
    batch = batch_at(cursor)
    if explain:
        own = meshes.place_batch(mesh, batch.arrays)
        other = meshes.place_batch(mesh, batch_at(batch.next_cursor).arrays)
        explained = _explain(parts.model, state, own, other, parts.plan.parts(rows))
    placed = meshes.place_batch(mesh, meshes.pack(batch.arrays))
    _, values = function(state, placed, None, peak_rate(history.rate_factor(step)))
    return ReplayResult(form.read(np.asarray(values))[0], batch, explained)


def _begin(
    parts: Components, run_dir: RunDir, commit: Commit | None
) -> tuple[TrainState, Progress]:
    if commit is None:
        return parts.init(), Progress()
    step_dir = (run_dir.root / commit.path).absolute()
    restored = restore(step_dir, commit, to_plain(parts.shapes))
    return from_plain(restored.state), restored.progress


def _explain(
    model: Model, state: TrainState, batch: Any, other: Any, parts: Sequence[BatchPart]
) -> list[str]:
    """Returns where the first non-finite number occurs: in the forward pass, else the backward one.

    The batch is compared with another one. If both have the same non-finite numbers, the cause is
    the state; then the batch is traced by itself.
    """
    _, key = jax.random.split(jax.random.wrap_key_data(state.key))
    for index, part in enumerate(parts):
        rows, others = (
            {name: array[part.rows] for name, array in arrays.items()} for arrays in (batch, other)
        )
        own_key = functools.reduce(jax.random.fold_in, part.folds, key)
        where = f"microbatch {index}: " if len(parts) > 1 else ""
        for name, function in (
            ("forward", _forward(model, state.model_state)),
            ("backward", _gradient(model, state)),
        ):
            for compared in (others, None):
                found = _first(function, state, rows, compared, own_key)
                if found is not None:
                    note = "" if compared is not None else " (of other rows too)"
                    return [f"first number that is not finite: {where}{name}: {found}{note}"]
    return ["every number is finite"]


def _first(
    function: Callable[..., Any], state: TrainState, rows: Any, others: Any, key: Any
) -> NonFinite | None:
    num_rows = len(next(iter(rows.values())))
    return first_nonfinite(
        functools.partial(function, key=key),
        (state.params, rows),
        other=None if others is None else (state.params, others),
        num_rows=num_rows,
    )


def _forward(model: Model, model_state: Any) -> Callable[..., Any]:
    """Returns the forward pass of the step: loss and weight of each row."""

    def losses(params: Any, rows: Any, key: Any) -> Any:
        own = {name: array for name, array in rows.items() if name != SOURCE_KEY}
        out = compute_loss(model, params, model_state, own, key)
        return out.loss_sum_B, out.weight_B

    return losses


def _gradient(model: Model, state: TrainState) -> Callable[..., Any]:
    """Returns the backward pass of the step, with its loss scale if it has one."""
    scale, forward = state.loss_scale, _forward(model, state.model_state)

    def loss_sum(params: Any, rows: Any, key: Any) -> Any:
        loss_sum_B, weight_B = forward(params, rows, key)
        return jnp.sum(loss_sum_B), (jnp.sum(weight_B),)

    def gradient(params: Any, rows: Any, key: Any) -> Any:
        if scale is None:
            return jax.grad(loss_sum, has_aux=True)(params, rows, key)[0]
        return value_and_grad(loss_sum, scale["factor"])(params, rows, key)[1]

    return gradient
