"""Which scenarios need the response of each row of the table of faults. Pure."""

from __future__ import annotations

from jaxres import faults
from jaxres.operate.chaos.scenarios import ALL


def scenarios_of(row: str) -> tuple[str, ...]:
    """Returns the scenarios that need the response of a row.

    >>> scenarios_of("hang")
    ('hang',)
    """
    return tuple(one.name for one in ALL if row in one.rows)


def table() -> str:
    """Returns the table of docs/prove.md."""
    lines = ["| fault | scenarios |", "|---|---|"]
    for fault in faults.ALL:
        names = ", ".join(f"`{name}`" for name in scenarios_of(fault.name))
        lines.append(f"| {fault.name} | {names} |")
    return "\n".join(lines) + "\n"
