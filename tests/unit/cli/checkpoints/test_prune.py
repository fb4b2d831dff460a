import json
import os
import signal
import subprocess
import sys

import pytest

from jaxres import config
from jaxres.checkpoint.retention import pruning
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.cli.checkpoints import prune as prune_cli
from jaxres.clock import SystemClock
from jaxres.config.schema.checkpoint import KeepSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageRefused, UsageError
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, Claim, Commit, Prune, Start
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from tests.unit.config.conftest import MINIMAL
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS

BYTES = 100


@pytest.fixture
def run_dir(tmp_path):
    return create_run(tmp_path / "run", steps=(10, 20, 30, 40, 50))


def create_run(root, *, steps, stop=None):
    """Creates a run of one attempt that committed these steps and is no longer live."""
    run_dir = RunDir(root)
    root.mkdir()
    (root / "x.yaml").write_text(MINIMAL)
    text = config.dump_yaml(config.load(root / "x.yaml").config)
    run_dir.config.write_text(text)
    run_dir.attempt(1).mkdir(parents=True)
    (run_dir.attempt(1) / "config.yaml").write_text(text)
    log = run_log.RunLog.claim(run_dir.log, CLAIM, after=(), clock=SystemClock())
    log.append(Start(step=0, path=None, dataset="d", computation={}))
    for step in steps:
        folder = run_dir.checkpoints / f"{step:08d}-0001"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(bytes(BYTES))
        path = f"checkpoints/{folder.name}"
        log.append(Commit(step=step, path=path, manifest="m", bytes=BYTES))
    if stop is not None:
        log.append(stop)
    return run_dir


def run_history(run_dir):
    return run_log.fold(run_log.read_records(run_dir.log))


def committed(run_dir):
    return [commit.step for commit in run_history(run_dir).committed]


def present(run_dir):
    return files.list_names(run_dir.checkpoints)


def run_command(*arguments):
    return checkpoints_cli.main(["checkpoints", *map(str, arguments)], usage="", env={})


def names(*steps):
    return [f"{step:08d}-0001" for step in steps]


def test_a_dry_run_prints_the_plan_and_the_bytes_and_writes_nothing(run_dir, capsys):
    (run_dir.checkpoints / "00000060-0001.orbax-checkpoint-tmp").mkdir()
    before = sorted(p for p in run_dir.root.rglob("*"))
    assert run_command("prune", run_dir.root, "--dry-run", "checkpoint.keep.last=2") == 0
    out = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in out[1:6]] == ["10", "20", "30", "40", "50"]
    assert [row.rpartition("  ")[2] for row in out[1:6]] == ["(to be pruned)"] * 3 + ["last 2"] * 2
    assert out[-1] == "3 of 5 steps and 1 leftovers would be pruned: 300 bytes (300 B)"
    assert run_command("prune", "--dry-run", "--json", run_dir.root) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows if row.get("pruned")] == [10, 20]
    assert rows[2] == {"step": 30, "bytes": BYTES, "pruned": False, "kept_as": ["last 3"]}
    assert sorted(p for p in run_dir.root.rglob("*")) == before


def test_pruning_a_run_that_is_not_live_records_an_attempt_that_only_prunes(run_dir, capsys):
    (run_dir.checkpoints / "00000060-0001.orbax-checkpoint-tmp").mkdir()
    assert run_command("prune", run_dir.root) == 0
    assert "2 of 5 steps and 1 leftovers were pruned: 200 bytes" in capsys.readouterr().out
    assert present(run_dir) == names(30, 40, 50)
    bodies = [record.body for record in run_log.read_records(run_dir.log)]
    assert isinstance(bodies[-3], Claim)
    assert bodies[-2:-1] == [Prune(steps=(10, 20))]
    assert isinstance(bodies[-1], AttemptEnded)
    assert (bodies[-1].exit, bodies[-1].committed) == (ExitCode.STOPPED, True)
    assert run_history(run_dir).attempt == 2
    assert run_command("prune", run_dir.root) == 0, "nothing to do"
    assert run_history(run_dir).attempt == 2


