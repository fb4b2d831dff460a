"""What a step keeps besides parameters and moments: model state, average, metrics, frozen parts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres.config.schema.optimizer import (
    AdamwOptimizer,
    ConstantSchedule,
    ParamGroup,
    SgdOptimizer,
)
from jaxres.config.schema.run_config import MeshSection
from jaxres.data.mixture import SOURCE_KEY
from jaxres.engine import mesh as meshes
from jaxres.engine import optimizer, state, step
from jaxres.engine import schedule as schedules
from jaxres.faults import ConfigError
from jaxres.models import Model
from jaxres.runlog.skip_causes import SkipCause

B = 8


@functools.cache
def key():
    return jax.random.key(0)


def init(key: jax.Array) -> dict[str, Any]:
    return {"body": {"w": jax.random.normal(key, (3, 2))}, "head": {"w": jnp.ones((2, 1))}}


def loss(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
    """A regression whose inputs are centred with the batch's mean, or a running one."""
    x_BD = batch["x_BD"]
    mean_D = x_BD.mean(0) if key is not None else model_state["mean"]
    y_B = ((x_BD - mean_D) @ params["body"]["w"] @ params["head"]["w"])[:, 0]
    weight_B = batch["weight_B"]
    near_B = jnp.where(jnp.abs(y_B - batch["y_B"]) < 1, weight_B, 0)
    after = {"mean": 0.9 * model_state["mean"] + 0.1 * mean_D}
    square_B = jnp.square(y_B - batch["y_B"])
    return (square_B * weight_B, weight_B, {"near": (near_B, weight_B)}), after


MODEL = Model(
    init=init,
    axes={"body": {"w": (None, None)}, "head": {"w": (None, None)}},
    loss=loss,
    logits=None,
    flops_per_token=1.0,
    init_state=lambda key: {"mean": jnp.zeros(3)},
)


def batch(seed: int, *, bad: bool = False) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    x_BD = chance.normal(size=(B, 3)).astype(np.float32)
    if bad:
        x_BD[2, 1] = np.nan
    return {
        "x_BD": x_BD,
        "y_B": chance.normal(size=B).astype(np.float32),
        "weight_B": np.arange(B, dtype=np.float32),
        SOURCE_KEY: np.array([0, 1, 0, 1, 0, 1, 0, 1], np.int32),
    }


class Stepper:
    """A jitted step and its state."""

    def __init__(self, config: Any, *, microbatches: int = 1, devices: int = 1) -> None:
        self.tx = optimizer.build(config, axes=MODEL.axes)
        self.trainable = optimizer.trainable(config, MODEL.axes)
        mesh = meshes.build(MeshSection(), devices=jax.devices()[:devices])
        self.state = state.init(
            MODEL, self.tx, seed=0, trainable=self.trainable, ema_decay=config.ema_decay
        )
        self.layout = step.MetricsLayout.of(
            self.state,
            num_rows=B,
            trainable=self.trainable,
            model_metrics=("near", "one/loss", "two/loss"),
        )
        self._place = lambda arrays: meshes.place_batch(mesh, arrays)
        function = step.make_train_step(
            MODEL,
            self.tx,
            schedules.learning_rate(config.schedule, peak=config.learning_rate, total_steps=10),
            step.StepSettings(
                clip_norm=None,
                microbatches=microbatches,
                spikes=None,
                trainable=self.trainable,
                ema_decay=config.ema_decay,
                sources=("one", "two"),
                replicate=meshes.replicate(mesh),
            ),
        )
        self._step = jax.jit(function)

    def __call__(self, arrays: dict[str, np.ndarray]) -> step.StepMetrics:
        self.state, values = self._step(self.state, self._place(arrays))
        return self.layout.read(np.asarray(values))[0]


SGD = SgdOptimizer(learning_rate=0.01, momentum=0.0, weight_decay=0.1, schedule=ConstantSchedule())


