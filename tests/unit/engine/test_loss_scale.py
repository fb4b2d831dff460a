"""The dynamic loss scale: halved by overflows, and exact without them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres import models
from jaxres.config.schema.model import CustomModel, MlpModel
from jaxres.config.schema.optimizer import AdamwOptimizer, CosineSchedule
from jaxres.config.schema.run_config import MeshSection
from jaxres.config.schema.training import LEAST, MOST, LossScaleSection, most_back_offs
from jaxres.engine import loss_scale as scaling
from jaxres.engine import mesh as meshes
from jaxres.engine import optimizer, state, step
from jaxres.engine import schedule as schedules
from jaxres.runlog.skip_causes import SkipCause
from tests.tiers import campaign, slow_but
from tests.unit.engine.test_step import SPIKES, B, T, V, batch, equal

SECTION = LossScaleSection(first=2.0**16, grow_every_steps=4)
SMALL = MlpModel(kind="mlp", num_layers=1, d_model=16)


def after(scale: Any, *, loss: float = 1.0, norm: float = 1.0) -> Any:
    return scaling.update(
        scale, loss=jnp.float32(loss), grad_norm=jnp.float32(norm), section=SECTION
    )


def numbers(scale: Any) -> tuple[float, int]:
    return float(scale["factor"]), int(scale["good_steps"])


def at(factor: float, good_steps: int = 0) -> Any:
    return {"factor": jnp.float32(factor), "good_steps": jnp.int32(good_steps)}


def test_an_overflow_halves_the_scale_and_finite_steps_double_it() -> None:
    assert numbers(after(at(1024, 2))) == (1024, 3)
    assert numbers(after(at(1024, 3))) == (2048, 0)
    for norm in (np.inf, np.nan):
        assert numbers(after(at(1024, 3), norm=norm)) == (512, 0)
    assert numbers(after(at(LEAST, 3), norm=np.inf)) == (LEAST, 0)
    assert numbers(after(at(MOST, 3))) == (MOST, 0)


def test_a_nonfinite_loss_does_not_change_the_scale() -> None:
    for loss in (np.inf, np.nan):
        assert numbers(after(at(1024, 3), loss=loss, norm=np.nan)) == (1024, 3)


def test_the_scale_is_never_halved_more_often_than_the_stated_bound() -> None:
    scale, halved, worst = at(MOST, 3), 0, [1, 0]
    for number in range(1, 200):
        before = numbers(scale)[0]
        scale = after(scale, norm=np.inf if worst[number % 2] or before > 2**20 else 1.0)
        halved += numbers(scale)[0] < before
        assert halved <= most_back_offs(SECTION, steps=number)
    assert halved >= 24
    assert most_back_offs(None, steps=1000) == 0


def parts(
    scale: LossScaleSection | None,
    *,
    microbatches: int = 1,
    devices: int = 1,
    config: MlpModel | CustomModel = SMALL,
) -> tuple[Any, Any]:
    """Returns the initial state and the compiled step."""
    mesh = meshes.build(MeshSection(), devices=jax.devices()[:devices])
    model = models.build(
        config, vocab_size=V, seq_len=T, platform="cpu", keep_rows=meshes.pin_batch_dim(mesh)
    )
    tx = optimizer.build(AdamwOptimizer(), axes=model.axes)
    function = step.make_train_step(
        model,
        tx,
        schedules.learning_rate(CosineSchedule(), peak=1e-2, total_steps=10),
        step.StepSettings(
            clip_norm=1.0,
            microbatches=microbatches,
            spikes=SPIKES,
            loss_scale=scale,
            replicate=meshes.replicate(mesh),
        ),
    )
    return state.init(model, tx, seed=0, loss_scale=scale), jax.jit(function)


def measured(begin: Any, values: Any) -> step.StepMetrics:
    return step.MetricsLayout.of(begin, num_rows=B).read(np.asarray(values))[0]


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("microbatches", "devices"), [*campaign([(1, 1)]), *slow_but([(2, 8)])])
def test_a_scaled_and_unscaled_gradient_is_bit_equal(microbatches: int, devices: int) -> None:
    """The factor is an input of one program."""
    begin, function = parts(SECTION, microbatches=microbatches, devices=devices)
    one, other = (dataclasses.replace(begin, loss_scale=at(factor)) for factor in (1, 2**16))
    plain, plainly = parts(None, microbatches=microbatches, devices=devices)
    for index in range(3):
        (one, here), (other, there) = (function(now, batch(index)) for now in (one, other))
        here, there = measured(one, here), measured(other, there)
        assert (here.loss_scale, there.loss_scale) == (1, 2**16)
        assert here.grad_norm == there.grad_norm
        assert dataclasses.replace(here, loss_scale=2.0**16) == there
        assert equal((one.params, one.opt, one.norms), (other.params, other.opt, other.norms))
        plain, values = plainly(plain, batch(index))
        # Another program adds in another order.
        assert here.grad_norm == pytest.approx(measured(plain, values).grad_norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("microbatches", "devices"), slow_but([(1, 1), (2, 8)], (1, 1)))
def test_float16_overflows_are_masked_and_halve_the_scale_until_none_remains(
    microbatches: int, devices: int
) -> None:
    first = SECTION.model_copy(update={"first": MOST})
    config = CustomModel(kind="custom", target="tests.promises.bad_models:in_float16")
    begin, function = parts(first, microbatches=microbatches, devices=devices, config=config)
    factors, now = [], begin
    for index in range(24):
        now, values = function(now, batch(index))
        seen = measured(now, values)
        factors.append(seen.loss_scale)
        if seen.applied:
            break
        assert seen.skip_cause is SkipCause.LOSS_SCALE
        assert np.isfinite(seen.loss)
        assert equal((now.params, now.opt), (begin.params, begin.opt))
        assert float(now.loss_scale["factor"]) == seen.loss_scale / 2
    assert factors == [MOST / 2**index for index in range(len(factors))]
    assert 3 < len(factors) < 24
    assert np.isfinite(seen.grad_norm)


def test_gradients_below_the_range_of_float16_are_preserved() -> None:
    def loss_sum(w: Any, rows: Any) -> Any:
        total = jnp.sum((w * rows).astype(jnp.float16).astype(jnp.float32) * 1e-8)
        return total, (jnp.float32(1000), None)

    rows = jnp.ones(3)
    _, plain = jax.value_and_grad(loss_sum, has_aux=True)(jnp.ones(3), rows)
    _, kept = scaling.value_and_grad(loss_sum, jnp.float32(2.0**24))(jnp.ones(3), rows)
    assert not plain.any(), "it is below what float16 has"
    np.testing.assert_allclose(kept, 1e-8, rtol=2e-3)  # float16 has 11 bits.


def test_a_microbatch_without_weight_is_no_overflow() -> None:
    def loss_sum(param: Any, weights: Any) -> Any:
        return (weights * param).sum(), (weights.sum(),)

    gradient = scaling.value_and_grad(loss_sum, jnp.float32(1024.0))
    (total, _), grad = gradient(jnp.float32(3.0), jnp.zeros(4))
    assert (float(total), float(grad)) == (0.0, 0.0)
    assert float(gradient(jnp.float32(3.0), jnp.ones(5))[1]) == 5.0
