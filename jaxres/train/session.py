"""One attempt from build to farewell, with the ends that only jax can tell.

What a person sees at the end of a run: the loss curve, a text sample, where things are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxres.cluster.host_group import Member, Peers
from jaxres.cluster.jax_coordination import first_line, is_loss, join
from jaxres.config import RunConfig
from jaxres.config.schema import TelemetrySection
from jaxres.data import Dataset
from jaxres.engine import mesh as meshes
from jaxres.faults import Exit, OutOfMemory, PeerLost
from jaxres.models import Model, Params
from jaxres.runlog import metrics
from jaxres.runlog.events import Event, PhaseChanged, SampleWritten
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.telemetry.heartbeat import Leaving
from jaxres.telemetry.tensorboard import TensorBoard
from jaxres.train import oom_advice
from jaxres.train.build import Built, build
from jaxres.train.context import Seat
from jaxres.train.loop import Ended, train

CURVE_POINTS = 100


def loss_curve(history: Sequence[MetricsLine], *, width: int = 76, height: int = 14) -> str:
    """Returns the training loss over the steps as a picture for the terminal."""
    import plotext

    points = [(line.step, line.loss) for line in history if line.loss is not None]
    chunks = np.array_split(np.asarray(points), min(len(points), CURVE_POINTS))
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
    """Returns text with which the model continues the prompt (temperature 0.8, seeded)."""
    assert model.logits is not None
    assert dataset.encode is not None
    assert dataset.decode is not None
    prompt = list(dataset.encode(section.sample_prompt))[-(seq_len // 2) :] or [0]
    tokens = _continue(model.logits, params, prompt, section.sample_tokens, seq_len, seed)
    return dataset.decode(tokens)


def _continue(
    logits: Callable[[Params, Any], Any],
    params: Params,
    prompt: Sequence[int],
    count: int,
    seq_len: int,
    seed: int,
) -> list[int]:
    """Draws tokens one by one, each from the last `seq_len` tokens; on all hosts alike."""

    def draw(params: Params, window_1T: jax.Array, last: jax.Array, index: jax.Array) -> jax.Array:
        logits_V = logits(params, window_1T)[0, last]
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.random.categorical(key, logits_V / 0.8)

    whole = meshes.replicated(jax.tree.leaves(params)[0].sharding.mesh)
    drawn = jax.jit(draw, out_shardings=whole)
    tokens = list(prompt)
    for index in range(count):
        recent = tokens[-seq_len:]
        window_1T = np.zeros((1, seq_len), np.int32)
        window_1T[0, : len(recent)] = recent
        place, turn = np.int32(len(recent) - 1), np.int32(index)
        tokens.append(int(drawn(params, window_1T, place, turn)))
    return tokens


def directions(run_dir: RunDir, *, step: int) -> str:
    """Returns where things are and what to try next."""
    root = run_dir.root
    return "\n".join(
        [
            f"done: step {step} is committed in {root}",
            "",
            "where things are",
            f"  {run_dir.checkpoints}/   checkpoints that stock Orbax reads",
            f"  {root}/attempts/*/metrics.jsonl   one line a step",
            "what to try next",
            f"  python -m jaxres status {root}",
            f"  python -m jaxres history {root}",
            f"  python -m jaxres checkpoints digest {root}",
            "  the same training command with run.seed=1, killed with `kill -9` and started again:",
            "  its digest is the one of an unbroken run",
        ]
    )


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
        if oom_advice.is_exhausted(error):
            raise OutOfMemory(oom_advice.advice(config, error)) from error
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
        text = sample(
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
    curve = loss_curve(metrics.read_history(seat.run_dir, seat.log.line()))
    return f"{curve}\n{directions(seat.run_dir, step=ended.progress.step)}\n"


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
