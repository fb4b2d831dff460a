"""Runs one attempt inside the worker; maps JAX runtime errors to exit codes.

At the end of a run it returns a summary: the loss curve, a text sample, paths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxres.checkpoint.write import write_check
from jaxres.cluster.host_group import HostGroup, HostRank
from jaxres.config import RunConfig
from jaxres.config.schema.data import ImagesSource, single_sources
from jaxres.config.schema.telemetry import TelemetrySection
from jaxres.data import Dataset
from jaxres.engine import mesh as meshes
from jaxres.engine.state import evaluated_params
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, OutOfMemory, PeerLost, StorageUnavailable, command_line
from jaxres.models import Model, Params
from jaxres.models.generate import Sampling, by_window
from jaxres.runlog import metrics_columns
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.events import PhaseChanged, SampleWritten
from jaxres.runlog.metrics_columns import MetricsColumns
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import is_remote
from jaxres.storage.timeouts import CallTimeout, call_with_timeout
from jaxres.supervisor import jax_settings
from jaxres.telemetry.tensorboard import TensorBoard
from jaxres.train import data_loader
from jaxres.train.build import BuiltTrainer, build
from jaxres.train.checks import oom_advice
from jaxres.train.compiled import compile_cache
from jaxres.train.components import Trainer
from jaxres.train.context import AttemptContext
from jaxres.train.jax_coordination import first_line, is_peer_lost, join
from jaxres.train.loop import LoopResult, train

CURVE_POINTS = 100
STORAGE_SHARE = 0.9
"""Share of the start deadline: hanging storage is reported before the watchdog's hang."""


def loss_curve(history: MetricsColumns, *, width: int = 76, height: int = 14) -> str:
    """Returns the training loss over the steps as a plot for the terminal."""
    import plotext

    points = np.stack([history.step, history.loss], axis=1)[np.isfinite(history.loss)]
    if not len(points):
        return "training loss over steps: it is finite at no step"
    chunks = np.array_split(points, min(len(points), CURVE_POINTS))
    means = [chunk.mean(axis=0) for chunk in chunks]
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot([m[0] for m in means], [m[1] for m in means], marker="braille")
    plotext.title("training loss over steps")
    return plotext.uncolorize(plotext.build())


