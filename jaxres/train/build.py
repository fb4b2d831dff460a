"""Builds a Trainer from a RunConfig; every component gets its own section of the config."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxres import config as configs
from jaxres import data, models
from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.checkpoint.memory.tier import MemoryTier, TierSettings
from jaxres.checkpoint.snapshot import prepare_copies
from jaxres.checkpoint.throttle import Throttle
from jaxres.checkpoint.write.frozen_arrays import split_state
from jaxres.config import RunConfig
from jaxres.config.doubts import doubts
from jaxres.config.schema.training import GuardsSection
from jaxres.data import Dataset
from jaxres.data.text_bytes import bytes_per_target
from jaxres.data.tokens.tokenizer import Tokenizer
from jaxres.engine import divergence, mesh_plan, schedule, sharding_report
from jaxres.engine import mesh as meshes
from jaxres.engine import state as states
from jaxres.engine.guards import Guard
from jaxres.engine.replica_fingerprint import Copies
from jaxres.engine.sharding_report import Layout
from jaxres.engine.trainable import Trainable
from jaxres.estimate import job_estimate, storage_rate
from jaxres.faults import ConfigError, RunError
from jaxres.host import processes
from jaxres.models import Model
from jaxres.runlog.events import HardwareTested, Noted, PhaseChanged, RunBuilt
from jaxres.runlog.metrics import MetricsLine, MetricsLog
from jaxres.storage import files, memory_folder
from jaxres.storage.path import RunPath, is_remote
from jaxres.storage.probe import Probed
from jaxres.train import data_loader, hooks, init_params, resume_results, save_scheduler
from jaxres.train.checks import (
    device_check,
    oom_advice,
    performance_guard,
    preflight,
    replica_check,
)
from jaxres.train.checks.device_probe import DeviceProbe
from jaxres.train.checks.performance_guard import PerformanceGuard
from jaxres.train.checks.preflight import PreflightResult
from jaxres.train.checks.replay_check import ReplayCheck, RotatedStep
from jaxres.train.checks.replica_check import ReplicaCheck
from jaxres.train.compiled import assemble, compile_cache, jitted_steps
from jaxres.train.compiled.jitted_steps import CompiledSteps
from jaxres.train.compiled.numerics_fingerprint import numerics_fingerprint
from jaxres.train.components import Components, DataLoader, Diagnostics, StepSchedule, Trainer
from jaxres.train.consensus import Consensus, SingleHostConsensus, StepConsensus
from jaxres.train.context import AttemptContext
from jaxres.train.hooks import Hook, Hooks


@dataclass(frozen=True)
class BuiltTrainer:
    """The trainer, and further inputs of the summary at the end."""

    run: Trainer
    dataset: Dataset
    model: Model
    trainable: Trainable


def build(config: RunConfig, context: AttemptContext, stack: contextlib.ExitStack) -> BuiltTrainer:
    """Builds every component; `stack` closes their resources (files, threads).

    Raises:
      ConfigError: devices, data and settings are incompatible.
    """
    compile_cache.configure_jax(config.compilation, context.emit)
    loaded = hooks.load(config.hooks)  # What can't be imported is named before a step compiles.
    parts = _parts(config, context)
    laid = _lay_out(parts, context)
    context.emit(_built(parts, laid))
    init = init_params.build(config.init_from, parts, context)
    rotated = _rotated(parts, context)
    compiled = jitted_steps.load_or_compile(parts, context, rotated=rotated)
    plain, text_bytes = states.to_plain(parts.shapes), _text_bytes(parts, context)
    prepare_copies(split_state(plain, parts.trainable), config.checkpoint.snapshot)
    # A job's first collective must come within half a minute; one host may compile for minutes.
    context.peers.barrier("compiled", seconds=config.deadlines.compile_seconds)
    is_due = save_scheduler.attach(config.checkpoint.when, context)
    on_step, sync, flush = _metrics(context, stack)
    checkpoints = _checkpoints(config, context, trainable=parts.trainable, before_commit=sync)
    computation = numerics_fingerprint(
        parts.config, context.claim, parts.mesh, parts.plan, compiled
    )
    _note_resume_check(config, context, devices=computation["devices"])
    _note_estimate(parts, context, laid)
    memory = _memory(parts, context, stack, flush)
    run = Trainer(
        steps=config.train.steps,
        schedule=_step_schedule(parts),
        log=context.log,
        checkpoints=checkpoints,
        guards=_guards(config.guards),
        limits=config.guards,
        data_loader=_data_loader(parts, context, stack),
        init=init,
        shapes=parts.shapes,
        step=compiled.train,
        peak_rate=schedule.rate_arrays(config.optimizer.learning_rate, parts.mesh),
        diagnostics=_diagnostics(config, context),
        metrics_layout=parts.metrics_layout(),
        row_origins=_row_origins(parts),
        evaluate=compiled.evaluate,
        text_bytes=text_bytes,
        dataset=_fingerprint(parts.dataset, context),
        heldout_data=_heldout_data(parts),
        tokenizer=_keep_tokenizer(parts.dataset.tokenizer, context),
        devices=meshes.devices_by_host(parts.mesh),
        computation=computation,
        on_step=on_step,
        consensus=_consensus(context, checkpoints, memory, parts.mesh, is_due),
        peers=context.peers,
        barrier_seconds=config.deadlines.restore_seconds,
        emit=context.emit,
        clock=context.clock,
        loss_scale=configs.loss_scale(config),
        least_guarantee=config.run.guarantee,
        hooks=_hooks(loaded, parts, context),
        memory=memory,
        replica_check=_replica_check(parts, context, compiled.fingerprints),
        replay_check=_replay_check(parts, context, compiled, rotated=rotated),
        performance=_performance(parts, context),
        device_probe=_device_probe(parts, context),
    )
    return BuiltTrainer(run, parts.dataset, parts.model, parts.trainable)


def _fingerprint(dataset: Dataset, context: AttemptContext) -> str:
    """Returns the data set's fingerprint, by the definition that the run was started with."""
    earlier = dataset.earlier_fingerprint
    return earlier if earlier and earlier == context.log.history().dataset else dataset.fingerprint


