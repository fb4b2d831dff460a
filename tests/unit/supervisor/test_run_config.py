"""Which run a command means, and when none is started."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.faults import ConfigError, StorageUnavailable, UsageError
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import OWN_LOOP
from jaxres.runlog.run_log import RunLog, Start
from jaxres.supervisor import attempt_runner, run_config
from jaxres.supervisor.process import worker_group
from jaxres.supervisor.process.worker_group import WorkerGroup, versions
from jaxres.supervisor.run_config import parse_target, resolve_run
from jaxres.supervisor.run_lock import RunLock
from tests.promises.trainer import ROOT, TINY
from tests.unit.runlog.example_records import CLAIM


def test_a_run_that_must_exist_is_not_started_where_there_is_none(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    overrides = [f"run.dir={run_dir.root}", "run.must_exist=true"]
    for make in (lambda: None, run_dir.root.mkdir, run_dir.log.mkdir):
        make()
        with pytest.raises(ConfigError, match=r"no run is here.*run.must_exist.*mounted\?"):
            resolve_run(TINY, overrides)
    RunLog.claim(run_dir.log, CLAIM, after=[], clock=SystemClock())
    assert resolve_run(TINY, overrides)[1] == run_dir


def test_a_name_that_differs_only_in_case_from_a_run_is_not_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that ignores case the directory exists, and its folder lists the other name."""
    for name in ("Mine", "mine"):
        (tmp_path / name).mkdir()
        resolve_run(TINY, [f"run.dir={tmp_path / name}"])
    real = os.listdir

    def listed(folder: Path) -> list[str]:
        return ["Mine", "other"] if folder == tmp_path else real(folder)

    monkeypatch.setattr(os, "listdir", listed)
    assert resolve_run(TINY, [f"run.dir={tmp_path}/Mine"])[1].root == tmp_path / "Mine"
    assert resolve_run(TINY, [f"run.dir={tmp_path}/new"])[1].root == tmp_path / "new"
    with pytest.raises(ConfigError, match=r"on this disk that is .*/Mine, because it ignores"):
        resolve_run(TINY, [f"run.dir={tmp_path}/mine"])


