"""Which row of the table of faults has a scenario, and why the others have none. Pure."""

from __future__ import annotations

from jaxres import faults
from jaxres.chaos.scenarios import ALL

NOT_INJECTED = {
    "bad_config": "no run begins; the config of the run is checked before",
    "nonfinite_update": "it would need a change of the model or of the rows",
    "diverged": "it would need a change of the model or of the rows",
    "loss_spike": "it would need a change of the model or of the rows",
    "silent_corruption": "bits of a device's memory can't be changed from outside",
    "straggler": "it is reported only; what counts as slow depends on the machine",
    "bad_record": "it would need a change of the rows; damaged-data is found before",
    "out_of_memory": "it would need a limit of memory that fits the config",
    "unhealthy_device": "the fault of a GPU can't be caused from outside",
    "missing_device": "a device can't be taken away from outside",
    "failed_preflight": "the fault of a device or link can't be caused from outside",
    "crash_loop": "it ends a run for good; each run here must reach its last step",
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
