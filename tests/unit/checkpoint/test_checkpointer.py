import contextlib
import dataclasses
import errno
import gc
import io
import os
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint.digests.content_digest import content_digest
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.restore import restore as restoring
from jaxres.checkpoint.state_arrays import array_infos
from jaxres.checkpoint.write import array_writer
from jaxres.cli.checkpoints import adopt
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Fenced, StorageUnavailable, Unrestorable
from jaxres.runlog import run_log, step_dirs
from jaxres.runlog.events import SaveCommitted, SaveFailed, SaveStarted, SaveWaited, StepsPruned
from jaxres.runlog.run_log import Commit, Prune
from tests.unit.checkpoint.conftest import like, progress, sharding, state
from tests.waiting import SURE_SECONDS, wait_until


def host(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def assert_equal(found, wanted):
    found, wanted = host(found), host(wanted)
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        assert found[path].dtype == array.dtype, path
        assert found[path].tobytes() == array.tobytes(), path


def commits(attempt):
    return [commit.step for commit in attempt.log.history().committed]


def restore(attempt, commit, wanted):
    """Restores one given step."""
    step_dir = (attempt.run_dir.root / commit.path).absolute()
    found = restoring.restore(step_dir, commit, wanted)
    return found.state, found.progress


def restore_damaged(attempt, commit):
    """Restores a step during which Orbax fails; collects the tasks that Orbax then drops."""
    try:
        return restore(attempt, commit, like(state(8)))
    finally:
        gc.collect()


def test_a_saved_step_is_restored_bit_for_bit(attempt):
    commit = attempt.save(8)
    assert commit.path == "checkpoints/00000008-0001"
    restored, facts = restore(attempt, commit, like(state(8)))
    assert_equal(restored, state(8))
    assert facts == progress(8)


def test_the_data_of_the_held_out_loss_is_recorded_with_a_step_and_restored(attempt):
    evaluated = progress(8).evaluated(2.5, data="easy")
    with attempt.checkpoints() as checkpoints:
        checkpoints.save(state(8), evaluated)
        checkpoints.wait()
    commit = attempt.log.history().newest
    assert (commit.heldout_loss, commit.heldout_data) == (2.5, "easy")
    (found,) = step_dirs.listed(attempt.run_dir.checkpoints)
    assert adopt._commit_of(attempt.run_dir, found) == commit, "a rebuilt log loses it"
    _, facts = restore(attempt, commit, like(state(8)))
    assert facts == evaluated
    same, other = facts.evaluated(3.0, data="easy"), facts.evaluated(3.0, data="hard")
    assert (same.best_loss, other.best_loss) == (2.5, 3.0)


def test_the_record_is_written_only_after_everything_else_is_durable(attempt):
    seen = []

    def before_commit():
        step_dir = attempt.run_dir.checkpoints / "00000008-0001"
        data = (step_dir / manifests.MANIFEST).read_bytes()
        commit = Commit(step=8, path="", manifest=manifests.digest_of(data), bytes=0)
        arrays = manifests.read_arrays(step_dir, commit)
        seen.append(content_digest(arrays, progress=manifests.read_progress(step_dir, commit)))
        assert commits(attempt) == []

    commit = attempt.save(8, before_commit=before_commit)
    assert seen == [content_digest(host(state(8)), progress=progress(8).facts)]
    assert commit.step == 8


def test_all_files_and_folders_of_a_step_are_synced_before_the_record(attempt, monkeypatch):
    synced, real = set(), os.fsync

    def fsync(descriptor):
        real(descriptor)
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", fsync)
    missing = []

    def before_commit():
        step_dir = attempt.run_dir.checkpoints / "00000008-0001"
        everything = {str(p) for p in (step_dir.parent, step_dir, *step_dir.rglob("*"))}
        missing.append({path for path in everything if path not in synced})

    attempt.save(8, before_commit=before_commit)
    assert missing == [set()]


def test_a_save_returns_before_the_step_is_committed(attempt):
    gate = threading.Event()
    with attempt.checkpoints(before_commit=lambda: assert_set(gate)) as checkpoints:
        checkpoints.save(state(8), progress(8))
        checkpoints.check()
        assert commits(attempt) == []
        gate.set()
        checkpoints.wait()
        assert commits(attempt) == [8]


def assert_set(event):
    assert event.wait(timeout=SURE_SECONDS), "no call has waited for the save"


def test_a_save_due_while_one_is_in_flight_waits_and_reports_it(attempt):
    gate = threading.Event()
    with attempt.checkpoints(before_commit=lambda: assert_set(gate)) as checkpoints:
        checkpoints.save(state(8), progress(8))
        wait = checkpoints.wait

        def opening_wait():
            gate.set()
            wait()

        checkpoints.wait = opening_wait
        checkpoints.save(state(16), progress(16))
        checkpoints.wait()
    kinds = [type(event) for event in attempt.events]
    assert kinds == [SaveStarted, SaveCommitted, SaveWaited, SaveStarted, SaveCommitted]
    assert [event.step for event in attempt.events] == [8, 8, 16, 16, 16]


def test_a_committed_step_is_not_saved_again(attempt):
    attempt.save(8)
    attempt.events.clear()
    with attempt.checkpoints() as checkpoints:
        assert checkpoints.saved_step == 8
        checkpoints.save(state(8), progress(8))
    assert attempt.events == []
    assert commits(attempt) == [8]


def test_donating_the_state_after_the_call_does_not_change_what_is_saved(attempt):
    gate, saved = threading.Event(), state(8)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with attempt.checkpoints(before_commit=lambda: assert_set(gate)) as checkpoints:
        checkpoints.save(saved, progress(8))
        jax.block_until_ready(step(saved))
        gate.set()
        checkpoints.wait()
    restored, _ = restore(attempt, attempt.log.history().newest, like(state(8)))
    assert_equal(restored, state(8))


class InjectedError(Exception):
    """The error that a test injects."""


def inject():
    raise InjectedError


def wait_settled(checkpoints):
    """Waits until the save in flight has ended; raises none of its errors."""
    checkpoints._flight._work.exception(timeout=SURE_SECONDS)


def test_a_failure_before_the_record_is_raised_at_the_next_check_and_commits_nothing(attempt):
    with (  # noqa: PT012
        pytest.raises(InjectedError),
        attempt.checkpoints(before_commit=inject) as checkpoints,
    ):
        checkpoints.save(state(8), progress(8))
        wait_settled(checkpoints)
        checkpoints.check()
    assert commits(attempt) == []


@pytest.mark.parametrize("end", ["wait", "save", "leave"])
def test_every_way_to_leave_raises_a_failed_save(attempt, end):
    with (  # noqa: PT012
        pytest.raises(InjectedError),
        attempt.checkpoints(before_commit=inject) as checkpoints,
    ):
        checkpoints.save(state(8), progress(8))
        wait_settled(checkpoints)
        if end == "wait":
            checkpoints.wait()
        if end == "save":
            checkpoints.save(state(16), progress(16))
    assert commits(attempt) == []
    assert [type(event) for event in attempt.events] == [SaveStarted]


def test_a_step_directory_that_vanishes_during_the_save_is_storage_unavailable(
    attempt, monkeypatch
):
    complete = array_writer.ArrayWriter.complete

    def vanish(self, reports):
        self._folder.rename(self._folder.with_name("gone"))
        return complete(self, reports)

    monkeypatch.setattr(array_writer.ArrayWriter, "complete", vanish)
    attempt.save(8)
    assert commits(attempt) == []
    (failed,) = [event for event in attempt.events if isinstance(event, SaveFailed)]
    assert (failed.step, failed.failures) == (8, 1)
    assert "its folder is gone" in failed.reason


def test_an_exception_inside_abandons_the_save_in_flight(attempt):
    checkpoints = attempt.checkpoints(before_commit=lambda: wait_until_leaving(checkpoints))
    with pytest.raises(InjectedError), checkpoints:  # noqa: PT012
        checkpoints.save(state(8), progress(8))
        inject()
    assert commits(attempt) == []
    assert [type(event) for event in attempt.events] == [SaveStarted]


def wait_until_leaving(checkpoints):
    wait_until(lambda: checkpoints._leaving, "exit")


def test_a_superseded_attempt_neither_commits_nor_prunes(attempt):
    attempt.save(8, 16)
    with pytest.raises(Fenced):
        attempt.save(24, before_commit=lambda: attempt.again())
    assert commits(attempt) == [8, 16]
    assert attempt.step_dir(8).exists()


def test_a_complete_step_without_a_record_is_deleted_once_it_is_committed_again(attempt):
    attempt.save(8)
    with contextlib.suppress(InjectedError):
        attempt.save(16, before_commit=inject)
    names = os.listdir(attempt.run_dir.checkpoints)
    assert sorted(names) == ["00000008-0001", "00000016-0001"]
    attempt.again().save(16)
    names = os.listdir(attempt.run_dir.checkpoints)
    assert sorted(names) == ["00000008-0001", "00000016-0002"]


def test_parts_of_a_killed_save_are_deleted_by_the_next_attempt_after_its_restore(attempt):
    commit = attempt.save(8)
    part = attempt.run_dir.checkpoints / "00000016-0001.orbax-checkpoint-tmp"
    part.mkdir()
    with attempt.again().checkpoints() as checkpoints:
        assert part.exists(), "nothing is deleted before a valid step is known"
        wanted = like(state(8))
        checkpoints.restore(attempt.log.history(), wanted, seconds=60)
        assert not part.exists()
    assert attempt.log.history().newest == commit


@dataclasses.dataclass
class WatchedLog:
    """A log that notes which step directories exist when a record is written."""

    log: run_log.RunLog
    folder: object
    present: dict = dataclasses.field(default_factory=dict)

    @property
    def attempt(self):
        return self.log.attempt

    @property
    def clock(self):
        return self.log.clock

    def records(self):
        return self.log.records()

    def history(self):
        return self.log.history()

    def append(self, body):
        self.present[type(body), getattr(body, "steps", None)] = sorted(os.listdir(self.folder))
        return self.log.append(body)


def test_steps_are_pruned_in_the_log_before_they_are_deleted(attempt):
    watched = WatchedLog(attempt.log, attempt.run_dir.checkpoints)
    attempt.save(8, 16, 24, log=watched)
    assert watched.present[Prune, (8,)] == ["00000008-0001", "00000016-0001", "00000024-0001"]
    assert sorted(os.listdir(watched.folder)) == ["00000016-0001", "00000024-0001"]
    assert commits(attempt) == [16, 24]
    assert attempt.events[-1] == StepsPruned((8,))


SPLITS = {
    "one device": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    "two by four": lambda: sharding("a", "b", shape=(2, 4), names=("a", "b")),
    "other dim": lambda: sharding(None, "fsdp"),
    "replicated": lambda: sharding(),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_step_is_restored_bit_for_bit_onto_another_sharding(attempt, split):
    commit = attempt.save(8)
    wanted, other = like(state(8)), SPLITS[split]()
    wanted["params"]["w"] = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=other)
    restored, _ = restore(attempt, commit, wanted)
    assert_equal(restored, state(8))
    assert restored["params"]["w"].sharding.is_equivalent_to(other, 2)


def test_a_moved_run_directory_restores_from_where_it_is(attempt, tmp_path, monkeypatch):
    commit = attempt.save(8)
    attempt.run_dir.root.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    moved = dataclasses.replace(attempt, run_dir=type(attempt.run_dir)(type(tmp_path)("moved")))
    restored, _ = restore(moved, commit, like(state(8)))
    assert_equal(restored, state(8))


def test_a_relative_run_directory_commits_the_same_path(attempt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = dataclasses.replace(attempt, run_dir=type(attempt.run_dir)(type(tmp_path)("run")))
    assert relative.save(8).path == "checkpoints/00000008-0001"


def test_every_array_that_differs_is_named_with_both_sides(attempt):
    commit = attempt.save(8)
    wanted = like(state(8))
    wanted["params"]["w"] = jax.ShapeDtypeStruct((16, 9), jnp.float32)
    wanted["params"]["b"] = jax.ShapeDtypeStruct((3,), jnp.float32)
    wanted["params"]["new"] = jax.ShapeDtypeStruct((), jnp.int32)
    del wanted["opt"]["count"]
    with pytest.raises(ConfigError) as caught:
        restore(attempt, commit, wanted)
    assert str(caught.value).splitlines()[1:-1] == [
        "  opt/count: int32[], expected absent",
        "  params/b: bfloat16[3], expected float32[3]",
        "  params/new: absent, expected int32[]",
        "  params/w: float32[16,8], expected float32[16,9]",
    ]


@pytest.mark.parametrize("how", ["missing", "shorter"])
def test_a_missing_or_shortened_file_of_a_step_is_always_detected(attempt, how):
    commit, step_dir = attempt.save(8), attempt.step_dir(8)
    names = [name for name, size in manifests.inventory(step_dir).items() if size]
    for name in [*names, manifests.MANIFEST]:
        path, data = step_dir / name, (step_dir / name).read_bytes()
        path.unlink() if how == "missing" else path.write_bytes(data[:-1])
        with pytest.raises(Unrestorable) as caught:
            restore(attempt, commit, like(state(8)))
        assert name in str(caught.value)
        assert caught.value.exit_code == ExitCode.UNRESTORABLE
        path.write_bytes(data)
    restore(attempt, commit, like(state(8)))


def test_an_index_damaged_in_place_is_unrestorable_for_training_and_for_the_digest(attempt):
    commit, path = attempt.save(8), attempt.step_dir(8) / "state" / "manifest.ocdbt"
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    with pytest.raises(Unrestorable, match="arrays can't be read"):
        manifests.read_arrays(attempt.step_dir(8), commit)
    with pytest.raises(Unrestorable, match="arrays can't be read"):
        restore_damaged(attempt, commit)
    assert (
        run_command("checkpoints", "digest", str(attempt.run_dir.root))[0] == ExitCode.UNRESTORABLE
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state/_sharding", b"sharding_type"),
        ("state/_METADATA", b"tree_metadata"),
        ("state/_METADATA", b"{"),
    ],
)
def test_a_letter_flipped_in_orbax_own_files_spoils_no_restore_and_verify_names_the_file(
    attempt, name, text
):
    """A restore needs none of them; stock Orbax does."""
    commit, path = attempt.save(8), attempt.step_dir(8) / name
    data = path.read_bytes()
    assert text in data
    path.write_bytes(data.replace(text, text[:-1] + b"_"))
    restored, _ = restore(attempt, commit, like(state(8)))
    assert_equal(restored, state(8))
    code, lines, _ = run_command("checkpoints", "verify", str(attempt.run_dir.root))
    assert code == 1
    assert f"damaged: {name} has " in lines


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (b"{", "differs from the committed file"),
        (b"", "differs from the committed file"),
        (b'{"step":7}', "differs from the committed file"),
    ],
)
def test_damaged_facts_are_unrestorable(attempt, facts, why):
    commit, path = attempt.save(8), attempt.step_dir(8) / manifests.PROGRESS
    path.write_bytes(facts.ljust(path.stat().st_size))
    with pytest.raises(Unrestorable, match=why):
        restore(attempt, commit, like(state(8)))


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        ValueError("PERMISSION_DENIED: Error opening array"),
        ValueError("UNKNOWN: reading [OS error 5: EIO Input/output error]"),
    ],
)
def test_storage_that_does_not_answer_is_never_judged_as_damage(attempt, monkeypatch, error):
    commit = attempt.save(8)

    def load(*_, **__):
        raise error

    monkeypatch.setattr(restoring, "load", load)
    with pytest.raises(StorageUnavailable, match="Nothing was judged damaged"):
        restore(attempt, commit, like(state(8)))


