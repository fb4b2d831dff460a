"""A save writes the state as of the call, even if training reuses its buffers meanwhile."""

import contextlib
import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.checkpoint import snapshot
from jaxres.checkpoint.read import manifest
from jaxres.checkpoint.snapshot import SnapshotMemory

from .conftest import progress

STEPS = 30
NUM_LAYOUTS = 6


@jax.jit
def start():
    return {"params": {"w": jnp.arange(2**20, dtype=jnp.float32)}, "step": jnp.zeros((), jnp.int32)}


@pytest.mark.parametrize("how", ["copy", "device", "auto"])
def test_training_that_donates_the_state_changes_nothing_of_what_is_saved(attempt, how):
    train = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = start()
    with attempt.checkpoints(snapshot=how) as checkpoints:
        checkpoints.save(state, progress(8))
        for _ in range(STEPS):
            state = train(state)
        jax.block_until_ready(state)
        checkpoints.wait()
    (commit,) = attempt.log.history().committed
    found = manifest.read_arrays((attempt.run_dir.root / commit.path).absolute(), commit)
    expected = start()
    assert np.array_equal(found["params/w"], expected["params"]["w"])
    assert found["step"] == 0
    assert float(state["params"]["w"][0]) == STEPS


def test_a_device_copy_has_the_sharding_of_the_state_and_shares_no_buffer():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    state = {"w": jax.device_put(jnp.arange(64.0), sharding)}
    copied, is_own = snapshot.take_snapshot(state, "device", SnapshotMemory())
    assert is_own
    assert copied["w"].sharding == sharding
    ours = {shard.data.unsafe_buffer_pointer() for shard in state["w"].addressable_shards}
    theirs = {shard.data.unsafe_buffer_pointer() for shard in copied["w"].addressable_shards}
    assert not ours & theirs
    assert snapshot.take_snapshot(state, "copy", SnapshotMemory()) == (state, False)
    assert snapshot.take_snapshot(state, "auto", SnapshotMemory())[1], (
        "on a CPU the next step would allocate as much anyway"
    )


def pointers(state):
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
    }


def test_a_copy_is_made_in_the_memory_of_one_that_was_given_back():
    memory, state = SnapshotMemory(), start()
    first = memory.copy(state)
    before = pointers(first)
    memory.give_back(first)
    second = memory.copy(jax.tree.map(lambda x: x + 1, state))
    assert pointers(second) == before
    assert float(second["params"]["w"][5]) == 6
    assert not pointers(memory.copy(state)) & before, "it is in use"


def test_memory_that_is_still_read_is_not_used():
    memory, state = SnapshotMemory(), start()
    first = memory.copy(state)
    view = np.asarray(first["params"]["w"])
    memory.give_back(first)
    memory.copy(jax.tree.map(lambda x: x + 1, state))
    assert np.array_equal(view, np.arange(2**20))


def test_memory_of_another_layout_is_freed():
    memory, state = SnapshotMemory(), start()
    memory.give_back(memory.copy(state))
    other = {"params": {"w": jnp.ones(3)}, "step": state["step"]}
    assert memory.copy(other)["params"]["w"].shape == (3,)


def test_the_second_save_copies_into_the_memory_of_the_first(attempt, monkeypatch):
    spares, copied = [], snapshot._copied

    def recorded(state, spare):
        spares.append(spare)
        return copied(state, spare)

    monkeypatch.setattr(snapshot, "_copied", recorded)
    state = start()
    with attempt.checkpoints(snapshot="device") as checkpoints:
        checkpoints.save(state, progress(8))
        checkpoints.wait()
        assert spares == [None]
        checkpoints.save(state, progress(16))
        checkpoints.wait()
    assert len(spares) == 2
    assert spares[1] is not None
    assert [commit.step for commit in attempt.log.history().committed] == [8, 16]


def many_arrays(num_arrays):
    return {f"a{n}": jnp.full(4 + n % NUM_LAYOUTS, n, jnp.float32) for n in range(num_arrays)}


@pytest.mark.slow
def test_thousands_of_arrays_are_copied_by_a_few_programs():
    """One program for all of them takes minutes to compile on a busy machine."""
    for num_arrays in (300, 3000):
        arrays = list(many_arrays(num_arrays).values())
        groups = snapshot.copy_groups(arrays)
        assert sorted(n for group in groups for n in group) == list(range(num_arrays))
        programs = {tuple(arrays[n].shape for n in group) for group in groups}
        assert len(programs) <= NUM_LAYOUTS + 2
        assert max(map(len, programs)) <= snapshot.MAX_ARRAYS
    assert snapshot.copy_groups(arrays[:254]) == [list(range(254))], "as before"
    place = arrays[0].sharding
    distinct = [jax.ShapeDtypeStruct((n + 1,), jnp.float32, sharding=place) for n in range(3000)]
    assert len(snapshot.copy_groups(distinct)) == 12


@pytest.mark.slow
def test_thousands_of_arrays_are_copied_into_the_memory_of_an_earlier_copy():
    memory, state = SnapshotMemory(), many_arrays(400)
    first = memory.copy(state)
    assert all(np.array_equal(first[path], state[path]) for path in state)
    before = pointers(first)
    memory.give_back(first)
    second = memory.copy(jax.tree.map(lambda x: x + 1, state))
    assert pointers(second) == before
    assert all(np.array_equal(second[path], state[path] + 1) for path in state)


@pytest.mark.slow
def test_no_save_compiles_the_copy_that_was_prepared():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    shapes = {f"a{n}": jax.ShapeDtypeStruct((8,), jnp.int16, sharding=sharding) for n in range(300)}
    state = jax.jit(
        lambda: {path: jnp.ones(8, jnp.int16) for path in shapes}, out_shardings=sharding
    )()
    snapshot.prepare_copies(shapes, "auto")
    memory = SnapshotMemory()
    log, lines = logging.getLogger("jax"), io.StringIO()
    log.addHandler(handler := logging.StreamHandler(lines))
    with jax.log_compiles(), contextlib.ExitStack() as stack:
        stack.callback(log.removeHandler, handler)
        for _ in range(3):
            memory.give_back(jax.block_until_ready(memory.copy(state)))
        assert "Compiling" not in lines.getvalue()
        jax.jit(lambda x: x - 3)(state["a0"])
        assert "Compiling" in lines.getvalue()
