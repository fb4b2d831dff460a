"""A save writes the state as of the call, even if training reuses its buffers meanwhile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.checkpoint import manifest, snapshot
from jaxres.checkpoint.snapshot import SnapshotMemory

from .conftest import progress

STEPS = 30


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
