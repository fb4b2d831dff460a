"""One attempt from build to farewell, with the ends that only jax can tell."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxres import metrics
from jaxres.beat import Leaving
from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.events import Emit, Event, PhaseChanged, SampleWritten
from jaxres.faults import Exit, OutOfMemory
from jaxres.metrics import MetricsLine
from jaxres.rundir import RunDir
from jaxres.runlog import Claim, RunLog
from jaxres.tensorboard import TensorBoard
from jaxres.train import farewell, memory
from jaxres.train.build import Built, Place, build
from jaxres.train.loop import Ended, train
from jaxres.train.requests import Requests


@dataclass(frozen=True)
class Told:
    """How the attempt ended, and what a person reads at its end."""

    leaving: Leaving
    step: int
    farewell: str


def tell(
    config: RunConfig,
    run_dir: RunDir,
    log: RunLog,
    claim: Claim,
    requests: Requests,
    emit: Emit,
    clock: Clock,
    landed: Callable[[MetricsLine], None],
    stack: contextlib.ExitStack,
) -> Told:
    """Builds the run, trains, and says goodbye.

    Raises:
      TypedEnd: for an end that is nobody's success.
    """
    place = Place(run_dir, log, claim, emit, clock, landed, requests)
    try:
        place = _with_tensorboard(config, place, stack)
        built = build(config, place, stack)
        ended = train(built.run)
        text = _goodbye(config, run_dir, log, built, ended)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not memory.is_exhausted(error):
            raise
        raise OutOfMemory(memory.advice(config, error)) from error
    leaving = Leaving(ended.exit, ended.reason, ended.committed)
    return Told(leaving, ended.progress.step, text)


def _goodbye(config: RunConfig, run_dir: RunDir, log: RunLog, built: Built, ended: Ended) -> str:
    if ended.exit != Exit.DONE:
        return ""
    if config.telemetry.sample_tokens:
        built.run.emit(
            PhaseChanged("sample", f"{config.telemetry.sample_tokens} tokens from the model")
        )
        text = farewell.sample(
            built.model,
            ended.state.params,
            built.dataset,
            config.telemetry,
            seq_len=config.data.seq_len,
            seed=config.run.seed,
        )
        built.run.emit(SampleWritten(config.telemetry.sample_prompt, text))
    curve = farewell.loss_curve(metrics.read_history(run_dir, log.line()))
    return f"{curve}\n{farewell.directions(run_dir, step=ended.progress.step)}\n"


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
