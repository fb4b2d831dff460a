"""The hook of `jaxres chaos` edits the arrays of a step where they lie, once, and can undo it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.train.chaos_hooks import array_edit_hook, break_hook, fault_request
from jaxres.train.chaos_hooks.fault_request import FaultRequest


@pytest.fixture
def params() -> dict[str, Any]:
    return {
        "blocks": [{"kernel": jnp.arange(6.0).reshape(2, 3)}, {"kernel": jnp.ones(4)}],
        "count": jnp.arange(3),
        "scale": jnp.ones(3, jnp.bfloat16),
    }


def bits(tree: Any) -> list[bytes]:
    return [np.array(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@jax.jit
def squares(tree: Any) -> jax.Array:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in floats])


def test_an_overflow_is_finite_and_is_undone_bit_for_bit(params: dict[str, Any]) -> None:
    before = bits(params)
    assert array_edit_hook.overflow(params) == 3
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
    assert not np.isfinite(np.array(squares(params))).any()
    assert array_edit_hook.restore(params) == 3
    assert bits(params) == before


def test_a_nan_is_in_each_array_of_floats(params: dict[str, Any]) -> None:
    assert array_edit_hook.plant_nan(params) == 3
    assert np.isnan(np.array(squares(params))).all()
    assert int(jnp.sum(params["count"])) == 3


def test_a_bit_is_flipped_in_one_copy_alone() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    copied = jax.jit(lambda: jnp.ones(4), out_shardings=whole)()
    parts = jax.jit(lambda: jnp.ones(4), out_shardings=split)()
    assert array_edit_hook.flip({"parts": parts}) == 0, "there is no copy"
    assert array_edit_hook.flip({"a": parts, "b": copied}) == 1
    first, second = (np.array(shard.data) for shard in copied.addressable_shards)
    assert (first == 1).all()
    assert (second != 1).tolist() == [True, False, False, False]


def test_an_edit_is_done_once_at_its_step_on_its_host(tmp_path: Path) -> None:
    run_dir, array = tmp_path / "run", jnp.ones(4)

    def call(step: int, host: int) -> None:
        context: Any = SimpleNamespace(step=step, params={"a": array}, run_dir=run_dir, host=host)
        array_edit_hook.edit(context)

    call(5, 0)
    break_hook.folder_of(run_dir).mkdir(parents=True)
    fault_request.write(run_dir, FaultRequest(number=2, step=5, kind="nan", host=1))
    call(4, 1)
    call(5, 0)
    assert bool(jnp.isfinite(array).all())
    call(5, 1)
    assert bool(jnp.isnan(array[0]))
    assert fault_request.done(run_dir, number=2, host=1) == "nan of 1 array(s) after step 5"
    assert fault_request.done(run_dir, number=2, host=0) == ""
    array_edit_hook.restore({"a": array})
    call(5, 1)
    assert bool(jnp.isfinite(array).all()), "a step that is trained again is left alone"
