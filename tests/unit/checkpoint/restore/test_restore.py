"""A damaged step is skipped only on proof; storage that does not answer proves nothing."""

import collections
import contextlib
import dataclasses
import io
import json
import os
import random
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint import checkpointer
from jaxres.checkpoint.restore import restore as checkpoint_restore
from jaxres.checkpoint.restore import restore as restoring
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.faults import ConfigError, StorageUnavailable, Unrestorable
from jaxres.runlog.events import Noted, StepQuarantined
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Quarantine
from tests import damage
from tests.promises.trainer import ROOT
from tests.unit.checkpoint import conftest
from tests.unit.checkpoint.conftest import like, progress, sharding
from tests.unit.checkpoint.test_checkpointer import InjectedError, assert_equal, commits, inject
from tests.waiting import SURE_SECONDS


def state(step):
    """A state with arrays that are stored outside the index, where no library verifies them.

    Each chunk of `tall` has whole blocks of the digest; those of `wide` cut them.
    """
    wide = jnp.arange(64 * 128, dtype=jnp.float32).reshape(64, 128) / 7 + step
    tree = conftest.state(step)
    tree["params"]["wide"] = jax.device_put(wide, sharding("fsdp"))
    tall = jnp.arange(2048 * 128, dtype=jnp.float32).reshape(2048, 128) / 3 + step
    tree["params"]["tall"] = jax.device_put(tall, sharding("fsdp"))
    return tree


def save(attempt, *steps):
    with attempt.checkpoints(keep_last=3) as checkpoints:
        for step in steps:
            checkpoints.save(state(step), progress(step))
            checkpoints.wait()


@pytest.fixture
def saved(attempt):
    """Steps 8, 16 and 24 of an attempt, and the next attempt."""
    save(attempt, 8, 16, 24)
    return attempt.again()


@dataclasses.dataclass
class SleepRecorder:
    """Clock whose sleeps return at once and are recorded."""

    slept: list = dataclasses.field(default_factory=list)

    def wall(self):
        return 0.0

    def monotonic(self):
        return 0.0

    def sleep(self, seconds):
        self.slept.append(seconds)


def restore(attempt, *, seconds=60, wanted=None):
    checkpoints = attempt.checkpoints()
    checkpoints._clock = clock = SleepRecorder()
    found = checkpoints.restore(attempt.log.history(), wanted or like(state(8)), seconds=seconds)
    assert found is not None
    assert checkpoints.committed_step == checkpoints.saved_step == found.commit.step
    return found, clock


def data_files(step_dir):
    return [path for path in step_dir.rglob("*") if path.is_file()]


def largest(step_dir):
    return max(data_files(step_dir), key=lambda path: path.stat().st_size)


def spoil(attempt, step):
    """Flips one bit of the values of params/wide, which stock Orbax would not notice."""
    values = np.asarray(state(step)["params"]["wide"])[3].tobytes()
    contents = {path: path.read_bytes() for path in data_files(attempt.step_dir(step))}
    # A save on a slow machine may have more than one data file.
    (path,) = (path for path, data in contents.items() if values in data)
    data = bytearray(contents[path])
    data[data.index(values)] ^= 1
    path.write_bytes(data)


def test_the_newest_intact_step_is_restored(saved):
    found, clock = restore(saved)
    assert (found.commit.step, clock.slept) == (24, [])
    assert_equal(found.state, state(24))
    assert saved.log.history().quarantined == ()


def test_the_threads_that_read_and_verify_do_not_call_jax(saved):
    """Two threads at the first use of a part of jaxlib crashed 1 of 100 first restores."""
    calls = collections.defaultdict(set)

    def record(frame, event, _):
        if event == "call" and f"{os.sep}jax{os.sep}" in frame.f_code.co_filename:
            calls[threading.current_thread().name.partition("_")[0]].add(frame.f_code.co_name)

    threading.setprofile(record)
    try:
        assert restore(saved)[0].commit.step == 24
    finally:
        threading.setprofile(None)
    assert "make_array_from_callback" in calls["jaxres-restore"]
    assert not (calls["jaxres-load"] | calls["jaxres-verify"]) - {"_xla_gc_callback"}


