"""Builds a Trainer from a RunConfig; every component gets its own section of the config."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxres import config as configs
from jaxres import data, models
from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.config import RunConfig
from jaxres.config.schema_training import GuardsSection
from jaxres.data import Dataset
from jaxres.data.text_bytes import bytes_per_target
from jaxres.data.tokenizer import Tokenizer
from jaxres.engine import divergence, mesh_plan, optimizer, sharding_report
from jaxres.engine import mesh as meshes
from jaxres.engine import state as states
from jaxres.engine import step as steps
from jaxres.engine.guards import Guard
from jaxres.engine.mesh_plan import MeshPlan
from jaxres.engine.sharding_report import Layout
from jaxres.engine.state import TrainState
from jaxres.faults import ConfigError
from jaxres.models import Model
from jaxres.runlog.events import Noted, PhaseChanged, RunBuilt
from jaxres.runlog.metrics import MetricsLine, MetricsLog
from jaxres.storage import files
from jaxres.train import (
    compile_cache,
    data_loader,
    device_check,
    init_params,
    jitted_steps,
    oom_advice,
    save_scheduler,
)
from jaxres.train.components import Components, Diagnostics, StepSchedule, Trainer
from jaxres.train.consensus import Consensus, SingleHostConsensus, StepConsensus
from jaxres.train.context import AttemptContext
from jaxres.train.numerics_fingerprint import numerics_fingerprint


@dataclass(frozen=True)
class BuiltTrainer:
    """The trainer, and what the summary at the end needs besides it."""

    run: Trainer
    dataset: Dataset
    model: Model


def build(config: RunConfig, context: AttemptContext, stack: contextlib.ExitStack) -> BuiltTrainer:
    """Builds every component; `stack` closes their resources (files, threads).

    Raises:
      ConfigError: devices, data and settings are incompatible.
    """
    compile_cache.configure_jax(config.compilation, context.emit)
    parts = _parts(config, context)
    context.emit(_built(parts, _lay_out(parts, context)))
    init = init_params.build(config.init_from, parts, context)  # Fails before the compilation.
    step, evaluation, program = jitted_steps.load_or_compile(parts, context)
    # The first collective of a job has a time limit of half a minute, and one host may compile for
    # minutes while another finds the program in its cache.
    context.peers.barrier("compiled", seconds=config.deadlines.compile_seconds)
    is_due = save_scheduler.attach(config.checkpoint.when, context)
    on_step, sync = _metrics(context, stack)
    checkpoints = _checkpoints(config, context, before_commit=sync)
    run = Trainer(
        steps=config.train.steps,
        schedule=_step_schedule(parts),
        log=context.log,
        checkpoints=checkpoints,
        guards=_guards(config.guards),
        limits=config.guards,
        data_loader=data_loader.open_data_loader(
            parts.dataset,
            parts.mesh,
            context,
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
            context.run_dir.diagnostics(context.log.attempt), config.guards.diagnostics
        ),
        metrics_layout=steps.MetricsLayout.of(parts.shapes, num_rows=parts.rows_per_batch),
        row_origins=_row_origins(parts),
        evaluate=evaluation,
        text_bytes=_text_bytes(parts, context),
        dataset=parts.dataset.fingerprint,
        tokenizer=_keep_tokenizer(parts.dataset.tokenizer, context),
        devices=meshes.devices_by_host(parts.mesh),
        computation=numerics_fingerprint(
            config, context.claim, parts.mesh, parts.plan, step, program=program
        ),
        on_step=on_step,
        consensus=_consensus(context, checkpoints, parts.mesh, is_due),
        peers=context.peers,
        barrier_seconds=config.deadlines.restore_seconds,
        emit=context.emit,
        clock=context.clock,
        loss_scale=configs.loss_scale(config),
    )
    return BuiltTrainer(run, parts.dataset, parts.model)


def _step_schedule(parts: Components) -> StepSchedule:
    config = parts.config
    return StepSchedule(
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


def _row_origins(parts: Components) -> list[tuple[int, int]]:
    hosts = meshes.hosts_of_rows(parts.mesh, parts.rows_per_batch)
    return [(host, row % parts.plan.microbatches) for row, host in enumerate(hosts)]


def _metrics(
    context: AttemptContext, stack: contextlib.ExitStack
) -> tuple[Callable[[MetricsLine], None], Callable[[], None]]:
    """Returns a function that receives every completed step, and one that syncs metrics.jsonl."""
    if not context.peers.member.leads:
        return context.observers.on_step, lambda: None
    metrics = stack.enter_context(MetricsLog(context.run_dir.metrics(context.log.attempt)))

    def on_step(line: MetricsLine) -> None:
        # First, so that the supervisor knows every step that a reader of the file finds.
        context.observers.on_step(line)
        metrics.append(line)

    return on_step, metrics.sync


def _consensus(
    context: AttemptContext, checkpoints: Checkpointer, mesh: Mesh, by_clock: Callable[[], bool]
) -> Consensus:
    def is_due() -> bool:
        return not checkpoints.in_flight and by_clock()

    if context.peers.member.is_alone:
        return SingleHostConsensus(context.requests, checkpoints.verdict, is_due=is_due)
    return StepConsensus(context.requests, checkpoints.verdict, mesh=mesh, is_due=is_due)


def _parts(config: RunConfig, context: AttemptContext) -> Components:
    emit = context.emit
    emit(PhaseChanged("data", "opening the data set"))
    dataset = data.open_dataset(config.data, progress=lambda what: emit(PhaseChanged("data", what)))
    if config.telemetry.sample_tokens and dataset.tokenizer is None:
        raise ConfigError(
            "telemetry.sample_tokens: the tokenizer of these token ids is not known, so a sample "
            "can't be text. Set data.tokenizer, or telemetry.sample_tokens to 0."
        )
    emit(PhaseChanged("build", "devices, model, optimizer"))
    _check_devices(config, context)
    plan, mesh, slow = devices_here(config)
    if slow is not None:
        emit(Noted(slow))
    return assemble(config, dataset, plan=plan, mesh=mesh, platform=jax.default_backend())


def _check_devices(config: RunConfig, context: AttemptContext) -> None:
    """Raises if this host has fewer devices than are known to belong to it."""
    host = context.peers.member.host
    sizes = tuple(config.mesh.sizes()[axis] for axis in mesh_plan.AXES)
    expected, why = device_check.expected_devices(
        context.log.history(), context.claim, host, given=context.min_devices, mesh=sizes
    )
    found, name = jax.local_device_count(), socket.gethostname()
    device_check.check(found, expected, why, host=host, name=name)


def devices_here(config: RunConfig) -> tuple[MeshPlan, Mesh, str | None]:
    """Returns the mesh plan, the mesh of this job's devices, and a warning if the plan is slow.

    Raises:
      ConfigError: the number of devices does not fit the config.
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
    config: RunConfig, dataset: Dataset, *, plan: MeshPlan, mesh: Mesh, platform: str
) -> Components:
    """Returns the components for a mesh, which may be abstract; computes nothing yet."""
    model = models.build(
        config.model,
        vocab_size=dataset.vocab_size,
        seq_len=config.data.seq_len,
        platform=platform,
        keep_rows=meshes.pin_batch_dim(mesh),
    )
    tx = optimizer.build(config.optimizer, decay_mask=optimizer.matrices(model.axes))
    shapes, init = _initializer(model, tx, mesh, config)
    return Components(config, dataset, plan, mesh, model, tx, shapes, init)


