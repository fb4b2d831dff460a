"""Numbers as people read them: durations, sizes, counts."""

from __future__ import annotations

import math

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def duration(seconds: float) -> str:
    """Returns a duration in two units at most.

    >>> duration(0.25), duration(59), duration(3725), duration(200_000)
    ('0.25 s', '59 s', '1 h 02 min', '2 d 07 h')
    """
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.01 else "0 s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24:02} h"


def size(num_bytes: float) -> str:
    """Returns a size in decimal units.

    >>> size(999), size(1_488_000_000)
    ('999 B', '1.49 GB')
    """
    power = 0
    while abs(num_bytes) >= 999.5 and power < len(UNITS) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{num_bytes:.3g} {UNITS[power]}"


def short(value: float) -> str:
    """Returns a number with three digits or so.

    >>> short(1_250_000), short(4550), short(0.0003), short(12.345), short(20)
    ('1.25M', '4,550', '0.0003', '12.3', '20')
    """
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.3g}{letter}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value and (abs(value) < 1e-4 or not math.isfinite(value)):
        return f"{value:.2g}"
    return f"{value:.3g}"


def count(value: int, what: str) -> str:
    """Returns a count with its noun.

    >>> count(1, "step"), count(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{value:,} {what}" if value == 1 else f"{value:,} {what}s"
