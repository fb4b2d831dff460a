"""The runner of the mutants, on a small tree: what is a death and what is none."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutants.run import Result, run
from tools.mutants.tables import Edit, Mutant
from tools.mutants.trees import Tree

PRODUCT = """
def half(number):
    assert number is not None, "a crash"
    return number / 2
"""
TESTS = """
import os, subprocess
import pytest
from jaxres.numbers import half

@pytest.fixture
def four():
    yield 4
    assert half(8) == 4, "in the fixture"

def test_half(four):
    assert half(four) == 2

@pytest.mark.parametrize("number", [0, 4])
def test_halves(number):
    assert half(number) + half(number) == number

@pytest.mark.slow
def test_that_is_slow():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(os.environ["PID_FILE"], "w") as file:
        file.write(str(child.pid))
    assert half(4) == 2

@pytest.mark.skip
def test_that_is_skipped():
    assert half(4) == 2

def test_of_the_word():
    with pytest.raises(TypeError):
        half("four")
"""
FILES = {
    "jaxres/__init__.py": "",
    "jaxres/numbers.py": PRODUCT,
    "tests/test_numbers.py": TESTS,
    "conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--workers')\n",
    "pytest.ini": "[pytest]\nmarkers =\n    slow:\n    gpu:\n    campaign:\n",
}
HALF = "return number / 2"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working tree."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "root"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def mutant(
    by: str, *, test: str = "test_half", old: str = HALF, raises: str | None = None
) -> Mutant:
    """Returns a mutant that replaces a text of the product."""
    edits = (Edit("jaxres/numbers.py", old, by),)
    name = "-".join([*by.split(), test, raises or ""])
    return Mutant(name, f"tests/test_numbers.py::{test}", edits, raises)


def verdicts(tree: Path, mutants: list[Mutant], **options: object) -> list[Result]:
    """Runs mutants without the imports of the libraries."""
    given = {"root": tree, "modules": (), "slots": 1} | options
    return run(mutants, **given)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_only_a_call_that_fails_by_an_assertion_or_the_named_class_is_a_death(tree, capsys):
    rows = [
        (mutant("return number / 3"), "died", "AssertionError", "call"),
        (mutant("return number / 2 "), "survived", "", ""),
        (mutant("return number / 0"), "wrong reason", "ZeroDivisionError", "call"),
        (
            mutant("return number / 0", raises="ArithmeticError"),
            "died",
            "ZeroDivisionError",
            "call",
        ),
        (mutant("return number // 2 if number < 8 else 0"), "wrong reason", "", "teardown"),
        (mutant("raise OSError\ndef half", old="def half"), "wrong reason", "", "collect"),
        (mutant("", old="def half"), "does not apply", "", ""),
        (mutant("is None", old="is not None"), "wrong reason", "AssertionError", "call"),
        (mutant("return 0", test="test_of_the_word"), "died", "Failed", "call"),
        (mutant("return number / 3", test="test_halves"), "died", "AssertionError", "call"),
        (
            mutant("return 1 / number", test="test_halves"),
            "wrong reason",
            "ZeroDivisionError",
            "call",
        ),
        (mutant("return 0", test="test_that_is_skipped"), "no verdict", "", ""),
        (mutant("return number / 2.0"), "survived", "", ""),
    ]
    found = verdicts(tree, [row[0] for row in rows])
    for (_, verdict, by, phase), result in zip(rows, found, strict=True):
        assert (result.verdict, result.phase) == (verdict, phase), result
        assert result.by == by or not by, result
    printed = capsys.readouterr().out
    assert "return-number-/-0-test_half-ArithmeticError: died by ZeroDivisionError" in printed
    assert "tools/mutants/run.py return-number-/-2-test_half-\n" in printed, (
        "the command that repeats it"
    )


@pytest.mark.slow
def test_a_slow_promise_is_run_and_what_it_has_started_is_killed(tree, tmp_path, monkeypatch):
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    (result,) = verdicts(tree, [mutant("return 0", test="test_that_is_slow")])
    assert result.verdict == "died", result
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_the_limit_is_no_death(tree):
    endless = mutant("import time; time.sleep(600)")
    (result,) = verdicts(tree, [endless], limit=1.0)
    assert (result.verdict, result.seconds < 60) == ("no verdict", True), result


def test_what_is_restored_is_as_it_was_but_for_the_time_of_what_was_changed(tree, tmp_path):
    (tree / "link").symlink_to("conftest.py")
    copy = Tree(tmp_path / "copy", tree)
    times = {(tmp_path / "copy" / "conftest.py").stat().st_mtime}
    for _ in range(3):
        (copy.folder / "tests" / "left").mkdir()
        (copy.folder / "tests" / "left" / "file").touch()
        (copy.folder / "conftest.py").write_text("")
        (copy.folder / "pytest.ini").unlink()
        (copy.folder / "link").unlink()
        (copy.folder / "jaxres" / "__init__.py").chmod(0o700)
        copy.restore()
        times.add((copy.folder / "conftest.py").stat().st_mtime)
    assert len({int(time) for time in times}) == 4, "bytecode of another version fits"
    compared = subprocess.run(["diff", "-r", "--no-dereference", tree, copy.folder])
    assert compared.returncode == 0
    assert (copy.folder / "jaxres" / "__init__.py").stat().st_mode & 0o777 != 0o700


@pytest.mark.slow
def test_a_file_of_results_says_what_need_not_be_run_again(tree, tmp_path):
    file = tmp_path / "results"
    dead, alive = mutant("return 0"), mutant("return number / 2 ")
    before = verdicts(tree, [dead, alive], results=file)
    after = verdicts(tree, [dead, alive], results=file)
    assert [result.verdict for result in before + after] == ["died", "survived"] * 2
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["verdict"] for line in lines] == ["died", "survived", "survived"]
    assert {*lines[0]} == {"mutant", "verdict", "by", "phase", "seconds", "reason", "digest"}
    changed = replace(dead, edits=mutant("return number * 0.5").edits)
    (result,) = verdicts(tree, [changed], results=file)
    assert result.verdict == "survived", "the line is of another change"
