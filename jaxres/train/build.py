"""RunConfig -> Run: the only place that sees the whole config; every part gets its own section."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxres import config as configs
from jaxres import data, models
from jaxres.checkpoint.checkpointer import Checkpoints
from jaxres.config import RunConfig
from jaxres.config.schema_training import GuardsSection
from jaxres.data import Dataset
from jaxres.engine import divergence, evaluate, mesh_plan, optimizer, sharding_report
from jaxres.engine import mesh as meshes
from jaxres.engine import state as states
from jaxres.engine import step as steps
from jaxres.engine.guards import Guard
from jaxres.engine.mesh_plan import Plan
from jaxres.engine.sharding_report import Layout
from jaxres.engine.state import TrainState
from jaxres.models import Model
from jaxres.runlog.events import Emit, Noted, PhaseChanged, RunBuilt
from jaxres.runlog.metrics import MetricsLine, MetricsLog
from jaxres.storage import files
from jaxres.train import compile_cache, data_loader, init_params, oom_advice, save_scheduler
from jaxres.train.components import Agenda, Diagnostics, Run
from jaxres.train.consensus import Agreement, AllWords, OwnWord, facts_shape
from jaxres.train.context import Seat
from jaxres.train.reproducibility import computation


@dataclass(frozen=True)
class Built:
    """The run, and what the farewell needs beside it."""

    run: Run
    dataset: Dataset
    model: Model


@dataclass(frozen=True)
class Parts:
    """What the compiled functions are made of."""

    config: RunConfig
    dataset: Dataset
    plan: Plan
    mesh: Mesh
    model: Model
    tx: optax.GradientTransformation
    shapes: TrainState
    init: Callable[[], TrainState]

    @property
    def rows_per_batch(self) -> int:
        """Rows of the global batch."""
        return self.config.train.global_batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step consumes."""
        return self.rows_per_batch * self.dataset.tokens_per_row

    @property
    def evaluates(self) -> bool:
        """Whether held-out data are there and asked for."""
        return bool(self.config.evaluation.every_steps and len(self.dataset.heldout))


def build(config: RunConfig, seat: Seat, stack: contextlib.ExitStack) -> Built:
    """Builds every part; resources (files, threads) are closed by `stack`.

    Raises:
      ConfigError: devices, data and settings that can't go together.
    """
    if config.compilation.cache_dir is not None:
        compile_cache.use_compilation_cache(str(config.compilation.cache_dir.expanduser()))
    parts = _parts(config, seat.emit)
    laid = _lay_out(parts, seat)
    seat.emit(_built(parts, laid))
    init = init_params.build(config.init_from, parts, seat)  # Before minutes of compilation.
    step, evaluation = _compile(parts, seat)
    # The first collective of a job waits for half a minute only, and one host may have compiled
    # for long where another has found the program in its cache.
    seat.peers.meet("compiled", seconds=config.deadlines.compile_seconds)
    seat, is_due = save_scheduler.listen(config.checkpoint.when, seat)
    landed, sync = _metrics(seat, stack)
    checkpoints = _checkpoints(config, seat, before_commit=sync)
    run = Run(
        steps=config.train.steps,
        agenda=_agenda(parts),
        log=seat.log,
        checkpoints=checkpoints,
        guards=_guards(config.guards),
        limits=config.guards,
        feed=data_loader.open_feed(
            parts.dataset,
            parts.mesh,
            seat,
            stack,
            section=config.data,
            train=config.train,
            leaves_out=config.guards.bad_records is not None,
            seed=config.run.seed,
        ),
        init=init,
        shapes=parts.shapes,
        step=step,
        rate_factor=optimizer.factors(config.guards.rollback, parts.mesh),
        diagnostics=Diagnostics(
            seat.run_dir.diagnostics(seat.log.attempt), config.guards.diagnostics
        ),
        form=steps.Form.of(parts.shapes, num_rows=parts.rows_per_batch),
        row_places=_row_places(parts),
        evaluate=evaluation,
        dataset=parts.dataset.fingerprint,
        computation=computation(config, seat.claim, parts.mesh, parts.plan, step),
        landed=landed,
        agreement=_agreement(seat, checkpoints, parts.mesh, is_due),
        peers=seat.peers,
        meeting_seconds=config.deadlines.restore_seconds,
        emit=seat.emit,
        clock=seat.clock,
        loss_scale=configs.loss_scale(config),
    )
    return Built(run, parts.dataset, parts.model)


def _agenda(parts: Parts) -> Agenda:
    config = parts.config
    return Agenda(
        steps=config.train.steps,
        save_every_steps=save_scheduler.every_steps(config.checkpoint.when),
        evaluate_every_steps=config.evaluation.every_steps if parts.evaluates else 0,
    )


def _guards(section: GuardsSection) -> tuple[Guard, ...]:
    guards = [divergence.skips(section)]
    if section.spikes is not None and section.spikes.mode == "warn":
        guards.append(divergence.bands(section.spikes))
    if section.rollback is not None:
        guards.append(divergence.losses(section.rollback))
    return tuple(guards)


