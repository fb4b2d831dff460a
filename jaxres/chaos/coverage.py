"""Which row of the table of faults has a scenario, and why the others have none. Pure."""

from __future__ import annotations

from jaxres import faults
from jaxres.chaos.scenarios import ALL

NOT_INJECTED = {
    "straggler": "it is reported only; what counts as slow depends on the machine",
    "out_of_memory": "what a process does at a limit of its memory is not always the same",
    "unhealthy_device": "the fault of a GPU can't be caused from outside",
    "failed_preflight": "the tests are of an attempt's start, before a hook could change a result",
}
"""Row of the table without a scenario -> why."""


def scenarios_of(row: str) -> tuple[str, ...]:
    """Returns the scenarios that need the response of a row.

    >>> scenarios_of("hang")
    ('hang',)
    """
    return tuple(one.name for one in ALL if row in one.rows)


def table() -> str:
    """Returns the table of docs/chaos.md."""
    lines = ["| fault | scenarios, or why there is none |", "|---|---|"]
    for fault in faults.ALL:
        names = scenarios_of(fault.name)
        text = ", ".join(f"`{name}`" for name in names) or f"none: {NOT_INJECTED[fault.name]}"
        lines.append(f"| {fault.name} | {text} |")
    return "\n".join(lines) + "\n"
