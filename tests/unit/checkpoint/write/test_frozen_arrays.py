"""Frozen arrays: which saves link files, and which write them again; real Orbax files."""

import errno
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.verify import verify_step
from jaxres.checkpoint.write import frozen_arrays
from jaxres.engine.trainable import Trainable
from jaxres.faults import StorageUnavailable
from jaxres.runlog.events import SaveCommitted, SaveFailed
from jaxres.storage import files
from tests.damage import flip_bit_at
from tests.tiers import slow_but
from tests.unit.checkpoint.conftest import like, progress, state
from tests.unit.checkpoint.test_checkpointer import assert_equal, commits

FROZEN = Trainable(frozenset({"w"}))


def lora(step, *, base=0):
    """A state of that step whose frozen array `w` is the same at all steps."""
    whole = state(step)
    return whole | {"params": {"w": state(base)["params"]["w"], "b": whole["params"]["b"] * step}}


def saved(attempt, *states, **kwargs):
    """Saves steps 8, 16, ...; returns the bytes that each commit has linked."""
    with attempt.checkpoints(trainable=FROZEN, keep_last=20, **kwargs) as checkpoints:
        newest = attempt.log.history().step
        for number, tree in enumerate(states, start=1):
            checkpoints.save(tree, progress(newest + 8 * number))
            checkpoints.wait()
    return [event.linked_bytes for event in attempt.events if isinstance(event, SaveCommitted)]


def restored(checkpoints, attempt):
    found = checkpoints.restore(attempt.log.history(), like(lora(1)), seconds=60)
    assert found is not None
    return found


def is_shared(attempt, a, b):
    first, second = (attempt.step_dir(step) / frozen_arrays.PROBE for step in (a, b))
    return first.samefile(second)


def assert_all_valid(attempt):
    for commit in attempt.log.history().committed:
        found = verify_step(attempt.run_dir.root / commit.path, commit)
        assert found.problems == (), found.evidence


@pytest.mark.slow
def test_two_copies_are_written_and_later_saves_link_them_in_turn(attempt):
    first, second, *others = saved(attempt, *map(lora, range(1, 6)))
    assert (first, second) == (0, 0)
    assert all(linked > 0 for linked in others)
    assert is_shared(attempt, 8, 24)
    assert is_shared(attempt, 16, 32)
    assert is_shared(attempt, 8, 40)
    assert not is_shared(attempt, 8, 16)
    assert_all_valid(attempt)
    event = [event for event in attempt.events if isinstance(event, SaveCommitted)][-1]
    shared = sum(
        files.sizes(attempt.step_dir(40) / name)[f]
        for name in frozen_arrays.FOLDERS
        for f in files.sizes(attempt.step_dir(40) / name)
    )
    assert event.linked_bytes == shared
    assert event.bytes == sum(files.sizes(attempt.step_dir(40)).values())


@pytest.mark.slow
def test_a_linked_step_is_restored_bit_for_bit_and_the_next_save_writes_another_copy(attempt):
    saved(attempt, *map(lora, range(1, 5)))
    again = attempt.again()
    with again.checkpoints(trainable=FROZEN, keep_last=20) as checkpoints:
        found = restored(checkpoints, again)
        assert_equal(found.state, lora(4))
        for number in (5, 6):
            checkpoints.save(lora(number), progress(8 * number))
            checkpoints.wait()
    linked = [event.linked_bytes for event in again.events if isinstance(event, SaveCommitted)]
    assert linked[0] == 0
    assert linked[1] > 0
    assert is_shared(again, 32, 48), "the restored copy, which was verified, is linked"
    assert_all_valid(again)


@pytest.mark.slow
def test_a_damaged_file_that_a_restore_did_not_need_is_a_part_of_no_later_step(attempt):
    """The arrays of the restored step are valid, and all steps that share the file are not."""
    saved(attempt, *map(lora, range(1, 5)))
    flip_bit_at(attempt.step_dir(32) / "frozen" / "_METADATA", 10)
    again = attempt.again()
    with again.checkpoints(trainable=FROZEN, keep_last=20) as checkpoints:
        assert restored(checkpoints, again).commit.step == 32
        for number in range(5, 9):
            checkpoints.save(lora(number), progress(8 * number))
            checkpoints.wait()
    (failed,) = [event for event in again.events if isinstance(event, SaveFailed)]
    assert failed.step == 48, "the first save has written its own copy"
    assert "frozen/_METADATA differs from the committed file" in failed.reason
    assert [step for step in commits(again) if step > 32] == [40, 56, 64]
    for step in (40, 56, 64):
        (commit,) = [one for one in again.log.history().committed if one.step == step]
        assert verify_step(again.step_dir(step), commit).problems == ()


def test_a_frozen_array_that_has_changed_is_not_linked_and_then_written(attempt):
    states = [lora(1), lora(2), lora(3, base=7), lora(4, base=7), lora(5, base=7)]
    linked = saved(attempt, *states)
    assert commits(attempt) == [8, 16, 32, 40]
    (failed,) = [event for event in attempt.events if isinstance(event, SaveFailed)]
    assert failed.step == 24
    assert "parameters that the config freezes have changed" in failed.reason
    assert linked == [0, 0, 0, 0]
    with attempt.checkpoints(trainable=FROZEN, keep_last=20) as checkpoints:
        assert_equal(restored(checkpoints, attempt).state, lora(5, base=7))


