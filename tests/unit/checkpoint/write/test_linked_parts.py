"""Arrays that have not changed, in a run that freezes nothing: which parts are links."""

import errno
import os

import jax
import jax.numpy as jnp
import pytest

from jaxres.checkpoint import checkpointer
from jaxres.checkpoint.read.readback import HostReport
from jaxres.checkpoint.read.verify import verify_step
from jaxres.checkpoint.write import array_writer, host_arrays
from jaxres.faults import StorageUnavailable
from jaxres.runlog.events import SaveCommitted, SaveFailed
from tests.damage import flip_bit_at
from tests.unit.checkpoint import independent_reader
from tests.unit.checkpoint.conftest import like, progress, sharding, state
from tests.unit.checkpoint.test_checkpointer import assert_equal, commits
from tests.unit.checkpoint.write.test_frozen_arrays import assert_all_valid

LARGE, REST = "state/ocdbt.process_0.0", "state/ocdbt.process_0.1"
"""The part of the large array `w`, and that of all others."""


@pytest.fixture(autouse=True)
def w_is_large(monkeypatch):
    monkeypatch.setattr(array_writer, "PART_BYTES", 4096)


def tree(step, *, base=0):
    """A state of that step whose array `w` is the same at all steps."""
    whole = state(step)
    w = jax.device_put(jnp.arange(4096, dtype=jnp.float32).reshape(64, 64) + base, sharding("fsdp"))
    return whole | {"params": {"w": w, "b": whole["params"]["b"] * step}}


def saved(attempt, *states, **kwargs):
    """Saves steps 8, 16, ...; returns the bytes that each commit has linked."""
    with attempt.checkpoints(keep_last=20, **kwargs) as checkpoints:
        for number, each in enumerate(states, start=1):
            checkpoints.save(each, progress(8 * number))
            checkpoints.wait()
    return linked_bytes(attempt)


def linked_bytes(attempt):
    return [event.linked_bytes for event in attempt.events if isinstance(event, SaveCommitted)]


def values(attempt, step, part=LARGE):
    return attempt.step_dir(step) / part / "d" / "values"


def is_shared(attempt, a, b, part=LARGE):
    names = [
        path.relative_to(attempt.step_dir(a)) for path in (attempt.step_dir(a) / part).rglob("*")
    ]
    files = [name for name in names if (attempt.step_dir(a) / name).is_file()]
    assert files
    shared = {(attempt.step_dir(a) / n).samefile(attempt.step_dir(b) / n) for n in files}
    (found,) = shared
    return found


@pytest.mark.slow
def test_an_array_that_has_not_changed_is_linked_to_two_copies_in_turn(attempt):
    first, second, *others = saved(attempt, *map(tree, range(1, 6)))
    assert (first, second) == (0, 0)
    assert all(linked > values(attempt, 40).stat().st_size >= 4 * 4096 for linked in others)
    assert is_shared(attempt, 8, 24)
    assert is_shared(attempt, 16, 32)
    assert is_shared(attempt, 8, 40)
    assert not is_shared(attempt, 8, 16)
    assert not is_shared(attempt, 8, 24, REST), "the other arrays have changed"
    assert_all_valid(attempt)
    independent_reader.checked_digest(attempt.run_dir.root)
    with attempt.checkpoints(keep_last=20) as checkpoints:
        found = checkpoints.restore(attempt.log.history(), like(tree(1)), seconds=60)
        assert_equal(found.state, tree(5))


def test_linked_bytes_are_those_of_all_hosts(attempt, monkeypatch):
    others, gather = iter([0, 0, 700]), checkpointer.gather_reports

    def with_another_host(*args, **kwargs):
        return [*gather(*args, **kwargs), HostReport({}, linked_bytes=next(others))]

    monkeypatch.setattr(checkpointer, "gather_reports", with_another_host)
    *_, linked = saved(attempt, *map(tree, range(1, 4)))
    part = attempt.step_dir(24) / LARGE
    own = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
    assert linked == own + 700


def test_arrays_that_change_are_never_linked_and_are_digested_once(attempt, monkeypatch):
    digested = []

    def counted(info, pieces):
        digested.append(info)
        return digests_of(info, pieces)

    digests_of = host_arrays.digests_of
    monkeypatch.setattr(host_arrays, "digests_of", counted)
    assert saved(attempt, *map(state, range(1, 5))) == [0, 0, 0, 0]
    assert len(digested) == 4 * 5


@pytest.mark.slow
def test_an_array_that_changes_again_is_written(attempt):
    states = [*map(tree, (1, 2, 3)), tree(4, base=7), tree(5, base=7), tree(6, base=7)]
    linked = saved(attempt, *states)
    assert [size > 0 for size in linked] == [False, False, True, False, False, True]
    assert_all_valid(attempt)


@pytest.mark.slow
def test_a_shared_file_that_was_damaged_is_found_by_the_next_save_that_links_it(attempt):
    with attempt.checkpoints(keep_last=20) as checkpoints:
        for number in range(1, 8):
            if number == 5:
                flip_bit_at(values(attempt, 24), 100)
            checkpoints.save(tree(number), progress(8 * number))
            checkpoints.wait()
    (failed,) = [event for event in attempt.events if isinstance(event, SaveFailed)]
    assert failed.step == 40
    assert "params/w" in failed.reason
    assert commits(attempt) == [8, 16, 24, 32, 48, 56]
    assert linked_bytes(attempt)[-2:] == [0, 0], "the next saves write all"
    found = {
        commit.step: verify_step(attempt.step_dir(commit.step), commit)
        for commit in attempt.log.history().committed
    }
    assert {step for step, each in found.items() if each.problems} == {8, 24}
    assert "the same file is a part of step 8" in str(found[24].problems)


def test_where_hard_links_are_refused_or_a_file_is_gone_the_part_is_written(attempt, monkeypatch):
    real, refused = os.link, []

    def link(source, target, **more):
        if "ocdbt" in str(source):
            refused.append(source)
            if len(refused) == 1:
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            if str(source).endswith("values"):
                raise FileNotFoundError(errno.ENOENT, "No such file", str(source))
        real(source, target, **more)

    monkeypatch.setattr(os, "link", link)
    before = saved(attempt, *map(tree, range(1, 5)))
    assert before == [0, 0, 0, 0]
    assert len(refused) >= 2
    assert not any(is_shared(attempt, a, b) for a, b in ((8, 24), (16, 32)))
    assert_all_valid(attempt)


@pytest.mark.slow
def test_files_of_a_save_that_was_not_committed_are_never_linked(attempt):
    outcomes = iter([None, StorageUnavailable("as asked"), None, None, None])

    def before_commit():
        if (error := next(outcomes)) is not None:
            raise error

    linked = saved(attempt, *map(tree, range(1, 6)), before_commit=before_commit)
    assert commits(attempt) == [8, 24, 32, 40]
    assert [size > 0 for size in linked] == [False, False, False, True]
    assert is_shared(attempt, 24, 40)
    assert_all_valid(attempt)


def test_a_rollback_forgets_the_parts(attempt):
    with attempt.checkpoints(keep_last=20) as checkpoints:
        for number in range(1, 5):
            if number == 3:
                checkpoints.rewind(16)
            checkpoints.save(tree(number), progress(8 * number))
            checkpoints.wait()
    assert linked_bytes(attempt) == [0, 0, 0, 0]
