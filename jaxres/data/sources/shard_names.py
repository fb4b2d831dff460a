"""Finds missing shards by the names of the others, such as train-00000-of-00005.parquet."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

SHARD = re.compile(
    r"(?P<before>.*?)(?P<number>\d{2,})-of-(?P<total>\d{2,})(?P<after>.*)", re.DOTALL
)


def missing_shards(names: Iterable[str]) -> list[str]:
    """Returns a line for each set of shards that is not complete, in the order of their names."""
    found = defaultdict[tuple[str, str, str], set[int]](set)
    for name in names:
        if match := SHARD.fullmatch(name):
            found[match["before"], match["total"], match["after"]].add(int(match["number"]))
    return [
        f"{before}*-of-{total}{after}: {len(numbers):,} of {int(total):,} shards are there"
        for (before, total, after), numbers in sorted(found.items())
        if len(numbers) < int(total)
    ]
