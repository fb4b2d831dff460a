"""States in host memory survive a killed worker, and are used only if the run continues from them.

The steps lost are at most those between two states in memory; no checkpoint is read. Wrong, missing
or outdated states in memory are never used: then a committed step is restored as without them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Start
from jaxres.storage import files
from jaxres.storage.memory_folder import memory_folder
from tests.promises.cloud import Cloud
from tests.promises.mounts import Namespace
from tests.promises.preloaded import Mount
from tests.promises.test_loss_spike_is_rolled_back import ONSET, OVERRIDES, STEPS
from tests.promises.trainer import (
    FAULTY,
    PACED,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    digest,
    run_history,
)
from tests.tiers import campaign_but

EVERY = 5
MEMORY = f"checkpoint.memory={{every_steps: {EVERY}}}"
ARGUMENTS = (MEMORY, "checkpoint.save_every_steps=20", "restart.backoff_seconds=0")
HALTED = PACED | {"FAULT": "row:800:sleep"}
"""The data stop after step 32, so that every machine kills the worker between steps 25 and 35."""
HALTED_PAIR = PACED | {"FAULT": "row:400:sleep"}
"""The same on two hosts, which read half of the rows each."""


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace.open()
    yield namespace
    namespace.close()


def held(run_dir: RunDir, host: int = 0) -> dict[int, Path]:
    """Returns step -> file of pieces of the states that a host holds in memory."""
    found: dict[int, Path] = {}
    if not files.exists(run_dir.root):
        return found
    for index in memory_folder(run_dir.root).glob(f"host{host:03d}-*.json"):
        with contextlib.suppress(FileNotFoundError):  # It is replaced.
            found[json.loads(index.read_text())["step"]] = index.with_suffix(".data")
    return found


def wait_held(trainer: TrainingProcess, step: int, *, hosts: int = 1) -> None:
    """Waits until every host holds the state of a step, or a newer one, in memory."""
    trainer.wait(
        lambda: all(max(held(trainer.run_dir, host), default=0) >= step for host in range(hosts)),
        what=f"step {step} in memory",
    )


def kill_worker(trainer: TrainingProcess) -> None:
    worker = trainer.worker()
    assert worker is not None
    os.kill(worker, signal.SIGKILL)


def killed_at(workspace: Workspace, step: int, *, committed: int = 0) -> TrainingProcess:
    """Returns a run whose worker was killed once it held a step in memory, and a committed one."""
    trainer = workspace.start("run", *ARGUMENTS, config=FAULTY, env=HALTED)
    wait_held(trainer, step)
    trainer.wait(
        lambda: run_history(trainer.run_dir).step == committed,
        what=f"commit of step {committed}, which is due",
    )
    kill_worker(trainer)
    assert trainer.wait_exit() == 128 + signal.SIGKILL, trainer.printed()
    return trainer


def begins(run_dir: RunDir) -> list[tuple[int, str | None]]:
    """Returns step and tier of each start of training."""
    starts: list[Start] = [run_log.start_of(record) for record in run_history(run_dir).starts]
    return [(start.step, start.tier) for start in starts]


def reason_of(trainer: TrainingProcess) -> str:
    """Returns why the tier was closed in this attempt."""
    closed = trainer.events_of("memory_tier_closed")
    assert len(closed) == 1, "the tier was not closed once"
    return str(closed[0]["reason"])


def flip(path: Path, at: int) -> None:
    """Changes one bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_killed_worker_loses_few_steps_and_the_restart_reads_no_checkpoint(
    workspace: Workspace, fault_free: RunDir
) -> None:
    first = killed_at(workspace, 30, committed=20)
    run_dir, last = first.run_dir, max(first.steps())
    newest = max(held(run_dir))
    assert last - newest <= EVERY, "more steps are lost than between two states"
    hidden = workspace.root / "hidden"
    os.rename(run_dir.checkpoints, hidden)
    (run_dir.root / "checkpoints").mkdir()
    second = workspace.start("run", *ARGUMENTS, config=FAULTY, env=PACED | {"HELD": "5"})
    second.wait_step(newest + 1)
    for step_dir in hidden.iterdir():
        os.rename(step_dir, run_dir.root / "checkpoints" / step_dir.name)
    assert second.wait_exit() == 0, second.printed()
    assert begins(run_dir) == [(0, None), (newest, "memory")]
    committed = f"resuming from step {newest} (from host memory; newest committed step: step 20)"
    assert committed in second.printed()
    assert {commit.step for commit in run_history(run_dir).committed} >= {40, 60}
    assert_bit_exact(run_dir, fault_free)
    assert not memory_folder(run_dir.root).exists(), "a run that is done takes no memory"


