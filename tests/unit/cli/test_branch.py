"""What `jaxres branch` copies and refuses; a damaged step is never the beginning of a run."""

from __future__ import annotations

import fcntl
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxres.__main__ import main
from jaxres.checkpoint.read import manifest
from jaxres.checkpoint.read.verify import verify_step
from jaxres.cli.branch import decides_arrays_or_rows
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.supervisor.run_config import resolve_run
from tests import damage
from tests.unit.checkpoint.llama_run import config, random_params, run_of


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    cfg = config()
    return run_of(
        tmp_path_factory.mktemp("origin") / "run", cfg, random_params(cfg.model), steps=(4, 8)
    )


def branch(origin: RunDir, to: Path, *words: str) -> int:
    return main(["branch", str(origin.root), "--to", str(to), *words])


def arrays(run_dir: RunDir) -> dict[str, np.ndarray]:
    commit = run_log.fold(run_log.read_records(run_dir.log)).committed[-1]
    step_dir = (run_dir.root / commit.path).absolute()
    assert not verify_step(step_dir, commit).problems
    return manifest.read_arrays(step_dir, commit)


@pytest.mark.slow
def test_a_branch_has_every_array_and_names_its_origin(
    origin: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert branch(origin, tmp_path / "b", "--step", "4", "optimizer.learning_rate=0.5") == 0
    assert "optimizer.learning_rate: 0.0003 -> 0.5\n" in capsys.readouterr().out
    run_dir = RunDir(tmp_path / "b")
    history = run_log.fold(run_log.read_records(run_dir.log))
    assert history.origin is not None
    assert (history.step, history.origin.step) == (4, 4)
    assert (history.dataset, history.origin.path) == ("d", str(origin.root))
    assert resolve_run(run_dir.root, ())[0].config.optimizer.learning_rate == 0.5
    copied = arrays(run_dir)
    commit = run_log.fold(run_log.read_records(origin.log)).committed[0]
    there = manifest.read_arrays((origin.root / commit.path).absolute(), commit)
    assert copied.keys() == there.keys()
    assert all(np.array_equal(copied[path], there[path]) for path in there)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"], "a temporary folder is left"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--step", "5"], ExitCode.CONFIG, "step 5 is not committed (committed: 4, 8)"),
        (["model.num_layers=3"], ExitCode.CONFIG, "model.num_layers: a branch takes arrays and"),
        (["data.seq_len=8"], ExitCode.CONFIG, "data.seq_len: a branch takes arrays and rows"),
        (["optimizer.ema_decay=0.9"], ExitCode.CONFIG, "optimizer.ema_decay: a branch takes"),
        (["optimizer={kind: sgd}"], ExitCode.CONFIG, "optimizer.kind: a branch takes"),
        (["run.seed=7"], ExitCode.CONFIG, "run.seed: a branch takes arrays and rows"),
        (["train.steps=7"], ExitCode.CONFIG, "train.steps: 7 is before step 8"),
        (["run.dir=other"], ExitCode.USAGE, "run.dir: the directory of the new run is given by"),
        (["optimizer.rate=3"], ExitCode.CONFIG, "optimizer.rate: unknown key"),
        (["--what"], ExitCode.USAGE, "unrecognized arguments: --what"),
    ],
)
def test_a_branch_that_can_not_be_made_leaves_nothing(
    origin: RunDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    says: str,
) -> None:
    assert branch(origin, tmp_path / "b", *words) == code
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_batch_size_of_a_mixture_with_a_schedule_and_arrays_of_adafactor_are_kept() -> None:
    text = {"kind": "text", "path": "x"}
    mixture = {
        "kind": "mixture",
        "sources": ({"name": "a", "weight": 1, "source": text},),
        "schedule": ({"after_step": 10, "weights": {"a": 2}},),
    }

    def keeps(source: dict[str, Any], key: str, old: object, new: object) -> bool:
        fields = {"data": {"source": source}, "train": {"steps": 1}}
        return decides_arrays_or_rows(RunConfig.model_validate(fields), key, old, new)

    assert keeps(mixture, "train.global_batch_size", 4, 8)
    assert not keeps({**mixture, "schedule": ()}, "train.global_batch_size", 4, 8)
    assert not keeps(text, "train.global_batch_size", 4, 8)
    assert keeps(text, "optimizer.momentum", None, 0.9)
    assert not keeps(text, "optimizer.momentum", 0.8, 0.9)
    assert keeps(text, "optimizer.min_dim_size_to_factor", 128, 16)


def test_the_best_step_is_branched_from(origin: RunDir, tmp_path: Path) -> None:
    """The run has no held-out loss, so that none is the best."""
    assert branch(origin, tmp_path / "b", "--step", "best") == ExitCode.CONFIG
    assert branch(origin, tmp_path / "b", "--step", "newest") == 0


def test_what_a_killed_branch_has_left_is_deleted_by_the_next_and_a_live_one_stays(
    origin: RunDir, tmp_path: Path
) -> None:
    dead, live = (tmp_path / f".b.{12 * letter}.tmp" for letter in "ab")
    other = tmp_path / f".c.{12 * 'a'}.tmp"
    for left in (dead, live, other):
        shutil.copytree(origin.root, left)
        RunDir(left).lock.touch()
    with RunDir(live).lock.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert branch(origin, tmp_path / "b") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [live.name, other.name, "b"]


def test_what_is_locked_by_no_file_is_not_deleted(origin: RunDir, tmp_path: Path) -> None:
    left = tmp_path / f".b.{12 * 'a'}.tmp"
    shutil.copytree(origin.root, left)
    RunDir(left).lock.unlink(missing_ok=True)
    RunDir(left).lock.symlink_to("/dev/null")
    assert branch(origin, tmp_path / "b") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "b"]


def test_a_branch_writes_over_nothing(
    origin: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    assert branch(origin, tmp_path) == ExitCode.USAGE
    assert branch(origin, tmp_path / "file") == ExitCode.USAGE
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_what_the_manifest_does_not_list_is_not_copied(tmp_path: Path) -> None:
    cfg = config()
    run_dir = run_of(tmp_path / "run", cfg, random_params(cfg.model))
    (commit,) = run_log.fold(run_log.read_records(run_dir.log)).committed
    step_dir = Path(run_dir.root, commit.path)
    (step_dir / "extra").write_text("no part of the step")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("another file of the account")
    (step_dir / "linked").symlink_to(tmp_path / "private" / "key")
    (step_dir / "state" / "folder").symlink_to(tmp_path / "private")
    assert branch(run_dir, tmp_path / "b") == 0
    copied = Path(tmp_path, "b", commit.path)
    names = {path.relative_to(copied).as_posix() for path in copied.rglob("*") if path.is_file()}
    (new,) = run_log.fold(run_log.read_records(RunDir(tmp_path / "b").log)).committed
    assert names == {*manifest.load(copied, new).files, "MANIFEST.json"}


def test_a_damaged_step_is_no_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config()
    run_dir = run_of(tmp_path / "run", cfg, random_params(cfg.model))
    (commit,) = run_log.fold(run_log.read_records(run_dir.log)).committed
    largest: Any = max(
        (path for path in (run_dir.root / commit.path).rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    damage.flip_bit(largest, random.Random(0))
    assert branch(run_dir, tmp_path / "b") == ExitCode.STORAGE
    assert "checkpoints verify" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
