"""fsdp and tensor axes train like one device: same initial bits, same losses, less memory."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxres import models
from jaxres.config.schema.model import GptModel
from jaxres.config.schema.optimizer import AdamwOptimizer, CosineSchedule
from jaxres.config.schema.run_config import MeshSection
from jaxres.engine import mesh as meshes
from jaxres.engine import optimizer, sharding_report, state, step
from jaxres.engine import schedule as schedules
from tests.compiling import quickly_compiled
from tests.tiers import campaign, slow_but

B, T, V = 24, 16, 128
STEPS = 5
MODEL = GptModel(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, compute_dtype="float32")
ONE = "one device"
MESHES = {
    ONE: ({"data": 1}, 1),
    "data=8": ({"data": 8}, 1),
    "fsdp=8": ({"fsdp": 8}, 1),
    "fsdp=4 tensor=2": ({"fsdp": 4, "tensor": 2}, 1),
    "data=2 fsdp=2 tensor=2": ({"data": 2, "fsdp": 2, "tensor": 2}, 1),
    "data=2 fsdp=2 tensor=2, 3 microbatches": ({"data": 2, "fsdp": 2, "tensor": 2}, 3),
    "tensor=2 on 2 devices": ({"data": 1, "tensor": 2}, 1),
    "fsdp=3 on 3 devices, which divides no dim": ({"data": 1, "fsdp": 3}, 1),
}
IN_CI = (
    "data=2 fsdp=2 tensor=2, 3 microbatches",
    "fsdp=3 on 3 devices, which divides no dim",
)
BOUND = 2e-5
"""Relative difference of the losses. Meshes add the same float32 numbers (24 bits: 6e-8) in other
orders. Adam divides by the gradient's size, so the rounding of a gradient near zero moves the
parameter by up to the whole learning rate. Measured: at most 6e-7."""


def batch(seed: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, V, (B, T + 1), dtype=np.int32)
    return {
        "tokens_BT": tokens[:, :-1],
        "targets_BT": tokens[:, 1:],
        "segment_ids_BT": np.ones((B, T), np.int32),
        "positions_BT": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "weights_BT": np.ones((B, T), np.float32),
    }


@functools.cache
def trained(name: str, *, quickly: bool) -> tuple[Any, list[float], Any]:
    """Returns the initial state, the losses of the first steps, and the compiled step.

    The initial state is computed as in production: its bits depend on how it is compiled.
    """
    sizes, microbatches = MESHES[name]
    num_devices = int(np.prod(list(sizes.values()))) if "data" in sizes else 8
    mesh = meshes.build(MeshSection(**sizes), devices=jax.devices()[:num_devices])
    model = models.build(
        MODEL, vocab_size=V, seq_len=T, platform="cpu", keep_rows=meshes.pin_batch_dim(mesh)
    )
    tx = optimizer.build(AdamwOptimizer(), axes=model.axes)
    rate = schedules.learning_rate(CosineSchedule(warmup_fraction=0), peak=1e-2, total_steps=STEPS)
    function = step.make_train_step(
        model, tx, rate, step.StepSettings(clip_norm=1.0, microbatches=microbatches, spikes=None)
    )
    shapes = jax.eval_shape(lambda: state.init(model, tx, seed=0))
    shardings = state.shardings(shapes, model, mesh)
    init = jax.jit(
        lambda: state.init(model, tx, seed=0),
        out_shardings=shardings,
        compiler_options=state.INIT_OPTIONS,
    )
    now = init()
    begin = jax.device_get(now)
    out = (shardings, meshes.replicated(mesh))
    placed = meshes.place_batch(mesh, batch(0))
    with quickly_compiled() if quickly else contextlib.nullcontext():
        jitted = jax.jit(function, donate_argnums=0, out_shardings=out)
        compiled = jitted.lower(now, placed).compile()
    losses = []
    for index in range(STEPS):
        now, metrics = compiled(now, meshes.place_batch(mesh, batch(index)))
        losses.append(float(metrics[0]))
    return begin, losses, compiled


@pytest.mark.parametrize(
    "name", [*slow_but(IN_CI), *campaign(name for name in MESHES if name not in (ONE, *IN_CI))]
)
def test_a_mesh_has_the_same_initial_bits_and_losses_as_one_device(name: str) -> None:
    begin, losses, _ = trained(name, quickly=True)
    expected, expected_losses, _ = trained(ONE, quickly=True)
    for a, b in zip(jax.tree.leaves(begin), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b), "the initial state depends on the mesh"
    assert abs(losses[0] - losses[-1]) > 0.01, "nothing was learned, so nothing was compared"
    np.testing.assert_allclose(losses, expected_losses, rtol=BOUND)


@pytest.mark.parametrize("name", [*slow_but(["fsdp=4 tensor=2"]), *campaign(["fsdp=8"])])
def test_a_step_needs_less_memory_per_device_if_the_state_is_split(name: str) -> None:
    # XLA once split the width of the activations as the parameters', so each device held those
    # of the whole batch: three times the bytes, with the right numbers.
    whole = sharding_report.step_bytes(trained("data=8", quickly=False)[2])
    split = sharding_report.step_bytes(trained(name, quickly=False)[2])
    assert whole is not None
    assert split is not None
    assert split < whole
