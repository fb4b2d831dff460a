"""What the disk has made of a save is seen before it counts, and older steps stay till then."""

import dataclasses
import json

import pytest

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint import orbax_io, readback
from jaxres.cluster.host_group import Alone, Member
from jaxres.faults import PeerLost
from jaxres.runlog.events import SaveFailed
from jaxres.storage import files
from tests.unit.checkpoint.conftest import progress
from tests.unit.checkpoint.test_fallback import largest, save, state
from tests.unit.checkpoint.test_store import commits


def spoil_after_orbax(monkeypatch, harm):
    """Has something happen to a step's files once Orbax has written them."""
    real = orbax_io.settle

    def settle(writing, step_dir, *, timeout):
        real(writing, step_dir, timeout=timeout)
        harm(step_dir)

    monkeypatch.setattr(orbax_io, "settle", settle)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


HARM = {
    "a value": lambda step_dir: flip(largest(step_dir)),
    "the index": lambda step_dir: flip(next((step_dir / "state" / "d").iterdir())),
    "the digests": lambda step_dir: flip(step_dir / "digests" / "process_0.json"),
    "no digests": lambda step_dir: (step_dir / "digests" / "process_0.json").unlink(),
    "a file less": lambda step_dir: largest(step_dir).unlink(),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_save_that_reads_back_differently_is_given_up_and_the_older_step_stays(
    place, monkeypatch, harm
):
    with place.checkpoints(keep_last=2) as checkpoints:
        for step in (4, 8):
            checkpoints.save(state(step), progress(step))
            checkpoints.wait()
        older = {p: p.read_bytes() for p in place.run_dir.checkpoints.rglob("*") if p.is_file()}
        with monkeypatch.context() as spoilt:
            spoil_after_orbax(spoilt, HARM[harm])
            checkpoints.save(state(16), progress(16))
            checkpoints.wait()
        assert checkpoints.committed_step == 8
        assert commits(place) == [4, 8]
        there = {p: p.read_bytes() for p in place.run_dir.checkpoints.rglob("*") if p.is_file()}
        assert there == older
        (failed,) = [event for event in place.events if isinstance(event, SaveFailed)]
        assert failed.step == 16
        assert "00000016-0001" in failed.reason
        checkpoints.save(state(24), progress(24))
        checkpoints.wait()
    assert commits(place) == [8, 24]


def test_every_file_is_dropped_from_memory_before_it_is_read_back(place, monkeypatch):
    forgotten, real = [], files.forget

    def forget(path):
        real(path)
        forgotten.append(path.name)

    monkeypatch.setattr(files, "forget", forget)
    save(place, 8)
    manifest = manifests.load(place.step_dir(8), place.log.line().newest)
    assert {name.rpartition("/")[2] for name in manifest.files} <= set(forgotten)
    assert "MANIFEST.json" in forgotten


def test_a_host_that_could_not_digest_refuses_the_step_and_says_why(place, monkeypatch):
    monkeypatch.setattr("jaxres.checkpoint.snapshot.digests_of", lambda *_: 1 / 0)
    save(place, 8)
    assert commits(place) == []
    (failed,) = [event for event in place.events if isinstance(event, SaveFailed)]
    assert "could not digest what it held: ZeroDivisionError" in failed.reason


def of_two(checkpoints, collect):
    class Two(Alone):
        member = Member(host=0, num_hosts=2)

        def collect(self, topic, word, *, seconds):
            return collect(word)

        def told(self, topic):
            return ()

    checkpoints._peers = Two()
    return checkpoints


def lost(word):
    raise PeerLost("host 1 did not say it within 60 s")


@pytest.mark.parametrize(
    ("collect", "why"),
    [
        (lambda word: (word, readback.Report({}, "no space left").encode()), "host 1: no space"),
        (lost, "not every host has said within 60 s (checkpoint.timeout_seconds)"),
    ],
    ids=["one host's failure", "one host's silence"],
)
def test_the_lead_commits_only_when_all_hosts_have_read_back_their_parts(place, collect, why):
    with of_two(place.checkpoints(), collect) as checkpoints:
        checkpoints.save(state(8), progress(8))
        checkpoints.wait()
        assert why in checkpoints.why_not_committed
    assert commits(place) == []


def test_a_report_reads_back_as_it_was_told():
    told = readback.Report({"state/d/x": manifests.info_of(b"1")}, "")
    assert readback.Report.decode(told.encode()) == told
    assert readback.Report.decode(told.of(3).encode()).failure == ""
    assert dataclasses.replace(told, failure="full").of(3).failure == "host 3: full"
    assert json.loads(told.encode())["files"]["state/d/x"]["size"] == 1
