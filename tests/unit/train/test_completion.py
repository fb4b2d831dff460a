"""A complete run is done if its last checkpoint is valid; unreadable storage proves nothing."""

import contextlib
import random
import shutil
import threading

import pytest

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.faults import StorageUnavailable
from jaxres.runlog.paths import RunDir
from jaxres.storage import files, local_store
from jaxres.supervisor.run_lock import RunLock
from jaxres.train import completion
from jaxres.train.completion import Completion
from tests import damage
from tests.hanging import waiting_opener
from tests.promises.trainer import ROOT, TINY

GOLDEN = ROOT / "tests" / "golden" / "checkpoint-3"
PATH = "checkpoints/00000008-0001"
NOTHING_TO_DO = "step 8 of 8 is committed already; nothing to do: its checkpoint is valid."


@pytest.fixture
def run_dir(tmp_path):
    """A run whose newest committed step is 8."""
    run_dir = RunDir(shutil.copytree(GOLDEN, tmp_path / "run"))
    files.create(run_dir.config, configs.dump_yaml(config()).encode())
    return run_dir


def config(*overrides, steps=8):
    return configs.load(TINY, (f"train.steps={steps}", *overrides)).config


def test_a_run_is_complete_if_its_last_step_is_committed_and_valid(run_dir, capsys):
    assert completion.check(run_dir, config(steps=9)) == Completion(is_complete=False)
    assert capsys.readouterr() == ("", "")
    assert completion.check(run_dir, config()) == Completion(is_complete=True)
    assert NOTHING_TO_DO in capsys.readouterr().out
    assert completion.is_complete(RunDir(run_dir.root / "new"), config()) is False


@contextlib.contextmanager
def heartbeats(lock):
    """Writes heartbeats, as a supervisor does."""
    ended = threading.Event()

    def beat():
        while not ended.wait(0.01):
            lock.heartbeat()

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    ended.set()
    thread.join()


def test_leftovers_of_a_killed_worker_are_deleted_when_the_run_is_complete(run_dir):
    parts = run_dir.checkpoints / "00000004-0001"
    shutil.copytree(run_dir.root / PATH, parts)
    (parts / "MANIFEST.json").unlink()  # No save has completed it.
    assert completion.check(run_dir, config(steps=9)) == Completion(is_complete=False)
    assert parts.exists(), "an attempt follows and deletes it after its restore"
    with RunLock(run_dir, clock=SystemClock()) as lock, heartbeats(lock):
        completion.delete_leftovers(run_dir)
        assert parts.exists(), "nothing is deleted while the run is live"
    assert completion.check(run_dir, config()) == Completion(is_complete=True)
    assert not parts.exists(), "leftovers of a complete run stay"
    assert (run_dir.root / PATH).exists()


def test_temporary_files_of_the_log_are_deleted_when_the_run_is_complete(run_dir):
    """A supervisor was killed between the two operations by which a record gets its name."""
    record = max(run_dir.log.glob("*.json"))
    temporary = record.with_name(f".{record.name}.8f0758552d92.tmp")
    shutil.copy(record, temporary)
    assert completion.check(run_dir, config()) == Completion(is_complete=True)
    assert not temporary.exists(), "a temporary file of a complete run stays"
    assert record.exists()


def test_temporary_files_of_attempts_are_deleted_when_the_run_is_complete(run_dir):
    """A worker was killed while it wrote `sharding.txt`."""
    temporary = run_dir.attempt(2) / ".sharding.txt.7dedd044c1f2.tmp"
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text("half")
    assert completion.check(run_dir, config(steps=9)) == Completion(is_complete=False)
    assert temporary.exists(), "an attempt follows"
    with RunLock(run_dir, clock=SystemClock()) as lock, heartbeats(lock):
        completion.delete_leftovers(run_dir)
        assert temporary.exists(), "nothing is deleted while the run is live"
    assert completion.check(run_dir, config()) == Completion(is_complete=True)
    assert not temporary.exists(), "a temporary file of an attempt stays"


def largest(step_dir):
    """Returns the name of the file that has most values."""
    sizes = files.sizes(step_dir)
    return max(sizes, key=lambda name: (name.startswith("state/"), sizes[name]))


@pytest.mark.parametrize("harm", [damage.flip_bit, damage.delete, damage.to_pipe])
@pytest.mark.parametrize("name", [largest(GOLDEN / PATH), "_CHECKPOINT_METADATA", "MANIFEST.json"])
def test_damage_of_the_last_step_is_named_and_the_run_is_not_complete(run_dir, capsys, name, harm):
    damage.harm(run_dir.root / PATH, name, harm, random.Random(0))
    assert completion.check(run_dir, config()) == Completion(is_complete=False, unconfirmed=PATH)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "step 8 of 8 is committed already, but its checkpoint is damaged: " in printed.err
    assert name in printed.err


def fails(step_dir, monkeypatch):
    """Reading the first page of a process's memory fails with EIO in the kernel."""
    values = step_dir / largest(step_dir)
    values.unlink()
    values.symlink_to("/proc/self/mem")


def hangs(step_dir, monkeypatch):
    waits = waiting_opener(step_dir / "MANIFEST.json", while_there=step_dir / "MANIFEST.json")
    monkeypatch.setattr(local_store, "open_file", waits)


@pytest.mark.parametrize(
    ("outage", "seconds", "named"), [(fails, 600, "Input/output"), (hangs, 0.1, "does not answer")]
)
def test_a_last_step_that_cannot_be_read_is_neither_valid_nor_damaged(
    run_dir, capsys, monkeypatch, outage, seconds, named
):
    outage(run_dir.root / PATH, monkeypatch)
    with pytest.raises(StorageUnavailable, match=named) as refused:
        completion.check(run_dir, config(f"deadlines.restore_seconds={seconds}"))
    assert "judged damaged" in str(refused.value)
    assert capsys.readouterr() == ("", "")
    (run_dir.root / PATH / "MANIFEST.json").unlink()  # Nothing waits any longer.
