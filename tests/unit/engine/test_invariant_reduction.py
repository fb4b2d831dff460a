"""With train.reduction=invariant a run has the same bits on any number of devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres import models
from jaxres.config.schema.model import AnyModel, GptModel, MlpModel
from jaxres.config.schema.optimizer import (
    AdamwOptimizer,
    CosineSchedule,
    LionOptimizer,
    Optimizer,
    SgdOptimizer,
)
from jaxres.config.schema.run_config import MeshSection, TrainSection
from jaxres.config.schema.training import LossScaleSection, SpikesSection
from jaxres.engine import mesh as meshes
from jaxres.engine import mesh_plan, optimizer, state, step
from jaxres.engine import schedule as schedules
from jaxres.engine.invariant_reduction import InvariantReduction
from jaxres.faults import ConfigError
from jaxres.models.interface import LossSums, Model
from tests.tiers import campaign, slow_but

B, T, V, SHARDS = 16, 16, 64, 8
STEPS = 3
GPT = GptModel(num_layers=1, d_model=64, num_heads=2, compute_dtype="float32", dropout=0.1)
MESHES = {
    "data=4": {"data": 4},
    "fsdp=2": {"data": 1, "fsdp": 2},
    "data=2 fsdp=4": {"data": 2, "fsdp": 4},
}
CASES: dict[str, dict[str, Any]] = {
    "mlp": {"model": MlpModel()},
    "dropout, microbatches, spikes": {"microbatches": 2, "spikes": SpikesSection()},
    "split in data only": {
        "microbatches": 2,
        "spikes": SpikesSection(),
        "meshes": {"data=4": MESHES["data=4"]},
    },
    "sgd, an average": {"model": MlpModel(), "tx": SgdOptimizer(), "ema_decay": 0.9},
    "a loss scale, lion": {
        "model": MlpModel(),
        "tx": LionOptimizer(),
        "loss_scale": LossScaleSection(),
    },
    "bfloat16, sgd, an average": {
        "model": GPT.model_copy(update={"compute_dtype": "bfloat16"}),
        "tx": SgdOptimizer(),
        "ema_decay": 0.9,
    },
    "float16 with a loss scale, lion": {
        "model": GPT.model_copy(update={"compute_dtype": "float16"}),
        "tx": LionOptimizer(),
        "loss_scale": LossScaleSection(),
    },
}


@pytest.fixture(autouse=True)
def compiled_as_in_production() -> Iterator[None]:
    """Else the learning rate, a reported scalar, is rounded otherwise on one device."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


def batch(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, V, (B, T + 1), dtype=np.int32)
    return {
        "tokens_BT": tokens[:, :-1],
        "targets_BT": tokens[:, 1:],
        "segment_ids_BT": np.ones((B, T), np.int32),
        "positions_BT": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "weights_BT": draw.integers(0, 2, (B, T)).astype(np.float32),  # Shards of unequal weight.
    }


def trained(
    sizes: dict[str, int],
    *,
    model: AnyModel = GPT,
    tx: Optimizer | None = None,
    microbatches: int = 1,
    loss_scale: LossScaleSection | None = None,
    spikes: SpikesSection | None = None,
    ema_decay: float | None = None,
    reduction: str = "invariant",
    steps: int = STEPS,
    total_steps: int = 9,
) -> tuple[Any, list[np.ndarray], state.TrainState]:
    """Returns the state after the last step, the metrics of each step, and the state's arrays."""
    num_devices = int(np.prod(list(sizes.values())))
    mesh = meshes.build(MeshSection(**sizes), devices=jax.devices()[:num_devices])
    built = models.build(model, vocab_size=V, seq_len=T, platform="cpu")
    transform = optimizer.build(tx or AdamwOptimizer(), axes=built.axes)
    rate = schedules.learning_rate(
        CosineSchedule(warmup_fraction=0), peak=1e-2, total_steps=total_steps
    )
    function = step.make_train_step(
        built,
        transform,
        rate,
        step.StepSettings(
            clip_norm=0.5,
            microbatches=microbatches,
            spikes=spikes,
            loss_scale=loss_scale,
            ema_decay=ema_decay,
            reduction=InvariantReduction(mesh, SHARDS) if reduction == "invariant" else None,
        ),
    )
    make = functools.partial(
        state.init, built, transform, seed=0, loss_scale=loss_scale, ema_decay=ema_decay
    )
    shardings = state.shardings(jax.eval_shape(make), built, mesh)
    now = jax.jit(make, out_shardings=shardings, compiler_options=state.INIT_OPTIONS)()
    out = (shardings, meshes.replicated(mesh))
    jitted = jax.jit(function, donate_argnums=0, out_shardings=out)
    metrics = []
    for index in range(steps):
        now, values = jitted(now, meshes.place_batch(mesh, batch(index)))
        metrics.append(np.asarray(values))
    return jax.device_get(now), metrics, now


