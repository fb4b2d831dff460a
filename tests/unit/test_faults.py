import inspect

from jaxres import faults
from jaxres.faults import Exit, TypedEnd

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


def test_exit_codes_are_the_ones_that_launchers_know():
    assert {exit.name: exit.value for exit in Exit} == CONTRACT


def test_every_typed_end_has_its_own_exit_and_says_what_it_is():
    ends = [
        kind
        for _, kind in inspect.getmembers(faults, inspect.isclass)
        if issubclass(kind, TypedEnd) and kind is not TypedEnd
    ]
    exits = {kind.__name__: kind.exit for kind in ends}
    assert exits == {
        "UsageError": Exit.USAGE,
        "ConfigError": Exit.CONFIG,
        "StorageUnavailable": Exit.STORAGE,
        "Fenced": Exit.FENCED,
        "Unrestorable": Exit.UNRESTORABLE,
        "OutOfMemory": Exit.OUT_OF_MEMORY,
        "PeerLost": Exit.PEER_LOST,
        "Preempted": Exit.PREEMPTED,
        "Stopped": Exit.STOPPED,
    }
    assert all(kind.__doc__ for kind in ends)


def test_rows_of_the_table_are_unique_and_found_by_name():
    names = [fault.name for fault in faults.ALL]
    assert len(names) == len(set(names))
    assert [faults.fault(name) for name in names] == list(faults.ALL)


def test_every_fault_that_is_done_has_a_home_that_says_so():
    root = inspect.getfile(faults).removesuffix("faults.py")
    done = [fault for fault in faults.ALL if fault.done]
    assert done
    for fault in done:
        with open(root + fault.home) as file:
            assert f"Home of: {fault.name}" in file.read(), fault


def test_the_printed_table_has_one_row_a_fault_with_its_exit():
    rows = [row for row in faults.table().splitlines() if row.startswith("| ")][1:]
    assert len(rows) == len(faults.ALL)
    for row, fault in zip(rows, faults.ALL, strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 6, row
        exit = f"{fault.exit.value} {fault.exit.name}" if fault.exit is not None else ""
        assert cells == [
            fault.name,
            fault.circle,
            fault.home,
            fault.answer,
            exit,
            "done" if fault.done else "*planned*",
        ]


def test_a_state_that_may_be_wrong_is_never_called_good():
    for name in ("nonfinite_update", "diverged", "silent_corruption", "unhealthy_device"):
        assert not faults.fault(name).state_is_good
    for name in ("preemption", "operators_stop"):
        assert faults.fault(name).state_is_good
