"""Recorded runs of the campaign, a JSON line for each, and the tables made of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

Line = Mapping[str, Any]
HELD = "held"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
PAIRS = "<!-- pairs -->", "<!-- end of pairs -->"


class Numbered(Protocol):
    """A planned run."""

    @property
    def number(self) -> int:
        """Its number in the schedule of a seed."""
        ...


P = TypeVar("P", bound=Numbered)


def read(path: Path) -> list[Line]:
    """Returns the recorded runs; a torn last line is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def append(path: Path, line: Line) -> None:
    """Records a run."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def left(
    plans: Iterable[P], recorded: Sequence[Line], *, seed: int, only: Sequence[str]
) -> list[P]:
    """Returns the planned runs that are not recorded yet, in order."""
    done = {line["run"] for line in recorded if (line["seed"], line["only"]) == (seed, list(only))}
    return [plan for plan in plans if plan.number not in done]


def tables(recorded: Sequence[Line]) -> str:
    """Returns the results as Markdown."""
    if not recorded:
        return "No run is recorded yet."
    kills = [(line, kill) for line in recorded for kill in line["kills"]]
    failed = [line for line in recorded if line["outcome"] != HELD]
    missed = sum(len(line["missed"]) for line in recorded)
    cpu = sum(line["cpu_seconds"] for line in recorded)
    attempts = sum(line["attempts"] for line in recorded)
    per_kill = f"{cpu / len(kills):.1f}" if kills else "-"
    verdict = (
        "every promise held in every run"
        if not failed
        else f"**a promise was broken in {len(failed)} run(s)**, see below"
    )
    parts = [
        f"{len(kills)} kills in {len(recorded)} runs with {attempts} attempts: {verdict}. "
        f"{missed} planned kills came after the end of their run and are not counted. "
        f"{per_kill} CPU seconds a kill.",
        _table("process", (k["target"] for _, k in kills)),
        _table("hosts, storage", (f"{r['hosts']}, {r['storage']}" for r, _ in kills)),
        _table("place", (k["place"] for _, k in kills)),
        _table("phase of the worker, by its events", (k["phase"] for _, k in kills)),
        _table("a save in flight", ("yes" if k["in_save"] else "no" for _, k in kills)),
        _table("commit, date", (f"{r['commit']}, {r['date']}" for r, _ in kills)),
    ]
    if failed:
        rows = [
            f"| {r['seed']} | {r['run']} | {r['commit']} | {'; '.join(r['outcome'])[:300]} |"
            for r in failed
        ]
        parts.append("\n".join(["| seed | run | commit | broken |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _table(name: str, values: Iterable[str]) -> str:
    counted = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
    rows = [f"| {value} | {number} |" for value, number in counted]
    return "\n".join([f"| {name} | kills |", "|---|---|", *rows])


def write_tables(readme: Path, recorded: Sequence[Line]) -> None:
    """Replaces the results of kills in a README."""
    _replace(readme, (BEGIN, END), tables(recorded))


def pair_table(recorded: Sequence[Line], num_pairs: int) -> str:
    """Returns the results of pairs as Markdown: a row for each that has run."""
    if not recorded:
        return "No pair is recorded yet."
    failed = [line for line in recorded if line["outcome"] != HELD]
    found = {tuple(line["pair"]) for line in recorded}
    verdict = "every promise held in every run" if not failed else f"{len(failed)} broke a promise"
    cpu = sum(line["cpu_seconds"] for line in recorded) / len(recorded)
    rows = [_pair_row(line) for line in recorded]
    return "\n".join(
        [
            f"{len(found)} of {num_pairs} pairs have run, in {len(recorded)} runs: {verdict}. "
            f"{cpu:.0f} CPU seconds a run.",
            "",
            "| first | second | seed | commit | date | outcome |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )


def _pair_row(line: Line) -> str:
    held = line["outcome"] == HELD
    outcome = HELD if held else "; ".join(line["outcome"])[:300]
    cells = [*line["pair"], line["seed"], line["commit"], line["date"], outcome]
    return f"| {' | '.join(map(str, cells))} |"


def write_pairs(readme: Path, recorded: Sequence[Line], num_pairs: int) -> None:
    """Replaces the results of pairs in a README."""
    _replace(readme, PAIRS, pair_table(recorded, num_pairs))


def _replace(readme: Path, marks: tuple[str, str], new: str) -> None:
    begin, end = marks
    text = readme.read_text()
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    readme.write_text(f"{before}{begin}\n{new}\n{end}{after}")
