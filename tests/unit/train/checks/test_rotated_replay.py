"""A device that always computes the same wrong number is found by a replay on rotated devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres.engine import mesh as meshes
from jaxres.engine import replica_fingerprint
from jaxres.faults import Continue, StopRun, Warn
from jaxres.train.checks.replay_check import Replay, ReplayCheck, RotatedStep
from tests.tiers import slow_but
from tests.unit.engine.test_replica_fingerprint import flip, mesh_of, placed, with_copy
from tests.unit.train.test_no_bad_state_is_committed import Device

MESHES = {
    "data=4": {"data": 4},
    "fsdp=4": {"fsdp": 4},
    "data=2 fsdp=2": {"data": 2, "fsdp": 2},
    "data=2 fsdp=2 tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
}
BIT = 20


def shapes_on(mesh: Any) -> dict[str, Any]:
    dims = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "bias": (None,)}
    sizes = {"up": (32, 64), "down": (64, 32), "bias": (32,)}
    return {
        name: jax.ShapeDtypeStruct(
            sizes[name], jnp.float32, sharding=meshes.param_sharding(mesh, dims[name], sizes[name])
        )
        for name in dims
    }


def new_step(mesh: Any) -> Any:
    """A step whose update depends on sums over all devices."""

    def step(params: Any, batch: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            out = jnp.tanh(batch @ params["up"]) @ params["down"] + params["bias"]
            return jnp.mean((out - batch) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
        updated = jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, gradient)
        return updated, jnp.stack([value, norm])

    shardings = jax.tree.map(lambda shape: shape.sharding, shapes_on(mesh))
    return jax.jit(step, out_shardings=(shardings, meshes.replicated(mesh)))


def fingerprints_on(mesh: Any) -> Any:
    return jax.jit(replica_fingerprint.make(shapes_on(mesh), mesh, with_single=True))


@functools.cache
def on(name: str) -> tuple[Any, Any, dict[str, jax.Array], jax.Array]:
    """Mesh, rotated mesh, state and batch."""
    mesh = mesh_of(MESHES[name])
    turned = meshes.rotated(mesh)
    assert turned is not None
    draw = np.random.default_rng(0)
    state = {
        key: jax.device_put(draw.normal(size=shape.shape).astype(np.float32), shape.sharding)
        for key, shape in shapes_on(mesh).items()
    }
    rows = draw.normal(size=(16, 32)).astype(np.float32)
    return mesh, turned, state, jax.device_put(rows, meshes.batch_sharding(mesh))


def faulty(step: Any, device: int | None, where: str) -> Any:
    """The step on devices of which one always reads its rows, or writes its update, wrongly."""

    def run(state: Any, batch: jax.Array) -> Any:
        if device is not None and where == "rows":
            batch = with_copy(batch, device, flip(BIT))
        state, metrics = step(state, batch)
        if device is not None and where == "update":
            state = {**state, "up": with_copy(state["up"], device, flip(BIT))}
        return state, metrics

    return run


def judged(name: str, *, device: int | None, where: str = "update", rotates: bool = True) -> Any:
    """The verdict on a step that is computed on devices of which one is faulty."""
    mesh, turned, state, batch = on(name)
    devices = list(mesh.devices.flat)
    rotated = RotatedStep(
        move=lambda arrays: meshes.move(arrays, mesh, turned),
        step=faulty(new_step(turned), device, where),
        fingerprints=fingerprints_on(turned),
        places=[devices.index(one) for one in turned.devices.flat],
        is_exact=True,
    )
    check = ReplayCheck(
        lambda state: jax.tree.map(jnp.copy, state),
        fingerprints_on(mesh),
        devices,
        0,
        every_steps=1,
        mode="act",
        emit=lambda event: None,
        rotated=rotated if rotates else None,
    )
    step = faulty(new_step(mesh), device, where)
    first = check.compute(step, state, (batch,))
    result, metrics = step(state, batch)
    second = check.fingerprints(result), metrics
    replay = Replay(*zip(first, second, strict=True))
    return check.judge(replay, step=8, last_good_step=4, was_equal=True)


@pytest.mark.parametrize("name", slow_but(MESHES, "data=4"))
def test_without_a_fault_both_results_have_the_same_bits(name: str) -> None:
    assert isinstance(judged(name, device=None), Continue)


@pytest.mark.parametrize("where", ["rows", "update"])
@pytest.mark.parametrize("name", slow_but(MESHES, "data=4", "data=2 fsdp=2"))
def test_a_device_that_always_computes_the_same_wrong_number_is_found(
    name: str, where: str
) -> None:
    assert isinstance(judged(name, device=2, where=where, rotates=False), Continue)
    verdict = judged(name, device=2, where=where)
    assert isinstance(verdict, StopRun)
    assert verdict.last_good_step == 4
    assert "device 2 (cpu, host 0)" in verdict.reason
    others = [d for d in range(8) if d != 2 and f"device {d} " in verdict.reason]
    assert where == "rows" or others == [], "the device is named alone"


def test_devices_rotate_within_their_host_and_parts_keep_their_bits() -> None:
    class FakeMesh:
        axis_names = ("data", "fsdp", "tensor")
        devices = np.empty((4, 1, 1), object)

    hosts = [0, 0, 1, 2]
    FakeMesh.devices[:, 0, 0] = [Device(id, host) for id, host in enumerate(hosts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "Mesh", lambda devices, names, axis_types: devices)
        turned = meshes.rotated(FakeMesh)  # pyright: ignore[reportArgumentType]
    assert [device.id for device in turned.flat] == [1, 0, 2, 3]
    assert meshes.rotated(mesh_of({"data": 1})) is None
    mesh = mesh_of({"data": 2, "fsdp": 2})
    other = meshes.rotated(mesh)
    values = np.asarray([[np.nan, -0.0], [1e-45, 3.0]], np.float32).view(np.uint32)
    array = placed(mesh, values.view(np.float32), "embed", None)
    moved = meshes.move({"a": array}, mesh, other)["a"]
    assert np.asarray(moved).view(np.uint32).tolist() == values.tolist()
    assert {shard.device.id: shard.index for shard in moved.addressable_shards} == {
        (shard.device.id + 1) % 4: shard.index for shard in array.addressable_shards
    }


def test_where_sums_may_have_another_order_only_a_later_difference_is_a_fault() -> None:
    check = ReplayCheck(
        lambda state: state,
        lambda state: np.zeros((3, 1), np.uint32),
        [Device(10), Device(11), Device(12)],
        0,
        every_steps=1,
        mode="act",
        emit=lambda event: None,
        rotated=RotatedStep(lambda arrays: arrays, max, max, (1, 2, 0), is_exact=False),
    )
    metrics = np.zeros(3, np.float32)
    rows = np.zeros((3, 1), np.uint32), np.asarray([[0], [1], [1]], np.uint32)
    replay = Replay(rows, (metrics, metrics))
    first = check.judge(replay, step=3, last_good_step=2, was_equal=False)
    assert isinstance(first, Warn)
    assert "guards.corruption.replay_on=same" in first.reason
    later = check.judge(replay, step=3, last_good_step=2, was_equal=True)
    assert isinstance(later, StopRun)
    assert "differ on device 12 (chip, host 0)." in later.reason
