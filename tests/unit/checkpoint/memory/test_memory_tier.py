"""States in shared memory: whole or not there, verified, and never a reason to fail."""

import dataclasses
import errno
import functools
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxres.checkpoint.memory import slots as memory_slots
from jaxres.checkpoint.memory import tier as memory_tier
from jaxres.checkpoint.memory.tier import MemoryTier, TierSettings
from jaxres.cluster.host_group import HostRank, SingleHost
from jaxres.engine.state import Progress
from jaxres.faults import StorageUnavailable
from jaxres.runlog import run_log
from jaxres.runlog.events import Noted
from jaxres.runlog.records import Record, Start
from jaxres.storage import codec, memory_folder
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS

BEGUN = Start(step=0, path=None, dataset="d", computation={})
HISTORY = run_log.fold([Record(1, 1, 0.0, CLAIM), Record(2, 1, 0.0, BEGUN)])
GIB = 2**30


def state_of(value: float) -> dict:
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("fsdp",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
    return {
        "w": {"a": jax.device_put(jnp.full((4, 3), value, jnp.bfloat16), split)},
        "key": jax.device_put(jnp.arange(2, dtype=jnp.uint32), whole),
        "step": jax.device_put(jnp.int32(value), whole),
    }


@functools.cache
def shapes():
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0)
    )


class Harness:
    """Tiers of one folder, and their events."""

    def __init__(self, folder):
        self.folder, self.events = folder, []

    def tier(self, **changes):
        given = {"shapes": shapes(), "nonce": CLAIM.nonce}
        given |= {"available": lambda: GIB, "emit": self.events.append}
        copies = changes.pop("neighbor_copies", False)
        settings = TierSettings(5, neighbor_copies=copies, folder=self.folder)
        return MemoryTier(settings, **(given | changes))

    def restore(self, tier, history=HISTORY):
        return tier.restore(history, dataset="d", topic="t", seconds=1)

    def begun(self, **changes):
        tier = self.tier(**changes)
        assert self.restore(tier) is None
        tier.begin(2, step=0)
        return tier


@pytest.fixture
def harness(tmp_path):
    return Harness(tmp_path / "memory")


def keep(tier, step):
    tier.save(state_of(step), Progress(step=step, cursor=24 * step))
    tier._saver.submit(lambda: None).result()


def test_the_newest_state_is_restored_with_the_same_bits_on_every_device(harness):
    tier = harness.begun()
    for step in (3, 5, 10, 15):
        keep(tier, step)
    tier.close()
    restored = harness.restore(harness.tier())
    assert restored.progress == Progress(step=15, cursor=360)
    for found, wanted in zip(
        jax.tree.leaves(restored.state), jax.tree.leaves(state_of(15)), strict=True
    ):
        assert found.sharding == wanted.sharding
        assert found.dtype == wanted.dtype
        assert [np.asarray(s.data).tobytes() for s in found.addressable_shards] == [
            np.asarray(s.data).tobytes() for s in wanted.addressable_shards
        ]


def test_a_state_that_is_being_overwritten_leaves_the_other_one(harness, monkeypatch):
    tier = harness.begun()
    for step in (5, 10):
        keep(tier, step)
    monkeypatch.setattr(memory_slots.Slot, "publish", lambda *_, **__: None)  # As a kill before it.
    keep(tier, 15)
    assert harness.restore(harness.tier()).progress.step == 10


def test_a_restored_state_stays_until_a_newer_one_is_whole(harness):
    keep(harness.begun(), 5)
    second = harness.tier()
    assert harness.restore(second).progress.step == 5
    assert harness.restore(harness.tier()).progress.step == 5


def test_wrong_bytes_close_the_tier_for_later_attempts_too(harness):
    keep(harness.begun(), 5)
    (data,) = [p for p in harness.folder.glob("*.data") if p.with_suffix(".json").exists()]
    with data.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    for _ in range(2):
        assert harness.restore(harness.tier()) is None
        assert "has digest" in harness.events[-1].reason
        assert harness.events[-1].is_damaged
    assert not list(harness.folder.glob("*.data")), "its memory is given back"


