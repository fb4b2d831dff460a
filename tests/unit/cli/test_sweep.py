"""`jaxres sweep` trains each combination, and goes on after an interruption."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import jaxres
from jaxres.__main__ import main
from jaxres.cli import sweep
from jaxres.cli.sweep import points_of
from jaxres.faults import UsageError
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from tests.waiting import SURE_SECONDS, wait_until

TINY = Path(__file__).parents[2] / "promises" / "tiny.yaml"


def test_each_combination_has_its_overrides_and_a_folder_named_after_them(tmp_path):
    grid = ["optimizer.learning_rate=1e-3,3e-3", "optimizer.betas=[0.9, 0.95],[0.9, 0.99]"]
    points = list(points_of(grid, ["train.steps=3"], tmp_path))
    assert [point.overrides for point in points][1] == [
        "train.steps=3",
        "optimizer.learning_rate=1e-3",
        "optimizer.betas=[0.9, 0.99]",
    ]
    assert points[0].folder == tmp_path / "learning_rate-1e-3_betas--0.9--0.95-"
    assert len({point.folder for point in points}) == 4
    same_last = ["data.seq_len=1", "model.seq_len=2"]
    (point,) = points_of(same_last, [], tmp_path)
    assert point.name == "data.seq_len-1_model.seq_len-2"


@pytest.mark.parametrize(
    "values",
    ["[é],[ü]", "'a b',a-b", "a,A", ",".join(letter * 300 for letter in "ab"), f"{'a' * 300},b"],
)
def test_combinations_never_share_a_folder(tmp_path, values):
    points = points_of([f"telemetry.sample_prompt={values}"], [], tmp_path)
    assert len({point.folder.name.lower() for point in points}) == len(points) == 2
    assert all(len(name) <= 200 for p in points for name in (p.name, p.folder.name))


@pytest.mark.parametrize("values", ["a,a.txt", "a.txt,a", "A.TXT,a"])
def test_no_folder_of_a_run_is_the_output_of_another(tmp_path, values):
    points = points_of([f"telemetry.sample_prompt={values}"], [], tmp_path)
    names = {point.folder.name.lower() for point in points}
    assert not names & {f"{name}.txt" for name in names}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--grid", "optimizer.learning_rate=1e-3,0.001"], "a combination is there twice"),
        (["--grid", "run.dir=a,b"], "the sweep itself sets run.dir"),
        (["--grid", "train.steps=1,2", "--to", "gs://bucket/s"], "give a folder of a disk"),
    ],
)
def test_runs_that_are_the_same_or_in_a_bucket_are_refused(tmp_path, capsys, words, says):
    assert main(["sweep", str(TINY), "--to", str(tmp_path / "s"), *words]) == 64
    assert says in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_file_in_place_of_the_folder_is_a_config_error(tmp_path, capsys):
    (tmp_path / "s").write_text("")
    words = ["sweep", str(TINY), "--grid", "train.steps=1,2", "--to", str(tmp_path / "s")]
    assert main(words) == 78
    assert "the folder can't be made" in capsys.readouterr().err


KILLED = """\
import os, signal, sys
from pathlib import Path
from jaxres.cli.sweep import SweepPoint, Sweep
sys.executable = sys.argv[1]
sweep = Sweep(Path("c.yaml"), [], 1, os.environ)
point = sweep._start(SweepPoint("a", [], Path(sys.argv[2])))
while not Path(sys.argv[2]).exists():
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_runs_of_a_killed_sweep_get_sigterm_so_that_they_save(tmp_path):
    fake, place = tmp_path / "python", tmp_path / "r"
    fake.write_text(
        f"#!/bin/bash\ntrap 'echo saved > {place}; exit' TERM\ntouch {place}\n"
        "while :; do sleep 0.05; done\n"
    )
    fake.chmod(0o755)
    subprocess.run([sys.executable, "-c", KILLED, str(fake), str(place)])
    wait_until(place.read_text, "save")
    assert place.read_text() == "saved\n"


