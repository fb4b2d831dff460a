"""What a person sees at the end of a run: the loss curve, a text sample, where things are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxres import mesh as meshes
from jaxres.config.schema import TelemetrySection
from jaxres.data import Dataset
from jaxres.metrics import MetricsLine
from jaxres.models import Model, Params
from jaxres.rundir import RunDir

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
