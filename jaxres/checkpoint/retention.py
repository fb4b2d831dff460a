"""What to keep, and how it goes: first a prune record makes steps dead for all, then bytes go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from jaxres import storage


def to_prune(steps: Sequence[int], *, keep_last: int) -> tuple[int, ...]:
    """Returns the committed steps that are no longer kept; pure.

    >>> to_prune([10, 20, 30], keep_last=2)
    (10,)
    """
    return tuple(sorted(steps)[:-keep_last])


def sweep(checkpoints: Path, *, keep: Collection[str]) -> list[str]:
    """Deletes what is not on the line: pruned steps, and what killed saves have left behind.

    Only the run's owner may call this, and only while it has no save in flight.
    """
    left = [name for name in storage.list_names(checkpoints) if name not in keep]
    for name in left:
        storage.delete_tree(checkpoints / name)
    storage.delete_trash(checkpoints)
    return left