def test_the_last_exit_of_the_run_is_kept_after_pruning(tmp_path):
    stop = AttemptEnded(exit=81, reason="host 3 (x): loss is not finite", committed=False)
    run_dir = create_run(tmp_path / "ended", steps=(10, 20, 30, 40), stop=stop)
    assert run_command("prune", run_dir.root) == 0
    last = run_history(run_dir).last_stop
    assert last is not None
    assert (last.attempt, last.body.exit, last.body.committed) == (2, 81, False)
    assert last.body.reason.endswith("Attempt 1 before: host 3 (x): loss is not finite")


def test_a_suspended_lock_holder_is_fenced_before_anything_is_deleted(run_dir):
    paused = run_log.RunLog(run_dir.log, attempt=1, last_seq=7, clock=SystemClock())
    assert run_command("prune", run_dir.root) == 0
    with pytest.raises(run_log.Fenced, match="attempt 2"):
        paused.append(Commit(step=60, path="p", manifest="m", bytes=1))


def test_a_live_run_is_not_pruned_and_a_dry_run_reports_that_it_prunes_itself(run_dir, capsys):
    with prune_cli.RunLock(run_dir, clock=SystemClock()) as lock:
        heartbeats = subprocess.Popen([sys.executable, "-c", HEARTBEAT, str(run_dir.owner)])
        try:
            assert run_command("prune", run_dir.root) == ExitCode.FENCED
        finally:
            heartbeats.send_signal(signal.SIGKILL)
            heartbeats.wait()
        lock.heartbeat()
        assert "owned by host" in capsys.readouterr().err
        assert run_command("prune", run_dir.root, "--dry-run") == 0
        assert "The run is alive: it prunes by itself" in capsys.readouterr().out
    assert committed(run_dir) == [10, 20, 30, 40, 50]


