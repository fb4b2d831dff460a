"""What to keep, and how it goes: first a prune record makes steps dead for all, then bytes go."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from jaxres import storage

_STEP_DIR = re.compile(r"\d{8,}-(\d{4,})(-\d+)?(\..*)?")
"""<step>-<attempt>, a number where an attempt saves a step again, a suffix while Orbax writes."""


def step_names(step: int, *, attempt: int) -> Iterator[str]:
    """Yields the names that a step directory may have: an attempt may save a step again.

    >>> [name for name, _ in zip(step_names(8, attempt=2), range(2))]
    ['00000008-0002', '00000008-0002-2']
    """
    name = step_name(step, attempt=attempt)
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def step_name(step: int, *, attempt: int) -> str:
    """Returns the name of a step directory; no two saves of a run share one."""
    return f"{step:08d}-{attempt:04d}"


def to_prune(steps: Sequence[int], *, keep_last: int) -> tuple[int, ...]:
    """Returns the committed steps that are no longer kept; pure.

    >>> to_prune([10, 20, 30], keep_last=2)
    (10,)
    """
    return tuple(sorted(steps)[:-keep_last])


def sweep(checkpoints: Path, *, keep: Collection[str], attempt: int) -> list[str]:
    """Deletes what is not on the line: pruned steps, and what killed saves have left behind.

    Names of later attempts stay, so that an owner that was paused here and fenced destroys nothing;
    names that no save gives are somebody else's and stay too.

    Args:
      checkpoints: the folder of step directories.
      keep: names that the log, read after this attempt's claim, has committed.
      attempt: this one; it has no save in flight.
    """
    left = [
        name
        for name in storage.list_names(checkpoints)
        if name not in keep and (match := _STEP_DIR.fullmatch(name)) and int(match[1]) <= attempt
    ]
    for name in left:
        storage.delete_tree(checkpoints / name)
    storage.delete_trash(checkpoints)
    return left
