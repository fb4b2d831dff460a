"""Slots of states in memory: a kill at any operation leaves the newest state that was whole."""

import contextlib
import functools
import io
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres.checkpoint.memory import slots as memory_slots
from jaxres.checkpoint.memory.slots import Slot, layout, oldest, parts_of


@functools.cache
def initial_state():
    return {"a": jnp.arange(3000, dtype=jnp.float32), "b": jnp.int32(7)}


@functools.cache
def shapes():
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in initial_state().items()
    }


@functools.cache
def pieces():
    return layout(initial_state(), host=0)


OPERATIONS = ("pwrite", "unlink", "replace")


class Killed(BaseException):
    """The process ends here."""


def state_of(step):
    return {name: x + step for name, x in initial_state().items()}


def opened(folder, name):
    slots = [Slot(folder / f"{name}-{number}.data", pieces()) for number in range(2)]
    for slot in slots:
        slot.open()
    return slots


def keep(slots, step):
    """Keeps a state as a host keeps its own."""
    slot = oldest(slots)
    digests = slot.write(parts_of(state_of(step), pieces()))
    slot.publish(digests, step=step, seq=2, nonce="0a", progress={})


def received(slots, sent):
    """Keeps a state as the neighbour of its host does."""
    size, data = sent
    oldest(slots).receive(size, io.BytesIO(data).read)


def sent_by(slots, step):
    """Returns the size and the bytes of a state that a host sends."""
    keep(slots, step)
    slot = next(slot for slot in slots if slot.index.step == step)
    size, parts = slot.sent()
    return size, b"".join(parts)


@contextlib.contextmanager
def killed(monkeypatch, *, before):
    """Ends what is inside before the given file operation; yields the calls so far."""
    calls = []

    def dying(operation):
        def call(*args, **options):
            calls.append(operation)
            if len(calls) == before:
                raise Killed
            return operation(*args, **options)

        return call

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        for name in OPERATIONS:
            patched.setattr(os, name, dying(getattr(os, name)))
        yield calls


@pytest.mark.parametrize("tier", ["own memory", "neighbour's memory"])
def test_a_kill_at_any_operation_leaves_a_whole_state(tmp_path, monkeypatch, tier):
    monkeypatch.setattr(memory_slots, "CHUNK_BYTES", 4096)
    sender = opened(tmp_path, "sender")
    sent = {step: sent_by(sender, step) for step in (5, 10, 15)}
    found, number = [], 0
    while 15 not in found:
        number += 1
        slots = opened(tmp_path, f"slot{number}")
        for step in (5, 10):
            keep(slots, step)
        with killed(monkeypatch, before=number) as calls:
            keep(slots, 15) if tier == "own memory" else received(slots, sent[15])
        again = opened(tmp_path, f"slot{number}")
        newest = max((s for s in again if s.index), key=lambda slot: slot.index.step)
        found.append(newest.index.step)
        restored = newest.read(shapes())
        for name, wanted in state_of(found[-1]).items():
            np.testing.assert_array_equal(restored[name], wanted)
        for slot in again:  # The other one is whole, too, or holds nothing.
            assert slot.index is None or slot.read(shapes())
        for slot in (*slots, *again):
            slot.close()
    assert found == [10] * (number - 1) + [15]
    assert len(calls) == number - 1 >= 6, "hardly killed"
    for slot in sender:
        slot.close()


def test_an_index_that_is_no_file_is_neither_read_nor_taken_for_damage(tmp_path):
    first = opened(tmp_path, "slot")[0]
    keep([first], 5)
    index = tmp_path / "slot-0.json"
    index.unlink()
    index.symlink_to("/dev/null")
    with pytest.raises(OSError, match="a pipe, a socket or a device, expected a file"):
        Slot(tmp_path / "slot-0.data", pieces()).open()