def _heldout_data(parts: Components) -> str:
    batches = parts.config.evaluation.batches
    return f"{parts.dataset.heldout_fingerprint}/{batches}" if parts.evaluates else ""


def _data_loader(
    parts: Components, context: AttemptContext, stack: contextlib.ExitStack
) -> DataLoader:
    config = parts.config
    return data_loader.open_data_loader(
        parts.dataset,
        parts.mesh,
        context,
        stack,
        section=config.data,
        train=config.train,
        leaves_out=config.guards.bad_records is not None,
        seed=config.run.seed,
    )


def _note_resume_check(config: RunConfig, context: AttemptContext, *, devices: str) -> None:
    """Reports, until the run has started once, whether a resume of its config was tested."""
    if context.peers.member.leads and not context.log.history().starts:
        found = resume_results.read(config)
        context.emit(Noted(resume_results.start_note(found, devices=devices)))


def _note_estimate(parts: Components, context: AttemptContext, laid: Layout) -> None:
    """Reports, until the run has started once, the estimate that doctor and plan print too."""
    config = parts.config
    if context.peers.member.leads and not context.log.history().starts:
        known = job_estimate.estimate(
            config,
            job_estimate.fleet(parts.mesh.devices.size, context.peers.member.num_hosts),
            state_bytes=laid.global_bytes,
            # The agent of a VM has set the notice of this VM in the config.
            given={job_estimate.NOTICE: config.preemption.notice_seconds},
            rate=storage_rate.read(config, context.run_dir.root, machine=socket.gethostname()),
        )
        context.emit(Noted(f"estimate: {'; '.join(known.lines())}"))


def _diagnostics(config: RunConfig, context: AttemptContext) -> Diagnostics:
    folder = context.run_dir.diagnostics(context.log.attempt)
    return Diagnostics(folder, config.guards.diagnostics)


