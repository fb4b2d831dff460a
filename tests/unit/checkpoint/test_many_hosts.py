"""Several hosts write one step and restore the same step, whichever of them reads damaged data."""

import shutil

import jax
import pytest

from jaxres.checkpoint import finalize
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.restore import restore as restoring
from jaxres.checkpoint.write.frozen_arrays import NOTHING_LINKED
from jaxres.faults import StorageUnavailable
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests import damage
from tests.unit.checkpoint import hosts

pytestmark = pytest.mark.slow  # Two hosts are two processes that import JAX.


@pytest.fixture
def run_dir(written_by, tmp_path):
    shutil.copytree(written_by(2).root, tmp_path / "run")
    return RunDir(tmp_path / "run")


def newest(run_dir):
    commit = run_log.fold(run_log.read_records(run_dir.log)).newest
    return (run_dir.root / commit.path).absolute(), commit


def values_of(step_dir, host):
    found = (step_dir / "state").glob(f"ocdbt.process_{host}.*/d/*")
    return max(found, key=lambda path: path.stat().st_size)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_damage_read_by_one_host_makes_both_restore_the_older_step(run_dir):
    step_dir, _ = newest(run_dir)
    flip(values_of(step_dir, 1), 9000)
    outputs = hosts.run(2, run_dir.root, "restore")
    assert ["restored 8" in output for output in outputs] == [True, True], outputs
    ((_, decided),) = run_log.fold(run_log.read_records(run_dir.log)).quarantined
    assert decided.step == 16
    assert "ocdbt.process_1" in decided.evidence


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_a_step_of_two_hosts_is_verified_when_restored_onto_other_devices(run_dir, num_devices):
    step_dir, commit = newest(run_dir)
    wanted = hosts.like(jax.devices()[:num_devices])
    found = restoring.restore(step_dir, commit, wanted)
    assert hosts.is_that_of(found.state, 16)
    flip(values_of(step_dir, 1), 9000)
    with pytest.raises(manifests.CheckpointDamaged, match="has other digests than were committed"):
        restoring.restore(step_dir, commit, wanted)


def test_no_damage_to_any_file_is_restored(run_dir):
    """Each damage is refused or does not change the restored state."""
    step_dir, commit = newest(run_dir)
    files = {path: path.read_bytes() for path in step_dir.rglob("*") if path.is_file()}
    harmless = set()
    for harm in (damage.flip_byte, damage.swap):
        chance = damage.random.Random(harm.__name__)
        for path, data in files.items():
            for _ in range((4 if len(data) > 16_000 else 1) if data else 0):
                harm(path, chance)
                try:
                    found = restoring.restore(step_dir, commit, hosts.like())
                except manifests.CheckpointDamaged:
                    pass
                else:
                    assert hosts.is_that_of(found.state, 16), path
                    assert found.progress == hosts.progress(16)
                    harmless.add(path.name)
                for changed, original in files.items():
                    changed.write_bytes(original)
    assert harmless <= {
        "_CHECKPOINT_METADATA",
        "_METADATA",
        "_sharding",
        "process_0",  # Of Orbax's array_metadatas.
        "process_1",
        "commit_success.txt",
        "manifest.ocdbt",
        "run_log.jsonl",  # A restore does not read it; `checkpoints verify` and `adopt` do.
        *(path.name for path in files if "ocdbt.process" in str(path)),
    }


NAMES = ["digests/process_0.json", "digests/process_1.json"]


def test_digests_of_one_host_are_not_accepted_as_those_of_all_hosts(run_dir):
    step_dir, commit = newest(run_dir)
    infos = manifests.read(step_dir, commit).arrays
    digests, _ = finalize._array_digests(step_dir, NAMES, infos, (), NOTHING_LINKED)
    assert digests == manifests.read(step_dir, commit).digests
    with pytest.raises(StorageUnavailable, match="no process has digested block"):
        finalize._array_digests(step_dir, NAMES[:1], infos, (), NOTHING_LINKED)


def test_a_shared_block_that_reads_back_differently_fails_the_save(run_dir):
    """The lead compares each host's digest of its part with the block that it reads back."""
    step_dir, commit = newest(run_dir)
    infos = manifests.read(step_dir, commit).arrays
    path = step_dir / "digests" / "process_1.json"
    text = path.read_text()
    small = text.index("parts", text.index('"small"'))
    at = text.index('"', text.index("]],", small)) + 1
    path.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
    with pytest.raises(StorageUnavailable, match="small reads back differently"):
        finalize._array_digests(step_dir, NAMES, infos, (), NOTHING_LINKED)


def test_digests_of_shared_blocks_that_read_back_differently_fail_the_save(run_dir, monkeypatch):
    """Otherwise the manifest would have the checksum of the wrong ones."""
    step_dir, commit = newest(run_dir)
    infos = manifests.read(step_dir, commit).arrays
    real = files.replace

    def replace(path, data):
        real(path, data + b" ")

    monkeypatch.setattr(files, "replace", replace)
    with pytest.raises(StorageUnavailable, match=r"read_back\.json reads back differently"):
        finalize._array_digests(step_dir, NAMES, infos, (), NOTHING_LINKED)


def test_digests_of_shared_blocks_that_are_being_written_fail_no_save(tmp_path):
    """The list of the step is made meanwhile, and what it names is read."""
    for name in ("a", "digests/.read_back.json.0123456789ab.tmp", "digests/read_back.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [*finalize._written_files(tmp_path, [], NOTHING_LINKED)] == ["a"]