def _row_places(parts: Parts) -> list[tuple[int, int]]:
    hosts = meshes.hosts_of_rows(parts.mesh, parts.rows_per_batch)
    return [(host, row % parts.plan.microbatches) for row, host in enumerate(hosts)]


def _metrics(
    seat: Seat, stack: contextlib.ExitStack
) -> tuple[Callable[[MetricsLine], None], Callable[[], None]]:
    """Returns what hears of every finished step, and what makes the lines durable."""
    if not seat.peers.member.leads:
        return seat.landed, lambda: None
    metrics = stack.enter_context(MetricsLog(seat.run_dir.metrics(seat.log.attempt)))

    def landed(line: MetricsLine) -> None:
        seat.landed(line)  # First: whoever reads the line may rely on the door's knowing of it.
        metrics.append(line)

    return landed, metrics.sync


def _agreement(
    seat: Seat, checkpoints: Checkpoints, mesh: Mesh, by_clock: Callable[[], bool]
) -> Agreement:
    def is_due() -> bool:
        return not checkpoints.is_busy and by_clock()

    if seat.peers.member.is_alone:
        return OwnWord(seat.requests, checkpoints.verdict, is_due=is_due)
    return AllWords(seat.requests, checkpoints.verdict, mesh=mesh, is_due=is_due)


def _parts(config: RunConfig, emit: Emit) -> Parts:
    emit(PhaseChanged("data", "opening the corpus"))
    dataset = data.open_dataset(config.data, progress=lambda what: emit(PhaseChanged("data", what)))
    emit(PhaseChanged("build", "devices, model, optimizer"))
    plan, mesh, slow = devices_here(config)
    if slow is not None:
        emit(Noted(slow))
    return assemble(config, dataset, plan=plan, mesh=mesh, platform=jax.default_backend())


def devices_here(config: RunConfig) -> tuple[Plan, Mesh, str | None]:
    """Returns how the devices that are there share the work, and what is slow about it.

    Raises:
      ConfigError: their number will not do.
    """
    devices = jax.devices()
    plan = mesh_plan.plan(
        config.mesh,
        config.train,
        config.model,
        num_devices=len(devices),
        num_hosts=jax.process_count(),
    )
    slow = mesh_plan.crosses_hosts(plan, devices_per_host=jax.local_device_count())
    return plan, meshes.build(config.mesh, devices=devices), slow


def assemble(
    config: RunConfig, dataset: Dataset, *, plan: Plan, mesh: Mesh, platform: str
) -> Parts:
    """Returns the parts on a mesh, which may be one without devices; computes nothing yet."""
    model = models.build(
        config.model,
        vocab_size=dataset.vocab_size,
        seq_len=config.data.seq_len,
        platform=platform,
        keep_rows=meshes.keep_rows(mesh),
    )
    tx = optimizer.build(config.optimizer, decay_mask=optimizer.matrices(model.axes))
    shapes, init = _initializer(model, tx, mesh, config)
    return Parts(config, dataset, plan, mesh, model, tx, shapes, init)


def state_shapes(
    config: RunConfig, *, vocab_size: int | None, mesh: Mesh, platform: str
) -> tuple[TrainState, Model]:
    """Returns the state's shapes with shardings and the model, for which no data are needed."""
    model = models.build(
        config.model, vocab_size=vocab_size, seq_len=config.data.seq_len, platform=platform
    )
    tx = optimizer.build(config.optimizer, decay_mask=optimizer.matrices(model.axes))
    return _initializer(model, tx, mesh, config)[0], model


def _lay_out(parts: Parts, seat: Seat) -> Layout:
    """Tells what lies on every device.

    Raises:
      ConfigError: the state alone is larger than a device.
    """
    laid = sharding_report.of(parts.shapes, parts.model, parts.mesh)
    if seat.peers.member.leads:
        files.replace(seat.run_dir.sharding(seat.log.attempt), laid.table().encode())
    for warning in laid.warnings():
        seat.emit(Noted(warning))
    oom_advice.refuse_large_state(laid.device_bytes, sharding_report.device_limit(parts.mesh))
    small = oom_advice.small_host(*sharding_report.save_memory(laid))
    if small is not None:
        seat.emit(Noted(small))
    return laid


def _checkpoints(
    config: RunConfig, seat: Seat, *, before_commit: Callable[[], None]
) -> Checkpoints:
    return Checkpoints(
        config.checkpoint,
        run_dir=seat.run_dir,
        log=seat.log,
        claim=seat.claim,
        emit=seat.emit,
        peers=seat.peers,
        clock=seat.clock,
        before_commit=before_commit,
    )


