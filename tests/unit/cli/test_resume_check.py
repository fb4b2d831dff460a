"""`jaxres resume-check`: bad input, what it overrides, and what `doctor` knows of its results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxres import config as configs
from jaxres.cli import resume_check
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageRefused
from jaxres.operate.chaos.short_runs import Topology, shortened
from jaxres.train import kept_results, resume_results
from jaxres.train.chaos_hooks import break_hook
from jaxres.train.resume_results import KnownResume, ResumeCheckResult

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "promises" / "tiny.yaml"
CONFIGS = sorted(ROOT.glob("configs/*.yaml"))


@pytest.fixture
def config(tmp_path: Path) -> configs.RunConfig:
    return configs.load(TINY, [f"data.cache_dir={tmp_path}"]).config


def result(**changes: Any) -> ResumeCheckResult:
    found = ResumeCheckResult(
        config="tiny",
        trajectory="x",
        guarantee="bitwise",
        summary="guarantee: bitwise here",
        cause="",
        topologies={},
        first_difference=None,
        runs=(),
        versions=kept_results.versions_here(),
        devices="1 x cpu",
        steps=12,
        seed=0,
        overridden=(),
        seconds=1.0,
        date="2026-11-26",
    )
    return dataclasses.replace(found, **changes)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_a_check_computes_the_trajectory_of_the_config(path: Path) -> None:
    config = configs.load(path).config
    short = configs.load(path, shortened(config, steps=12, save_every=3, breaks=3)).config
    assert configs.digest(short) == configs.digest(config)
    assert short.train.steps == 12
    assert short.checkpoint.keep.last >= 12, "a pruned step can't be compared"
    waits = short.restart.max_storage_attempts * short.restart.storage_backoff_seconds
    assert waits < 10, "storage that fails without a fault ends the check soon"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["/nowhere.yaml"], ExitCode.USAGE, "no such file"),
        ([str(TINY), "train.stepz=1"], ExitCode.CONFIG, "train.stepz"),
        ([str(TINY), "run.dir=/tmp/x"], ExitCode.USAGE, "--to chooses where"),
        ([str(TINY), "--steps", "3"], ExitCode.USAGE, "expected more than --breaks (3)"),
        ([str(TINY), "--breaks", "0"], ExitCode.USAGE, "--breaks 0: expected 1 to"),
        ([str(TINY), "--topology", "2by4"], ExitCode.USAGE, "as in 2x4"),
        ([str(TINY), "--to", "gs://bucket/x"], ExitCode.USAGE, "a folder of a disk"),
        ([str(TINY), "--to", str(ROOT)], ExitCode.CONFIG, "it is not empty"),
    ],
)
def test_bad_input_is_one_clear_error_and_nothing_runs(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume_check.main(arguments, env={}) == code
    printed = capsys.readouterr()
    assert text in printed.err
    assert printed.out == ""


def test_a_topology_has_hosts_and_perhaps_devices() -> None:
    assert resume_check._topology("2") == Topology(2, None)
    assert resume_check._topology("2x4") == Topology(2, 4)
    assert Topology(2, 4).arguments() == ["--hosts", "2", "--devices-per-host", "4"]


def test_a_result_is_found_for_its_trajectory_only(config: configs.RunConfig) -> None:
    assert "never tested" in resume_results.read(config).text
    resume_results.store(config, result())
    assert resume_results.read(config) == KnownResume(
        True, "guarantee: bitwise here", date="2026-11-26", devices="1 x cpu"
    )
    free = config.model_copy(update={"hooks": (), "train": config.train.model_copy()})
    assert resume_results.read(free).is_good
    other = config.run.model_copy(update={"seed": 7})
    assert "never tested" in resume_results.read(config.model_copy(update={"run": other})).text


@pytest.mark.parametrize("level", ["different", "not tested"])
def test_a_result_that_is_not_bitwise_is_not_good(config: configs.RunConfig, level: str) -> None:
    resume_results.store(config, result(guarantee=level, summary="guarantee: none"))
    found = resume_results.read(config)
    assert not found.is_good
    assert "guarantee: none" in found.text


def test_a_result_of_other_versions_is_not_good(config: configs.RunConfig) -> None:
    versions = kept_results.versions_here() | {"jax": "0.1"}
    resume_results.store(config, result(versions=versions))
    found = resume_results.read(config)
    assert not found.is_good
    assert "jax 0.1 -> " in found.text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"versions": 3}', "\xff"])
def test_a_damaged_result_is_a_warning(config: configs.RunConfig, text: str) -> None:
    path = resume_results.store(config, result())
    path.write_text(text, encoding="latin-1")
    found = resume_results.read(config)
    assert not found.is_good
    assert "can't be read" in found.text


class Context:
    """A hook's context."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self.run_dir, self.step, self.host = run_dir, step, 0


def test_the_hook_holds_once_after_the_planned_step_of_a_broken_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    break_hook.hold(Context(run_dir, 3))  # Not planned: an unbroken run.
    break_hook.plan_next(run_dir, number=0, step=3)
    break_hook.hold(Context(run_dir, 2))
    held = break_hook.reached(run_dir, number=0)
    assert not held.exists()
    break_hook.release(run_dir, number=0)  # Before it holds, so that it does not wait here.
    break_hook.hold(Context(run_dir, 3))
    assert json.loads(held.read_text()) > 0
    before = held.stat().st_ino
    break_hook.hold(Context(run_dir, 3))  # The step is computed again after the resume.
    assert held.stat().st_ino == before


def test_a_result_that_can_not_be_kept_is_told_and_no_failure() -> None:
    def store() -> Path:
        raise StorageRefused("the disk is full")

    assert kept_results.kept(store) == "not kept for jaxres doctor: the disk is full"
    assert kept_results.kept(lambda: Path("x")) == "kept in x"
