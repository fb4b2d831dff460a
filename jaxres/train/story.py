"""One attempt from build to farewell, with the ends that only jax can tell."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

import jax

from jaxres import metrics
from jaxres.beat import Leaving
from jaxres.config import RunConfig
from jaxres.events import Event, PhaseChanged, SampleWritten
from jaxres.faults import Exit, OutOfMemory, PeerLost
from jaxres.hosts import Member, Peers
from jaxres.metrics import MetricsLine
from jaxres.peers import first_line, is_loss, join
from jaxres.tensorboard import TensorBoard
from jaxres.train import farewell, memory
from jaxres.train.build import Built, build
from jaxres.train.loop import Ended, train
from jaxres.train.seat import Seat


@dataclass(frozen=True)
class Told:
    """How the attempt ended, and what a person reads at its end."""

    leaving: Leaving
    step: int
    farewell: str
    peers: Peers
    """Who is to be told before the process ends."""


def tell(
    config: RunConfig,
    seat: Seat,
    stack: contextlib.ExitStack,
    *,
    member: Member,
) -> Told:
    """Joins the other hosts, builds the run, trains, and says goodbye.

    Args:
      config: the run's.
      seat: where it lives, and who tells of it.
      stack: closes what was opened.
      member: this process's part among the hosts.

    Raises:
      TypedEnd: for an end that is nobody's success.
    """
    try:
        seat = _joined(config, seat, member)
        seat = _with_tensorboard(config, seat, stack)
        built = build(config, seat, stack)
        ended = train(built.run)
        text = _goodbye(config, seat, built, ended)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if memory.is_exhausted(error):
            raise OutOfMemory(memory.advice(config, error)) from error
        if not member.is_alone and is_loss(error):
            raise PeerLost(f"another host is gone: {first_line(error)}") from error
        raise
    leaving = Leaving(ended.exit, ended.reason, ended.committed)
    return Told(leaving, ended.progress.step, text, seat.peers)


def _joined(config: RunConfig, seat: Seat, member: Member) -> Seat:
    """Returns the seat with the job's other hosts, where there are any."""
    if member.is_alone:
        return seat
    seat.emit(PhaseChanged("join", f"{member.num_hosts} hosts at {member.coordinator}"))
    job = join(member, heartbeat_seconds=config.hosts.heartbeat_seconds, clock=seat.clock)
    return dataclasses.replace(seat, peers=job)


def _goodbye(config: RunConfig, seat: Seat, built: Built, ended: Ended) -> str:
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
    if not seat.peers.member.leads:
        return ""
    curve = farewell.loss_curve(metrics.read_history(seat.run_dir, seat.log.line()))
    return f"{curve}\n{farewell.directions(seat.run_dir, step=ended.progress.step)}\n"


def _with_tensorboard(config: RunConfig, seat: Seat, stack: contextlib.ExitStack) -> Seat:
    """Returns the seat with a listener more, where the config asks for it."""
    if not (config.telemetry.tensorboard and seat.peers.member.leads):
        return seat
    board = stack.enter_context(
        TensorBoard(
            seat.run_dir.tensorboard,
            attempt=seat.log.attempt,
            emit=seat.emit,
            clock=seat.clock,
        )
    )

    def emit(event: Event) -> None:
        seat.emit(event)
        board.heard(event)

    def landed(line: MetricsLine) -> None:
        seat.landed(line)
        board.landed(line)

    return dataclasses.replace(seat, emit=emit, landed=landed)