def test_a_damaged_step_is_quarantined_with_evidence_and_the_next_older_one_restored(saved):
    path, step_dir = saved.step_dir(24), saved.step_dir(24)
    damaged = largest(path)
    damage.flip_byte(damaged, random.Random(1))
    before = {p: p.read_bytes() for p in step_dir.rglob("*") if p.is_file()}
    found, _ = restore(saved)
    assert found.commit.step == 16
    assert_equal(found.state, state(16))
    assert commits(saved) == [8, 16]
    ((_, decided),) = saved.log.history().quarantined
    assert (decided.step, decided.path) == (24, f"checkpoints/{step_dir.name}")
    assert damaged.relative_to(step_dir).as_posix() in decided.evidence
    (quarantined,) = [event for event in saved.events if isinstance(event, StepQuarantined)]
    assert (quarantined.step, quarantined.evidence) == (24, decided.evidence)
    assert {p: p.read_bytes() for p in step_dir.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("name", ["state/manifest.ocdbt", "state/_METADATA", "progress.json"])
def test_a_step_with_a_file_without_end_is_skipped_and_the_next_older_one_restored(saved, name):
    """TensorStore would ask for a tebibyte of memory, and a checksum of it would take hours."""
    path = saved.step_dir(24) / name
    size = path.stat().st_size
    os.truncate(path, 2**40)
    found, _ = restore(saved)
    assert found.commit.step == 16
    assert_equal(found.state, state(16))
    ((_, decided),) = saved.log.history().quarantined
    text = f"{name} has {2**40} bytes, the manifest records {size} bytes"
    assert (decided.step, decided.evidence) == (24, text)


@pytest.mark.slow
def test_a_quarantined_step_is_never_deleted_and_never_read_again(saved):
    step_dir = saved.step_dir(24)
    shutil.rmtree(step_dir / "state")
    restore(saved)
    again = saved.again()
    found, _ = restore(again)
    assert found.commit.step == 16
    assert len(again.log.history().quarantined) == 1
    save(again, 17, 24)
    assert step_dir.exists()
    assert (step_dir / "MANIFEST.json").exists()
    assert commits(again) == [16, 17, 24]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        checkpoints_cli.main(["checkpoints", "list", str(again.run_dir.root), "--json"], usage="")
    rows = [json.loads(row) for row in out.getvalue().splitlines()]
    assert [(row["step"], row["attempt"], row["status"]) for row in rows] == [
        (16, 1, "committed"),
        (17, 3, "committed"),
        (24, 1, "quarantined"),
        (24, 3, "committed"),
    ]
    assert "state/" in rows[2]["evidence"]


def test_an_attempt_that_saves_a_step_again_uses_another_directory(attempt):
    """Happens after a fallback or rollback to an older step of the same attempt."""
    with attempt.checkpoints(keep_last=3) as checkpoints:
        for step in (8, 16):
            checkpoints.save(state(step), checkpointer.Progress(step=step))
            checkpoints.wait()
        largest(attempt.step_dir(16)).unlink()
        first = attempt.step_dir(16)
        found = checkpoints.restore(attempt.log.history(), like(state(8)), seconds=60)
        assert found.commit.step == 8
        checkpoints.save(state(16), checkpointer.Progress(step=16))
        checkpoints.wait()
    assert attempt.step_dir(16).name == f"{first.name}-2"
    assert first.exists()
    assert commits(attempt) == [8, 16]


def test_a_flipped_bit_that_stock_orbax_restores_is_found_and_its_array_named(saved):
    spoil(saved, 24)
    step_dir = str(saved.step_dir(24).absolute())
    stock = ocp.load(step_dir, like(state(24)), checkpointable_name="state")
    assert not np.array_equal(stock["params"]["wide"], state(24)["params"]["wide"])
    found, _ = restore(saved)
    assert_equal(found.state, state(16))
    ((_, decided),) = saved.log.history().quarantined
    assert "params/wide has digest" in decided.evidence
    assert "in block [0, 0] of [2, 1]" in decided.evidence


@pytest.mark.slow
def test_a_step_directory_without_a_commit_record_is_ignored(saved):
    """The directory is complete: the save was killed right before its record."""
    with contextlib.suppress(InjectedError), saved.checkpoints(before_commit=inject) as checkpoints:
        checkpoints.save(state(32), progress(32))
        checkpoints.wait()
    assert (saved.run_dir.checkpoints / "00000032-0002" / "MANIFEST.json").exists()
    found, _ = restore(saved)
    assert found.commit.step == 24
    assert saved.log.history().quarantined == ()


@pytest.mark.slow
def test_several_damaged_steps_are_skipped_in_one_restore(saved):
    spoil(saved, 24)
    (saved.step_dir(16) / "MANIFEST.json").write_bytes(b"{}")
    found, _ = restore(saved)
    assert found.commit.step == 8
    assert [decided.step for _, decided in saved.log.history().quarantined] == [16, 24]


def test_if_no_step_is_intact_all_are_listed_and_left_unchanged(saved):
    for step in (8, 16, 24):
        spoil(saved, step)
    with pytest.raises(Unrestorable) as caught:
        restore(saved)
    text = str(caught.value)
    assert "none is valid" in text
    assert "does not start again from step 0" in text
    for step in (8, 16, 24):
        assert f"{saved.step_dir(step).name}: step {step}: " in text
    assert commits(saved) == [8, 16, 24], "a copy of one of them still restores the run"
    assert saved.log.history().quarantined == ()


def test_a_run_whose_steps_are_all_quarantined_never_starts_from_step_0(attempt):
    save(attempt, 8)
    commit = attempt.log.history().newest
    attempt.log.append(Quarantine(step=8, path=commit.path, evidence="w has another digest"))
    with pytest.raises(Unrestorable, match="step 8: w has another digest"):
        restore(attempt)


def test_a_run_without_a_commit_restores_nothing(attempt):
    assert attempt.checkpoints().restore(attempt.log.history(), like(state(8)), seconds=1) is None


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        OSError(5, "Input/output error"),
        OSError(116, "Stale file handle"),
        TimeoutError("timed out"),
        ValueError("UNAVAILABLE: 503"),
    ],
)
def test_reads_from_failing_storage_are_retried_and_quarantine_nothing(saved, monkeypatch, error):
    calls, real = [], restoring.load

    def load(*arguments, **settings):
        calls.append(arguments)
        if len(calls) < checkpoint_restore.TRIES + count:
            raise error
        return real(*arguments, **settings)

    monkeypatch.setattr(restoring, "load", load)
    count = 0
    found, clock = restore(saved)
    assert (found.commit.step, clock.slept) == (24, [1.0, 2.0])
    calls, count = [], 1
    with pytest.raises(StorageUnavailable, match="Nothing was judged damaged"):
        restore(saved)
    assert len(calls) == checkpoint_restore.TRIES
    assert saved.log.history().quarantined == ()