@pytest.mark.slow
def test_metrics_are_means_by_weight_over_all_rows_and_by_source() -> None:
    for microbatches in (1, 2, 4):
        stepper, arrays = Stepper(SGD, microbatches=microbatches), batch(0)
        weight_B = arrays["weight_B"]
        if microbatches > 1:  # Each part is centred by itself, so only the weights are compared.
            measured = stepper({**arrays, "weight_B": np.ones_like(weight_B)})
            parts = measured.model_metrics["one/loss"] + measured.model_metrics["two/loss"]
            np.testing.assert_allclose(measured.loss, parts / 2, rtol=1e-6)
            continue
        params = jax.tree.map(np.asarray, stepper.state.params)
        measured = stepper(arrays)
        x_BD = arrays["x_BD"] - arrays["x_BD"].mean(0)
        error_B = (x_BD @ params["body"]["w"] @ params["head"]["w"])[:, 0] - arrays["y_B"]
        odd = np.arange(B) % 2 == 1
        expected = {
            "near": np.average(np.abs(error_B) < 1, weights=weight_B),
            "one/loss": np.average(error_B[~odd] ** 2, weights=weight_B[~odd]),
            "two/loss": np.average(error_B[odd] ** 2, weights=weight_B[odd]),
        }
        found = measured.model_metrics
        assert found.keys() == expected.keys()
        np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


@pytest.mark.slow
def test_a_source_without_rows_in_a_batch_has_no_loss() -> None:
    measured = Stepper(SGD)({**batch(0), SOURCE_KEY: np.zeros(B, np.int32)})
    assert np.isnan(measured.model_metrics["two/loss"])
    assert measured.model_metrics["one/loss"] == pytest.approx(measured.loss)
    assert measured.applied


@pytest.mark.slow
def test_the_model_state_goes_through_all_microbatches_and_is_over_the_rows_of_all_devices() -> (
    None
):
    arrays = batch(0)
    expected = np.zeros(3)
    for part in range(2):
        expected = 0.9 * expected + 0.1 * arrays["x_BD"][part::2].mean(0)
    stepper = Stepper(SGD, microbatches=2)
    stepper(arrays)
    np.testing.assert_allclose(stepper.state.model_state["mean"], expected, rtol=1e-5)
    stepper = Stepper(SGD, devices=4)
    stepper(arrays)
    mean = stepper.state.model_state["mean"]
    np.testing.assert_allclose(mean, 0.1 * arrays["x_BD"].mean(0), rtol=1e-5)


@pytest.mark.slow
def test_a_masked_step_changes_neither_model_state_nor_average() -> None:
    stepper = Stepper(SGD.model_copy(update={"ema_decay": 0.5}))
    stepper(batch(0))
    before = stepper.state
    measured = stepper(batch(1, bad=True))
    assert not measured.applied
    assert measured.bad_rows
    for name in ("params", "opt", "model_state", "ema"):
        pair = getattr(before, name), getattr(stepper.state, name)
        assert jax.tree.all(jax.tree.map(np.array_equal, *pair)), name
    assert stepper(batch(2)).applied


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "cause"),
    [
        (np.nan, np.nan, 2.0, SkipCause.NONFINITE_LOSS),
        (np.inf, 1.0, None, SkipCause.NONFINITE_LOSS),
        (1.0, np.inf, None, SkipCause.NONFINITE_GRADIENT),
        (1.0, np.nan, 1.0, SkipCause.NONFINITE_GRADIENT),
        (1.0, np.nan, 2.0, SkipCause.LOSS_SCALE),
        (1.0, 9e9, 2.0, SkipCause.NORM_SPIKE),
    ],
)
def test_the_cause_of_a_masked_step_follows_from_its_numbers(
    loss: float, norm: float, scale: float | None, cause: SkipCause
) -> None:
    layout = step.MetricsLayout(params=("w",), num_rows=1, is_scaled=scale is not None)
    scales = [] if scale is None else [scale]
    for applied, expected in ((0.0, cause), (1.0, None)):
        numbers = [loss, norm, 0.1, 0.0, applied, 1.0, *scales, 1.0, 0.0]
        measured, _ = layout.read(np.array(numbers, np.float32))
        assert measured.skip_cause is expected