def sample(
    model: Model,
    params: Params,
    dataset: Dataset,
    section: TelemetrySection,
    *,
    seq_len: int,
    seed: int,
) -> str:
    """Returns text with which the model continues the prompt; the same on all hosts."""
    assert model.logits is not None
    assert dataset.tokenizer is not None
    prompt = list(dataset.tokenizer.encode(section.sample_prompt))[-(seq_len // 2) :] or [0]
    tokens = by_window(
        model.logits,
        params,
        prompt,
        count=section.sample_tokens,
        seq_len=seq_len,
        sampling=Sampling(seed),
        out_sharding=meshes.replicated(jax.tree.leaves(params)[0].sharding.mesh),
    )
    return dataset.tokenizer.decode([*prompt, *tokens])


def next_steps_text(run_dir: RunDir, *, step: int) -> str:
    """Returns the paths of the results, and commands to try next."""
    root = run_dir.root
    return "\n".join(
        [
            f"done: step {step} is committed in {root}",
            "",
            "results",
            f"  {run_dir.checkpoints}/   checkpoints that stock Orbax reads",
            f"  {root}/attempts/*/metrics.jsonl   one line per step",
            "what to try next",
            f"  {command_line('python -m jaxres status', root)}",
            f"  {command_line('python -m jaxres history', root)}",
            f"  {command_line('python -m jaxres checkpoints digest', root)}",
            "  the same training command with run.seed=1, killed with `kill -9` and rerun:",
            "  its digest equals that of an unbroken run",
        ]
    )


@dataclass(frozen=True)
class SessionResult:
    """How the attempt ended, and the summary to print."""

    result: AttemptResult
    step: int
    summary: str
    peers: HostGroup
    """Peers to notify before exit."""


def run_session(
    config: RunConfig,
    context: AttemptContext,
    stack: contextlib.ExitStack,
    *,
    member: HostRank,
) -> SessionResult:
    """Joins the other hosts, builds the run, trains, and returns the result with a summary.

    Raises:
      RunError: the attempt failed for a known cause.
    """
    refuse_unknown_homes(config.model_dump())
    try:
        compile_cache.set_determinism(config.run.determinism)
        context = _join_cluster(config, context, member)
        _check_storage(config, context)
        board = _attach_tensorboard(config, context, stack)
        built = build(config, context, stack)
        ended = train(_with_images(built.run, config, board))
        text = _summary(config, context, built, ended)
    except (RuntimeError, MemoryError, AssertionError) as error:
        is_of_jax = isinstance(error, jax.errors.JaxRuntimeError | MemoryError)
        end = jax_settings.backend_error(error, compile_cache.environment_here())
        if (is_of_jax or end is not None) and oom_advice.is_oom(error):
            raise OutOfMemory(oom_advice.oom_message(config, error)) from error
        if (is_of_jax or end is not None) and not member.is_alone and is_peer_lost(error):
            raise PeerLost(f"another host is gone: {first_line(error)}") from error
        if end is not None:
            raise end from error
        raise
    return SessionResult(ended.result, ended.progress.step, text, context.peers)


def refuse_unknown_homes(values: Mapping[str, Any], prefix: str = "") -> None:
    """Raises if a path of a config begins with a user that this machine does not know.

    Raises:
      ConfigError: one does.
    """
    for name, value in values.items():
        if isinstance(value, dict):
            refuse_unknown_homes(value, f"{prefix}{name}.")
        is_place = isinstance(value, Path) or (name == "path" and isinstance(value, str))
        text = str(value)
        if is_place and text.startswith("~") and os.path.expanduser(text) == text:
            user = text.partition("/")[0]
            raise ConfigError(f"{prefix}{name}={text}: {user} has no home folder here")


def _join_cluster(config: RunConfig, context: AttemptContext, member: HostRank) -> AttemptContext:
    """Returns the context with the job's other hosts, if there are any."""
    if member.is_alone:
        return context
    context.emit(PhaseChanged("join", f"{member.num_hosts} hosts at {member.coordinator}"))
    job = join(member, heartbeat_seconds=config.hosts.heartbeat_seconds, clock=context.clock)
    return dataclasses.replace(context, peers=job, programs_key=compile_cache.take_programs_key())


def _check_storage(config: RunConfig, context: AttemptContext) -> None:
    """Writes a tiny array into the run directory and reads it back, as saves will do.

    In a bucket only until the first commit, because each of the requests delays the restart.

    Raises:
      ConfigError: no checkpoint can be saved there.
      StorageUnavailable: storage failed, or did not answer.
    """
    run_dir, log = context.run_dir, context.log
    if run_dir.is_remote and log.history().newest is not None:
        return
    seconds = STORAGE_SHARE * config.deadlines.start_seconds
    host, writer = context.peers.member.host, config.checkpoint.writer
    try:
        call_with_timeout(
            lambda: write_check.check(run_dir, attempt=log.attempt, host=host, writer=writer),
            seconds=seconds,
        )
    except CallTimeout as error:
        raise StorageUnavailable(
            f"{run_dir.checkpoints}: {error}. Is the mount or the network down?"
        ) from error


def _summary(
    config: RunConfig, context: AttemptContext, built: BuiltTrainer, ended: LoopResult
) -> str:
    if ended.result.code != ExitCode.DONE:
        return ""
    if config.telemetry.sample_tokens and built.model.logits is not None:
        built.run.emit(
            PhaseChanged("sample", f"{config.telemetry.sample_tokens} tokens from the model")
        )
        text = sample(
            built.model,
            evaluated_params(ended.state, built.trainable),
            built.dataset,
            config.telemetry,
            seq_len=config.data.seq_len,
            seed=config.run.seed,
        )
        built.run.emit(SampleWritten(config.telemetry.sample_prompt, text, ended.progress.step))
    if not context.peers.member.leads:
        return ""
    curve = loss_curve(metrics_columns.read_history(context.run_dir, context.log.history()))
    return f"{curve}\n{next_steps_text(context.run_dir, step=ended.progress.step)}\n"


def _attach_tensorboard(
    config: RunConfig, context: AttemptContext, stack: contextlib.ExitStack
) -> TensorBoard | None:
    """Appends TensorBoard to the observers of host 0 and returns it, if the config asks for it."""
    if not (config.telemetry.tensorboard and context.peers.member.leads):
        return None
    run_dir = context.run_dir
    board = TensorBoard(
        run_dir.tensorboard,
        attempt=context.log.attempt,
        emit=context.emit,
        clock=context.clock,
        copy_to=run_dir.root / "tensorboard" if is_remote(run_dir.root) else None,
    )
    context.observers.append(stack.enter_context(board))
    return board


def _with_images(run: Trainer, config: RunConfig, board: TensorBoard | None) -> Trainer:
    """Returns the trainer; the first batch of a source of images is shown on the board too."""
    sources = single_sources(config.data.source).values()
    if board is None or not any(isinstance(source, ImagesSource) for source in sources):
        return run
    loader = data_loader.showing_first_batch(
        run.data_loader, lambda batch: board.on_images(batch.arrays["image"])
    )
    return dataclasses.replace(run, data_loader=loader)
