"""A word that a command does not know is shown without what may be a password."""

import pytest

from jaxres.__main__ import main
from jaxres.exit_codes import ExitCode

WORD = "hunter2:pass:word"
COMMANDS = (
    "{}",
    "data {}",
    "data show c.yaml {}",
    "data show {}",
    "data show c.yaml --{}",
    "checkpoints {} x",
    "plan --gpus {}",
    "doctor c.yaml --devices {}",
    "chaos run c.yaml {}",
    "evaluate x {}",
    "sample x {}",
    "runs x {}",
    "compare --{} x",
    "branch x --to y --{}",
    "sweep c.yaml --grid a.b=1 --{}",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_word_that_is_not_known_shows_no_password(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("train: {steps: 1}\n")
    code = main(command.format(WORD).split())
    printed = capsys.readouterr().err
    assert code in (ExitCode.USAGE, ExitCode.CONFIG)
    assert "hunter2:<secret>" in printed
    assert "word" not in printed