def test_a_read_from_hanging_storage_times_out_once_and_quarantines_nothing(saved, monkeypatch):
    gate, calls = threading.Event(), []

    def load(*_, **__):
        calls.append(1)
        gate.wait(SURE_SECONDS)

    monkeypatch.setattr(restoring, "load", load)
    with pytest.raises(StorageUnavailable, match=r"within 2 s .*storage does not answer"):
        restore(saved, seconds=2.0)  # It comes to the read in time.
    assert len(calls) == 1
    assert commits(saved) == [8, 16, 24]
    gate.set()


@pytest.mark.slow
def test_one_wrong_read_is_no_proof_of_damage(saved, monkeypatch):
    """A read returns wrong bytes once, by the network or bad memory; storage holds correct ones."""
    calls, real = [], restoring.load

    def load(*arguments, **settings):
        calls.append(1)
        tree = real(*arguments, **settings)
        if len(calls) == 1:
            tree["params"]["w"] = tree["params"]["w"] + 1
        return tree

    monkeypatch.setattr(restoring, "load", load)
    found, _ = restore(saved)
    assert (found.commit.step, len(calls)) == (24, 2)
    assert_equal(found.state, state(24))
    (noted,) = [event for event in saved.events if isinstance(event, Noted)]
    assert "params/w has other digests than were committed" in noted.message
    assert "all bytes as committed" in noted.message


@pytest.mark.slow
def test_a_host_that_always_reads_wrong_data_raises_a_storage_error(saved, monkeypatch):
    real = restoring.load

    def load(*arguments, **settings):
        tree = real(*arguments, **settings)
        tree["params"]["b"] = tree["params"]["b"] + 1
        return tree

    monkeypatch.setattr(restoring, "load", load)
    with pytest.raises(StorageUnavailable, match="all bytes as committed"):
        restore(saved)
    assert commits(saved) == [8, 16, 24]


def test_a_step_of_another_model_is_not_damaged(saved):
    wanted = like(state(8))
    del wanted["params"]["b"]
    with pytest.raises(ConfigError, match="not those of this model"):
        restore(saved, wanted=wanted)
    assert commits(saved) == [8, 16, 24]


def test_steps_whose_folder_is_missing_are_not_damaged(saved):
    saved.run_dir.checkpoints.rename(saved.run_dir.root / "away")
    with pytest.raises(StorageUnavailable, match="Is it mounted"):
        restore(saved)
    assert saved.log.history().quarantined == ()


def test_the_committed_checkpoint_is_restored(tmp_path):
    golden = ROOT / "tests" / "golden" / "checkpoint-3"
    shutil.copytree(golden, tmp_path / "run")
    old = conftest.claimed(RunDir(tmp_path / "run"), attempt=2)
    found, _ = restore(old, wanted=like(conftest.state(8)))
    assert_equal(found.state, conftest.state(8))
    assert found.progress == progress(8)


def result(kind, what=""):
    return checkpoint_restore.ReadResult(kind, what).encode()


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([result("valid"), result("valid")], "valid"),
        ([result("valid"), result("storage", "EIO")], "storage"),
        ([result("damaged", "w"), result("storage", "EIO")], "storage"),
        ([result("damaged", "w"), result("timeout", "hangs")], "timeout"),
        ([result("config", "w"), result("valid")], "config"),
        ([result("valid"), result("damaged", "w")], "storage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_host_0_combines_all_results_and_requires_proof_of_damage(saved, messages, wanted):
    """In the last row the step is intact on storage: one host's result is not enough."""
    checkpoints = saved.checkpoints()
    search = checkpoint_restore.NewestValid(
        read=lambda commit: None,
        examine=lambda commit: checkpointer.verify_step(checkpoints._dir_of(commit), commit),
        peers=checkpoints._peers,
        topic="t",
        seconds=60,
        emit=saved.events.append,
        clock=SleepRecorder(),
    )
    commit = saved.log.history().newest
    decision = checkpoint_restore.ReadResult.decode(
        search._decide(commit, messages, checkpoint_restore.TRIES)
    )
    assert decision.kind == wanted
    if wanted not in ("valid",):
        assert "host " in decision.detail
