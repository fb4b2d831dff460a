"""Which run a command means, and when none is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.faults import ConfigError, StorageUnavailable, UsageError
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.process.worker_group import WorkerGroup
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