def test_stock_orbax_reads_a_committed_step(attempt):
    attempt.save(8)
    found = ocp.load(str(attempt.step_dir(8)), like(state(8)), checkpointable_name="state")
    assert_equal(found, state(8))


def run_command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = checkpoints_cli.main(arguments, usage="")
    return code, out.getvalue(), err.getvalue()


@pytest.mark.slow
def test_the_digest_of_a_step_is_that_of_the_state_and_needs_no_jax(attempt):
    attempt.save(8, 16)
    code = (
        "import sys; from jaxres.cli.checkpoints import command as checkpoints; "
        "code = checkpoints.main(sys.argv[1:], usage=''); "
        "assert 'jax' not in sys.modules and 'orbax' not in sys.modules; sys.exit(code)"
    )
    for options, step in ((("--step", "8"), 8), ((), 16)):
        found = subprocess.run(
            [sys.executable, "-c", code, "checkpoints", "digest", attempt.run_dir.root, *options],
            check=True,
            capture_output=True,
            text=True,
        )
        facts = progress(step).facts
        assert found.stdout == content_digest(host(state(step)), progress=facts) + "\n"


def test_a_copied_step_directory_has_the_same_digest(attempt, tmp_path):
    attempt.save(8)
    shutil.copytree(attempt.run_dir.root, tmp_path / "copy")
    digests = {
        run_command("checkpoints", "digest", str(tmp_path / name))[1] for name in ("run", "copy")
    }
    assert len(digests) == 1
    assert digests.pop().startswith("sha256:")


@pytest.mark.parametrize("twin", [{"a/b": 0}, {"a.b": 0}])
def test_two_arrays_that_would_be_stored_as_one_are_refused(twin):
    leaf = jax.ShapeDtypeStruct((), jnp.int32)
    assert len(array_infos({"a": {"b": leaf}, "a_b": leaf})) == 2
    with pytest.raises(ConfigError, match="would be stored as one: a/b and a"):
        array_infos({"a": {"b": leaf}, **dict.fromkeys(twin, leaf)})
