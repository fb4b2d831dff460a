"""What can be wrong with a configuration, a line each: where, which key, what, what is allowed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxres.faults import ConfigError

LONGEST_VALUE = 60


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    key: str
    """Dotted key; empty where the file as a whole is meant."""
    text: str
    """What is wrong, and what is allowed."""
    where: str = ""
    """`file:line` or `command line (key=value)`."""
    others: tuple[str, ...] = ()
    """Further keys that take part in it."""

    def line(self) -> str:
        """Returns the problem as one line."""
        return one_line(": ".join(part for part in (self.where, self.key, self.text) if part))


def raise_all(problems: Iterable[Problem]) -> None:
    """Raises one ConfigError with a line for each problem; returns if there is none."""
    lines = list(dict.fromkeys(problem.line() for problem in problems))
    if lines:
        raise ConfigError("\n".join(lines))


def one_line(text: str) -> str:
    """Returns the text with everything that a terminal would act on written as an escape."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shorten(text: str) -> str:
    """Returns the text cut to what a person reads in a message."""
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def show(value: Any) -> str:
    """Returns the value as one would write it in the file, cut where it is long."""
    if isinstance(value, int) and abs(value) >= 10**LONGEST_VALUE:
        return "a number of more than 60 digits"
    return shorten(json.dumps(value, ensure_ascii=False, default=str))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