def _replica_check(
    parts: Components, context: AttemptContext, fingerprints: Any
) -> ReplicaCheck | None:
    """Returns the comparison of the copies of the state; emits a note on its blind spots."""
    section, copies = parts.config.guards.corruption, Copies.of(parts.shapes, parts.mesh)
    if section is None:
        return None
    note = replica_check.undetected(copies)
    if note is not None:
        context.emit(Noted(note))
    if fingerprints is None:
        return None
    return ReplicaCheck(
        fingerprints,
        copies,
        list(parts.mesh.devices.flat),
        context.peers.member.host,
        every_steps=section.every_steps,
        # Devices of another kind may round in another way, which is no fault.
        mode=section.mode if len(meshes.device_kinds(parts.mesh)) == 1 else "warn",
        emit=context.emit,
    )


def _performance(parts: Components, context: AttemptContext) -> PerformanceGuard | None:
    section = parts.config.guards.throughput
    if section is None:
        return None
    guard = PerformanceGuard(
        section,
        places=performance_guard.places_of(list(parts.mesh.devices.flat)),
        tokens_per_step=parts.tokens_per_step,
        reports=context.peers.member.leads,
        emit=context.emit,
        clock=context.clock,
    )
    context.observers.append(guard)
    return guard


def _device_probe(parts: Components, context: AttemptContext) -> DeviceProbe | None:
    section, devices = parts.config.guards.throughput, list(parts.mesh.local_devices)
    if section is None or section.probe == "off":
        return None
    if section.probe == "auto" and devices[0].platform == "cpu":
        return None
    return DeviceProbe(devices, clock=context.clock)


def _rotated(parts: Components, context: AttemptContext) -> Components | None:
    """Returns the components on the rotated devices, if replays are computed there."""
    section = parts.config.guards.corruption
    if section is None or section.replay_every_steps is None or section.replay_on == "same":
        return None
    mesh = meshes.rotated(parts.mesh)
    if mesh is None:
        note = "no host has two devices, so replays are computed on the same devices"
        context.emit(Noted(f"guards.corruption.replay_on=rotated: {note}"))
        return None
    return assemble.components(
        parts.config, parts.dataset, plan=parts.plan, mesh=mesh, platform=jax.default_backend()
    )


def _replay_check(
    parts: Components,
    context: AttemptContext,
    compiled: CompiledSteps,
    *,
    rotated: Components | None,
) -> ReplayCheck | None:
    section, mesh = parts.config.guards.corruption, parts.mesh
    if section is None or section.replay_every_steps is None:
        return None
    devices = list(mesh.devices.flat)
    again = None
    if rotated is not None:
        again = RotatedStep(
            move=lambda arrays: meshes.move(arrays, mesh, rotated.mesh),
            step=compiled.rotated_train,
            fingerprints=compiled.rotated_replay,
            places=[devices.index(device) for device in rotated.mesh.devices.flat],
            # CPU: sums are in the order of the mesh. Sums of two numbers have no order.
            is_exact=mesh.size <= 2 or devices[0].platform == "cpu",
        )
    shardings = jax.tree.map(lambda shape: shape.sharding, parts.shapes)
    return ReplayCheck(
        jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=shardings),
        compiled.replay,
        devices,
        context.peers.member.host,
        every_steps=section.replay_every_steps,
        mode=section.mode,
        emit=context.emit,
        rotated=again,
    )


def _hooks(loaded: Sequence[Hook], parts: Components, context: AttemptContext) -> Hooks:
    return Hooks(
        loaded,
        params_of=lambda state: states.evaluated_params(state, parts.trainable),
        emit=context.emit,
        run_dir=context.run_dir.root,
        host=context.peers.member.host,
    )


