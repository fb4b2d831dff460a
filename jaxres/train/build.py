"""RunConfig -> Run: the only place that sees the whole config; every part gets its own section."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxres import data, evaluate, models, optim
from jaxres import mesh as meshes
from jaxres import state as states
from jaxres import step as steps
from jaxres.checkpoint.store import Checkpoints
from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.data import Batch, Dataset
from jaxres.events import Emit, Event, PhaseChanged, RunBuilt
from jaxres.faults import ConfigError
from jaxres.guards.divergence import stop_on_nonfinite
from jaxres.metrics import MetricsLine, MetricsLog
from jaxres.models import Model
from jaxres.rundir import RunDir
from jaxres.runlog import Claim, RunLog
from jaxres.state import TrainState
from jaxres.tensorboard import TensorBoard
from jaxres.train.loop import Agenda, Feed, Run


@dataclass(frozen=True)
class Built:
    """The run, and what the farewell needs beside it."""

    run: Run
    dataset: Dataset
    model: Model


@dataclass(frozen=True)
class Place:
    """Where a run lives and who tells of it: what build is given beside the config."""

    run_dir: RunDir
    log: RunLog
    claim: Claim
    emit: Emit
    clock: Clock
    landed: Callable[[MetricsLine], None]
    """Told of every finished step, after its line is written."""


def build(config: RunConfig, place: Place, stack: contextlib.ExitStack) -> Built:
    """Builds every part; resources (files, threads) are closed by `stack`.

    Raises:
      ConfigError: devices, data and settings that can't go together.
    """
    place = _with_tensorboard(config, place, stack)
    emit = place.emit
    if config.compilation.cache_dir is not None:
        use_compilation_cache(str(config.compilation.cache_dir.expanduser()))
    emit(PhaseChanged("data", "opening the corpus"))
    dataset = data.open_dataset(config.data, progress=lambda what: emit(PhaseChanged("data", what)))
    emit(PhaseChanged("build", "devices, model, optimizer"))
    mesh = meshes.build(config.mesh, devices=jax.devices())
    rows_per_batch = config.train.global_batch_size
    _refuse_uneven_rows(rows_per_batch, config.train.microbatches, mesh)
    model = models.build(
        config.model,
        vocab_size=dataset.vocab_size,
        seq_len=config.data.seq_len,
        platform=jax.default_backend(),
    )
    tx = optim.build(config.optimizer, decay_mask=optim.matrices(model.axes))
    metrics = stack.enter_context(MetricsLog(place.run_dir.metrics(place.log.attempt)))
    tokens_per_step = rows_per_batch * dataset.tokens_per_row
    shapes, init = _initializer(model, tx, mesh, seed=config.run.seed)
    emit(_built(config, dataset, model, mesh, shapes, tokens_per_step=tokens_per_step))
    example = _batch_shapes(dataset, rows_per_batch, mesh)
    step, evaluation = _compile(config, model, tx, shapes, example, mesh, dataset, emit)

    def landed(line: MetricsLine) -> None:
        metrics.append(line)
        place.landed(line)

    run = Run(
        steps=config.train.steps,
        agenda=Agenda(
            steps=config.train.steps,
            save_every_steps=config.checkpoint.save_every_steps,
            evaluate_every_steps=config.evaluation.every_steps if len(dataset.heldout) else 0,
        ),
        log=place.log,
        checkpoints=_checkpoints(config, place, before_commit=metrics.sync),
        guards=(stop_on_nonfinite(),),
        feed=Feed(
            at=_feed(config, dataset, place, mesh, stack),
            num_rows=len(dataset.train),
            tokens_per_step=tokens_per_step,
        ),
        init=init,
        shapes=shapes,
        step=step,
        evaluate=evaluation,
        dataset=dataset.fingerprint,
        computation=computation(config, place.claim, mesh),
        landed=landed,
        emit=emit,
        clock=place.clock,
    )
    return Built(run, dataset, model)


def _with_tensorboard(config: RunConfig, place: Place, stack: contextlib.ExitStack) -> Place:
    """Returns the place with a listener more, where the config asks for it."""
    if not config.telemetry.tensorboard:
        return place
    board = stack.enter_context(
        TensorBoard(
            place.run_dir.tensorboard,
            attempt=place.log.attempt,
            emit=place.emit,
            clock=place.clock,
        )
    )

    def emit(event: Event) -> None:
        place.emit(event)
        board.heard(event)

    def landed(line: MetricsLine) -> None:
        place.landed(line)
        board.landed(line)

    return dataclasses.replace(place, emit=emit, landed=landed)


def _checkpoints(
    config: RunConfig, place: Place, *, before_commit: Callable[[], None]
) -> Checkpoints:
    return Checkpoints(
        config.checkpoint,
        run_dir=place.run_dir,
        log=place.log,
        claim=place.claim,
        emit=place.emit,
        clock=place.clock,
        before_commit=before_commit,
    )


def use_compilation_cache(folder: str) -> None:
    """Keeps compiled programs in `folder`, also the ones that compile fast."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _refuse_uneven_rows(rows: int, microbatches: int, mesh: Mesh) -> None:
    parts = meshes.batch_shards(mesh) * microbatches
    if rows % parts:
        raise ConfigError(
            f"train.global_batch_size={rows} can't be split evenly over mesh.data x mesh.fsdp = "
            f"{meshes.batch_shards(mesh)} device(s) and train.microbatches={microbatches}; "
            f"try {rows // parts * parts or parts} or {(rows // parts + 1) * parts}."
        )


