"""Every row of the table of faults has a scenario of `jaxres chaos`, or a reason why not."""

from __future__ import annotations

from pathlib import Path

from jaxres import faults
from jaxres.chaos import coverage
from jaxres.chaos.scenarios import ALL

DOCS = Path(__file__).parents[3] / "docs" / "chaos.md"


def test_each_row_has_a_scenario_or_a_reason_and_not_both() -> None:
    rows = {row.name for row in faults.ALL}
    with_scenario = {name for scenario in ALL for name in scenario.rows}
    assert with_scenario <= rows
    assert with_scenario.isdisjoint(coverage.NOT_INJECTED)
    assert with_scenario | set(coverage.NOT_INJECTED) == rows
    assert all(coverage.NOT_INJECTED.values())


def test_the_table_is_in_the_docs() -> None:
    assert coverage.table() in DOCS.read_text()