def assert_same_bits(found: Any, expected: Any) -> None:
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), path


IN_CI = ("mlp", "dropout, microbatches, spikes", "sgd, an average", "a loss scale, lion")
"""The others are a part of the mesh, and the decoder in 16 bits, which compiles for a minute."""


@pytest.mark.parametrize(
    "case",
    [*slow_but(IN_CI), *campaign(case for case in CASES if case not in IN_CI)],
)
def test_state_and_metrics_have_the_same_bits_on_any_mesh(case: str) -> None:
    settings = dict(CASES[case])
    meshes_to_compare = settings.pop("meshes", {"data=2 fsdp=4": MESHES["data=2 fsdp=4"]})
    end, metrics, _ = trained({"data": 1}, **settings)
    for name, sizes in meshes_to_compare.items():
        found, values, arrays = trained(sizes, **settings)
        assert_same_bits((found, values), (end, metrics))
        is_split = any(
            leaf.addressable_shards[0].data.shape != leaf.shape
            for leaf in jax.tree.leaves(arrays.params)
        )
        assert is_split == ("fsdp" in name), name


@pytest.mark.slow
def test_without_it_another_mesh_has_other_bits() -> None:
    """Else the test above would compare runs that nothing makes different."""
    one, four = (
        trained(sizes, model=MlpModel(), reduction="fast")[1]
        for sizes in ({"data": 1}, MESHES["data=4"])
    )
    assert any(a.tobytes() != b.tobytes() for a, b in zip(one, four, strict=True))


def plain_step(model: Model, reduction: InvariantReduction, *, microbatches: int) -> Any:
    """Returns a step without clipping, and its first state."""
    transform = optimizer.build(SgdOptimizer(), axes=model.axes)
    function = step.make_train_step(
        model,
        transform,
        lambda step: jnp.float32(0.1),
        step.StepSettings(
            clip_norm=None,
            microbatches=microbatches,
            spikes=None,
            reduction=reduction,
        ),
    )
    return function, state.init(model, transform, seed=0)


@pytest.mark.slow
def test_a_model_with_a_state_is_refused() -> None:
    """Its state goes from one part of the batch to the next, on one device after the other."""
    mesh = meshes.build(MeshSection(), devices=jax.devices()[:1])
    built = models.build(MlpModel(), vocab_size=V, seq_len=T, platform="cpu")
    stateful = dataclasses.replace(
        built,
        init_state=lambda key: {"count": jnp.zeros(())},
        loss=lambda params, state, batch, key: (built.loss(params, batch, key), state),
    )
    function, begin = plain_step(stateful, InvariantReduction(mesh, SHARDS), microbatches=1)
    with pytest.raises(ConfigError, match=r"invariant is impossible with a model"):
        jax.eval_shape(function, begin, batch(0))


@pytest.mark.slow
def test_the_rows_of_a_plan_are_those_that_the_step_computes() -> None:
    """Each part has the rows that one call of the loss gets, with the key that it gets."""
    seen = list[tuple[tuple[int, ...], int]]()

    def loss(params: Any, rows: Any, key: Any) -> LossSums:
        jax.debug.callback(
            lambda ids, data: seen.append((tuple(ids.tolist()), int(data[1]))),
            rows["id_B"],
            jax.random.key_data(key),
        )
        return params["w"] * rows["id_B"], jnp.ones(len(rows["id_B"]))

    mesh = meshes.build(MeshSection(), devices=jax.devices()[:2])
    section = TrainSection(
        steps=1, global_batch_size=B, microbatches=2, reduction="invariant", virtual_shards=4
    )
    plan = mesh_plan.plan(MeshSection(), section, MlpModel(), num_devices=2)
    model = Model(
        init=lambda key: {"w": jnp.ones(())},
        axes={"w": ()},
        loss=loss,
        logits=None,
        flops_per_token=1.0,
    )
    reduction = InvariantReduction(mesh, 4)
    function, begin = plain_step(model, reduction, microbatches=plan.microbatches)
    placed = meshes.place_batch(mesh, {"id_B": np.arange(B, dtype=np.float32)})
    jax.block_until_ready(jax.jit(function)(begin, placed))
    jax.effects_barrier()
    _, key = jax.random.split(jax.random.wrap_key_data(begin.key))
    expected = {
        (
            tuple(range(*part.rows.indices(B))),
            int(jax.random.key_data(functools.reduce(jax.random.fold_in, part.folds, key))[1]),
        )
        for part in plan.parts(B)
    }
    assert set(seen) == expected