@pytest.mark.parametrize("number", slow_but([errno.EXDEV, errno.EMLINK], errno.EMLINK))
def test_where_hard_links_are_refused_every_save_writes(attempt, monkeypatch, number):
    real, refused = os.link, []

    def link(source, target, **more):
        if "frozen" in str(source):
            refused.append(target)
            raise OSError(number, os.strerror(number))
        real(source, target, **more)

    monkeypatch.setattr(os, "link", link)
    assert saved(attempt, *map(lora, range(1, 5))) == [0, 0, 0, 0]
    assert len(refused) == 2
    assert_all_valid(attempt)


@pytest.mark.slow
def test_a_link_that_fails_after_all_refuses_one_save_and_the_next_one_writes(attempt, monkeypatch):
    monkeypatch.setattr(files, "link", lambda path, to: False)
    assert saved(attempt, *map(lora, range(1, 5))) == [0, 0, 0]
    assert commits(attempt) == [8, 16, 32]
    (failed,) = [event for event in attempt.events if isinstance(event, SaveFailed)]
    assert "can't be linked" in failed.reason
    assert_all_valid(attempt)


@pytest.mark.slow
def test_files_of_a_save_that_was_not_committed_are_never_linked(attempt):
    outcomes = iter([None, StorageUnavailable("as asked"), None, None, None])

    def before_commit():
        if (error := next(outcomes)) is not None:
            raise error

    linked = saved(attempt, *map(lora, range(1, 6)), before_commit=before_commit)
    assert commits(attempt) == [8, 24, 32, 40]
    assert linked[:2] == [0, 0]
    assert all(linked[2:])
    assert is_shared(attempt, 8, 32)
    assert is_shared(attempt, 24, 40)
    assert_all_valid(attempt)


def test_a_source_whose_file_has_another_size_is_not_linked(attempt):
    with attempt.checkpoints(trainable=FROZEN, keep_last=20) as checkpoints:
        for number in range(1, 5):
            if number == 3:
                path = attempt.step_dir(8) / "frozen" / "_METADATA"
                path.write_bytes(path.read_bytes() + b" ")
            checkpoints.save(lora(number), progress(8 * number))
            checkpoints.wait()
    assert commits(attempt) == [8, 16, 32]
    (failed,) = [event for event in attempt.events if isinstance(event, SaveFailed)]
    assert "frozen/_METADATA has" in failed.reason


def test_a_step_of_format_3_is_restored_and_the_next_steps_have_a_frozen_folder(attempt):
    with attempt.checkpoints(keep_last=20) as checkpoints:  # As before this feature.
        checkpoints.save(lora(1), progress(8))
    manifest = json.loads((attempt.step_dir(8) / "MANIFEST.json").read_bytes())
    assert manifest["format"] == 3
    assert "frozen" not in manifest
    assert not (attempt.step_dir(8) / "frozen").exists()
    again = attempt.again()
    with again.checkpoints(trainable=FROZEN, keep_last=20) as checkpoints:
        assert_equal(restored(checkpoints, again).state, lora(1))
        checkpoints.save(lora(2), progress(16))
    manifest = json.loads((again.step_dir(16) / "MANIFEST.json").read_bytes())
    assert manifest["format"] == 4
    assert manifest["frozen"] == ["params/w"]
    arrays = manifests.read_arrays(again.step_dir(16), again.log.history().newest)
    assert sorted(arrays) == ["key", "opt/count", "params/b", "params/w", "step"]


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "int8", "bool", "complex64", "uint32", "int2", "int4", "float4_e2m1fn"],
)
def test_the_sums_of_two_arrays_differ_if_an_item_differs(dtype):
    array = jnp.zeros((3, 5, 7), dtype)
    other = array.at[2, 4, 6].set(jnp.ones((), dtype))
    for sums in (frozen_arrays._sums, frozen_arrays._host_sums):  # On an accelerator; on a CPU.
        one, same, changed = (sums([a]) for a in (array, jnp.zeros_like(array), other))
        assert frozen_arrays.are_equal((one,), (same,))
        assert not frozen_arrays.are_equal((one,), (changed,))


def test_on_a_cpu_a_sample_of_a_large_array_is_summed():
    array = jnp.zeros((64, 4096))
    assert not frozen_arrays.are_equal(
        frozen_arrays.sums_of({"params": {"a": array}}),
        frozen_arrays.sums_of({"params": {"a": array + 1}}),
    )
    assert len(frozen_arrays._sample(np.asarray(array))) <= 4 * frozen_arrays.SAMPLE


def test_bytes_are_shared_until_the_last_name_is_gone(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "x").write_bytes(bytes(100))
    (folders[0] / "own").write_bytes(bytes(7))
    for folder in folders[1:]:
        assert files.link(folders[0] / "x", folder / "x")
    assert [files.shared_bytes(folders[:n]) for n in range(4)] == [0, 100, 200, 200]
    assert files.is_same(folders[0] / "x", folders[2] / "x")
    assert not files.is_same(folders[0] / "own", folders[2] / "x")
    assert not files.is_same(folders[0] / "own", folders[2] / "own")
