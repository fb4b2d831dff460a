"""Prints the cost and the sole purpose of each family of tests.

    python -m tools.ci.table build/campaign/COMMIT > tests/costs.md

A family is a folder of unit tests, or a file of promises. "Mutants" are those whose promise is in
the family; "lines" are those of the functions of jaxres that no test of another family executes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.ci import executed
from tools.ci.results import ROOT, TESTS, lines
from tools.mutants import tables as mutants

SHARE = 0.8
"""The families that cost this share are described; the others are one row."""


@dataclass
class Family:
    """Tests of one folder or file, in one tier."""

    name: str
    num_tests: int = 0
    processor: float = 0.0
    """Seconds."""
    wall: float = 0.0
    """Seconds."""
    functions: set[str] = field(default_factory=set)


def family_of(test: str) -> str:
    """Returns the family of a test."""
    path = test.partition("::")[0]
    if path.startswith("tests/promises/"):
        return path
    return "/".join(path.split("/")[:3])


def families(
    tests: Iterable[Mapping[str, Any]], functions: Mapping[str, set[str]], *, tier: str
) -> list[Family]:
    """Returns the families of a tier, the costliest first."""
    found: dict[str, Family] = {}
    for line in tests:
        if line["tier"] == tier:
            family = found.setdefault(name := family_of(line["test"]), Family(name))
            family.num_tests += 1
            family.processor += line["processor"]
            family.wall += line["wall"]
            family.functions |= functions.get(line["test"], set())
    return sorted(found.values(), key=lambda family: -family.processor)


def own_lines(family: Family, others: Iterable[Family]) -> int:
    """Returns the number of lines of functions that only this family executes."""
    shared = {function for other in others for function in other.functions}
    return sum(_num_lines(function) for function in family.functions - shared)


def _num_lines(function: str) -> int:
    first, _, last = function.rpartition(":")[2].partition("-")
    return int(last) - int(first) + 1


def table(found: list[Family], everything: list[Family]) -> list[str]:
    """Returns the rows of a tier.

    Args:
      found: its families.
      everything: the families of all tiers.
    """
    named: dict[str, int] = {}
    for mutant in mutants.read_all():
        family = family_of(mutant.promise)
        named[family] = named.get(family, 0) + 1
    whole = sum(family.processor for family in found)
    rows = ["| family | tests | processor s | wall s | mutants | lines only it executes |"]
    rows.append("|---|---|---|---|---|---|")
    spent, rest = 0.0, Family("all others")
    for family in found:
        if spent >= SHARE * whole:
            rest.num_tests += family.num_tests
            rest.processor += family.processor
            rest.wall += family.wall
            continue
        spent += family.processor
        others = [other for other in everything if other.name != family.name]
        alone = own_lines(family, others) if family.functions else "not recorded"
        rows.append(
            f"| {family.name} | {family.num_tests} | {family.processor:.0f} | {family.wall:.0f} "
            f"| {named.get(family.name, 0)} | {alone} |"
        )
    rows.append(f"| {rest.name} | {rest.num_tests} | {rest.processor:.0f} | {rest.wall:.0f} | | |")
    return rows


def main(arguments: list[str]) -> int:
    """Prints the page."""
    folder = Path(arguments[0])
    tests = lines(folder / TESTS)
    recorded = folder / "executed"
    functions = executed.read(recorded, root=ROOT) if recorded.exists() else {}
    tiers = {tier: families(tests, functions, tier=tier) for tier in ("fast", "slow")}
    everything = [family for found in tiers.values() for family in found]
    print("# What the tests cost\n")
    commit = folder.name[:12]
    print(f"By `python -m tools.ci.table`, of the tests that were run on {commit}, on two cores.")
    for tier, found in tiers.items():
        if not found:
            continue
        total = sum(family.processor for family in found)
        print(f"\n## {tier}: {total:.0f} processor seconds\n")
        print("\n".join(table(found, everything)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
