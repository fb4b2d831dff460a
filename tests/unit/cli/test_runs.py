"""Runs side by side: each run is one line, and what differs between runs is all that is listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxres.__main__ import main
from jaxres.cli import runs
from jaxres.config.schema.run_config import RunConfig, RunSection
from jaxres.exit_codes import ExitCode
from jaxres.runlog.events import EVENTS, Evaluated
from jaxres.runlog.metrics import MetricsLine, MetricsLog
from jaxres.runlog.paths import RunDir
from tests.unit.checkpoint.llama_run import config, random_params, run_of

RATES = {"a": 3e-4, "b": 1e-3}


def line(step: int, loss: float | None) -> MetricsLine:
    return MetricsLine(
        seq=2,
        step=step,
        attempt=1,
        loss=loss,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=100 * step,
        step_seconds=0.5,
        skipped=False,
        samples="0",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 8 and 6 steps, one of them in a folder below, and no third one."""
    root = tmp_path_factory.mktemp("runs")
    params = random_params(config().model)
    for name, place, steps in (("a", "a", 8), ("b", "below/b", 6)):
        cfg = config()
        optimizer = cfg.optimizer.model_copy(update={"learning_rate": RATES[name]})
        section = RunSection(name=f"run {name}", tags=("tried", name))
        cfg = RunConfig.model_validate(
            cfg.model_copy(update={"optimizer": optimizer, "run": section}).model_dump()
        )
        (root / place).parent.mkdir(exist_ok=True)
        run_dir = run_of(root / place, cfg, params, steps=(4,))
        with MetricsLog(run_dir.metrics(1)) as written:
            for step in range(1, steps + 1):
                written.append(line(step, 1 / step if name == "a" else 2 / step))
        heldout = Evaluated(4, 0.5, 0.5, 4, {"heldout": 0.5 if name == "a" else 0.75})
        row = {"event": EVENTS.tag(Evaluated), "time": 0.0} | EVENTS.encode(heldout)
        run_dir.events(1, 0).write_text(json.dumps(row) + "\n")
    (root / "empty").mkdir()
    (root / ".hidden").mkdir()
    return root


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    return capsys.readouterr().out


def test_each_run_below_a_folder_is_a_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(row) for row in printed(capsys, "runs", str(folder), "--json").splitlines()]
    assert [row["run"] for row in rows] == [str(folder / "a"), str(folder / "below/b")]
    first, second = rows
    assert (first["name"], first["tags"], first["state"]) == ("run a", ["tried", "a"], "down")
    assert (first["step"], first["steps"], first["loss"]) == (8, 8, 1 / 8)
    assert (first["heldout_loss"], second["heldout_loss"]) == (0.5, 0.75)
    assert first["tokens_per_second"] == pytest.approx(200)
    assert first["train_seconds"] == pytest.approx(4.0)
    text = printed(capsys, "runs", str(folder))
    assert "(run b) #tried #b" in text
    assert "6 of 8" in text
    tagged = printed(capsys, "runs", str(folder), "--tag", "tried", "--tag", "b", "--json")
    assert [json.loads(row)["name"] for row in tagged.splitlines()] == ["run b"]
    assert printed(capsys, "runs", str(folder / "empty")) == "no runs here\n"
    assert printed(capsys, "runs", str(folder / "a"), "--json").count("\n") == 1


def test_a_damaged_run_is_a_line_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_of(tmp_path / "run", config(), random_params(config().model))
    next(iter(run_dir.log.iterdir())).write_bytes(b"nothing")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("nonsense: [")
    (tmp_path / "other" / "log").mkdir()
    listed = printed(capsys, "runs", str(tmp_path), "--json")
    rows = [json.loads(row) for row in listed.splitlines()]
    assert [row["state"] for row in rows] == ["unreadable"] * 2
    assert any("adopt" in row["problem"] for row in rows)


def test_what_differs_is_listed_and_losses_are_compared_at_equal_steps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("compare", str(folder / "a"), str(folder / "below/b"))
    compared = json.loads(printed(capsys, *words, "--json"))
    keys = {row["key"]: (row["values"], row["trajectory"]) for row in compared["config"]}
    assert keys == {
        "optimizer.learning_rate": ([3e-4, 1e-3], True),
        "run.name": (["run a", "run b"], False),
        "run.tags": ([["tried", "a"], ["tried", "b"]], False),
    }
    assert compared["config"][0]["key"] == "optimizer.learning_rate", "trajectory keys are first"
    assert [row["step"] for row in compared["losses"]] == [1, 2, 3, 4, 5, 6]
    assert compared["losses"][3]["loss"] == [1 / 4, 2 / 4]
    assert compared["heldout"] == [{"set": "heldout", "step": 4, "loss": [0.5, 0.75]}]
    assert (compared["last_step"], compared["last_loss"]) == ([8, 6], [1 / 8, 2 / 6])
    text = printed(capsys, *words, "--plot")
    assert "run.name (free)" in text
    assert "training loss over steps" in text
    same = printed(capsys, "compare", str(folder / "a"), str(folder / "a"))
    assert "configs are equal" in same


@pytest.mark.parametrize("loss", [1.5e308, -1.5e308, float("inf"), float("nan"), None])
def test_losses_of_any_size_are_drawn(loss: float | None) -> None:
    lines = [line(step, value) for step, value in enumerate((2.0, loss, -1.5e308, 1.5), 1)]
    assert "training loss over steps" in runs.plot([lines, lines[:1], []])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("compare", "A"), "compare takes two run directories or more"),
        (("compare", "A", "NO"), "no run here (no log/)"),
        (("runs", "NO"), "no such folder"),
        (("runs", "--what"), "unrecognized arguments: --what"),
    ],
)
def test_what_is_no_run_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    places = {"A": str(folder / "a"), "NO": str(folder / "nothing")}
    assert main([places.get(word, word) for word in words]) == ExitCode.USAGE
    assert says in capsys.readouterr().err


def test_steps_are_spread_evenly_and_end_with_the_last() -> None:
    for count in range(1, 40):
        steps = runs.spread(list(range(5, 5 + count)), count=10)
        assert len(steps) == min(count, 10)
        assert steps[-1] == 4 + count
        assert sorted(set(steps)) == steps


def test_a_run_directory_in_a_run_directory_is_not_listed(folder: Path) -> None:
    assert RunDir(folder / "a").root in runs.run_dirs(folder)
    assert all("log" not in str(root.name) for root in runs.run_dirs(folder))