def _step_schedule(parts: Components) -> StepSchedule:
    config = parts.config
    return StepSchedule(
        steps=config.train.steps,
        save_every_steps=save_scheduler.every_steps(config.checkpoint.when),
        evaluate_every_steps=config.evaluation.every_steps if parts.evaluates else 0,
        save_every_epochs=save_scheduler.every_epochs(config.checkpoint.when),
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
    part_of = dict[int, int]()
    for number, part in enumerate(parts.plan.parts(len(hosts))):
        part_of |= dict.fromkeys(range(*part.rows.indices(len(hosts))), number)
    return [(host, part_of[row]) for row, host in enumerate(hosts)]


def _metrics(
    context: AttemptContext, stack: contextlib.ExitStack
) -> tuple[Callable[[MetricsLine], None], Callable[[], None], Callable[[], None]]:
    """Returns functions that record a completed step, sync the metrics file and flush it."""
    if not context.peers.member.leads:
        return context.observers.on_step, lambda: None, lambda: None
    metrics = stack.enter_context(MetricsLog(context.run_dir.metrics(context.log.attempt)))

    def on_step(line: MetricsLine) -> None:
        # First, so that the supervisor knows every step that a reader of the file finds.
        context.observers.on_step(line)
        metrics.append(line)

    return on_step, metrics.sync, metrics.flush


def _consensus(
    context: AttemptContext,
    checkpoints: Checkpointer,
    memory: MemoryTier,
    mesh: Mesh,
    by_clock: Callable[[], bool],
) -> Consensus:
    def is_due() -> bool:
        return not checkpoints.in_flight and by_clock()

    if context.peers.member.is_alone:
        return SingleHostConsensus(context.requests, checkpoints.verdict, is_due=is_due)
    keeps = memory.is_writing
    return StepConsensus(
        context.requests, checkpoints.verdict, mesh=mesh, is_due=is_due, is_keeping=keeps
    )


def _parts(config: RunConfig, context: AttemptContext) -> Components:
    emit = context.emit
    emit(PhaseChanged("data", "opening the data set"))
    dataset = data.open_dataset(
        config.data,
        progress=lambda what: emit(PhaseChanged("data", what)),
        bad_records=config.guards.bad_records,
    ).for_model(config.model, has_64_bits=jax.config.read("jax_enable_x64"))
    if config.telemetry.sample_tokens and dataset.tokenizer is None:
        raise ConfigError(
            "telemetry.sample_tokens: the tokenizer of these token ids is not known, so a sample "
            "can't be text. Set data.tokenizer, or telemetry.sample_tokens to 0."
        )
    emit(PhaseChanged("build", "devices, model, optimizer"))
    _check_devices(config, context)
    _test_hardware(config, context)
    plan, mesh, slow = assemble.devices_here(config)
    if slow is not None:
        emit(Noted(slow))
    parts = assemble.components(
        config, dataset, plan=plan, mesh=mesh, platform=jax.default_backend()
    )
    if config.telemetry.sample_tokens and parts.model.logits is None:
        emit(Noted("telemetry.sample_tokens: the model has no logits, so no text is sampled"))
    for note in doubts(config):
        emit(Noted(f"WARNING: {note}"))
    return parts


def _check_devices(config: RunConfig, context: AttemptContext) -> None:
    """Raises if this host has fewer devices than are known to belong to it, or only CPUs."""
    host, name, place = context.peers.member.host, socket.gethostname(), context.place
    history = context.log.history()
    expected, why = device_check.expected_platform(history, context.claim, given=place.platform)
    device_check.check_platform(jax.default_backend(), expected, why, host=host, name=name)
    kinds: dict[int, list[str]] = {}
    for device in jax.devices():
        kinds.setdefault(device.process_index, []).append(device.device_kind)
    for warning in device_check.kind_warnings(history, context.claim, kinds):
        context.emit(Noted(warning))
    sizes = tuple(config.mesh.sizes()[axis] for axis in mesh_plan.AXES)
    number, why = device_check.expected_devices(
        history, context.claim, host, given=place.min_devices, mesh=sizes
    )
    found = jax.local_device_count()
    if found < number and config.hardware.allow_fewer:
        context.emit(
            Noted(f"hardware.allow_fewer: {number} devices expected, {found} found ({why})")
        )
        return
    device_check.check(found, number, why, host=host, name=name)


def _test_hardware(config: RunConfig, context: AttemptContext) -> None:
    """Tests devices and disk as `hardware.preflight` says; raises if one is faulty."""
    setting, began = config.hardware.preflight, context.clock.monotonic()
    extent = preflight.extent_of(setting, jax.default_backend())
    if extent is None:
        return
    places = _places(context)
    tests = preflight.run(
        extent,
        dtypes=preflight.dtypes_of(config.model),
        places=places,
        host=socket.gethostname(),
        clock=context.clock,
    )
    passed: list[PreflightResult] = []
    for measured in tests:
        passed.append(measured)
        context.emit(PhaseChanged("build", f"tested {measured.what}"))
    sums = [each for each in passed if each.bus_bytes_per_second is not None]
    rates = [each.storage for each in passed if each.storage is not None]
    has_own = places[-1] == context.run_dir.root and len(rates) == len(places)
    own = rates[-1] if has_own else None
    if own is not None:
        _keep_rate(own, config, context)
    context.emit(
        HardwareTested(
            setting,
            devices=jax.local_device_count(),
            device_kind=jax.local_devices()[0].device_kind,
            seconds=context.clock.monotonic() - began,
            results=tuple(map(str, passed)),
            num_devices=jax.device_count(),
            bus_bytes_per_second=sums[0].bus_bytes_per_second if sums else None,
            message_bytes=sums[0].message_bytes if sums else 0,
            write_bytes_per_second=own and own.write_bytes_per_second,
            read_bytes_per_second=own and own.read_bytes_per_second,
        )
    )


def _places(context: AttemptContext) -> list[RunPath]:
    """Returns the places that are measured: a bucket in the first attempt only."""
    run_dir = context.run_dir
    is_first = context.log.attempt == 1
    return [run_dir.local, *([run_dir.root] if is_remote(run_dir.root) and is_first else [])]


def _keep_rate(found: Probed, config: RunConfig, context: AttemptContext) -> None:
    """Keeps the rate of the place of the run for the estimate, if the cache folder takes it."""
    root, machine, clock = context.run_dir.root, socket.gethostname(), context.clock
    rate = storage_rate.of_probe(found, root=root, machine=machine, clock=clock)
    with contextlib.suppress(RunError):
        storage_rate.store(config, rate)


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
    config: RunConfig,
    context: AttemptContext,
    *,
    trainable: Trainable,
    before_commit: Callable[[], None],
) -> Checkpointer:
    return Checkpointer(
        config.checkpoint,
        run_dir=context.run_dir,
        log=context.log,
        claim=context.claim,
        emit=context.emit,
        peers=context.peers,
        before_commit=before_commit,
        trainable=trainable,
    )


def _memory(
    parts: Components,
    context: AttemptContext,
    stack: contextlib.ExitStack,
    flush: Callable[[], None],
) -> MemoryTier:
    section = parts.config.checkpoint
    if section.memory is None:
        return MemoryTier()
    folder = memory_folder.memory_folder(context.run_dir.root, section.memory.folder)
    tier = MemoryTier(
        TierSettings(
            every_steps=section.memory.every_steps,
            neighbor_copies=section.memory.neighbor_copies,
            folder=folder,
            snapshot=section.snapshot,
        ),
        shapes=states.to_plain(parts.shapes),
        nonce=context.claim.nonce,
        available=processes.available_bytes,
        pace=Throttle(section.background_share, context.clock),
        peers=context.peers,
        emit=context.emit,
        flush=flush,
    )
    stack.callback(tier.close)
    return tier


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
        attention_flops_per_token=parts.model.attention_flops_per_token,
        state_bytes_per_device=laid.device_bytes,
        save_bytes_per_host=sharding_report.save_memory(laid)[0],
    )
