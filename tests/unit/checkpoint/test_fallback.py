"""A damaged step is passed over on proof only; storage that does not answer proves nothing."""

import contextlib
import dataclasses
import io
import json
import random
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres.checkpoint import checkpointer, orbax_io
from jaxres.checkpoint import restore as checkpoint_restore
from jaxres.checkpoint import restore as restoring
from jaxres.cli import checkpoints as checkpoints_cli
from jaxres.faults import ConfigError, StorageUnavailable, Unrestorable
from jaxres.runlog.events import Noted, StepQuarantined
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Quarantine
from jaxres.train.reproducibility import BITWISE, guarantee
from tests import damage
from tests.promises.trainer import ROOT
from tests.unit.checkpoint import conftest
from tests.unit.checkpoint.conftest import like, progress, sharding
from tests.unit.checkpoint.test_store import Lost, assert_equal, commits, forgotten_tasks, lose


def state(step):
    """A state of which some values lie beside the index, where no library checks them."""
    wide = jnp.arange(64 * 128, dtype=jnp.float32).reshape(64, 128) / 7 + step
    tree = conftest.state(step)
    tree["params"]["wide"] = jax.device_put(wide, sharding("fsdp"))
    return tree


def save(place, *steps):
    with place.checkpoints(keep_last=3) as checkpoints:
        for step in steps:
            checkpoints.save(state(step), progress(step))
            checkpoints.wait()


@pytest.fixture
def saved(place):
    """Steps 8, 16 and 24 of an attempt, and the next attempt."""
    save(place, 8, 16, 24)
    return place.again()


@dataclasses.dataclass
class Clock:
    """Sleeps at once, and remembers for how long."""

    slept: list = dataclasses.field(default_factory=list)

    def wall(self):
        return 0.0

    def monotonic(self):
        return 0.0

    def sleep(self, seconds):
        self.slept.append(seconds)


def restore(place, *, seconds=60, wanted=None):
    checkpoints = place.checkpoints()
    checkpoints._clock = clock = Clock()
    found = checkpoints.restore(place.log.line(), wanted or like(state(8)), seconds=seconds)
    assert found is not None
    assert checkpoints.committed_step == checkpoints.saved_step == found.commit.step
    return found, clock


