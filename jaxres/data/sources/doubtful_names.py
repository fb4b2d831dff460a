"""Names of a corpus's files that tell that more, or other data are trained on than is meant."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import PurePath

_SHARD = re.compile(
    r"(?P<before>.*?)(?P<number>\d{2,})-of-(?P<total>\d{2,})(?P<after>.*)", re.DOTALL
)
"""Name of a shard, such as train-00000-of-00005.parquet."""

_WORD = re.compile(r"[a-z]+")
TRAINING = frozenset({"train", "training"})
HELD_OUT = frozenset({"val", "valid", "validation", "dev", "test", "eval", "evaluation", "heldout"})


def describe(names: Collection[str]) -> list[str]:
    """Returns warnings about the relative names of a corpus's files."""
    return [*_shards(names), *_compressed_twins(names), *_splits(names)]


def _shards(names: Collection[str]) -> list[str]:
    """Returns a line for each set of shards that is not complete, or is beside another one."""
    found = defaultdict[tuple[str, str], dict[str, set[int]]](dict)
    for name in names:
        if match := _SHARD.fullmatch(name):
            sets = found[match["before"], match["after"]]
            sets.setdefault(match["total"], set()).add(int(match["number"]))
    lines = list[str]()
    for (before, after), sets in sorted(found.items()):
        if len(sets) > 1:
            others = " and ".join(f"*-of-{total}" for total in sorted(sets))
            lines.append(f"{before}{others}{after}: shards of {len(sets)} saves, all are taken")
        lines += [
            f"{before}*-of-{total}{after}: {len(numbers):,} of {int(total):,} shards are there"
            for total, numbers in sorted(sets.items())
            if len(numbers) < int(total)
        ]
    return lines


def _compressed_twins(names: Collection[str]) -> list[str]:
    known = frozenset(names)
    twice = sorted(name for name in known if not known.isdisjoint((f"{name}.gz", f"{name}.zst")))
    if not twice:
        return []
    more = f", and {len(twice) - 1:,} more" if len(twice) > 1 else ""
    return [f"{twice[0]} is there compressed too{more}: both are taken"]


def _splits(names: Collection[str]) -> list[str]:
    """Returns a line for each folder with files, or folders, of a training and another split.

    >>> _splits(["data/train-0.parquet", "tests/a.parquet", "train/x", "a/test.py"])
    []
    """
    found = defaultdict[tuple[str, ...], tuple[set[str], set[str]]](lambda: (set(), set()))
    for name in names:
        parts = PurePath(name).parts
        for depth, part in enumerate(parts):
            word = match[0] if (match := _WORD.match(part.lower())) else ""
            if word in TRAINING | HELD_OUT:
                found[parts[:depth]][word in HELD_OUT].add(part)
    return [
        f"{'/'.join(folder) or 'data.source.path'} has splits, all are trained on: "
        f"{min(others)!r} beside {min(training)!r}. Give the training data with data.source.include"
        for folder, (training, others) in sorted(found.items())
        if training and others
    ]