HEARTBEAT = """
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
for count in range(2, 10**6):
    fields = json.loads(path.read_text()) | {"count": count}
    path.write_text(json.dumps(fields))
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.steps=3", "only checkpoint.keep.* can be given here"),
        ("checkpoint.keep.last=1", "must be at least 2"),
        ("nonsense", "unrecognized arguments: nonsense"),
        ("--force", "unrecognized arguments: --force"),
    ],
)
def test_other_arguments_are_rejected(run_dir, capsys, argument, message):
    assert run_command("prune", run_dir.root, argument) in (ExitCode.USAGE, ExitCode.CONFIG)
    assert message in capsys.readouterr().err
    assert committed(run_dir) == [10, 20, 30, 40, 50]


def test_a_pin_keeps_a_step_until_it_is_removed(run_dir, capsys):
    assert run_command("pin", run_dir.root, "--step", 20) == 0
    assert run_command("list", run_dir.root, "--json") == 0
    advice, *lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if row["pinned"]] == [20]
    assert run_command("prune", run_dir.root) == 0
    assert committed(run_dir) == [20, 30, 40, 50]
    words = advice.partition("`python -m jaxres checkpoints ")[2].rstrip("`").split()
    assert words == ["unpin", str(run_dir.root), "--step", "20"]
    assert run_command(*words) == 0
    assert run_command("prune", run_dir.root) == 0
    assert committed(run_dir) == [30, 40, 50]
    assert present(run_dir) == names(30, 40, 50)
    assert run_command("pin", run_dir.root, "--step", 20) == ExitCode.USAGE
    assert "step 20 is not committed (committed: 30, 40, 50)" in capsys.readouterr().err
    assert os.listdir(run_dir.pins) == []


def in_bucket(run_dir, bucket):
    """Returns a copy of a run in a bucket."""
    root = GcsPath(bucket, "runs/held")
    for path in run_dir.root.rglob("*"):
        if path.is_file():
            files.replace(root / path.relative_to(run_dir.root).as_posix(), path.read_bytes())
    return RunDir(root)


def test_a_held_step_is_deleted_by_nobody_until_it_is_unpinned(
    run_dir, gcs_bucket, gcs_server, capsys
):
    copy = in_bucket(run_dir, gcs_bucket)
    data = copy.checkpoints / "00000020-0001" / "data"
    assert run_command("pin", copy.root, "--step", 20, "--hold") == 0
    assert "is pinned and held" in capsys.readouterr().out
    with pytest.raises(StorageRefused, match="hold"):
        files.delete(data)
    with pytest.raises(StorageRefused, match="hold"):
        files.replace(data, b"other")
    held = [one.name for one in gcs_server.objects.now.values() if one.is_held]
    assert held == [data.key], "other steps, and the log, have no hold"
    assert run_command("unpin", copy.root, "--step", 20) == 0
    assert "no longer pinned; 1 objects are no longer held" in capsys.readouterr().out
    assert files.delete(data)


def test_a_hold_on_a_disk_is_refused_before_anything_is_pinned(run_dir, capsys):
    assert run_command("pin", run_dir.root, "--step", 20, "--hold") == ExitCode.USAGE
    assert "is in no bucket" in capsys.readouterr().err
    assert pruning.pinned(run_dir) == set()


def test_a_pin_after_the_prune_record_fails_and_is_removed(run_dir, monkeypatch):
    real = pruning.pin

    def pin_late(*args):
        log = run_log.RunLog(run_dir.log, attempt=1, last_seq=7, clock=SystemClock())
        pruning.prune(log, KeepSection(last=2), run_dir=run_dir)
        real(*args)

    monkeypatch.setattr(prune_cli.pruning, "pin", pin_late)
    with pytest.raises(UsageError, match="step 20 was pruned meanwhile"):
        prune_cli.pin(run_dir, 20)
    assert os.listdir(run_dir.pins) == []


def test_a_pin_between_reading_the_pins_and_the_prune_record_is_kept(run_dir):
    """The pin read the log before the prune record was written, so it has reported success."""

    class Late(run_log.RunLog):
        def append(self, body):
            if isinstance(body, Prune):
                assert "is pinned" in prune_cli.pin(run_dir, 20)
            return super().append(body)

    log = Late(run_dir.log, attempt=1, last_seq=7, clock=SystemClock())
    assert pruning.prune(log, KeepSection(last=2), run_dir=run_dir) == (10, 30)
    assert committed(run_dir) == [20, 40, 50]
    pruning.delete_all_but(log.history(), run_dir=run_dir, attempt=1)
    assert present(run_dir) == names(20, 40, 50)


def test_files_not_named_by_a_step_are_no_pins(run_dir):
    run_dir.pins.mkdir()
    for name in ("best", "-3", "7.5", "30"):
        (run_dir.pins / name).touch()
    assert pruning.pinned(run_dir) == {30}


@pytest.mark.slow
def test_a_prune_killed_before_any_of_its_file_operations_loses_nothing(run_dir, tmp_path):
    copies = tmp_path / "copies"
    command = [
        sys.executable,
        "-m",
        "tests.unit.cli.checkpoints.prune_killer",
        run_dir.root,
        copies,
    ]
    completed = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=SURE_SECONDS
    )
    num_operations, histories, num_leftovers = int(completed.stdout), set(), 0
    assert num_operations > 20, "operations: claim, config, record, two deletions, end"
    for number in range(1, num_operations + 1):
        copy = RunDir(copies / f"{number:04d}")
        histories.add(tuple(committed(copy)))
        assert set(names(*committed(copy))) <= set(present(copy)), (
            "files were deleted before the record"
        )
        for step in (30, 40, 50):
            assert (copy.checkpoints / f"{step:08d}-0001" / "data").read_bytes() == bytes(BYTES)
        num_leftovers += len(list(copy.checkpoints.iterdir())) > len(committed(copy))
        assert run_command("prune", copy.root) == 0, "the next prune completes"
        assert committed(copy) == [30, 40, 50]
        assert sorted(os.listdir(copy.checkpoints)) == names(30, 40, 50), "no leftover remains"
    assert histories == {(10, 20, 30, 40, 50), (30, 40, 50)}, "all or nothing, and both occurred"
    assert num_leftovers >= 4, "kills between the record and the deletions"