def test_a_reason_that_is_no_file_is_not_read(harness):
    """What an earlier attempt has written of damage; who reads a pipe there waits for ever."""
    keep(harness.begun(), 5)
    (harness.folder / memory_tier.DAMAGED).symlink_to("/dev/null")
    assert harness.restore(harness.tier()) is None
    assert "a device, expected a file" in str(harness.events[-1])
    assert not harness.events[-1].is_damaged


@pytest.mark.parametrize("number", [0, -1])
def test_a_wrong_copy_on_any_device_is_found(harness, monkeypatch, number):
    """The bytes of the slot are right: they change on the way to one device."""
    keep(harness.begun(), 5)
    devices = {each for x in jax.tree.leaves(state_of(5)) for each in x.sharding.device_set}
    device, wrong, real = sorted(devices, key=lambda each: each.id)[number], [], jax.device_put

    def device_put(items, to, **more):
        if to == device and getattr(items, "nbytes", 0) >= 4 and not wrong:
            wrong.append(items)
            items = items.copy()
            items.view(np.uint8).reshape(-1)[0] ^= 1
        return real(items, to, **more)

    monkeypatch.setattr(jax, "device_put", device_put)
    assert harness.restore(harness.tier()) is None
    assert wrong
    assert "has digest" in harness.events[-1].reason
    assert harness.events[-1].is_damaged


def test_memory_that_can_not_be_read_once_is_not_damaged(harness, monkeypatch):
    keep(harness.begun(), 5)

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        tier = harness.tier()
        assert harness.restore(tier) is None
    assert isinstance(harness.events[-1], Noted), harness.events[-1]
    assert "can't be read from host memory" in harness.events[-1].message
    tier.begin(2, step=0)
    keep(tier, 10)
    assert harness.restore(harness.tier()).progress.step == 10, "the tier goes on"


def test_a_state_that_no_host_could_fetch_keeps_no_slot_from_those_that_follow(
    harness, monkeypatch
):
    """Training begins before it, so no attempt continues from it: one slot would always hold it."""
    keep(harness.begun(), 15)
    tier = harness.tier()

    def unreachable(*_):
        raise ConnectionError("host 1 does not answer")

    with monkeypatch.context() as lost:
        lost.setattr(memory_slots.Slot, "read", unreachable)
        assert harness.restore(tier) is None
    tier.begin(2, step=0)
    for step in (5, 10):
        keep(tier, step)
    assert sorted(step for step, _, _ in memory_tier._keys(tier._slots)) == [5, 10]


def test_a_state_is_not_kept_before_its_metrics_lines_are_written(harness):
    def refuse():
        raise StorageUnavailable("no space left")

    tier = harness.begun(flush=refuse)
    keep(tier, 5)
    assert harness.restore(harness.tier()) is None


def test_a_write_that_fails_closes_the_tier_and_raises_nothing(harness, monkeypatch):
    tier = harness.begun()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_slots.os, "pwrite", fail)
    for step in (5, 10):
        keep(tier, step)
    closed = [event for event in harness.events if hasattr(event, "is_damaged")]
    assert ["No space left" in event.reason for event in closed] == [True]
    assert tier.is_due(15), "what all hosts have agreed on stays, so that they drain together"


@pytest.mark.parametrize("what", ["take_snapshot", "parts_of"])
def test_a_copy_for_which_there_is_no_memory_closes_the_tier_and_raises_nothing(
    harness, monkeypatch, what
):
    tier = harness.begun()

    def fail(*_):
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr(memory_tier, what, fail)
    keep(tier, 5)
    assert "no memory for the copy" in harness.events[-1].reason


def test_a_flip_in_the_mark_of_damage_ends_no_attempt(harness):
    keep(harness.begun(), 5)
    (harness.folder / memory_tier.DAMAGED).write_bytes(b"host000-0.data: \xffas digest")
    assert harness.restore(harness.tier()) is None
    assert harness.events[-1].is_damaged


