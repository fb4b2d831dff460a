"""The table of exit codes is complete, is the documented contract, and is the only one."""

import ast
import signal
from pathlib import Path

import pytest

import jaxres
from jaxres import exit_codes
from jaxres.exit_codes import (
    PROGRAM_ROWS,
    ROWS,
    ExitCode,
    ProgramEnd,
    RestartRule,
    Severity,
    exit_name,
    exit_row,
    of_program,
    remedy,
)

PACKAGE = Path(jaxres.__file__).parent
CONTRACT = {
    "DONE": 0,
    "USAGE": 64,
    "BUG": 70,
    "STORAGE": 74,
    "PREEMPTED": 75,
    "STOPPED": 76,
    "CONFIG": 78,
    "PEER_LOST": 79,
    "HUNG": 80,
    "DIVERGED": 81,
    "UNHEALTHY": 82,
    "FENCED": 83,
    "NO_PROGRESS": 84,
    "UNRESTORABLE": 85,
    "OUT_OF_MEMORY": 86,
}
"""Launchers rely on these numbers: a change here is a breaking one."""


def test_exit_codes_do_not_change():
    assert {exit.name: exit.value for exit in ExitCode} == CONTRACT


def test_each_code_has_one_row_in_ascending_order():
    assert [row.code for row in ROWS] == sorted(ExitCode)
    assert [row.name for row in ROWS] == [code.name for code in ExitCode]


def test_every_code_and_signal_has_one_text():
    assert exit_name(ExitCode.HUNG) == "80 HUNG"
    assert exit_name(128 + signal.SIGKILL) == "137 signal 9 (SIGKILL)"
    assert exit_name(128 + 40) == "168 signal 40"
    assert exit_name(3) == "3 unknown"


@pytest.mark.parametrize("code", [*ExitCode, 137, 3])
def test_each_code_has_a_meaning_and_a_remedy(code):
    assert exit_row(code).meaning.endswith(".")
    assert remedy(code)
    assert "{" not in remedy(code, command="COMMAND", stacks="STACKS")


def test_a_crash_restarts_within_the_budget_and_blames_its_host():
    row = exit_row(128 + signal.SIGSEGV)
    assert (row.severity, row.restart) == (Severity.FAILURE, RestartRule.FAILURE_BUDGET)
    assert row.blames_host
    assert not row.resumes_unattended
    assert exit_row(128 + signal.SIGTERM).resumes_unattended


def test_a_stop_signal_requests_a_graceful_exit():
    assert exit_codes.STOP_SIGNALS == {
        signal.SIGTERM: ExitCode.PREEMPTED,
        signal.SIGHUP: ExitCode.PREEMPTED,
        signal.SIGINT: ExitCode.STOPPED,
    }
    assert exit_codes.STOP_REQUESTS == (None, ExitCode.PREEMPTED, ExitCode.STOPPED)
    assert all(exit_row(code).is_graceful for code in exit_codes.STOP_SIGNALS.values())


def test_the_printed_table_is_the_one_in_docs():
    assert (PACKAGE.parent / "docs" / "exit-codes.md").read_text() == exit_codes.table()


def _members(node: ast.expr) -> list[ast.expr]:
    """Returns the elements of a literal, nested ones too."""
    if isinstance(node, ast.Starred):
        return _members(node.value)
    if isinstance(node, ast.Tuple | ast.Set | ast.List):
        return [member for element in node.elts for member in _members(element)]
    if isinstance(node, ast.Dict):
        inner = [*(key for key in node.keys if key), *node.values]
        return [member for element in inner for member in _members(element)]
    return [node]


def _groupings(path: Path) -> list[str]:
    """Returns where a literal groups two or more codes."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Tuple | ast.Set | ast.List | ast.Dict):
            names = {ast.unparse(member) for member in _members(node)}
            codes = sorted(name for name in names if name.startswith("ExitCode."))
            if len(codes) > 1:
                found.append(f"{path.name}:{node.lineno}: {', '.join(codes)}")
    return found


def test_no_other_module_groups_codes():
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "exit_codes.py"]
    assert len(files) > 100
    files = [path for path in files if path.read_text().count("ExitCode.") > 1]
    assert [grouping for path in files for grouping in _groupings(path)] == []


def test_a_grouping_is_found(tmp_path):
    path = tmp_path / "one.py"
    path.write_text("A = (*(ExitCode.BUG, 1), ExitCode.DONE)\nB = {ExitCode.BUG: 1}\n")
    assert _groupings(path) == ["one.py:1: ExitCode.BUG, ExitCode.DONE"]


SIGTERM, SIGKILL = -signal.SIGTERM, -signal.SIGKILL
ENDS = (
    *((0, ProgramEnd(code, requested=ExitCode.PREEMPTED), 75) for code in (0, 75, 76, 143)),
    (0, ProgramEnd(SIGTERM, requested=ExitCode.STOPPED), 76),
    (0, ProgramEnd(75, requested=ExitCode.STOPPED, announced=75), 76),
    (0, ProgramEnd(SIGKILL, requested=ExitCode.STOPPED, was_killed=True), 76),
    (1, ProgramEnd(81, announced=81), 81),
    (1, ProgramEnd(76, announced=76), 76),
    (1, ProgramEnd(0, announced=75), 75),
    (2, ProgramEnd(0), 0),
    (3, ProgramEnd(SIGKILL, was_out_of_memory=True), 86),
    (4, ProgramEnd(SIGKILL), 137),
    (4, ProgramEnd(137), 137),
    (4, ProgramEnd(SIGTERM), 143),
    (4, ProgramEnd(-signal.SIGSEGV, was_out_of_memory=True), 139),
    *((5, ProgramEnd(code), code) for code in (74, 75, 78, 79, 81, 82, 85, 86)),
    (6, ProgramEnd(64), 78),
    *((7, ProgramEnd(code), 70) for code in (1, 2, 70, 76, 80, 83, 84, 127, 255)),
    (7, ProgramEnd(83, announced=75), 70),
    (7, ProgramEnd(1, requested=ExitCode.PREEMPTED), 70),
)
"""Row of the table, end of a program, exit code of the attempt."""


@pytest.mark.parametrize(("row", "end", "code"), ENDS)
def test_each_end_of_a_program_has_one_exit_code(row, end, code):
    assert next(n for n, one in enumerate(PROGRAM_ROWS) if one.matches(end)) == row
    assert of_program(end)[0] == code


def test_every_row_of_the_ends_of_a_program_has_a_case():
    assert {row for row, _, _ in ENDS} == set(range(len(PROGRAM_ROWS)))