class FakeRun:
    """A run that ends at the first signal."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return 75 if self.signals else None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class StartedAtASignal(sweep.SweepPoint):
    """A point that gets its process in the moment of a signal to the sweep."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "process" and value is not None:
            signal.raise_signal(signal.SIGTERM)


@dataclass
class FakeClock:
    """A clock that does not wait, and refuses to wait for ever."""

    sleeps: int = 0

    def wall(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        assert self.sleeps < 10, "the signal did not reach the run"


@pytest.mark.parametrize("kind", [sweep.SweepPoint, StartedAtASignal])
def test_a_signal_during_the_start_of_a_run_reaches_it_once(tmp_path, monkeypatch, kind):
    started: list[FakeRun] = []

    def start(*_: Any, **__: Any) -> FakeRun:
        started.append(FakeRun())
        if kind is sweep.SweepPoint:
            signal.raise_signal(signal.SIGTERM)  # Before the sweep knows the process.
        return started[-1]

    monkeypatch.setattr(sweep, "start_command", start)
    points = [kind(name, [], tmp_path / name) for name in "ab"]
    assert sweep.Sweep(TINY, points, 1, {}, FakeClock()).run() == 75
    assert [run.signals for run in started] == [[signal.SIGTERM]], "a second one kills the run"


@pytest.mark.parametrize("grid", [["a"], ["=1"], ["a="], ["a=1", "a=2"]])
def test_a_wrong_grid_is_a_usage_error(tmp_path, grid):
    with pytest.raises(UsageError, match="--grid"):
        list(points_of(grid, [], tmp_path))


def test_all_configs_are_checked_before_one_starts(tmp_path, capsys):
    words = ["sweep", str(TINY), "--to", str(tmp_path / "s")]
    assert main([*words, "--grid", "optimizer.learning_rate=1e-3,fast"]) == 78
    assert "must be a number" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_combinations_that_differ_in_the_learning_rate_alone_compile_once(tmp_path):
    command = [
        sys.executable,
        "-m",
        "jaxres",
        "sweep",
        str(TINY),
        "train.steps=4",
        "model.kind=mlp",
    ]
    command += ["--grid", "optimizer.learning_rate=1e-3,3e-3", "--to", str(tmp_path / "s")]
    command += [f"compilation.cache_dir={tmp_path}/cache", "optimizer.schedule.kind=constant"]
    command += ["optimizer.schedule.warmup_fraction=0"]
    assert subprocess.run(command).returncode == 0
    found = {}
    for run in jaxres.runs(tmp_path / "s"):
        events = read_events(RunDir(Path(run["run"])).events(1, 0))
        names = {event["event"] for event in events} & {"steps_compiled", "compiled_steps_loaded"}
        rates = {round(line["learning_rate"], 6) for line in jaxres.Run(run["run"]).metrics()}
        found[run["name"]] = (rates, names)
    assert found == {
        "learning_rate-1e-3": ({0.001}, {"steps_compiled"}),
        "learning_rate-3e-3": ({0.003}, {"compiled_steps_loaded"}),
    }


@pytest.mark.campaign
def test_an_interrupted_sweep_saves_and_the_same_command_ends_it(tmp_path):
    command = [sys.executable, "-m", "jaxres", "sweep", str(TINY), "train.steps=160"]
    command += ["--grid", "optimizer.learning_rate=1e-3,3e-3", "--parallel", "2"]
    command += ["--to", str(tmp_path / "s"), "evaluation.every_steps=0"]
    process = subprocess.Popen(command)

    def have_saved():
        rows = jaxres.runs(tmp_path / "s") if (tmp_path / "s").exists() else []
        return len(rows) == 2 and all((row["step"] or 0) >= 8 for row in rows)

    wait_until(have_saved, "step of each run")
    process.send_signal(signal.SIGINT)
    assert process.wait(SURE_SECONDS) == 76
    stopped = [row["step"] for row in jaxres.runs(tmp_path / "s")]
    assert all(8 <= step < 160 for step in stopped)
    assert subprocess.run(command).returncode == 0
    assert [row["step"] for row in jaxres.runs(tmp_path / "s")] == [160, 160]
    assert all(list((tmp_path / "s").glob("*/attempts/0002"))), "they went on"