def test_memory_that_another_host_lacks_is_given_back_but_for_the_states(harness):
    """The tier is closed on all hosts then; a state may serve a later attempt."""
    keep(harness.begun(), 5)
    held = {path.stem for path in harness.folder.glob("*.json")}

    class Pair(SingleHost):
        member = HostRank(0, 2, "127.0.0.1:1")

        def gather(self, topic, message, *, seconds):
            return message, codec.to_text(report(problem="full"))

    assert harness.restore(harness.tier(peers=Pair())) is None
    assert harness.events[-1].reason == "host 1: full"
    assert {path.stem for path in harness.folder.glob("*.data")} == held
    assert harness.restore(harness.tier()).progress.step == 5


def test_a_state_that_is_due_while_one_is_being_written_is_left_out(harness):
    gate = threading.Event()
    tier = harness.begun(flush=lambda: gate.wait(SURE_SECONDS))
    tier.save(state_of(5), Progress(step=5))
    tier.save(state_of(10), Progress(step=10))
    gate.set()
    tier._saver.submit(lambda: None).result()
    assert harness.restore(harness.tier()).progress.step == 5


def test_hosts_that_take_longer_than_an_interval_hold_a_state_in_common(tmp_path):
    """A write takes two intervals, the first of host 1 three. If each host left out states alone,
    host 0 would keep 5, 15, 25 and so on, and host 1 20, 30, 40."""
    gates = [threading.Semaphore(0) for _ in range(2)]
    tiers = [Harness(tmp_path / str(n)).begun(flush=gate.acquire) for n, gate in enumerate(gates)]
    started, newest = [-1, -1], 0
    for step in range(5, 100, 5):
        for number, tier in enumerate(tiers):
            takes = 15 if number and started[number] == 5 else 10
            if tier.is_writing() and step - started[number] >= takes:
                gates[number].release()
                tier._writing.result(60)
        held = [{key[0] for key in memory_tier._keys(tier._slots)} for tier in tiers]
        newest = max(set.intersection(*held), default=0)
        waits = any(tier.is_writing() for tier in tiers)
        for number, tier in enumerate(tiers):
            is_free = not tier.is_writing()
            tier.save(state_of(step), Progress(step=step), is_busy=waits)
            started[number] = step if is_free and tier.is_writing() else started[number]
    for gate, tier in zip(gates, tiers, strict=True):
        gate.release(2)
        tier.close()
    assert newest >= 80, "the hosts hold no new state in common"


def test_a_rollback_forgets_all_states(harness):
    tier = harness.begun()
    keep(tier, 5)
    tier.discard()
    assert harness.restore(harness.tier()) is None


def test_pieces_of_another_sharding_are_not_used(harness):
    keep(harness.begun(), 5)
    whole = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(x.sharding.mesh, PartitionSpec())
        ),
        shapes(),
    )
    assert harness.restore(harness.tier(shapes=whole)) is None


def test_a_folder_that_others_can_write_to_is_refused(harness):
    harness.folder.mkdir(mode=0o700)
    harness.folder.chmod(0o777)
    assert harness.restore(harness.tier()) is None
    assert "only this user" in harness.events[-1].reason


def problem(gib, base=memory_folder.SHARED_MEMORY):
    return memory_tier.fit_problem(missing=gib * GIB, base=base, free=2 * GIB, available=GIB)


def test_what_does_not_fit_is_refused_with_the_numbers(harness, monkeypatch):
    assert problem(1) is None
    assert "it needs 2.0 GiB more; /dev/shm has 2.0 GiB free, and 1.0 GiB of memory" in problem(2)
    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", harness.folder.parent)
    assert harness.restore(harness.tier(available=lambda: 0)) is None
    assert "of memory are available" in harness.events[-1].reason
    assert not list(harness.folder.glob("*.data"))


def test_a_folder_on_a_disk_needs_its_space_only(harness):
    assert problem(2, harness.folder) is None
    assert problem(3, harness.folder).endswith(
        f"{harness.folder} has 2.0 GiB free. Free some, choose another checkpoint.memory.folder, "
        "or set checkpoint.memory=null"
    )
    tier = harness.begun(available=lambda: 0)
    keep(tier, 5)
    assert harness.restore(harness.tier()).progress.step == 5