def state_shapes(
    config: RunConfig, *, vocab_size: int | None, mesh: Mesh, platform: str
) -> tuple[TrainState, Model]:
    """Returns the state's shapes with shardings, and the model; needs no data set."""
    model = models.build(
        config.model, vocab_size=vocab_size, seq_len=config.data.seq_len, platform=platform
    )
    tx = optimizer.build(config.optimizer, decay_mask=optimizer.matrices(model.axes))
    return _initializer(model, tx, mesh, config)[0], model


def _text_bytes(parts: Components, context: AttemptContext) -> dict[str, float]:
    """Returns the text bytes a target of each validation set whose text is known, on host 0."""
    tokenizer, num_rows = parts.dataset.tokenizer, parts.rows_per_batch
    if tokenizer is None or not parts.evaluates or not context.peers.member.leads:
        return {}
    num_rows *= parts.config.evaluation.batches
    found = {
        name: bytes_per_target(rows, tokenizer, num_rows=num_rows)
        for name, rows in parts.dataset.validation.items()
    }
    return {name: count for name, count in found.items() if count is not None}


def _keep_tokenizer(tokenizer: Tokenizer | None, context: AttemptContext) -> str | None:
    """Writes the tokenizer's files to the run directory, for exports; returns its name."""
    if tokenizer is None:
        return None
    folder = context.run_dir.tokenizer(tokenizer.name)
    if context.peers.member.leads and tokenizer.files:
        files.make_dir(folder)
        for name, content in tokenizer.files.items():
            files.create(folder / name, content)
    return tokenizer.name


def _lay_out(parts: Components, context: AttemptContext) -> Layout:
    """Writes the sharding report and emits its warnings.

    Raises:
      ConfigError: the state alone exceeds a device's memory.
    """
    laid = sharding_report.of(parts.shapes, parts.model, parts.mesh)
    if context.peers.member.leads:
        files.replace(context.run_dir.sharding(context.log.attempt), laid.table().encode())
    for warning in laid.warnings():
        context.emit(Noted(warning))
    oom_advice.check_state_fits(laid.device_bytes, sharding_report.device_limit(parts.mesh))
    small = oom_advice.warn_host_memory(*sharding_report.save_memory(laid))
    if small is not None:
        context.emit(Noted(small))
    return laid


def _checkpoints(
    config: RunConfig, context: AttemptContext, *, before_commit: Callable[[], None]
) -> Checkpointer:
    return Checkpointer(
        config.checkpoint,
        run_dir=context.run_dir,
        log=context.log,
        claim=context.claim,
        emit=context.emit,
        peers=context.peers,
        clock=context.clock,
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


def _built(parts: Components, laid: Layout) -> RunBuilt:
    return RunBuilt(
        model=parts.config.model.kind,
        params=models.num_params(parts.shapes.params),
        devices=f"{parts.mesh.devices.size} x {parts.mesh.devices.flat[0].device_kind}",
        rows=len(parts.dataset.train),
        tokens_per_epoch=parts.dataset.tokens_of(len(parts.dataset.train)),
        padding=parts.dataset.padding,
        steps=parts.config.train.steps,
        tokens_per_step=parts.tokens_per_step,
        flops_per_token=parts.model.flops_per_token,
        state_bytes_per_device=laid.device_bytes,
        save_bytes_per_host=sharding_report.save_memory(laid)[0],
    )