@pytest.mark.slow
def test_the_average_follows_the_trained_parameters_and_is_what_is_evaluated() -> None:
    config = SGD.model_copy(update={"ema_decay": 0.75, "freeze": ("head/*",)})
    stepper = Stepper(config)
    expected = np.asarray(stepper.state.params["body"]["w"])
    for seed in range(3):
        stepper(batch(seed))
        expected = 0.75 * expected + 0.25 * np.asarray(stepper.state.params["body"]["w"])
    np.testing.assert_allclose(stepper.state.ema["body"]["w"], expected, rtol=1e-6)
    evaluated = state.evaluated_params(stepper.state, stepper.trainable)
    assert np.array_equal(evaluated["body"]["w"], stepper.state.ema["body"]["w"])
    assert np.array_equal(evaluated["head"]["w"], stepper.state.params["head"]["w"])
    assert "head" not in stepper.state.ema


@pytest.mark.slow
def test_a_frozen_parameter_keeps_its_bits_and_has_no_optimizer_state() -> None:
    config = AdamwOptimizer(freeze=("head/*",), weight_decay=0.5, schedule=ConstantSchedule())
    stepper = Stepper(config)
    before = jax.tree.map(np.asarray, stepper.state.params)
    for seed in range(3):
        assert stepper(batch(seed)).applied
    after = stepper.state.params
    assert np.array_equal(before["head"]["w"], after["head"]["w"])
    assert not np.array_equal(before["body"]["w"], after["body"]["w"])
    assert list(stepper.state.opt["mu"]) == ["body"]
    assert stepper.layout.params == ("body/w",)


@pytest.mark.slow
def test_a_group_has_its_own_rate_and_decay() -> None:
    group = ParamGroup(match="head/*", weight_decay=0.0, learning_rate=0.002)
    one, two = Stepper(SGD), Stepper(SGD.model_copy(update={"groups": (group,)}))
    start = np.asarray(one.state.params["head"]["w"])
    one(batch(0))
    two(batch(0))
    gradient = (start - np.asarray(one.state.params["head"]["w"])) / 0.01 - 0.1 * start
    moved = start - np.asarray(two.state.params["head"]["w"])
    np.testing.assert_allclose(moved, 0.002 * gradient, rtol=1e-3)
    assert np.array_equal(one.state.params["body"]["w"], two.state.params["body"]["w"])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (SgdOptimizer(freeze=("tail/*",)), "optimizer.freeze: tail/* matches no parameter"),
        (SgdOptimizer(freeze=("*",)), "every parameter is frozen"),
        (
            SgdOptimizer(freeze=("body/*",), groups=(ParamGroup(match="b*"),)),
            "optimizer.groups[0].match: b* matches frozen parameters only: body/w.",
        ),
        (
            SgdOptimizer(groups=(ParamGroup(match="x"),)),
            "optimizer.groups[0].match: x matches no parameter. They are: body/w, head/w",
        ),
    ],
)
def test_a_pattern_that_means_nothing_is_refused(config: Any, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Stepper(config)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (
            lambda: jnp.ones(B),
            "has to return ((sums_B, weights_B), new state); it returns an array",
        ),
        (lambda: ((jnp.ones(B), jnp.ones(())), {}), "one number for each of the 8 rows"),
        (
            lambda: ((jnp.ones(B), jnp.ones(B), {"near": jnp.ones(B)}), {}),
            "near has to be (sums_B,",
        ),
        (lambda: ((jnp.ones(B),), {}), "it returns (an array of shape [8])"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(returned: Any, says: str) -> None:
    model = Model(
        init=init,
        axes=MODEL.axes,
        loss=lambda *_: returned(),
        logits=None,
        flops_per_token=1.0,
        init_state=MODEL.init_state,
    )
    rows, evaluated = jax.tree.map(jnp.asarray, batch(0)), step.make_eval_step(model)
    with pytest.raises(ConfigError) as raised:
        evaluated(init(key()), {"mean": jnp.zeros(3)}, rows, jnp.ones(B))
    assert says in str(raised.value)
