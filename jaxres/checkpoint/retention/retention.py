"""Retention policies: which committed steps are kept, and which directories are leftovers.

Policies are pure; a step is kept if any policy keeps it. Times are those of the commit records and
are compared with the newest commit, not with the current time: a run that was paused for a month,
or whose clock was wrong, loses no steps. checkpoint/retention/pruning.py writes the prune record
before any directory is deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxres.config.schema.checkpoint import KeepSection
from jaxres.runlog import step_dirs
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunHistory
from jaxres.runlog.step_dirs import StepDir
from jaxres.storage import files

DAY_SECONDS = 86400.0
FIRST_MONDAY = 4 * DAY_SECONDS
"""The epoch began on a Thursday."""


@dataclass(frozen=True)
class CommittedStep:
    """A committed step, as input of the policies."""

    step: int
    time: float
    """Wall-clock time of the commit, on the machine that committed it."""
    bytes: int = 0
    known_good: bool = False
    """Whether no rollback can reach the step any more."""
    grows_good: bool = False
    """Whether the step becomes known good once it is old enough."""
    heldout_loss: float | None = None
    evaluated_step: int = 0
    """Step of the evaluation that gave `heldout_loss`; at most this step."""
    heldout_data: str = ""
    """Identity of the rows of that evaluation; empty: unknown."""


RetentionPolicy = Callable[[Sequence[CommittedStep]], Collection[int]]
"""Maps the committed steps, ascending, to the steps that the policy keeps."""


def last(count: int) -> RetentionPolicy:
    """Keeps the newest steps."""
    return lambda steps: [s.step for s in steps[len(steps) - min(count, len(steps)) :]]


def hours(count: float) -> RetentionPolicy:
    """Keeps the steps whose commit times are that close to the newest commit's, before or after."""
    return lambda steps: [s.step for s in steps if abs(steps[-1].time - s.time) < 3600 * count]


def one_a(seconds: float, *, count: int, since: float = 0.0) -> RetentionPolicy:
    """Keeps the newest step of each calendar period, for the newest periods that have a step.

    Only periods with steps are counted, so a pause or a jump of the clock deletes no step.
    """

    def policy(steps: Sequence[CommittedStep]) -> Collection[int]:
        newest: dict[int, int] = {}
        for step in reversed(steps):
            newest.setdefault(math.floor((step.time - since) / seconds), step.step)
        return list(newest.values())[:count]

    return policy


def multiples(every_steps: int) -> RetentionPolicy:
    """Keeps the steps that are multiples of a number."""
    return lambda steps: [s.step for s in steps if s.step % every_steps == 0]


def best(count: int) -> RetentionPolicy:
    """Keeps the steps of lowest held-out loss; of each evaluation only the first step after it.

    Losses that are not finite are ignored, and losses of other data than the newest evaluation had.
    Steps of earlier versions, whose data is unknown, are compared with all.
    """

    def policy(steps: Sequence[CommittedStep]) -> Collection[int]:
        newest_data = next((s.heldout_data for s in reversed(steps) if s.heldout_data), "")
        by_evaluation: dict[int, CommittedStep] = {}
        for step in steps:
            if step.heldout_data not in ("", newest_data):
                continue
            if step.heldout_loss is not None and math.isfinite(step.heldout_loss):
                by_evaluation.setdefault(step.evaluated_step, step)
        ranked = sorted(by_evaluation.values(), key=lambda s: (s.heldout_loss, -s.step))
        return [s.step for s in ranked[:count]]

    return policy


