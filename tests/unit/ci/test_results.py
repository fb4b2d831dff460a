"""The result file keeps what it is given, and a landing adds what has passed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.ci import campaign, change, executed
from tools.ci.results import ROOT, Entry, Results, lines, read, with_landing, write

FILES = frozenset({"jaxres/a.py", "jaxres/b.py"})
RESULTS = Results(
    "c0ffee",
    {"slow": "c0ffee", "fast": "c0ffee"},
    3,
    {"tests/x.py::one[a-1]": Entry(12.5, 3.1, 2, FILES), "tests/x.py::two": Entry(1.0, 0.5, 3)},
    {"a-mutant": Entry(4.0, 4.0, 1)},
)


def slow(name: str, outcome: str = "passed") -> dict[str, object]:
    return {"test": name, "outcome": outcome, "wall": 9.0, "processor": 8.0, "tier": "slow"}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write(RESULTS, tmp_path / "results.json")
    assert read(tmp_path / "results.json") == RESULTS
    assert (tmp_path / "results.json").read_text().count("\n") > 9, "one line for each test"


def test_without_a_file_nothing_has_passed(tmp_path: Path) -> None:
    assert read(tmp_path / "absent.json") == Results()


def test_a_landing_records_what_has_passed_and_keeps_what_was_executed() -> None:
    tests = [slow("tests/x.py::one[a-1]"), slow("tests/x.py::two", "failed")]
    died = [{"mutant": "new", "verdict": "died", "seconds": 2.0}]
    lived = [{"mutant": "a-mutant", "verdict": "survived", "seconds": 2.0}]
    after = with_landing(RESULTS, tests, died + lived)
    assert after.landing == 4
    assert after.tests["tests/x.py::one[a-1]"] == Entry(9.0, 8.0, 4, FILES)
    assert after.tests["tests/x.py::two"].landing == 3, "a failure counts as a run"
    assert (after.mutants["new"].landing, after.mutants["a-mutant"].landing) == (4, 1)
    assert after.passed == "c0ffee"


def test_half_a_line_of_an_interrupted_run_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"test": "a"}\n{"te')
    assert lines(tmp_path / "x.jsonl") == [{"test": "a"}]


def test_a_commit_that_is_no_ancestor_is_no_base() -> None:
    assert change.changed_since(None) is None
    assert change.changed_since("0" * 40) is None


def test_a_campaign_names_its_commit_for_each_part_and_for_all_once_all_have_passed(
    tmp_path: Path,
) -> None:
    (tmp_path / "executed").mkdir()
    (tmp_path / "executed" / "7").write_text(
        f"tests/x.py::one[a-1]\t{ROOT}/jaxres/c.py:1-9\ntests/x.py::one[a-1]\t/elsewhere/d.py:1-2\n"
    )
    (tmp_path / "tests.jsonl").write_text(json.dumps(slow("tests/x.py::one[a-1]")) + "\n")
    ended: dict[str, int | None] = {"slow": 0, "mutants": 1, "campaign": 0, "versions": None}
    (tmp_path / "parts.json").write_text(json.dumps(ended))
    after = campaign.merged(RESULTS, tmp_path, commit="beef")
    assert after.passed == "c0ffee"
    assert after.parts == {"slow": "beef", "campaign": "beef", "fast": "c0ffee"}
    assert after.tests["tests/x.py::one[a-1]"].executed == {"jaxres/c.py"}
    (tmp_path / "parts.json").write_text(json.dumps(ended | {"mutants": 0}))
    assert campaign.merged(RESULTS, tmp_path, commit="beef").passed == "c0ffee", "fast has not run"
    (tmp_path / "parts.json").write_text(json.dumps(ended | {"mutants": 0, "fast": 0}))
    assert campaign.merged(RESULTS, tmp_path, commit="beef").passed == "beef"


@pytest.mark.parametrize("ends", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_a_process_executes_is_recorded_for_its_test_even_if_it_is_killed(
    tmp_path: Path, ends: str
) -> None:
    (tmp_path / "jaxres").mkdir()
    (tmp_path / "jaxres" / "__init__.py").touch()
    module = 'def f():\n    """Doc."""\n    return 1\n\ndef g():\n    return f()\n\ndef h(): pass\n'
    (tmp_path / "jaxres" / "m.py").write_text(module)
    (folder := tmp_path / "executed").mkdir()
    code = f"""
import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
from tools.ci import executed
executed.start({str(folder)!r})
from jaxres import m
assert (m.g(), m.g(), m.f.__doc__) == (1, 1, "Doc.")
{ends}
"""
    env = {"PYTEST_CURRENT_TEST": "tests/x.py::test[a b] (call)"}
    subprocess.run([sys.executable, "-I", "-c", code], env=env, check=not ends)
    assert executed.read(folder, root=tmp_path) == {
        "tests/x.py::test[a b]": {"jaxres/m.py:1-3", "jaxres/m.py:5-6"}
    }
