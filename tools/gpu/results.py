"""Results of parts of tools/gpu/check.py: of a folder, and the committed ones of all machines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.gpu.parts import PARTS, Part, code_digest

COMMITTED = Path(__file__).with_name("results.jsonl")
PASSED, FAILED, TIMED_OUT, NO_TIME = "passed", "failed", "timed out", "no time left"
UNKNOWN = "unknown"
"""Digest of code that was not recorded."""
NOTE = "note"
"""Figure that is text for the table."""


@dataclass(frozen=True)
class Result:
    """How a part ended."""

    name: str
    status: str
    seconds: float
    figures: dict[str, object]
    error: str = ""
    device: str = ""
    """Kind of the GPU; empty: a rehearsal."""
    versions: str = ""
    date: str = ""
    code: str = UNKNOWN
    """Digest of the code that the figures depend on."""

    @property
    def has_passed(self) -> bool:
        """Whether the part need not run again for this code."""
        return self.status == PASSED


def read(path: Path) -> list[Result]:
    """Returns the results in a file, oldest first; none if there is no file."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError):  # A line may be cut off.
            found.append(Result(**json.loads(line)))
    return found


def line(result: Result) -> str:
    """Returns the line of a result in a file."""
    return json.dumps(dataclasses.asdict(result)) + "\n"


def known(device: str, *, path: Path = COMMITTED) -> dict[str, Result]:
    """Returns the committed results of parts that have passed with this code on such a device."""
    digests = {part.name: code_digest(part) for part in PARTS}
    return {
        result.name: result
        for result in read(path)
        if result.has_passed and (result.device, result.code) == (device, digests.get(result.name))
    }


def record(path: Path, *, into: Path = COMMITTED) -> list[str]:
    """Adds the results of a file to the committed ones; returns the names of the parts.

    One result is kept for each part and kind of device, the newest. Parts that had no time, and
    rehearsals, are left out.
    """
    new = [result for result in read(path) if result.status != NO_TIME and result.device]
    rows = {(result.name, result.device): result for result in [*read(into), *new]}
    into.write_text("".join(line(result) for result in rows.values()))
    return sorted({result.name for result in new})


def committed_table() -> str:
    """Returns the table of the newest committed result of each part."""
    newest = dict[str, Result]()
    for result in sorted(read(COMMITTED), key=lambda result: result.date):
        newest[result.name] = result
    return table(PARTS, newest).rstrip("\n")


def table(parts: Sequence[Part], results: Mapping[str, Result]) -> str:
    """Returns the results as a Markdown table."""
    rows = ["| part | question | result | figures |", "|---|---|---|---|"]
    for part in parts:
        result = results.get(part.name)
        figures = {} if result is None else result.figures
        cell = "; ".join(
            str(value) if name == NOTE else f"{name} {_text(value)}"
            for name, value in figures.items()
        )
        rows.append(f"| `{part.name}` | {part.question} | {_status(result)} | {cell} |")
    return "\n".join(rows) + "\n"


def _status(result: Result | None) -> str:
    if result is None:
        return "not measured yet"
    seconds = f"{result.seconds:.0f} s" if result.seconds else ""
    return ", ".join(filter(None, [result.status, seconds, result.device, result.date]))


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