def policies(keep: KeepSection, *, pinned: Collection[int] = ()) -> dict[str, RetentionPolicy]:
    """Returns display name -> policy for all policies of a config."""
    named: dict[str, RetentionPolicy] = {f"last {keep.last}": last(keep.last)}
    if keep.hours:
        named[f"last {keep.hours:g} h"] = hours(keep.hours)
    if keep.daily:
        named["daily"] = one_a(DAY_SECONDS, count=keep.daily)
    if keep.weekly:
        named["weekly"] = one_a(7 * DAY_SECONDS, count=keep.weekly, since=FIRST_MONDAY)
    if keep.every_steps is not None:
        named[f"every {keep.every_steps} steps"] = multiples(keep.every_steps)
    if keep.best:
        named[f"best {keep.best}"] = best(keep.best)
    named["known good"] = lambda steps: [s.step for s in steps if s.known_good][-1:]
    # The oldest step that can become known good; otherwise none would get old enough.
    named["next known good"] = lambda steps: [
        s.step for s in steps if s.grows_good and not s.known_good
    ][:1]
    named["pinned"] = lambda steps: [s.step for s in steps if s.step in pinned]
    return named


@dataclass(frozen=True)
class PrunePlan:
    """The decision of the policies on each committed step."""

    steps: tuple[CommittedStep, ...]
    """Committed steps, ascending."""
    reasons: Mapping[int, tuple[str, ...]]
    """Step -> names of the policies that keep it; a step without any is pruned."""

    @property
    def dead(self) -> tuple[int, ...]:
        """The steps to prune."""
        return tuple(s.step for s in self.steps if not self.reasons[s.step])


def plan(
    steps: Sequence[CommittedStep], keep: KeepSection, *, pinned: Collection[int] = ()
) -> PrunePlan:
    """Returns which steps are kept and why: the union of all policies. Pure.

    >>> plan([CommittedStep(step, 0.0) for step in (10, 20, 30)], KeepSection(last=2)).dead
    (10,)
    """
    ordered = tuple(sorted(steps, key=lambda s: s.step))
    kept = {name: policy(ordered) for name, policy in policies(keep, pinned=pinned).items()}
    return PrunePlan(
        ordered, {s.step: tuple(n for n, found in kept.items() if s.step in found) for s in ordered}
    )


def steps_of(history: RunHistory) -> list[CommittedStep]:
    """Returns the committed steps of a run's history, as input of the policies."""
    verified = history.verified_through
    return [
        CommittedStep(
            step=commit.step,
            time=record.time,
            bytes=commit.bytes,
            known_good=commit.step <= (verified or 0),
            grows_good=verified is not None and commit.step > verified,
            heldout_loss=commit.heldout_loss,
            evaluated_step=commit.evaluated_step,
            heldout_data=commit.heldout_data,
        )
        for record, commit in zip(history.commits, history.committed, strict=True)
    ]


def leftovers(
    run_dir: RunDir,
    history: RunHistory,
    *,
    attempt: int,
    listed: Sequence[StepDir] | None = None,
) -> list[str]:
    """Returns the names of leftover step directories: pruned steps, and remains of killed saves.

    Excluded are names that no save produces, and directories of later attempts, so that a process
    that was suspended here and has been superseded deletes no newer step. A complete step of an
    earlier attempt that the log has never recorded is a leftover only once this attempt has
    committed that step or a newer one: the log may be an old copy that lacks its record.

    Args:
      history: the run's history, read after this attempt's claim.
      attempt: number of this attempt, which has no save in flight.
      listed: the step directories, if they were listed already.
    """
    recorded = {path.rpartition("/")[2] for path in history.paths}
    own = [commit.step for commit in history.commits_of(attempt)]

    def is_leftover(found: StepDir) -> bool:
        if found.name in history.protected_dirs or found.attempt > attempt:
            return False
        return (
            found.attempt == attempt
            or found.name in recorded
            or found.step <= max(own, default=-1)
            or not step_dirs.is_complete(run_dir.checkpoints / found.name)
        )

    found_dirs = step_dirs.listed(run_dir.checkpoints) if listed is None else listed
    return [found.name for found in found_dirs if is_leftover(found)]


def sweep(
    run_dir: RunDir,
    history: RunHistory,
    *,
    attempt: int,
    listed: Sequence[StepDir] | None = None,
) -> list[str]:
    """Deletes the leftover step directories and returns their names."""
    names = leftovers(run_dir, history, attempt=attempt, listed=listed)
    for name in names:
        files.delete_tree(run_dir.checkpoints / name)
    files.delete_trash(run_dir.checkpoints)
    return names