def largest(step_dir):
    files = [path for path in step_dir.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def spoil(place, step):
    """Flips one bit of the values of params/wide, which stock Orbax would not notice."""
    path = largest(place.step_dir(step))
    data = bytearray(path.read_bytes())
    values = np.asarray(state(step)["params"]["wide"])[3].tobytes()
    data[data.index(values)] ^= 1
    path.write_bytes(data)


def test_the_newest_whole_step_is_taken(saved):
    found, clock = restore(saved)
    assert (found.commit.step, found.is_verified, clock.slept) == (24, True, [])
    assert_equal(found.state, state(24))
    assert saved.log.line().quarantined == ()


@forgotten_tasks
def test_a_damaged_step_is_quarantined_with_its_evidence_and_the_next_older_one_taken(saved):
    path, step_dir = saved.step_dir(24), saved.step_dir(24)
    damaged = largest(path)
    damage.flip_byte(damaged, random.Random(1))
    before = {p: p.read_bytes() for p in step_dir.rglob("*") if p.is_file()}
    found, _ = restore(saved)
    assert found.commit.step == 16
    assert_equal(found.state, state(16))
    assert commits(saved) == [8, 16]
    ((_, decided),) = saved.log.line().quarantined
    assert (decided.step, decided.path) == (24, f"checkpoints/{step_dir.name}")
    assert damaged.relative_to(step_dir).as_posix() in decided.evidence
    (told,) = [event for event in saved.events if isinstance(event, StepQuarantined)]
    assert (told.step, told.evidence) == (24, decided.evidence)
    assert {p: p.read_bytes() for p in step_dir.rglob("*") if p.is_file()} == before


@forgotten_tasks
def test_a_quarantined_step_is_evidence_that_no_sweep_takes_and_no_restart_reads(saved):
    step_dir = saved.step_dir(24)
    shutil.rmtree(step_dir / "state")
    restore(saved)
    again = saved.again()
    found, _ = restore(again)
    assert found.commit.step == 16
    assert len(again.log.line().quarantined) == 1
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


def test_an_attempt_that_saves_a_step_again_gives_it_another_place(place):
    """As after a fallback, or a rollback, to an older step of the same attempt."""
    with place.checkpoints(keep_last=3) as checkpoints:
        for step in (8, 16):
            checkpoints.save(state(step), checkpointer.Progress(step=step))
            checkpoints.wait()
        largest(place.step_dir(16)).unlink()
        first = place.step_dir(16)
        found = checkpoints.restore(place.log.line(), like(state(8)), seconds=60)
        assert found.commit.step == 8
        checkpoints.save(state(16), checkpointer.Progress(step=16))
        checkpoints.wait()
    assert place.step_dir(16).name == f"{first.name}-2"
    assert first.exists()
    assert commits(place) == [8, 16]


def test_a_flipped_bit_that_stock_orbax_restores_is_found_and_its_array_named(saved):
    spoil(saved, 24)
    stock = restoring.load(
        saved.step_dir(24).absolute(), like(state(24)), orbax_io.reading_context(host=0)
    )
    assert not np.array_equal(stock["params"]["wide"], state(24)["params"]["wide"])
    found, _ = restore(saved)
    assert_equal(found.state, state(16))
    ((_, decided),) = saved.log.line().quarantined
    assert "params/wide has digest" in decided.evidence
    assert "in block [0, 0] of [2, 1]" in decided.evidence


def test_a_step_directory_without_a_record_is_no_step(saved):
    """However whole it is: a save that was killed right before its record."""
    with contextlib.suppress(Lost), saved.checkpoints(before_commit=lose) as checkpoints:
        checkpoints.save(state(32), progress(32))
        checkpoints.wait()
    assert (saved.run_dir.checkpoints / "00000032-0002" / "MANIFEST.json").exists()
    found, _ = restore(saved)
    assert found.commit.step == 24
    assert saved.log.line().quarantined == ()


@forgotten_tasks
def test_several_damaged_steps_are_passed_over_at_once(saved):
    spoil(saved, 24)
    (saved.step_dir(16) / "MANIFEST.json").write_bytes(b"{}")
    found, _ = restore(saved)
    assert found.commit.step == 8
    assert [decided.step for _, decided in saved.log.line().quarantined] == [16, 24]


@forgotten_tasks
def test_if_none_is_whole_all_are_named_and_left_as_they_are(saved):
    for step in (8, 16, 24):
        spoil(saved, step)
    with pytest.raises(Unrestorable) as caught:
        restore(saved)
    text = str(caught.value)
    assert "none is whole" in text
    assert "does not start again from step 0" in text
    for step in (8, 16, 24):
        assert f"{saved.step_dir(step).name}: step {step}: " in text
    assert commits(saved) == [8, 16, 24], "a copy of one of them still mends the run"
    assert saved.log.line().quarantined == ()


def test_a_run_whose_steps_are_all_quarantined_never_starts_from_step_0(place):
    save(place, 8)
    commit = place.log.line().newest
    place.log.append(Quarantine(step=8, path=commit.path, evidence="w has another digest"))
    with pytest.raises(Unrestorable, match="step 8: w has another digest"):
        restore(place)


def test_a_run_without_any_commit_starts_anew(place):
    assert place.checkpoints().restore(place.log.line(), like(state(8)), seconds=1) is None


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
def test_storage_that_does_not_answer_is_asked_again_and_never_quarantines(
    saved, monkeypatch, error
):
    calls, real = [], restoring.load

    def load(*arguments):
        calls.append(arguments)
        if len(calls) < checkpoint_restore.TRIES + count:
            raise error
        return real(*arguments)

    monkeypatch.setattr(restoring, "load", load)
    count = 0
    found, clock = restore(saved)
    assert (found.commit.step, clock.slept) == (24, [1.0, 2.0])
    calls, count = [], 1
    with pytest.raises(StorageUnavailable, match="Nothing was judged damaged"):
        restore(saved)
    assert len(calls) == checkpoint_restore.TRIES
    assert saved.log.line().quarantined == ()


def test_storage_that_hangs_is_given_up_once_and_never_quarantines(saved, monkeypatch):
    gate, calls = threading.Event(), []

    def load(*_):
        calls.append(1)
        gate.wait(30)

    monkeypatch.setattr(restoring, "load", load)
    with pytest.raises(StorageUnavailable, match=r"within 0 s .*storage does not answer"):
        restore(saved, seconds=0.3)
    assert len(calls) == 1
    assert commits(saved) == [8, 16, 24]
    gate.set()


def test_one_wrong_read_is_no_proof(saved, monkeypatch):
    """The bytes came wrong once, from the network or a bad memory: those on storage are whole."""
    calls, real = [], restoring.load

    def load(*arguments):
        calls.append(1)
        tree = real(*arguments)
        if len(calls) == 1:
            tree["params"]["w"] = tree["params"]["w"] + 1
        return tree

    monkeypatch.setattr(restoring, "load", load)
    found, _ = restore(saved)
    assert (found.commit.step, len(calls)) == (24, 2)
    assert_equal(found.state, state(24))
    (noted,) = [event for event in saved.events if isinstance(event, Noted)]
    assert "params/w has other digests than were committed" in noted.message
    assert "every byte on storage is as committed" in noted.message


def test_a_host_that_always_reads_wrong_ends_as_storage_and_judges_nothing(saved, monkeypatch):
    real = restoring.load

    def load(*arguments):
        tree = real(*arguments)
        tree["params"]["b"] = tree["params"]["b"] + 1
        return tree

    monkeypatch.setattr(restoring, "load", load)
    with pytest.raises(StorageUnavailable, match="every byte on storage is as committed"):
        restore(saved)
    assert commits(saved) == [8, 16, 24]


def test_a_step_of_another_model_is_not_damaged(saved):
    wanted = like(state(8))
    del wanted["params"]["b"]
    with pytest.raises(ConfigError, match="other arrays than this model"):
        restore(saved, wanted=wanted)
    assert commits(saved) == [8, 16, 24]


def test_steps_whose_folder_is_gone_are_not_damaged(saved):
    saved.run_dir.checkpoints.rename(saved.run_dir.root / "away")
    with pytest.raises(StorageUnavailable, match="Is it mounted"):
        restore(saved)
    assert saved.log.line().quarantined == ()


def test_a_checkpoint_of_format_1_is_restored_and_the_guarantee_lowered(tmp_path):
    golden = ROOT / "tests" / "golden" / "checkpoint-1"
    shutil.copytree(golden, tmp_path / "run")
    old = conftest.claimed(RunDir(tmp_path / "run"), attempt=2)
    found, _ = restore(old, wanted=like(conftest.state(8)))
    assert not found.is_verified
    assert_equal(found.state, conftest.state(8))
    assert found.progress == progress(8)
    now = {"jax": "1"}
    assert guarantee([now], now, is_verified=True) == BITWISE
    assert "content not verified" in guarantee([now], now, is_verified=False)


def say(kind, what=""):
    return checkpoint_restore.Word(kind, what).encode()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([say("whole"), say("whole")], "whole"),
        ([say("whole"), say("storage", "EIO")], "storage"),
        ([say("damaged", "w"), say("storage", "EIO")], "storage"),
        ([say("damaged", "w"), say("silent", "hangs")], "silent"),
        ([say("config", "w"), say("whole")], "config"),
        ([say("whole"), say("damaged", "w")], "storage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_lead_weighs_what_all_hosts_say_and_trusts_only_proof(saved, words, wanted):
    """In the last row the step is whole on storage: one host's word is not enough."""
    checkpoints = saved.checkpoints()
    search = checkpoint_restore.Search(
        read=lambda commit: None,
        examine=lambda commit: checkpointer.examine(checkpoints._dir_of(commit), commit),
        peers=checkpoints._peers,
        topic="t",
        seconds=60,
        emit=saved.events.append,
        clock=Clock(),
    )
    commit = saved.log.line().newest
    word = checkpoint_restore.Word.decode(search._decide(commit, words, checkpoint_restore.TRIES))
    assert word.kind == wanted
    if wanted not in ("whole",):
        assert "host " in word.what
