"""Statistics of the gradient norm: robust estimation, scores after a warm-up."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres.config.schema.training import SpikesSection
from jaxres.engine import grad_norm_stats

BANDS = SpikesSection(warmup_steps=20, window_steps=50)
judge = jax.jit(
    lambda state, norm: (
        grad_norm_stats.score(state, norm, BANDS),
        grad_norm_stats.update(state, norm, BANDS),
    )
)


def learnt(values, state=None):
    """Returns the statistics after some norms, and the score of each."""
    state, scores = grad_norm_stats.init() if state is None else state, []
    for value in values:
        score, state = judge(state, jnp.float32(value))
        scores.append(float(score))
    return state, scores


def usual(count, *, seed=0, level=1.0, spread=0.15):
    return level * np.exp(spread * np.random.default_rng(seed).standard_normal(count))


def test_no_score_is_given_during_the_warm_up():
    _, scores = learnt([1.0, 1e6, 1e-6] * 6)
    assert scores == [0.0] * 18
    assert grad_norm_stats.limit(grad_norm_stats.init(), BANDS) == math.inf


def test_a_spike_has_a_high_score_and_a_usual_norm_has_not():
    state, scores = learnt(usual(2000))
    assert max(scores) < BANDS.clip_deviations, "no false flag in 2,000 steps"
    assert learnt([20.0], state)[1][0] > BANDS.skip_deviations
    assert 1.5 < float(grad_norm_stats.limit(state, BANDS)) < 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_norm_does_not_change_the_statistics(bad):
    before, _ = learnt(usual(100))
    state, _ = learnt([bad] * 5, before)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(a == b), state, before))
    assert learnt([20.0], state)[1][0] > BANDS.skip_deviations


def test_a_spike_does_not_hide_a_later_one():
    state, _ = learnt(usual(100))
    state, _ = learnt([1e20], state)
    assert learnt([20.0], state)[1][0] > BANDS.skip_deviations


def test_a_lasting_level_becomes_usual():
    state, _ = learnt(usual(200))
    _, scores = learnt(usual(300, seed=1, level=10.0), state)
    assert scores[0] > BANDS.skip_deviations
    assert max(scores[-100:]) < BANDS.clip_deviations


@pytest.mark.slow
def test_a_slow_decrease_and_increase_is_no_spike():
    drift = np.exp(np.sin(np.arange(4000) / 300))
    _, scores = learnt(usual(4000) * drift)
    assert max(scores) < BANDS.skip_deviations


def test_a_norm_of_zero_is_valid():
    state, _ = learnt([0.0] * 40)
    assert all(math.isfinite(float(leaf)) for leaf in jax.tree.leaves(state))
