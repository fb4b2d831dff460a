"""The train step: donation, microbatches and masking do not change what it computes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres import models
from jaxres.config.schema.model import GptModel
from jaxres.config.schema.optimizer import AdamwOptimizer, CosineSchedule
from jaxres.config.schema.run_config import MeshSection
from jaxres.config.schema.training import SpikesSection
from jaxres.engine import mesh as meshes
from jaxres.engine import optimizer, state, step
from jaxres.engine import schedule as schedules
from tests.tiers import campaign, slow_but

B, T, V = 24, 16, 64
TINY = GptModel(num_layers=2, d_model=32, num_heads=2, dropout=0.1, compute_dtype="float32")
SPIKES = SpikesSection(warmup_steps=3)
STILL = TINY.model_copy(update={"dropout": 0.0})


@functools.cache
def parts(
    config: GptModel = TINY, *, microbatches: int = 1, devices: int = 1
) -> tuple[Any, Any, Any]:
    """Returns model, optimizer and the step function."""
    mesh = meshes.build(MeshSection(), devices=jax.devices()[:devices])
    keep_rows = meshes.pin_batch_dim(mesh)
    model = models.build(config, vocab_size=V, seq_len=T, platform="cpu", keep_rows=keep_rows)
    tx = optimizer.build(AdamwOptimizer(), axes=model.axes)
    rate = schedules.learning_rate(CosineSchedule(), peak=1e-2, total_steps=10)
    function = step.make_train_step(
        model,
        tx,
        rate,
        step.StepSettings(
            clip_norm=1.0,
            microbatches=microbatches,
            spikes=SPIKES,
            replicate=meshes.replicate(mesh),
        ),
    )
    return model, tx, function


@functools.cache
def initial(config: GptModel = TINY, **kwargs: int) -> state.TrainState:
    """Returns the state at step 0; do not donate it."""
    model, tx, _ = parts(config, **kwargs)
    return state.init(model, tx, seed=0)


def batch(seed: int) -> dict[str, np.ndarray]:
    """Returns random rows of two documents each, some positions without weight."""
    chance = np.random.default_rng(seed)
    tokens = chance.integers(0, V, (B, T + 1), dtype=np.int32)
    return {
        "tokens_BT": tokens[:, :-1],
        "targets_BT": tokens[:, 1:],
        "segment_ids_BT": np.repeat([[1, 2]], T // 2, axis=1).repeat(B, axis=0).astype(np.int32),
        "positions_BT": np.tile(np.arange(T // 2, dtype=np.int32), (B, 2)),
        "weights_BT": (chance.random((B, T)) < 0.8).astype(np.float32),
    }


def run(function: Any, start: state.TrainState, *, num: int) -> tuple[Any, list[np.ndarray]]:
    metrics = []
    for index in range(num):
        start, values = function(start, batch(index))
        metrics.append(np.asarray(values))
    return start, metrics


def equal(a: Any, b: Any) -> bool:
    return all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.slow
def test_the_donated_step_equals_the_undonated_bit_for_bit() -> None:
    # jax 0.7.2 on CPU computed wrong results, silently, if buffers were donated.
    _, _, function = parts()
    donated = jax.jit(function, donate_argnums=0)
    start = jax.tree.map(jnp.copy, initial())
    after, metrics = run(donated, start, num=6)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(start)), "nothing was donated"
    expected, expected_metrics = run(jax.jit(function), initial(), num=6)
    assert equal(after, expected)
    assert equal(metrics, expected_metrics)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_every_step_draws_different_dropout_from_the_saved_key() -> None:
    _, _, function = parts()
    begin = initial()
    once, _ = jax.jit(function)(begin, batch(0))
    assert not np.array_equal(once.key, begin.key)
    other_key, _ = jax.jit(function)(dataclasses.replace(begin, key=once.key), batch(0))
    assert not equal(once.params, other_key.params)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("microbatches", [*slow_but([2]), *campaign([6])])
def test_microbatches_give_the_gradient_of_the_whole_batch(microbatches: int) -> None:
    # Not bit-equal: float32 additions of 24 rows in another order.
    _, _, whole = parts(STILL)
    _, _, parted = parts(STILL, microbatches=microbatches)
    begin = initial(STILL)
    after_whole, metrics_whole = jax.jit(whole)(begin, batch(0))
    after_parted, metrics_parted = jax.jit(parted)(begin, batch(0))
    np.testing.assert_allclose(metrics_parted, metrics_whole, rtol=1e-5)
    moment = "mu"
    for a, b in zip(
        jax.tree.leaves(after_parted.opt[moment]),
        jax.tree.leaves(after_whole.opt[moment]),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_the_evaluation_step_excludes_masked_rows() -> None:
    model, _, _ = parts()
    params = initial().params
    evaluate = jax.jit(step.make_eval_step(model))
    rows = batch(0)
    mask = np.ones(B, np.float32)
    mask[20:] = 0
    other = {name: array.copy() for name, array in rows.items()}
    other["targets_BT"][20:] = 0
    masked, whole = (evaluate(params, None, rows, m) for m in (mask, jnp.ones(B)))
    assert np.array_equal(masked, evaluate(params, None, other, mask))
    assert not np.array_equal(masked, whole)


def poisoned_gradient(model: Any, *, row: int, value: float) -> Any:
    """Returns the model with one row whose loss is finite and whose gradient is not."""

    @jax.custom_vjp
    def through(loss_B: Any) -> Any:
        return loss_B

    def backward(_: Any, cotangent_B: Any) -> Any:
        return (cotangent_B.at[row].set(value),)

    through.defvjp(lambda loss_B: (loss_B, None), backward)

    def loss(params: Any, rows: Any, key: Any) -> Any:
        loss_B, weight_B = model.loss(params, rows, key)
        return through(loss_B), weight_B

    return dataclasses.replace(model, loss=loss)


def read(model: Any, begin: Any, values: Any) -> step.StepMetrics:
    measured, facts = step.MetricsLayout.of(begin, num_rows=B).read(np.asarray(values))
    assert not facts.size
    return measured


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("microbatches", "devices"), [(1, 1), (6, 8), *campaign([(1, 8), (6, 1)])])
def test_a_nonfinite_step_changes_neither_parameters_nor_moments(
    microbatches: int, devices: int
) -> None:
    model, _, function = parts(microbatches=microbatches, devices=devices)
    begin, _ = jax.jit(function)(initial(), batch(0))
    rows = batch(1)
    rows["weights_BT"][[3, 17], 0] = [np.nan, np.inf]
    after, values = jax.jit(function)(begin, rows)
    measured = read(model, begin, values)
    assert not measured.applied
    assert measured.state_is_finite
    assert measured.bad_rows == (3, 17)
    assert equal((after.params, after.opt), (begin.params, begin.opt))
    assert int(after.step) == int(begin.step) + 1
    assert not np.array_equal(after.key, begin.key)
    again, values = jax.jit(function)(after, batch(2))
    assert read(model, begin, values).applied
    assert not equal(again.params, after.params)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
@pytest.mark.parametrize(
    "value", [*campaign([np.nan, np.inf]), 1e30], ids=["nan", "inf", "square overflows"]
)
def test_a_nonfinite_gradient_is_masked_although_its_clipped_norm_is_finite(
    value: float,
) -> None:
    model, tx, _ = parts()
    poisoned = poisoned_gradient(model, row=5, value=value)
    rate = schedules.learning_rate(CosineSchedule(), peak=1e-2, total_steps=10)
    function = step.make_train_step(
        poisoned, tx, rate, step.StepSettings(clip_norm=1.0, microbatches=1, spikes=SPIKES)
    )
    begin = initial()
    after, values = jax.jit(function)(begin, batch(0))
    measured = read(model, begin, values)
    assert not measured.applied
    assert np.isfinite(measured.loss)
    assert measured.bad_rows == ()
    assert "embedding" in measured.bad_params
    assert equal((after.params, after.opt), (begin.params, begin.opt))


@pytest.mark.slow
def test_masking_preserves_the_donation_of_the_whole_state() -> None:
    _, _, function = parts()
    begin = initial()
    compiled = jax.jit(function, donate_argnums=0).trace(begin, batch(0)).lower().compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(begin))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


def loud_parts() -> tuple[Any, Any, Any]:
    """Returns a model, the model with its loss multiplied by the batch's scale, an optimizer."""
    model, tx, _ = parts(STILL)

    def scaled(params: Any, rows: Any, key: Any) -> Any:
        loss_B, weight_B = model.loss(params, rows, key)
        return loss_B * rows["scale_B"][0], weight_B

    return model, dataclasses.replace(model, loss=scaled), tx


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_a_norm_far_above_the_usual_is_skipped_and_one_above_it_is_clipped() -> None:
    model, loud, tx = loud_parts()
    rate = schedules.learning_rate(CosineSchedule(), peak=1e-3, total_steps=10)
    function = jax.jit(
        step.make_train_step(
            loud, tx, rate, step.StepSettings(clip_norm=None, microbatches=1, spikes=SPIKES)
        )
    )
    begin = initial(STILL)
    for index in range(4):
        begin, _ = function(begin, batch(index) | {"scale_B": np.ones(B, np.float32)})
    usual = float(jnp.exp(begin.norms["mean"]))

    def after(scale: float) -> tuple[Any, step.StepMetrics]:
        after, values = function(begin, batch(9) | {"scale_B": np.full(B, scale, np.float32)})
        return after, read(model, begin, values)

    spiked, measured = after(1000.0)
    assert measured.spike_score > SPIKES.skip_deviations
    assert not measured.applied
    assert measured.bad_params == ()
    assert measured.bad_rows == ()
    assert equal((spiked.params, spiked.opt), (begin.params, begin.opt))
    assert float(jnp.exp(spiked.norms["mean"])) < 2 * usual, "a spike is not at once usual"
    louder, measured = after(4.0)
    assert SPIKES.clip_deviations < measured.spike_score < SPIKES.skip_deviations
    assert measured.applied
    clipped, _ = after(5.0)
    for a, b in zip(
        jax.tree.leaves(louder.opt["mu"]), jax.tree.leaves(clipped.opt["mu"]), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8)  # Both are scaled to the same norm.


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_bands_in_warn_mode_report_the_score_and_change_no_bit() -> None:
    model, loud, tx = loud_parts()
    rate = schedules.learning_rate(CosineSchedule(), peak=1e-3, total_steps=10)
    warned, free = (
        jax.jit(
            step.make_train_step(
                loud, tx, rate, step.StepSettings(clip_norm=None, microbatches=1, spikes=bands)
            )
        )
        for bands in (SPIKES.model_copy(update={"mode": "warn"}), None)
    )
    begin = states = initial(STILL)
    for index, scale in enumerate([1.0, 1.0, 1.0, 1.0, 4.0, 1000.0]):
        rows = batch(index) | {"scale_B": np.full(B, scale, np.float32)}
        begin, values = warned(begin, rows)
        states, _ = free(states, rows)
        measured = read(model, begin, values)
        assert measured.applied
        assert (measured.spike_score > SPIKES.clip_deviations) == (index >= 4)
    assert measured.spike_score > SPIKES.skip_deviations
    assert equal((begin.params, begin.opt), (states.params, states.opt))