def test_a_config_does_not_go_on_with_a_users_loop(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    claim = dataclasses.replace(CLAIM, trajectory=OWN_LOOP)
    RunLog.claim(run_dir.log, claim, after=[], clock=SystemClock())
    with pytest.raises(ConfigError, match=r"has the checkpoints of a loop of its own"):
        resolve_run(TINY, [f"run.dir={run_dir.root}"])
    assert not run_dir.config.exists()


def test_a_run_whose_records_are_gone_is_not_claimed_as_a_new_one(tmp_path: Path) -> None:
    run_dir, clock = RunDir(tmp_path / "run"), SystemClock()
    config = resolve_run(TINY, [f"run.dir={run_dir.root}"])[0].config
    with (
        RunLock(run_dir, clock=clock) as lock,
        pytest.raises(StorageUnavailable, match="2 records existed, 0 are left"),
    ):
        attempt_runner.claim_attempt(config, lock, job=WorkerGroup(), env={}, known=2)
    assert not run_dir.log.exists()


@pytest.mark.parametrize("name", ["-a", "a=b", "a b", "ünï"])
def test_a_run_directory_of_any_name_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.yaml").write_text(TINY.read_text())
    monkeypatch.chdir(tmp_path)
    given, overrides = parse_target([f"./{name}", "run.seed=3"], command="jaxres train")
    loaded, run_dir = resolve_run(given, overrides)
    assert (run_dir.root, loaded.config.run.seed) == (folder, 3)
    monkeypatch.chdir(ROOT)
    assert resolve_run(Path(f"{folder}/../{name}"), ["run.dir=" + str(folder)])[1] == run_dir
    with pytest.raises(ConfigError, match="the run directory is given already"):
        resolve_run(folder, ["run.dir=elsewhere"])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("train.steps=1 train.steps=2", "train.steps"),
        ("train={steps: 1} train.steps=2", "train.steps"),
        ("train.steps=1 run.seed=3 train={steps: 2}", "train.steps"),
        ("guards.rollback.window_steps=9 guards.rollback=null", "guards.rollback"),
        ("train.steps=1 run.seed=1 train.steps=1 train={microbatches: 2}", None),
        ("alerts.targets=[{kind: slack, url: https://a/one}] alerts.targets=[]", "alerts.targets"),
    ],
)
def test_a_key_that_is_given_twice_is_told(
    words: str, key: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = re.split(r" (?=[\w.]+=)", words)
    assert parse_target(["a.yaml", *overrides], command="jaxres train")[1] == overrides
    told = capsys.readouterr().err
    assert told.startswith(f"WARNING: {key}: given twice; ") if key else told == ""
    assert "https://a/one" not in told


def test_a_run_directory_where_nothing_can_be_saved_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a[b]").mkdir()
    with pytest.raises(ConfigError, match=r"RUN_DIR: 'a\[b\]' has one of"):
        resolve_run(tmp_path / "a[b]", [])
    with pytest.raises(UsageError, match="must be a local path or gs://"):
        parse_target(["s3://bucket/run"], command="jaxres train")


@pytest.mark.parametrize(
    ("source", "mode"),
    [
        ("{kind: custom, target: 'a:b', args: {token: hidden}}", 0o600),
        ("{kind: custom, target: 'a:b', args: {part: 5}}", 0o600),
        ("{kind: custom, target: 'a:b'}", 0o644),
        ("{kind: text, path: '{stdlib}'}", 0o644),
    ],
)
def test_a_recorded_config_with_arguments_of_custom_data_is_private(
    tmp_path: Path, source: str, mode: int
) -> None:
    run_dir, clock = RunDir(tmp_path), SystemClock()
    config = configs.load(TINY, [f"run.dir={tmp_path}", f"data.source={source}"]).config
    before = os.umask(0o022)
    try:
        with RunLock(run_dir, clock=clock) as lock:
            attempt_runner.claim_attempt(config, lock, job=WorkerGroup(), env={}, known=0)
    finally:
        os.umask(before)
    written = sorted(tmp_path.rglob("config.yaml"))
    assert [path.stat().st_mode & 0o777 for path in written] == [mode, mode]


@pytest.fixture
def started(tmp_path: Path) -> RunDir:
    """A run of one attempt that has started."""
    run_dir, clock = RunDir(tmp_path / "run"), SystemClock()
    config = resolve_run(TINY, [f"run.dir={run_dir.root}"])[0].config
    claim = dataclasses.replace(CLAIM, trajectory=configs.digest(config), versions=versions())
    log = RunLog.claim(run_dir.log, claim, after=[], clock=clock)
    run_config.record(config, run_dir, 1, [], print)
    log.append(Start(step=0, path=None, dataset="", computation={}))
    return run_dir


def test_a_recorded_config_that_was_edited_is_refused(started: RunDir) -> None:
    copy = started.attempt(1) / "config.yaml"
    assert isinstance(copy, Path)
    resolve_run(started.root, [])
    text = copy.read_text()
    copy.write_text(re.sub("learning_rate: .*", "learning_rate: 0.02", text))
    assert copy.read_text() != text
    for target, overrides in ((started.root, []), (TINY, [f"run.dir={started.root}"])):
        with pytest.raises(ConfigError, match=r"config\.yaml: was edited"):
            resolve_run(target, overrides)
    copy.write_text(text + "# A note.\n")
    resolve_run(started.root, [])


def test_an_edit_of_the_config_of_a_run_directory_has_no_effect_and_is_told(
    started: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    path = started.config
    assert isinstance(path, Path)
    text, config = path.read_text(), resolve_run(started.root, [])[0].config
    for changed in (re.sub("learning_rate: .*", "learning_rate: 0.02", text), "no: config", ""):
        path.write_text(changed)
        assert capsys.readouterr().err == ""
        assert resolve_run(started.root, [])[0].config == config
        assert "edits of it have no effect" in capsys.readouterr().err
    path.write_text(text + "# A note.\n")
    resolve_run(started.root, [])
    assert capsys.readouterr().err == ""


def test_without_proc_the_error_says_how_to_mount_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "BOOT_ID", tmp_path / "none")
    with pytest.raises(ConfigError, match="jaxres needs /proc: mount it"):
        worker_group.boot_id()
