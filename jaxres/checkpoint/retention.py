"""What to keep, and how it goes: first a prune record makes steps dead for all, then bytes go.

Policies are pure and compose by union. Times are those of the commit records, and are held against
the newest commit rather than against now: a run that was paused for a month, or whose clock was
wrong, loses nothing by that.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxres.config.schema_operations import KeepSection
from jaxres.runlog.run_log import Line
from jaxres.storage import files
from jaxres.storage.path import Place

DAY_SECONDS = 86400.0
FIRST_MONDAY = 4 * DAY_SECONDS
"""The epoch began on a Thursday."""
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


@dataclass(frozen=True)
class Step:
    """A committed step as the policies see it."""

    step: int
    time: float
    """When it was committed, by the wall clock of the machine that did."""
    bytes: int = 0
    known_good: bool = False
    grows_good: bool = False
    """Whether it will be known to be good once it is old enough."""
    heldout_loss: float | None = None
    evaluated_step: int = 0
    """Step whose held-out loss that is: at or before this one."""


Policy = Callable[[Sequence[Step]], Collection[int]]
"""Committed steps, ascending -> the steps that it wants kept."""


def last(count: int) -> Policy:
    """Keeps the newest steps."""
    return lambda steps: [s.step for s in steps[len(steps) - min(count, len(steps)) :]]


def hours(count: float) -> Policy:
    """Keeps all that lie so close to the newest commit, on whichever side by the clock."""
    return lambda steps: [s.step for s in steps if abs(steps[-1].time - s.time) < 3600 * count]


def one_a(seconds: float, *, count: int, since: float = 0.0) -> Policy:
    """Keeps the newest step of each period of the calendar, for the newest periods that have one.

    Periods are counted, not measured: neither a pause nor a clock that jumps ages what is kept.
    """

    def policy(steps: Sequence[Step]) -> Collection[int]:
        newest: dict[int, int] = {}
        for one in reversed(steps):
            newest.setdefault(math.floor((one.time - since) / seconds), one.step)
        return list(newest.values())[:count]

    return policy


def multiples(every_steps: int) -> Policy:
    """Keeps milestones, for ever."""
    return lambda steps: [s.step for s in steps if s.step % every_steps == 0]


def best(count: int) -> Policy:
    """Keeps those of lowest held-out loss: of each evaluation the first step after it.

    A loss that is not finite is never among the best.
    """

    def policy(steps: Sequence[Step]) -> Collection[int]:
        by_evaluation: dict[int, Step] = {}
        for one in steps:
            if one.heldout_loss is not None and math.isfinite(one.heldout_loss):
                by_evaluation.setdefault(one.evaluated_step, one)
        ranked = sorted(by_evaluation.values(), key=lambda s: (s.heldout_loss, -s.step))
        return [s.step for s in ranked[:count]]

    return policy


def newest_known_good(steps: Sequence[Step]) -> Collection[int]:
    """Keeps the newest step that is known to be good, whatever came after it; none is none."""
    return [s.step for s in steps if s.known_good][-1:]


def next_known_good(steps: Sequence[Step]) -> Collection[int]:
    """Keeps the oldest that is to become known good: else none would ever get so old."""
    return [s.step for s in steps if s.grows_good and not s.known_good][:1]


def policies(keep: KeepSection, *, pinned: Collection[int] = ()) -> dict[str, Policy]:
    """Returns the policies that a config asks for, by the name that a person reads."""
    found: dict[str, Policy] = {f"last {keep.last}": last(keep.last)}
    if keep.hours:
        found[f"last {keep.hours:g} h"] = hours(keep.hours)
    if keep.daily:
        found["daily"] = one_a(DAY_SECONDS, count=keep.daily)
    if keep.weekly:
        found["weekly"] = one_a(7 * DAY_SECONDS, count=keep.weekly, since=FIRST_MONDAY)
    if keep.every_steps is not None:
        found[f"every {keep.every_steps} steps"] = multiples(keep.every_steps)
    if keep.best:
        found[f"best {keep.best}"] = best(keep.best)
    found["known good"] = newest_known_good
    found["next known good"] = next_known_good
    found["pinned"] = lambda steps: [s.step for s in steps if s.step in pinned]
    return found


@dataclass(frozen=True)
class Plan:
    """What becomes of each committed step."""

    steps: tuple[Step, ...]
    """Ascending."""
    reasons: Mapping[int, tuple[str, ...]]
    """Step -> the policies that keep it; a step without any goes."""

    @property
    def dead(self) -> tuple[int, ...]:
        """The steps that go."""
        return tuple(s.step for s in self.steps if not self.reasons[s.step])


def plan(steps: Sequence[Step], keep: KeepSection, *, pinned: Collection[int] = ()) -> Plan:
    """Returns what is kept and why: the union of all policies; pure.

    >>> plan([Step(step, 0.0) for step in (10, 20, 30)], KeepSection(last=2)).dead
    (10,)
    """
    ordered = tuple(sorted(steps, key=lambda s: s.step))
    kept = {name: policy(ordered) for name, policy in policies(keep, pinned=pinned).items()}
    return Plan(
        ordered, {s.step: tuple(n for n, found in kept.items() if s.step in found) for s in ordered}
    )


def steps_of(line: Line) -> list[Step]:
    """Returns the committed steps of a line."""
    return [
        Step(
            step=commit.step,
            time=record.time,
            bytes=commit.bytes,
            known_good=commit.known_good or commit.step <= (line.good_through or 0),
            grows_good=line.good_through is not None and commit.step > line.good_through,
            heldout_loss=commit.heldout_loss,
            evaluated_step=commit.evaluated_step,
        )
        for record, commit in zip(line.commits, line.committed, strict=True)
    ]


def leftovers(checkpoints: Place, *, keep: Collection[str], attempt: int) -> list[str]:
    """Returns what is not on the line: pruned steps, and what killed saves have left behind.

    Names of later attempts are left out, so that an owner that was paused here and fenced destroys
    nothing; names that no save gives are somebody else's, and left out too.

    Args:
      checkpoints: the folder of step directories.
      keep: names that the log, read after this attempt's claim, has committed.
      attempt: this one; it has no save in flight.
    """
    return [
        name
        for name in files.list_names(checkpoints)
        if name not in keep and (match := _STEP_DIR.fullmatch(name)) and int(match[1]) <= attempt
    ]


def sweep(checkpoints: Place, *, keep: Collection[str], attempt: int) -> list[str]:
    """Deletes the leftovers, and returns their names."""
    left = leftovers(checkpoints, keep=keep, attempt=attempt)
    for name in left:
        files.delete_tree(checkpoints / name)
    files.delete_trash(checkpoints)
    return left