def _initializer(
    model: Model, tx: Any, mesh: Mesh, config: RunConfig
) -> tuple[TrainState, Callable[[], TrainState]]:
    """Returns the state's shapes with shardings, and a function that creates it sharded."""

    def init() -> TrainState:
        scale = configs.loss_scale(config)
        return states.init(model, tx, seed=config.run.seed, loss_scale=scale)

    bare = jax.eval_shape(init)
    shardings = states.shardings(bare, model, mesh)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), bare, shardings
    )
    jitted = jax.jit(init, out_shardings=shardings, compiler_options=states.INIT_OPTIONS)
    return shapes, jitted


def traced_step(parts: Parts, *, facts: Any = None) -> Any:
    """Returns the train step traced: to be lowered, also for devices that are not here.

    Args:
      parts: of the run.
      facts: the shape of all hosts' words; None for a host that is alone.
    """
    config, shapes = parts.config, parts.shapes
    rate = optimizer.learning_rate(
        config.optimizer.schedule,
        peak=config.optimizer.learning_rate,
        total_steps=config.train.steps,
    )
    train_step = steps.make_train_step(
        parts.model,
        parts.tx,
        rate,
        clip_norm=config.optimizer.clip_norm,
        microbatches=parts.plan.microbatches,
        spikes=config.guards.spikes,
        loss_scale=configs.loss_scale(config),
        replicate=meshes.replicate(parts.mesh),
    )
    out = (jax.tree.map(lambda x: x.sharding, shapes), meshes.replicated(parts.mesh))
    jitted = jax.jit(train_step, donate_argnums=0, out_shardings=out)
    batch = _batch_shapes(parts, rows=parts.rows_per_batch)
    return jitted.trace(shapes, batch, facts, optimizer.shape(config.guards.rollback, parts.mesh))


def _compile(
    parts: Parts, seat: Seat
) -> tuple[Any, Callable[[Any, evaluate.Listener], float | None]]:
    """Loads or compiles the train step and the evaluation step before the first step."""
    config, mesh = parts.config, parts.mesh
    facts = None if seat.peers.member.is_alone else facts_shape(mesh)
    traces = {"training": functools.partial(traced_step, parts, facts=facts)}
    rows = parts.plan.rows_at_once  # A whole batch may be more than what fits.
    if parts.evaluates:
        traces["evaluation"] = functools.partial(_traced_evaluation, parts, facts=facts, rows=rows)
    batch = {name: str(shape) for name, shape in _batch_shapes(parts, rows=rows).items()}
    made_of = compile_cache.made_of(
        config,
        vocab_size=parts.dataset.vocab_size,
        batch=batch,
        plan=str(parts.plan),
        mesh=str(mesh.shape),
    )
    compiled = compile_cache.get(
        traces,
        seat,
        devices=list(mesh.devices.flat),
        made_of=made_of,
        most=config.compilation.keep_programs,
        cache_dir=config.compilation.cache_dir,
        seconds=config.deadlines.compile_seconds,
    )
    step = compiled["training"]
    large = oom_advice.large_step(
        config, sharding_report.step_bytes(step), sharding_report.device_limit(mesh)
    )
    if large is not None:
        seat.emit(Noted(large))
    if not parts.evaluates:
        return step, _no_evaluation
    return step, evaluate.make(
        compiled["evaluation"],
        parts.dataset.heldout,
        rows_per_batch=rows,
        limit=config.evaluation.batches * parts.plan.microbatches,
        mesh=mesh,
    )


def _traced_evaluation(parts: Parts, *, facts: Any, rows: int) -> Any:
    mesh = parts.mesh
    mask = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=meshes.batch_sharding(mesh))
    step = jax.jit(steps.make_eval_step(parts.model), out_shardings=meshes.replicated(mesh))
    return step.trace(parts.shapes.params, _batch_shapes(parts, rows=rows), mask, facts)


def _batch_shapes(parts: Parts, *, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of so many rows without content, as place_batch will lay them."""
    one = parts.dataset.train.rows(np.zeros(1, np.int64))
    sharding = meshes.batch_sharding(parts.mesh)
    return {
        name: jax.ShapeDtypeStruct(
            (rows, *array.shape[1:]),
            jax.dtypes.canonicalize_dtype(array.dtype),
            sharding=sharding,
        )
        for name, array in one.items()
    }


def _no_evaluation(params: Any, hosts: Any) -> float | None:
    raise AssertionError("the agenda has no evaluation")


def _built(parts: Parts, laid: Layout) -> RunBuilt:
    return RunBuilt(
        model=parts.config.model.kind,
        params=models.num_params(parts.shapes.params),
        devices=f"{parts.mesh.devices.size} x {parts.mesh.devices.flat[0].device_kind}",
        rows=len(parts.dataset.train),
        tokens_per_epoch=len(parts.dataset.train) * parts.dataset.tokens_per_row,
        steps=parts.config.train.steps,
        tokens_per_step=parts.tokens_per_step,
        flops_per_token=parts.model.flops_per_token,
        state_bytes_per_device=laid.device_bytes,
        save_bytes_per_host=sharding_report.save_memory(laid)[0],
    )
