"""The result file: time, last pass and executed files of every slow test and mutant.

A campaign writes it (`campaign.py`), and a developer adds what CI has run on a change:

    python -m tools.ci.results          adds build/ci/ to tools/ci/results.json, as one landing

It is JSON with one test a line, so that a change of it can be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tools" / "ci" / "results.json"
BUILD = ROOT / "build" / "ci"
TESTS, MUTANTS = "tests.jsonl", "mutants.jsonl"
"""Lines that a run of CI writes into BUILD, of each test and of each mutant."""


@dataclass(frozen=True)
class Entry:
    """Known facts about a slow test or a mutant."""

    wall: float
    """Seconds."""
    processor: float
    """Seconds of all its processes."""
    landing: int
    """Number of the landing with which it last passed."""
    executed: frozenset[str] = frozenset()
    """Files that it executed in the last campaign."""


@dataclass(frozen=True)
class Results:
    """Contents of the file."""

    passed: str | None = None
    """Newest commit on which a whole campaign has passed; None: none has."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Newest commit on which each part of a campaign has passed, by its name."""
    landing: int = 0
    """Number of the newest landing in the file."""
    tests: Mapping[str, Entry] = field(default_factory=dict)
    mutants: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def files(self) -> frozenset[str]:
        """Files that the last campaign knew."""
        return frozenset(path for entry in self.tests.values() for path in entry.executed)


def read(path: Path = FILE) -> Results:
    """Reads the file; an absent one has no results."""
    if not path.exists():
        return Results()
    data = json.loads(path.read_text())
    files = data["files"]

    def entries(rows: dict[str, list[Any]]) -> dict[str, Entry]:
        return {
            name: Entry(wall, processor, landing, _unpacked(bits, files))
            for name, (wall, processor, landing, bits) in rows.items()
        }

    return Results(
        data["passed"],
        data.get("parts", {}),
        data["landing"],
        entries(data["tests"]),
        entries(data["mutants"]),
    )


def write(results: Results, path: Path = FILE) -> None:
    """Writes the file."""
    files = sorted(results.files)
    numbers = {name: number for number, name in enumerate(files)}

    def rows(entries: Mapping[str, Entry]) -> str:
        lines = (
            f"{json.dumps(name)}: {json.dumps(_row(entries[name], numbers))}"
            for name in sorted(entries)
        )
        return "{\n" + ",\n".join(lines) + "\n}"

    parts = {
        "passed": json.dumps(results.passed),
        "parts": json.dumps(dict(sorted(results.parts.items()))),
        "landing": json.dumps(results.landing),
        "files": "[\n" + ",\n".join(json.dumps(name) for name in files) + "\n]",
        "tests": rows(results.tests),
        "mutants": rows(results.mutants),
    }
    text = ",\n".join(f"{json.dumps(name)}: {value}" for name, value in parts.items())
    path.write_text("{\n" + text + "\n}\n")


def with_landing(
    results: Results, tests: Iterable[Mapping[str, Any]], mutants: Iterable[Mapping[str, Any]]
) -> Results:
    """Returns the results after one more landing.

    Args:
      results: those so far.
      tests: lines of tests that were run, as `measure.py` writes them.
      mutants: lines of mutants that were run, as `tools/mutants/run.py` writes them.
    """
    landing = results.landing + 1
    passed = dict(results.tests)
    for line in tests:
        if line["outcome"] == "passed" and line["tier"] == "slow":
            known = passed.get(line["test"], Entry(0, 0, 0))
            passed[line["test"]] = replace(
                known, wall=line["wall"], processor=line["processor"], landing=landing
            )
    died = dict(results.mutants)
    for line in mutants:
        if line["verdict"] == "died":
            died[line["mutant"]] = Entry(line["seconds"], line["seconds"], landing)
    return replace(results, landing=landing, tests=passed, mutants=died)


def lines(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines of a file of JSON lines; none if it is absent."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _row(entry: Entry, numbers: Mapping[str, int]) -> list[Any]:
    bits = sum(1 << numbers[name] for name in entry.executed)
    return [round(entry.wall, 1), round(entry.processor, 1), entry.landing, f"{bits:x}"]


def _unpacked(bits: str, files: list[str]) -> frozenset[str]:
    value = int(bits, 16)
    return frozenset(name for number, name in enumerate(files) if value >> number & 1)


def main() -> int:
    """Adds a run of CI to the file."""
    results = with_landing(read(), lines(BUILD / TESTS), lines(BUILD / MUTANTS))
    write(results)
    print(f"{FILE.relative_to(ROOT)}: landing {results.landing}; commit it with the change")
    return 0


if __name__ == "__main__":
    sys.exit(main())