def flip_piece(data: Path) -> None:
    """Changes one bit of the largest piece: the end of a file of pieces holds nothing."""
    pieces = json.loads(data.with_suffix(".json").read_text())["pieces"]
    largest = max(pieces, key=lambda piece: int(piece["size"]))
    flip(data, largest["offset"] + largest["size"] // 2)


def _flip_pieces(run_dir: RunDir) -> str:
    flip_piece(held(run_dir)[max(held(run_dir))])
    return "has digest"


def _flip_index(run_dir: RunDir) -> str:
    index = held(run_dir)[max(held(run_dir))].with_suffix(".json")
    flip(index, index.stat().st_size // 2)
    return ".json"


@pytest.mark.slow
@pytest.mark.parametrize("harm", campaign_but([_flip_pieces, _flip_index], _flip_pieces))
def test_a_flipped_bit_is_found_and_the_committed_step_is_restored(
    workspace: Workspace, fault_free: RunDir, harm: Callable[[RunDir], str]
) -> None:
    first = killed_at(workspace, 25, committed=20)
    evidence = harm(first.run_dir)
    second = workspace.start("run", *ARGUMENTS, config=FAULTY, env=PACED | {"HELD": "5"})
    second.wait_step(22)
    assert evidence in reason_of(second), second.printed()
    assert "no state is kept in host memory any more" in second.printed()
    kill_worker(second)
    second.wait_exit()
    third = workspace.finish("run", *ARGUMENTS, config=FAULTY)
    assert reason_of(third), "damaged memory is not used by a later attempt either"
    assert begins(first.run_dir) == [(0, None), (20, None), (20, None)]
    assert_bit_exact(first.run_dir, fault_free)


@pytest.mark.slow
def test_a_supervisor_restarts_from_memory_again_and_again(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """The second kill comes before that attempt has kept a state of its own."""
    never = (*ARGUMENTS, "checkpoint.save_every_steps=1000")
    trainer = workspace.launch("run", *never, hosts=1, config=FAULTY, env=PACED, restart=True)
    wait_held(trainer, 15)
    kill_worker(trainer)
    trainer.wait(lambda: len(begins(trainer.run_dir)) == 2, what="another start")
    kill_worker(trainer)
    trainer.wait(lambda: len(begins(trainer.run_dir)) == 3, what="another start")
    assert trainer.wait_exit() == 0, trainer.printed()
    (_, (first, tier), (second, again)) = begins(trainer.run_dir)
    assert first >= 15
    assert second >= first
    assert tier == again == "memory"
    assert "restart from step 0 or a newer one in host memory" in trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)
    assert not memory_folder(trainer.run_dir.root).exists()


@pytest.mark.slow
def test_a_killed_supervisor_leaves_the_states_to_the_next_one(
    workspace: Workspace, fault_free: RunDir
) -> None:
    first = workspace.start("run", *ARGUMENTS, config=FAULTY, env=HALTED)
    wait_held(first, 15)
    first.kill()
    assert first.wait_exit() == -signal.SIGKILL
    newest = max(held(first.run_dir))
    workspace.finish("run", *ARGUMENTS, config=FAULTY)
    assert begins(first.run_dir) == [(0, None), (newest, "memory")]
    assert_bit_exact(first.run_dir, fault_free)


@pytest.mark.slow
def test_states_of_a_run_that_its_copy_has_replaced_are_deleted_by_the_next_start(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """The copy is the same run, with another folder in shared memory."""
    first = workspace.start("run", *ARGUMENTS, config=FAULTY, env=HALTED)
    wait_held(first, 15)
    first.kill()
    first.wait_exit()
    root, moved = Path(str(first.run_dir.root)), workspace.root / "moved"
    left = memory_folder(root)
    root.rename(moved)
    shutil.copytree(moved, root, symlinks=True)
    assert memory_folder(moved) == left != memory_folder(root)
    assert list(left.glob("host000-*.json")), "there are states in memory"
    workspace.finish("run", *ARGUMENTS, config=FAULTY)
    assert not left.exists()
    assert begins(first.run_dir)[1][1] is None, "the states are not the copy's"
    assert_bit_exact(first.run_dir, fault_free)


@pytest.mark.campaign
def test_memory_that_was_wiped_ends_nothing(workspace: Workspace, fault_free: RunDir) -> None:
    gate = workspace.root / "gate"
    waits = PACED | {"FAULT": "row:660:gate", "GATE": str(gate)}  # In step 28.
    first = workspace.start("run", *ARGUMENTS, config=FAULTY, env=waits)
    wait_held(first, 25)
    shutil.rmtree(memory_folder(first.run_dir.root))
    gate.touch()
    first.wait(lambda: bool(first.events_of("memory_tier_closed")), what="the closed tier")
    kill_worker(first)
    first.wait_exit()
    workspace.finish("run", *ARGUMENTS, config=FAULTY)
    assert begins(first.run_dir)[1][1] is None
    assert_bit_exact(first.run_dir, fault_free)


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", campaign_but([4096, 64 * 1024], 64 * 1024))
def test_shared_memory_that_is_too_small_ends_nothing(
    workspace: Workspace, namespace: Namespace, fault_free: RunDir, size_bytes: int
) -> None:
    """The larger one has room when the tier is opened, and none for its index."""
    namespace.mount(Path("/dev/shm"), size_bytes=size_bytes)
    if size_bytes > 4096:
        namespace.fill(Path("/dev/shm"), but_bytes=12 * 1024)
    workspace.through = namespace.through
    trainer = workspace.finish("run", *ARGUMENTS, config=FAULTY)
    if size_bytes == 4096:
        assert "more; /dev/shm has" in reason_of(trainer)
    else:
        assert "No space left" in reason_of(trainer)
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_a_disk_of_states_that_gets_full_keeps_them(
    workspace: Workspace, namespace: Namespace, fault_free: RunDir
) -> None:
    """Its space is reserved; an index is deleted before the next one is written."""
    disk = workspace.root / "disk"
    disk.mkdir()
    namespace.mount(disk, size_bytes=4 * 2**20)
    workspace.through = namespace.through
    there = namespace.seen_from_here(disk)

    def steps() -> list[int]:
        found = list[int]()
        for index in there.glob("*/host000-*.json"):
            with contextlib.suppress(FileNotFoundError):  # It is replaced.
                found.append(json.loads(index.read_text())["step"])
        return found

    memory = f"checkpoint.memory={{every_steps: {EVERY}, folder: {disk}}}"
    gate = workspace.root / "gate"
    waits = PACED | {"FAULT": "row:310:gate", "GATE": str(gate)}  # In step 13.
    first = workspace.start("run", memory, *ARGUMENTS[1:], config=FAULTY, env=waits)
    first.wait(lambda: len(steps()) == 2, what="two states")
    namespace.fill(disk)
    filled_at = max(steps())
    gate.touch()
    first.wait(lambda: max(steps(), default=0) > filled_at, what="a newer state")
    kill_worker(first)
    first.wait_exit()
    newest = max(steps())
    workspace.finish("run", memory, *ARGUMENTS[1:], config=FAULTY)
    assert begins(first.run_dir) == [(0, None), (newest, "memory")]
    assert not first.events_of("memory_tier_closed")
    assert_bit_exact(first.run_dir, fault_free)
    assert list(there.iterdir()) == [there / "ballast"], "a run that is done leaves nothing there"


@pytest.mark.slow
def test_states_on_a_local_disk_survive_the_worker_too(
    workspace: Workspace, fault_free: RunDir
) -> None:
    disk = workspace.root / "disk"
    disk.mkdir()
    memory = f"checkpoint.memory={{every_steps: {EVERY}, folder: {disk}}}"
    first = workspace.start("run", memory, *ARGUMENTS[1:], config=FAULTY, env=HALTED)
    first.wait(lambda: len(list(disk.glob("*/host000-*.json"))) == 2, what="two states on the disk")
    assert not memory_folder(first.run_dir.root).exists(), "it takes no memory"
    kill_worker(first)
    first.wait_exit()
    workspace.finish("run", memory, *ARGUMENTS[1:], config=FAULTY)
    assert [tier for _, tier in begins(first.run_dir)] == [None, "memory"]
    assert_bit_exact(first.run_dir, fault_free)
    assert list(disk.iterdir()) == [], "a run that is done leaves nothing there"


@pytest.mark.campaign
def test_states_in_another_place_are_deleted_by_the_next_attempt(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """Also if that attempt is killed before it keeps a state of its own."""
    disks = [workspace.root / name for name in ("first", "second")]
    for disk in disks:
        disk.mkdir()
        (disk / f"jaxres-memory-{os.getuid()}-0123456789abcdef").mkdir()  # Of another run.
    on_disk = [
        (f"checkpoint.memory={{every_steps: {EVERY}, folder: {disk}}}", *ARGUMENTS[1:])
        for disk in disks
    ]
    first = workspace.start("run", *on_disk[0], config=FAULTY, env=HALTED)
    first.wait(lambda: len(list(disks[0].glob("*/host000-*.json"))) == 2, what="two states")
    kill_worker(first)
    first.wait_exit()
    second = workspace.start("run", *on_disk[1], config=FAULTY, env=HALTED)
    second.wait(lambda: bool(list(disks[1].glob("*/host000-*.json"))), what="a state elsewhere")
    assert not list(disks[0].glob("*/*")), "the states of the attempt before"
    second.kill()
    second.wait_exit()
    workspace.finish("run", *ARGUMENTS[1:], config=FAULTY)
    assert begins(first.run_dir)[1][1] is None, "the states were in another place"
    assert_bit_exact(first.run_dir, fault_free)
    assert [len(list(disk.iterdir())) for disk in disks] == [1, 1]


@pytest.mark.slow
def test_a_state_from_before_a_rollback_is_not_used(workspace: Workspace) -> None:
    """It has trained on the rows that the rollback leaves out."""
    arguments = (*OVERRIDES, f"train.steps={STEPS}")
    reference = workspace.finish("reference", *arguments, config=FAULTY)
    remembers = (*arguments, "checkpoint.memory={every_steps: 1}")
    # It is held where it has trained on those rows, and after the rollback, which deletes them.
    before = workspace.root / "before"
    waits = PACED | {"FAULT": f"row:{24 * (ONSET + 2)}:gate", "GATE": str(before)}
    first = workspace.start("run", *remembers, config=FAULTY, env=waits)
    wait_held(first, ONSET)
    first.kill(signal.SIGSTOP, target="worker")  # It does not write while it is copied.
    folder, copied = memory_folder(first.run_dir.root), workspace.root / "copied"
    shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("*.tmp"))
    first.kill(signal.SIGCONT, target="worker")
    before.touch()
    first.wait(lambda: bool(run_history(first.run_dir).rollbacks), what="the rollback")
    first.kill()
    first.wait_exit()
    shutil.rmtree(folder)
    shutil.copytree(copied, folder)
    stale = {json.loads(index.read_text())["step"] for index in copied.glob("*.json")}
    assert max(stale) >= ONSET
    workspace.finish("run", *remembers, config=FAULTY)
    tiers = [tier for _, tier in begins(first.run_dir)]
    assert tiers[-1] is None, "a state from before the rollback was used"
    assert digest(first.run_dir) == digest(reference.run_dir)


@pytest.mark.campaign
def test_states_that_a_zombie_writes_are_never_restored(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """They are newer than those of its successor, in the same files."""
    arguments = (*ARGUMENTS, "checkpoint.save_every_steps=1000")
    shortly = PACED | {"HELD": "8", "FAULT": "row:1300:sleep"}  # It ends neither early nor later.
    zombie = workspace.start("run", *arguments, config=FAULTY, env=shortly)
    wait_held(zombie, 5)
    zombie.kill(signal.SIGSTOP)
    kept = held(zombie.run_dir)
    successor = workspace.start("run", *arguments, config=FAULTY, env=HALTED)
    wait_held(successor, 25)
    # The worker alone: its supervisor would end it at once.
    zombie.kill(signal.SIGCONT, target="worker")
    zombie.go_on()
    zombie.wait(lambda: min(held(zombie.run_dir), default=0) > 35, what="states of the zombie")
    kill_worker(successor)
    assert successor.wait_exit() == 128 + signal.SIGKILL, successor.printed()
    workspace.finish("run", *arguments, config=FAULTY)
    assert begins(zombie.run_dir)[1:] == [(max(kept), "memory"), (0, None)]
    assert_bit_exact(zombie.run_dir, fault_free)
    zombie.kill(signal.SIGCONT, target="supervisor")
    zombie.assert_fails(ExitCode.FENCED, "owns this run now")
    assert_bit_exact(zombie.run_dir, fault_free)


@pytest.mark.slow
def test_other_devices_restore_the_committed_step(workspace: Workspace) -> None:
    """With another mesh each host needs other pieces than it holds."""
    model = "model.target=tests.promises.faulty:sharded_model"
    arguments = (model, *ARGUMENTS, "mesh.fsdp=-1", "mesh.data=1")
    env = HALTED | {"JAX_NUM_CPU_DEVICES": "2"}
    first = workspace.start("run", *arguments, config=FAULTY, env=env)
    first.wait_commit(20)
    wait_held(first, 25)
    kill_worker(first)
    first.wait_exit()
    committed = run_history(first.run_dir).step
    assert max(held(first.run_dir)) > committed
    env = {"JAX_NUM_CPU_DEVICES": "1"}
    workspace.finish("run", *arguments, config=FAULTY, env=env)
    assert begins(first.run_dir) == [(0, None), (committed, None)]


@pytest.mark.slow
@pytest.mark.parametrize("harmed", campaign_but([None, 0, 1], None))
def test_two_hosts_restore_the_newest_state_that_both_hold(
    workspace: Workspace, fault_free_pair: RunDir, harmed: int | None
) -> None:
    first = workspace.launch("run", *ARGUMENTS, hosts=2, config=FAULTY, env=HALTED_PAIR)
    first.wait_commit(20)
    wait_held(first, 25, hosts=2)
    kill_worker(first)
    assert first.wait_exit() != 0
    run_dir = first.run_dir
    newest = max(held(run_dir, 0).keys() & held(run_dir, 1).keys())
    if harmed is not None:
        flip_piece(held(run_dir, harmed)[newest])
    workspace.launched("run", *ARGUMENTS, hosts=2, config=FAULTY)
    expected = (newest, "memory") if harmed is None else (20, None)
    assert begins(run_dir) == [(0, None), expected]
    assert_bit_exact(run_dir, fault_free_pair)


@pytest.mark.slow
def test_a_host_whose_memory_hangs_leaves_a_state_that_all_hosts_hold(
    workspace: Workspace, fault_free_pair: RunDir
) -> None:
    """If host 0 went ahead it would soon have overwritten the newest state of host 1."""
    root = workspace.run_dir("run").root
    files.make_dir(root)
    never_published = memory_folder(root) / "host001-1.tmp"
    mount = Mount.over(never_published, built_in=workspace.root)
    arguments = (*ARGUMENTS, "checkpoint.save_every_steps=1000")
    with mount.hanging():
        env = HALTED_PAIR | mount.env
        first = workspace.launch("run", *arguments, hosts=2, config=FAULTY, env=env)
        first.wait_step(30)
        kill_worker(first)
        assert first.wait_exit() != 0
    assert set(held(first.run_dir, 1)) == {EVERY}, "host 1 did not hang"
    assert EVERY in held(first.run_dir, 0), "the hosts hold no state in common"
    workspace.launched("run", *arguments, hosts=2, config=FAULTY)
    assert begins(first.run_dir) == [(0, None), (EVERY, "memory")]
    assert_bit_exact(first.run_dir, fault_free_pair)


COPIED = (f"checkpoint.memory={{every_steps: {EVERY}, neighbor_copies: true}}", *ARGUMENTS[1:])


def copied(run_dir: RunDir, host: int, *, of: int) -> dict[int, Path]:
    """Returns step -> file of pieces of another host's states that a host keeps."""
    found: dict[int, Path] = {}
    for index in memory_folder(run_dir.root).glob(f"copy{host:03d}-host{of:03d}-*.json"):
        with contextlib.suppress(FileNotFoundError):  # It is replaced.
            found[json.loads(index.read_text())["step"]] = index.with_suffix(".data")
    return found


def lose_host(run_dir: RunDir, host: int) -> None:
    """Deletes what the memory of a machine held."""
    lost = [
        *memory_folder(run_dir.root).glob(f"host{host:03d}-*"),
        *memory_folder(run_dir.root).glob(f"copy{host:03d}-*"),
    ]
    assert lost, "the machine held nothing"
    for file in lost:
        file.unlink()


def killed_with_copies(workspace: Workspace, step: int) -> tuple[TrainingProcess, int]:
    """Returns a run of two hosts, killed once both have copies, and the newest copied step."""
    first = workspace.launch("run", *COPIED, hosts=2, config=FAULTY, env=HALTED_PAIR)
    first.wait_commit(20)
    first.wait(
        lambda: all(max(copied(first.run_dir, 1 - h, of=h), default=0) >= step for h in (0, 1)),
        what=f"copies of step {step}",
    )
    kill_worker(first)
    assert first.wait_exit() != 0
    each = [copied(first.run_dir, 1 - host, of=host).keys() for host in (0, 1)]
    own = [held(first.run_dir, host).keys() for host in (0, 1)]
    return first, max(set.intersection(*map(set, (*each, *own))))


@pytest.mark.slow
@pytest.mark.parametrize("lost", campaign_but([0, 1], 1))
def test_a_lost_host_gets_its_state_from_its_neighbors_memory(
    workspace: Workspace, fault_free_pair: RunDir, lost: int
) -> None:
    first, newest = killed_with_copies(workspace, 25)
    run_dir = first.run_dir
    lose_host(run_dir, lost)
    second = workspace.launched("run", *COPIED, hosts=2, config=FAULTY)
    fetched = [(e["step"], e["host"]) for e in second.events_of("memory_fetched", lost)]
    assert fetched == [(newest, 1 - lost)]
    assert not second.events_of("memory_fetched", 1 - lost)
    assert begins(run_dir) == [(0, None), (newest, "memory")]
    assert_bit_exact(run_dir, fault_free_pair)
    assert not memory_folder(run_dir.root).exists(), "a run that is done takes no memory"


@pytest.mark.slow
def test_a_damaged_copy_is_found_and_the_committed_step_is_restored(
    workspace: Workspace, fault_free_pair: RunDir
) -> None:
    first, newest = killed_with_copies(workspace, 25)
    run_dir = first.run_dir
    lose_host(run_dir, 1)
    flip_piece(copied(run_dir, 0, of=1)[newest])
    second = workspace.launched("run", *COPIED, hosts=2, config=FAULTY)
    assert "has not the digest" in reason_of(second)
    assert begins(run_dir) == [(0, None), (20, None)]
    assert_bit_exact(run_dir, fault_free_pair)


@pytest.mark.campaign
def test_two_lost_neighbors_restore_the_committed_step(
    workspace: Workspace, fault_free_pair: RunDir
) -> None:
    first, _ = killed_with_copies(workspace, 25)
    for host in (0, 1):
        lose_host(first.run_dir, host)
    workspace.launched("run", *COPIED, hosts=2, config=FAULTY)
    assert begins(first.run_dir) == [(0, None), (20, None)]
    assert_bit_exact(first.run_dir, fault_free_pair)


@pytest.mark.campaign
def test_a_replaced_vm_gets_its_state_from_the_vm_that_is_kept(
    cloud: Cloud, fault_free_pair: RunDir
) -> None:
    launcher = cloud.up(cloud.config(num_hosts=2, env=PACED), *COPIED[:2])
    cloud.wait(lambda: max(copied(cloud.run_dir, 0, of=1), default=0) >= 25, of="copies of step 25")
    lost = cloud.member(1)
    cloud.gce.host_error(lost, is_told=True)
    lose_host(cloud.run_dir, 1)
    cloud.go_on()
    assert launcher.wait_exit() == 0, cloud.describe()
    assert ("compute.instances.hostError", lost) in cloud.gce.events()
    (_, (step, tier)) = begins(cloud.run_dir)
    assert tier == "memory", cloud.describe()
    assert step >= 25
    events = read_json_lines(cloud.run_dir.events(2, 1))
    fetched = [(e["step"], e["host"]) for e in events if e["event"] == "memory_fetched"]
    assert fetched == [(step, 0)]
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()