def _initializer(
    model: Model, tx: Any, mesh: Mesh, *, seed: int
) -> tuple[TrainState, Callable[[], TrainState]]:
    """Returns the state's shapes with shardings, and a function that creates it sharded."""

    def init() -> TrainState:
        return states.init(model, tx, seed=seed)

    bare = jax.eval_shape(init)
    shardings = states.shardings(bare, model, mesh)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), bare, shardings
    )
    # Runs once: a lower level compiles in less than half the time, to the same bits.
    options = {"xla_backend_optimization_level": 1}
    return shapes, jax.jit(init, out_shardings=shardings, compiler_options=options)


def _batch_shapes(dataset: Dataset, rows: int, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    one = dataset.train.rows(np.zeros(1, np.int64))
    sharding = meshes.batch_sharding(mesh)
    return {
        name: jax.ShapeDtypeStruct(
            (rows, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype), sharding=sharding
        )
        for name, array in one.items()
    }


def _compile(
    config: RunConfig,
    model: Model,
    tx: Any,
    shapes: TrainState,
    batch: dict[str, jax.ShapeDtypeStruct],
    mesh: Mesh,
    dataset: Dataset,
    emit: Emit,
) -> tuple[Any, Callable[[Any], float]]:
    """Compiles the train step and the evaluation step before the first step."""
    rate = optim.learning_rate(
        config.optimizer.schedule,
        peak=config.optimizer.learning_rate,
        total_steps=config.train.steps,
    )
    train_step = steps.make_train_step(
        model,
        tx,
        rate,
        clip_norm=config.optimizer.clip_norm,
        microbatches=config.train.microbatches,
    )
    emit(PhaseChanged("compile", "training step"))
    out = (jax.tree.map(lambda x: x.sharding, shapes), meshes.replicated(mesh))
    step = jax.jit(train_step, donate_argnums=0, out_shardings=out).lower(shapes, batch).compile()
    rows = config.train.global_batch_size
    if not (config.evaluation.every_steps and len(dataset.heldout)):
        return step, _no_evaluation
    emit(PhaseChanged("compile", "evaluation step"))
    mask = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=meshes.batch_sharding(mesh))
    eval_step = (
        jax.jit(steps.make_eval_step(model), out_shardings=meshes.replicated(mesh))
        .lower(shapes.params, batch, mask)
        .compile()
    )
    return step, evaluate.make(
        eval_step,
        dataset.heldout,
        rows_per_batch=rows,
        limit=config.evaluation.batches,
        mesh=mesh,
    )


def _no_evaluation(params: Any) -> float:
    raise AssertionError("the agenda has no evaluation")


def _feed(
    config: RunConfig, dataset: Dataset, place: Place, mesh: Mesh, stack: contextlib.ExitStack
) -> Callable[[int], tuple[Batch, Mapping[str, jax.Array]]]:
    """Returns cursor -> (batch, arrays on devices), read ahead in the background."""
    batch_at = data.batch_at(
        dataset.train,
        seed=config.run.seed,
        global_batch_size=config.train.global_batch_size,
        skips=place.log.line().skips,
    )
    prefetch = stack.enter_context(
        data.Prefetch(
            batch_at,
            depth=config.data.prefetch_batches,
            timeout_seconds=config.data.timeout_seconds,
            place=lambda batch: (batch, meshes.place_batch(mesh, batch.arrays)),
        )
    )
    return prefetch.get


def computation(config: RunConfig, claim: Claim, mesh: Mesh) -> dict[str, str]:
    """Returns what decides bits besides the trajectory; equal words, equal bits."""
    device = mesh.devices.flat[0]
    words = {
        "devices": f"{mesh.devices.size} x {device.platform} {device.device_kind}",
        "mesh": " ".join(f"{axis}={mesh.shape[axis]}" for axis in mesh.axis_names),
        "microbatches": str(config.train.microbatches),
        "threads": str(claim.threads),
    }
    if config.model.kind == "gpt":
        words |= {"attention": config.model.attention, "remat": config.model.remat}
    return words | dict(claim.fingerprint) | dict(claim.versions)


def _built(
    config: RunConfig,
    dataset: Dataset,
    model: Model,
    mesh: Mesh,
    shapes: TrainState,
    *,
    tokens_per_step: int,
) -> RunBuilt:
    device = mesh.devices.flat[0]
    return RunBuilt(
        model=config.model.kind,
        params=models.num_params(shapes.params),
        devices=f"{mesh.devices.size} x {device.device_kind}",
        rows=len(dataset.train),
        tokens_per_epoch=len(dataset.train) * dataset.tokens_per_row,
        steps=config.train.steps,
        tokens_per_step=tokens_per_step,
        flops_per_token=model.flops_per_token,
    )