def test_a_run_has_its_own_folder_and_deleting_it_twice_is_no_error(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = (memory_folder.memory_folder(tmp_path / name, base) for name in ("one", "two"))
    assert one != two
    memory_folder.make(one)
    memory_folder.make(two)
    for _ in range(2):
        memory_folder.delete(tmp_path / "one", base)
    assert (one.exists(), two.exists()) == (False, True)


@pytest.mark.parametrize("kind", ["a folder that others can write to", "a link", "a pipe"])
def test_what_is_planted_at_a_runs_place_in_shared_memory_is_neither_used_nor_opened(
    tmp_path, kind
):
    """The name is predictable, and every account of the machine can write there."""
    folder = memory_folder.memory_folder(tmp_path, tmp_path)
    own = tmp_path / "own" / "file"
    own.parent.mkdir()
    own.write_text("kept")
    if kind == "a pipe":
        os.mkfifo(folder)
    elif kind == "a link":
        folder.symlink_to(own.parent)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(PermissionError, match="not a folder that only this user can write to"):
        memory_folder.make(folder)
    memory_folder.delete(tmp_path, tmp_path)
    assert (os.path.lexists(folder), own.read_text()) == (True, "kept")


@pytest.fixture
def two_runs(tmp_path):
    """Run directories with states in two places, of which the second is in use."""
    for name in ("run", "other", "first", "second", "shm"):
        (tmp_path / name).mkdir()
    for base in ("first", "second", "shm"):
        for run in ("run", "other"):
            folder = memory_folder.memory_folder(tmp_path / run, tmp_path / base)
            memory_folder.make(folder)
            for name in ("host000-0.data", "host000-0.json", "host000-1.data"):
                (folder / name).write_bytes(b"x")
    for base in ("first", "second"):
        memory_folder.record(tmp_path / base, places=tmp_path / "run" / "places")
    return tmp_path


def places_of(root, run):
    found = root.glob("*/" + memory_folder.memory_folder(root / run, root).name)
    return {folder.parent.name for folder in found}


@pytest.mark.parametrize("used", ["second", "shm", None])
def test_states_in_a_place_that_is_not_used_any_more_are_deleted(two_runs, monkeypatch, used):
    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", two_runs / "shm")
    places = two_runs / "run" / "places"
    for _ in range(2):
        memory_folder.delete_others(two_runs / "run", used and two_runs / used, places=places)
        assert places_of(two_runs, "run") == ({used} if used else set())
        assert places_of(two_runs, "other") == {"first", "second", "shm"}, "of another run"


def test_two_names_of_a_place_are_one(two_runs):
    (two_runs / "name").symlink_to("second")
    memory_folder.record(two_runs / "name", places=two_runs / "run" / "places")
    for used in ("name", "second"):
        places = two_runs / "run" / "places"
        memory_folder.delete_others(two_runs / "run", two_runs / used, places=places)
        assert places_of(two_runs, "run") >= {"name", "second"}


@pytest.mark.parametrize(
    ("changed", "is_deleted"),
    [
        ({}, True),
        ({"root": "/another/path"}, False),
        ({"run": "another-run"}, False),
        ({"process": "alive"}, False),
        (None, False),
        ("a folder that others can write to", False),
    ],
)
def test_states_of_a_run_that_was_replaced_by_its_copy_are_deleted_if_nothing_uses_them(
    two_runs, monkeypatch, changed, is_deleted
):
    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", two_runs / "shm")
    root, base = two_runs / "run", two_runs / "shm"
    replaced = memory_folder.memory_folder(root, base)
    owner = memory_folder.Owner(str(root), "first-claim", "dead")
    if isinstance(changed, dict):
        memory_folder.mark(root, base, dataclasses.replace(owner, **changed))
    elif changed is not None:
        memory_folder.mark(root, base, owner)
        replaced.chmod(0o777)
    root.rename(two_runs / "moved")
    shutil.copytree(two_runs / "moved", root)
    own = memory_folder.memory_folder(root, base)
    assert own != replaced
    memory_folder.mark(root, base, owner)
    memory_folder.delete_replaced(
        root, owner, places=root / "places", has_ended=lambda process: process == "dead"
    )
    assert replaced.exists() != is_deleted
    assert own.exists()
    assert places_of(two_runs, "other") == {"first", "second", "shm"}, "of another run"


@pytest.mark.parametrize("number", range(8))  # Two folders of three files.
def test_a_kill_while_old_states_are_deleted_leaves_them_to_the_next_start(
    two_runs, monkeypatch, number
):
    class Killed(BaseException):
        pass

    calls = []

    def dying(remove):
        def call(*args, **options):
            calls.append(args)
            if len(calls) > number:
                raise Killed
            return remove(*args, **options)

        return call

    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", two_runs / "shm")
    given = two_runs / "run", two_runs / "second"
    with monkeypatch.context() as killed:
        for name in ("unlink", "rmdir"):
            killed.setattr(os, name, dying(getattr(os, name)))
        with pytest.raises(Killed):
            memory_folder.delete_others(*given, places=two_runs / "run" / "places")
    memory_folder.delete_others(*given, places=two_runs / "run" / "places")
    assert places_of(two_runs, "run") == {"second"}


def test_files_of_hosts_that_an_attempt_does_not_have_are_deleted(harness):
    keep(harness.begun(), 5)
    kept = {file.name for file in harness.folder.iterdir()}
    gone = ("host001-0.data", "host001-0.json", "copy000-host001-1.data", "host002-1.tmp")
    for name in gone:
        (harness.folder / name).write_bytes(b"x" * 5000)
    assert harness.restore(harness.tier()).progress.step == 5
    assert {file.name for file in harness.folder.iterdir()} == kept


def test_files_of_other_hosts_on_the_same_machine_are_kept(harness):
    class Third(SingleHost):
        member = HostRank(2, 3, "127.0.0.1:1")

    tier = harness.tier(peers=Third(), neighbor_copies=True)
    harness.folder.mkdir(mode=0o700)
    kept = {"host000-0.data", "host001-1.json", "copy000-host002-1.data", "copy002-host001-0.data"}
    gone = {"host003-0.data", "copy001-host002-0.data"}
    for name in kept | gone:
        (harness.folder / name).write_bytes(b"x")
    tier._delete_unused()
    assert {file.name for file in harness.folder.iterdir()} == kept


def report(*steps, copied=(), **changes):
    """Returns a host's report to host 0."""
    held, copies = (tuple((step, 2, CLAIM.nonce) for step in each) for each in (steps, copied))
    return memory_tier.HeldStates(held=held, copied=copies, **changes)


def chosen(*reports, history=HISTORY, dataset="d"):
    """Returns the step that host 0 chooses."""
    found = memory_tier.agree(reports, history, dataset).key
    assert found is None or found[1:] == (2, CLAIM.nonce)
    return found and found[0]


def test_hosts_agree_on_the_newest_state_that_all_hold():
    assert chosen(report(5, 10), report(10, 15)) == 10
    assert chosen(report(5, 10), report(15)) is None
    assert chosen(report(5), report(5), dataset="other") is None
    broken = memory_tier.agree([report(5), report(problem="full")], HISTORY, "d")
    assert broken.problem == "host 1: full"
    newer = dataclasses.replace(BEGUN, step=5, tier="memory")
    later = run_log.fold(
        [Record(1, 1, 0.0, CLAIM), Record(2, 1, 0.0, BEGUN), Record(3, 1, 0.0, newer)]
    )
    assert chosen(report(5), history=later) == 5


def test_a_copy_at_the_next_host_stands_for_a_state_that_a_host_has_lost():
    assert chosen(report(10), report(), report(10, copied=[10])) == 10
    assert chosen(report(10), report(), report(10)) is None
    assert chosen(report(10, copied=[10]), report(), report(10)) is None, "it is host 2's"
    assert chosen(report(copied=[5]), report(5, 10, copied=[5]), report()) == 5
    assert chosen(report(10), report(5, 10, copied=[5])) == 10
