"""What to keep, and how it goes: first a prune record makes steps dead for all, then bytes go."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from jaxres import storage


def to_prune(steps: Sequence[int], *, keep_last: int) -> tuple[int, ...]:
    """Returns the committed steps that are no longer kept; pure.

    >>> to_prune([10, 20, 30], keep_last=2)
    (10,)
    """
    return tuple(sorted(steps)[:-keep_last])


def attempt_of(name: str) -> int:
    """Returns the attempt that a step directory, or an unfinished one, belongs to; 0 for others.

    >>> attempt_of("00000100-0003"), attempt_of("00000100-0003.orbax-checkpoint-tmp")
    (3, 3)
    """
    found = re.match(r"\d+-(\d+)", name)
    return int(found[1]) if found else 0


def sweep(checkpoints: Path, *, keep: Collection[str], before_attempt: int) -> list[str]:
    """Deletes what is not on the line: pruned steps, and what killed saves have left behind.

    Only of attempts before the caller's: whoever was fenced without knowing it yet, having slept,
    finds nothing of its heirs here that it may delete. (Earlier attempts can commit no more, so
    `keep` is all that will ever count of them.)
    """
    left = [
        name
        for name in storage.list_names(checkpoints)
        if name not in keep and attempt_of(name) < before_attempt
    ]
    for name in left:
        storage.delete_tree(checkpoints / name)
    storage.delete_trash(checkpoints)
    return left
