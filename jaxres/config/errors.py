"""Problems of a configuration, one line each: location, key, error, allowed values."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxres.faults import ConfigError
from jaxres.secret_values import redact, redact_text

LONGEST_VALUE = 60


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration."""

    key: str
    """Dotted key; empty if the problem concerns the whole file."""
    text: str
    """The error, and the allowed values."""
    where: str = ""
    """`file:line` or `command line (key=value)`."""
    others: tuple[str, ...] = ()
    """Other keys that are involved."""

    def line(self) -> str:
        """Returns the problem as one line."""
        text = ": ".join(part for part in (self.where, self.key, self.text) if part)
        return one_line(redact_text(text))


def raise_all(problems: Iterable[Problem]) -> None:
    """Raises one ConfigError with a line for each problem; returns if there is none."""
    lines = list(dict.fromkeys(problem.line() for problem in problems))
    if lines:
        raise ConfigError("\n".join(lines))


def one_line(text: str) -> str:
    """Returns the text with every non-printable character escaped, so that it is one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shorten(text: str) -> str:
    """Returns the text, cut to the length that a message shows."""
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def show(value: Any) -> str:
    """Returns the value as in a config file, without secrets, and cut where it is long."""
    if isinstance(value, int) and abs(value) >= 10**LONGEST_VALUE:
        return "a number of more than 60 digits"
    return shorten(json.dumps(redact(value), ensure_ascii=False, default=str))


def show_limit(limit: float) -> str:
    """Returns the smallest or largest value of a number, all of its digits.

    >>> show_limit(2**63 - 1), show_limit(0.5), show_limit(1e30)
    ('9,223,372,036,854,775,807', '0.5', '1e+30')
    """
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:,.15g}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the nearest known name, or empty text."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
