"""What a command can't write where its argument says is an error of the argument, not of a run."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from jaxres.__main__ import main
from jaxres.cli import report
from jaxres.config.argparser import require_writable
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageUnavailable, UsageError
from jaxres.runlog.paths import RunDir

NOWHERE = "/proc/jaxres/out"
"""Linux creates nothing below /proc, for no user, and says that its parent does not exist."""
COMMANDS = (
    "checkpoints export RUN --out OUT",
    "checkpoints import RUN --out OUT",
    "checkpoints replicate RUN OUT",
    "branch RUN --to OUT",
    "data build CONFIG --out OUT",
    "chaos run CONFIG --json /proc/out",
    "plan --gpus 8 --state-gib 1 --plot OUT",
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "log").mkdir(parents=True)
    return tmp_path / "run"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_can_not_be_created_is_a_usage_error(
    command: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    words = {"RUN": str(run_dir), "OUT": NOWHERE, "CONFIG": "configs/quickstart.yaml"}
    code = main([words.get(word, word) for word in command.split()])
    text = capsys.readouterr().err
    assert code == ExitCode.USAGE, text
    assert "/proc/" in text
    assert "Give another" in text
    assert "run directory" not in text


def test_a_page_that_can_not_be_created_is_a_usage_error(run_dir: Path):
    with pytest.raises(UsageError, match="--out /proc/out: can't be written"):
        report.text(RunDir(run_dir), as_json=False, out=Path("/proc/out"))


def test_an_output_is_tried_before_the_work_and_leaves_nothing_behind(tmp_path: Path):
    require_writable("--out", tmp_path / "a" / "b" / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"--out .*file/out: can't be written.*Give another path"):
        require_writable("--out", tmp_path / "file" / "out")


def test_a_full_disk_is_no_error_of_the_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(StorageUnavailable, match="no space left"):
        require_writable("--out", tmp_path / "out")
