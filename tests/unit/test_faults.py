import ast
import inspect
import re
from pathlib import Path

from jaxres import faults
from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError


def test_every_run_error_has_its_own_exit_code_and_a_docstring():
    errors = [
        kind
        for _, kind in inspect.getmembers(faults, inspect.isclass)
        if issubclass(kind, RunError) and kind is not RunError
    ]
    exits = {kind.__name__: kind.exit_code for kind in errors}
    assert exits == {
        "UsageError": ExitCode.USAGE,
        "ConfigError": ExitCode.CONFIG,
        "StorageUnavailable": ExitCode.STORAGE,
        "StorageRefused": ExitCode.STORAGE,
        "Fenced": ExitCode.FENCED,
        "Unrestorable": ExitCode.UNRESTORABLE,
        "OutOfMemory": ExitCode.OUT_OF_MEMORY,
        "PeerLost": ExitCode.PEER_LOST,
        "PreemptedError": ExitCode.PREEMPTED,
        "StoppedError": ExitCode.STOPPED,
        "DivergedError": ExitCode.DIVERGED,
        "UnhealthyHost": ExitCode.UNHEALTHY,
    }
    assert all(kind.__doc__ for kind in errors)


def test_rows_of_the_table_are_unique_and_found_by_name():
    names = [fault.name for fault in faults.ALL]
    assert len(names) == len(set(names))
    assert [faults.fault(name) for name in names] == list(faults.ALL)


def test_the_module_of_every_fault_names_the_fault():
    root = inspect.getfile(faults).removesuffix("faults.py")
    for fault in faults.ALL:
        with open(root + fault.module) as file:
            assert f"Home of: {fault.name}" in file.read(), fault


def test_the_printed_table_has_one_row_per_fault():
    rows = [row for row in faults.table().splitlines() if row.startswith("| ")][1:]
    assert len(rows) == len(faults.ALL)
    for row, fault in zip(rows, faults.ALL, strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5, row
        exit = f"{fault.exit.value} {fault.exit.name}" if fault.exit is not None else ""
        assert cells == [fault.name, fault.scope, fault.module, fault.response, exit]


def test_a_state_that_may_be_wrong_is_never_called_good():
    for name in ("nonfinite_update", "diverged", "silent_corruption", "unhealthy_device"):
        assert not faults.fault(name).state_is_good
    for name in ("preemption", "operators_stop"):
        assert faults.fault(name).state_is_good


COMMAND = re.compile(
    r"(?:jaxres (?:status|history|report|branch|replay|hosts|checkpoints [a-z]+)"
    r"|jaxres\.(?:train|launch [a-z ]+)|touch|chmod [0-7]+|rm -rf?) $"
)


def test_no_message_advises_a_command_whose_path_is_not_quoted():
    """A path may have spaces: `command_line` quotes it."""
    unquoted: list[str] = []
    for path in sorted(Path(inspect.getfile(faults)).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts = [part.value for part in node.values[:-1] if isinstance(part, ast.Constant)]
                unquoted += [f"{path}:{node.lineno}: {t}" for t in texts if COMMAND.search(t)]
    assert unquoted == []


def test_a_command_that_is_advised_can_be_pasted_into_a_shell():
    command = faults.command_line("jaxres hosts", Path("my runs/it's"), "--forget", "h0")
    assert command == "jaxres hosts 'my runs/it'\"'\"'s' --forget h0"
