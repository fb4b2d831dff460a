"""A replica of a run holds only verified steps, at any instant, and a run goes on there exactly."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxres.checkpoint.read.verify import verify_step
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.faults import Unrestorable
from jaxres.runlog import faulty_hosts, replica_files, run_log
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Prune, Quarantine, RunLog
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from tests.damage import flip_bit_at
from tests.promises.conftest import Make
from tests.promises.mounts import Namespace
from tests.promises.trainer import (
    FAULTY,
    MLP,
    ROOT,
    STEPS,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    digest,
    run_history,
    starts,
)
from tests.tiers import campaign_but


def replicate(source: RunDir, to: RunDir, *words: str) -> int:
    """Runs the command in this process; returns its exit code."""
    arguments = ["checkpoints", "replicate", str(source.root), str(to.root), *words]
    return checkpoints_cli.main(arguments, usage="")


def follow(workspace: Workspace, source: RunDir, to: RunDir, *words: str) -> TrainingProcess:
    """Starts the command with --follow, as a process."""
    arguments = ["checkpoints", "replicate", str(source.root), str(to.root), "--follow", *words]
    return workspace.command(to, arguments, verb=("jaxres",))


def committed(run_dir: RunDir) -> list[int]:
    return [commit.step for commit in run_history(run_dir).committed]


def assert_valid(replica: RunDir, source: RunDir, *, is_slow: bool = False) -> list[int]:
    """Asserts that the log is a part of the source's and all its steps are valid; returns them.

    is_slow: the source may have pruned all but the newest of them before they could be copied.
    """
    replica_files.finish_update(replica)
    there, here = run_log.read_records(source.log), run_log.read_records(replica.log)
    assert here == there[: len(here)], "the log is no beginning of the source's"
    history = run_log.fold(here)
    for commit in history.committed:
        is_pruned = commit not in run_log.fold(there).committed
        if is_slow and is_pruned and commit != history.newest:
            continue
        found = verify_step((replica.root / commit.path).absolute(), commit)
        assert not found.problems, f"step {commit.step} is in the log: {found.evidence}"
    return [commit.step for commit in history.committed]


def leftovers(replica: RunDir) -> list[Path]:
    """Returns temporary files and trash of killed processes, but for those of the run lock."""
    found = [*Path(str(replica.root)).rglob(".*.tmp"), *Path(str(replica.root)).rglob(".*.trash")]
    return [path for path in found if not path.name.startswith(".owner.json.")]


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    namespace = Namespace.open()
    yield namespace
    namespace.close()


@pytest.fixture
def later(
    workspace: Workspace, shared_run: Callable[[str, Make], RunDir], killed: RunDir
) -> tuple[RunDir, RunDir]:
    """A run that was killed, replicated, and then trained to its end: source and old replica."""

    def make(shared: Workspace, name: str) -> None:
        source = shared.copy(killed, name)
        assert replicate(source, shared.run_dir("old-replica")) == 0
        shared.finish(name, *MLP)

    shared = shared_run("replicated", make)
    source = workspace.copy(shared, "source")
    old = RunDir(shared.root.with_name("old-replica"))
    return source, workspace.copy(old, "replica")


@pytest.mark.campaign
def test_a_run_goes_on_in_its_replica_exactly(
    workspace: Workspace, later: tuple[RunDir, RunDir], unbroken: RunDir
) -> None:
    source, to = later
    replicated = run_history(to).step
    files.delete_tree(source.root)
    workspace.finish("replica", *MLP)
    assert starts(to)[-1] == replicated >= 60
    assert_bit_exact(to, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("stride", campaign_but([5, 23], 23))
def test_a_replicator_killed_at_any_file_operation_leaves_a_valid_replica(
    workspace: Workspace, later: tuple[RunDir, RunDir], stride: int
) -> None:
    """The source has pruned every step of the old replica meanwhile."""
    source, old = later
    before, after = committed(old), committed(source)
    assert not set(before) & set(after)
    copies = workspace.root / "copies"
    copies.mkdir()
    arguments = [str(source.root), str(old.root), str(copies), str(stride)]
    command = [sys.executable, "-m", "tests.promises.replica_killer", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert any(leftovers(RunDir(copy)) for copy in copies.iterdir()), "no kill left a file"
    states = [assert_valid(RunDir(copy), source) for copy in sorted(copies.iterdir())]
    assert len(states) > 3
    assert states == sorted(states)
    assert (states[0], states[-1]) == (before, after)
    assert {tuple(state) for state in states} == {tuple(before), tuple(after)}
    for copy in sorted(copies.iterdir())[:: max(1, len(states) // 8)]:
        assert replicate(source, RunDir(copy)) == 0, "the next copy does not go on"
        assert assert_valid(RunDir(copy), source) == after
        kept = {path.name for path in (copy / "checkpoints").iterdir()}
        assert kept == {path.name for path in (source.root / "checkpoints").iterdir()}
        assert not leftovers(RunDir(copy))


@pytest.mark.slow
def test_a_first_copy_that_is_killed_is_never_a_new_run(
    workspace: Workspace, killed: RunDir
) -> None:
    copies = workspace.root / "copies"
    copies.mkdir()
    arguments = [str(killed.root), str(workspace.root / "none"), str(copies), "23"]
    command = [sys.executable, "-m", "tests.promises.replica_killer", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    refused = 0
    for copy in sorted(copies.iterdir()):
        try:
            replica_files.prepare_start(RunDir(copy))
        except Unrestorable as error:
            assert "would begin at step 0" in str(error)  # noqa: PT017
            refused += 1
        else:
            is_marked = (copy / replica_files.MARKER).exists()
            assert not is_marked or assert_valid(RunDir(copy), killed) == committed(killed)
    assert 0 < refused < len(list(copies.iterdir()))


PLACES: dict[str, Callable[[Workspace, Workspace], tuple[RunDir, RunDir]]] = {
    "disk to disk": lambda disk, bucket: (disk.run_dir("first"), disk.run_dir("second")),
    "disk to bucket": lambda disk, bucket: (disk.run_dir("first"), bucket.run_dir("second")),
    "bucket to disk": lambda disk, bucket: (bucket.run_dir("first"), disk.run_dir("second")),
    "bucket to bucket": lambda disk, bucket: (bucket.run_dir("first"), bucket.run_dir("second")),
}


@pytest.mark.slow
@pytest.mark.parametrize("places", campaign_but(PLACES, "disk to bucket"))
def test_the_first_place_is_lost_and_the_run_goes_on_in_the_replica(
    request: pytest.FixtureRequest, workspace: Workspace, unbroken: RunDir, places: str
) -> None:
    """It loses at most what was not replicated, and ends with the digest of an unbroken run."""
    bucket = request.getfixturevalue("bucket") if "bucket" in places else workspace
    source, to = PLACES[places](workspace, bucket)
    here = bucket if isinstance(source.root, GcsPath) else workspace
    there = bucket if isinstance(to.root, GcsPath) else workspace
    trainer = here.start(source.root.name, *MLP, held_after=50)
    trainer.wait_commit(20)
    copier = follow(there, source, to)
    trainer.wait_commit(40)
    trainer.kill()
    trainer.wait_exit()
    copier.wait(lambda: replica_step(to) >= 40, what="a replica")
    files.delete_tree(source.root)
    copier.process.kill()
    copier.process.wait()
    replica_files.finish_update(to)
    replicated = run_history(to).step
    assert replicated >= 40
    there.finish(to.root.name, *MLP)
    assert starts(to)[-1] == replicated
    assert_bit_exact(to, unbroken)


def replica_step(to: RunDir) -> int:
    marker = replica_files.read_marker(to)
    return 0 if marker is None else marker.step


@pytest.mark.slow
def test_a_damaged_step_of_the_source_is_not_copied(
    later: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    """First the older step, then both: what the replica has stays."""
    source, to = later
    older, newest = run_history(source).committed
    with_newest = RunDir(to.root.with_name("with-newest"))
    shutil.copytree(to.root, with_newest.root)
    flip_largest(source.root / older.path)
    assert replicate(source, with_newest) == 1
    assert f"step {older.step}: damaged in the source and not copied" in capsys.readouterr().err
    assert not (with_newest.root / older.path / "MANIFEST.json").exists()
    found = run_history(with_newest).newest
    assert found is not None
    assert found.step == newest.step
    assert not verify_step((with_newest.root / found.path).absolute(), found).problems

    before = committed(to)
    flip_largest(source.root / newest.path)
    assert replicate(source, to, "--json") == 1
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)["damaged"]) == {str(older.step), str(newest.step)}
    assert assert_valid(to, source) == before


def test_a_step_that_is_pruned_while_it_is_copied_is_not_in_the_replica(
    workspace: Workspace, killed: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, to = workspace.copy(killed, "source"), workspace.run_dir("replica")
    oldest, *others = run_history(source).committed
    waiting = [oldest]
    records = run_log.read_records(source.log)
    log = RunLog(
        source.log, attempt=records[-1].attempt, last_seq=len(records), clock=SystemClock()
    )
    replace = files.replace

    def pruning_meanwhile(path: Path, data: bytes, *, mode: int = 0o666) -> None:
        if waiting and path.is_relative_to(to.root / oldest.path):
            log.append(Prune(steps=(waiting.pop().step,)))
            files.delete_tree(source.root / oldest.path)
        replace(path, data, mode=mode)

    monkeypatch.setattr(files, "replace", pruning_meanwhile)
    assert replicate(source, to) == 0
    assert not waiting, "none was pruned meanwhile"
    assert assert_valid(to, source) == [commit.step for commit in others]


@pytest.mark.slow
def test_half_a_copy_of_a_step_that_was_judged_damaged_is_deleted(
    later: tuple[RunDir, RunDir],
) -> None:
    """The copy was killed, and the source judged the step before the next copy."""
    source, to = later
    older, newest = run_history(source).committed
    half = to.root / older.path
    shutil.copytree(source.root / older.path, half, ignore=shutil.ignore_patterns("MANIFEST*"))
    temporary = half.parent / ".written.0123456789ab.tmp"
    temporary.write_bytes(b"x" * 5000)
    judged = Quarantine(step=older.step, path=older.path, evidence="w has another digest")
    records = run_log.read_records(source.log)
    log = RunLog(
        source.log, attempt=records[-1].attempt, last_seq=len(records), clock=SystemClock()
    )
    log.append(judged)
    assert replicate(source, to) == 0
    assert assert_valid(to, source) == [newest.step]
    assert run_history(to).quarantined, "the replica does not know that the step was damaged"
    assert not half.exists()
    assert not leftovers(to)


def flip_largest(folder: Path) -> None:
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    flip_bit_at(path, path.stat().st_size // 2)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_bytes_damaged_in_transit_never_reach_a_step_of_the_replica(
    workspace: Workspace, killed: RunDir, bucket: Workspace, gcs_server: GcsServer, method: str
) -> None:
    to = bucket.run_dir("replica")
    storm = gcs_server.fail("damage", method=method, probability=0.2, times=None, seed=1)
    codes = [replicate(killed, to)]
    while codes[-1] != 0 and len(codes) < 20:
        codes.append(replicate(killed, to))
    assert storm.hits > 5
    gcs_server.faults.clear()
    assert codes[-1] == 0, codes
    assert assert_valid(to, killed) == committed(killed)


def test_a_full_disk_of_the_replica_leaves_it_valid_and_the_next_copy_goes_on(
    workspace: Workspace, killed: RunDir, namespace: Namespace
) -> None:
    disk = workspace.root / "disk"
    disk.mkdir()
    namespace.mount(disk, size_bytes=32 * 2**20)
    to = RunDir(namespace.seen_from_here(disk) / "replica")
    found = set[tuple[int, ...]]()
    for room in (0, 64 * 1024, 1024 * 1024):
        ballast = namespace.fill(disk, but_bytes=room)
        assert replicate(killed, to) == ExitCode.STORAGE, f"the disk was not full: {room}"
        found.add(tuple(assert_valid(to, killed)))
        ballast.unlink()
    assert found <= {(), tuple(committed(killed))}
    assert replicate(killed, to) == 0
    assert assert_valid(to, killed) == committed(killed)
    assert not leftovers(to)


@pytest.mark.slow
def test_what_lies_there_with_wrong_bytes_is_copied_again(
    later: tuple[RunDir, RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty disk changes a bit of each first write; the size is right."""
    source, to = later
    replace, wrong = files.replace, set[str]()

    def damaging(path: Path, data: bytes, *, mode: int = 0o666) -> None:
        replace(path, data, mode=mode)
        if "checkpoints" in path.parts and data and str(path) not in wrong:
            wrong.add(str(path))
            flip_bit_at(path, len(data) // 2)

    monkeypatch.setattr(files, "replace", damaging)
    monkeypatch.setattr("jaxres.checkpoint.replica.TRIES", 1)
    codes = [replicate(source, to)]
    while codes[-1] != 0 and len(codes) < 100:
        assert assert_valid(to, source), "a wrong step counts"
        codes.append(replicate(source, to))
    assert len(wrong) > 10
    assert set(codes[:-1]) <= {ExitCode.STORAGE, ExitCode.UNRESTORABLE}
    assert assert_valid(to, source) == committed(source)


@pytest.mark.slow
def test_prunes_and_pins_are_carried_over(workspace: Workspace, killed: RunDir) -> None:
    source, to = workspace.copy(killed, "source"), workspace.run_dir("replica")
    first = committed(source)[0]
    assert (
        checkpoints_cli.main(
            ["checkpoints", "pin", str(source.root), "--step", str(first)], usage=""
        )
        == 0
    )
    files.make_dir(source.forgotten_faults)
    files.create(source.forgotten_faults / "nonce", b"")
    faulty_hosts.exclude(source, "node17", slot=None, reason="slow", now=1.0)
    assert replicate(source, to) == 0
    assert faulty_hosts.forgotten(to) == {"nonce"}
    assert [host.name for host in faulty_hosts.read(to)] == ["node17"]
    others = set(committed(to)) - {first}
    workspace.finish("source", *MLP)
    assert replicate(source, to) == 0
    assert committed(to) == committed(source)
    assert first in committed(to)
    assert not others & set(committed(to))
    names = {path.name for path in (Path(str(to.root)) / "checkpoints").iterdir()}
    assert names == {commit.path.rpartition("/")[2] for commit in run_history(to).committed}
    assert digest(to) == digest(source)


@pytest.mark.slow
def test_a_run_that_goes_on_in_the_replica_is_never_overwritten(
    workspace: Workspace, later: tuple[RunDir, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    source, to = later
    workspace.finish("replica", *MLP)
    records = run_log.read_records(to.log)
    assert replicate(source, to) == ExitCode.FENCED
    assert "a run goes on here" in capsys.readouterr().err
    assert run_log.read_records(to.log) == records
    assert digest(to) == digest(source)
    assert replicate(to, source) == ExitCode.CONFIG, "a run is no place for a replica"
    other = workspace.finish("other", *MLP, "run.seed=1", "train.steps=20")
    assert replicate(other.run_dir, to) == ExitCode.CONFIG
    assert replicate(source, source) == ExitCode.CONFIG
    assert replicate(workspace.run_dir("none"), to) == ExitCode.USAGE
    assert run_log.read_records(to.log) == records


@pytest.mark.slow
def test_many_replicators_at_once_and_killed_ones_leave_a_valid_replica(
    workspace: Workspace, unbroken: RunDir, killed: RunDir
) -> None:
    source, to = workspace.copy(killed, "source"), workspace.run_dir("replica")
    trainer = workspace.start("source", *MLP)
    for _ in range(3):
        copiers = [follow(workspace, source, to, "--max-mb-per-second", "20") for _ in range(3)]
        subprocess.run(["sleep", "2"], check=True)
        for copier in copiers:
            copier.process.kill()
            copier.process.wait()
        if os.path.exists(str(to.log)):
            assert_valid(to, source, is_slow=True)
    assert trainer.wait_exit() == 0, trainer.printed()
    assert replicate(source, to) == 0
    assert assert_valid(to, source) == committed(source)
    assert run_history(to).step == STEPS
    assert_bit_exact(to, unbroken)


@pytest.mark.slow
def test_a_supervised_run_is_replicated_and_its_end_is_there(
    workspace: Workspace, unbroken: RunDir
) -> None:
    to = workspace.run_dir("replica")
    place = f"checkpoint.replica.path={to.root}"
    trainer = workspace.finish("run", *MLP, place)
    assert assert_valid(to, trainer.run_dir) == committed(trainer.run_dir)
    assert run_log.read_records(to.log) == run_log.read_records(trainer.run_dir.log)
    assert_bit_exact(to, unbroken)
    progress = replica_files.read_progress(trainer.run_dir)
    assert progress is not None
    assert (progress.step, progress.error) == (STEPS, "")


@pytest.mark.slow
def test_a_run_that_is_restored_from_a_backup_repeats_no_step_that_its_replica_has(
    workspace: Workspace, fault_free: RunDir
) -> None:
    to = workspace.run_dir("replica")
    own = (f"checkpoint.replica.path={to.root}",)
    gate = workspace.root / "gate"
    held = {"FAULT": f"row:{24 * 15}:gate", "GATE": str(gate)}
    trainer = workspace.launch("run", *own, config=FAULTY, hosts=1, env=held)
    trainer.wait_commit(10)
    backup = workspace.root / "backup"
    temporaries = shutil.ignore_patterns(".*")  # They come and go.
    shutil.copytree(str(trainer.run_dir.root), backup, ignore=temporaries)
    gate.touch()
    assert trainer.wait_exit() == 0, trainer.printed()
    assert run_history(to).step == 60
    shutil.rmtree(str(trainer.run_dir.root))
    backup.rename(str(trainer.run_dir.root))
    before = run_history(trainer.run_dir)
    again = workspace.launch("run", *own, config=FAULTY, hosts=1)
    again.assert_fails(ExitCode.UNRESTORABLE, "it has step 60", f"run.dir={to.root}")
    assert run_history(trainer.run_dir).commits == before.commits
    assert_bit_exact(to, fault_free)


@pytest.mark.campaign
def test_the_place_of_a_supervised_run_is_lost_and_it_goes_on_in_the_replica(
    bucket: Workspace, fault_free: RunDir
) -> None:
    """A kill of the replicator is only a delay. The same command, with run.dir, fails over."""
    to = bucket.run_dir("replica")
    place = f"checkpoint.replica.path={to.root}"
    env = {"PACE": "0.02", "HELD": "40"}
    trainer = bucket.launch("run", place, config=FAULTY, hosts=1, restart=True, env=env)
    trainer.wait_commit(10)
    for pid in copiers(to):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    trainer.wait(lambda: replica_step(to) >= 20, what="a replica")
    trainer.kill()
    trainer.wait_exit()
    for pid in copiers(to):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    files.delete_tree(trainer.run_dir.root)
    replicated = run_history(to).step
    last = bucket.launch("replica", place, config=FAULTY, hosts=1, restart=True)
    assert last.wait_exit() == 0, last.printed()
    assert "this run trains in its replica now" in last.printed()
    assert starts(to)[-1] >= replicated >= 20
    assert_bit_exact(to, fault_free)


def copiers(to: RunDir) -> list[int]:
    """Returns the pids of the processes that copy to a place."""
    found = subprocess.run(
        ["pgrep", "-f", f"replicate .*{to.root} --follow"], capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize("fault", campaign_but(["503", "stall"], "503"))
def test_a_replica_that_is_unreachable_changes_no_bit_and_is_one_incident(
    workspace: Workspace, bucket: Workspace, fault_free: RunDir, gcs_server: GcsServer, fault: str
) -> None:
    """It refuses requests, or takes them and never answers."""
    to = bucket.run_dir("replica")
    own = (f"checkpoint.replica.path={to.root}", "checkpoint.replica.lag_minutes=0.03")
    away = gcs_server.fail(fault, times=None, late_seconds=3600)
    trainer = workspace.launch(
        *("run", *own), config=FAULTY, hosts=1, restart=True, env={"PACE": "0.02", "HELD": "40"}
    )

    def events(kind: str) -> list[dict[str, object]]:
        found = read_events(trainer.run_dir.supervisor_events)
        return [event for event in found if event["event"] == kind]

    trainer.wait(lambda: bool(events("replica_behind")) and away.hits, what="an incident")
    assert run_history(trainer.run_dir).attempt == 1
    subprocess.run(["sleep", "3"], check=True)
    assert len(events("replica_behind")) == 1
    gcs_server.faults.clear()
    away.ended.set()
    trainer.go_on()
    trainer.wait(
        lambda: bool(events("replica_caught_up")) or run_history(trainer.run_dir).step == 60,
        what="the end of the incident",
    )
    assert trainer.wait_exit() == 0, trainer.printed()
    assert assert_valid(to, trainer.run_dir) == committed(trainer.run_dir)
    assert_bit_exact(trainer.run_dir, fault_free)
