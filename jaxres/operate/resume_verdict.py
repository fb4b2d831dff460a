"""Verdict of `jaxres resume-check`: whether broken runs are equal to an unbroken one. Pure.

Compared are all steps of all attempts, those too that a later attempt has computed again, and the
content digest of every step that both runs have committed. A break counts only if the run log has
an attempt that ended by it, and a later one that trained.
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxres.exit_codes import SIGNAL_BASE, ExitCode
from jaxres.runlog.metrics import MetricsLine

BreakKind = Literal["kill", "notice", "hang"]
KINDS: tuple[BreakKind, ...] = ("kill", "notice", "hang")
NAMES = {"kill": "SIGKILL", "notice": "SIGTERM", "hang": "SIGSTOP"}
"""The signal of each kind of break."""
ENDS: Mapping[BreakKind, frozenset[int]] = {
    "kill": frozenset({SIGNAL_BASE + signal.SIGKILL, ExitCode.HUNG}),
    "notice": frozenset({ExitCode.PREEMPTED}),
    "hang": frozenset({ExitCode.HUNG}),
}
"""Exit of an attempt that ended by a break. The supervisor may find a worker hung that holds for
SIGKILL, on a machine that is so busy that the signal is late."""
COMPARED = ("samples", "tokens", "learning_rate", "loss", "grad_norm", "skipped")
"""Fields of a step that are compared, causes before their consequences."""
STATE = "state"
"""Name of the content digest among the compared fields."""
ROUNDING = 1e-4
"""Relative difference of two losses up to which another rounding explains it."""


@dataclass(frozen=True)
class Break:
    """A planned break of the worker after a step."""

    kind: BreakKind
    step: int


@dataclass(frozen=True)
class AttemptFacts:
    """One attempt, from its records and metrics."""

    attempt: int
    exit: int | None
    """Exit code, or 128 + the number of the signal; None: there is no stop record."""
    start_step: int | None
    """Step that it started from; None: it did not train."""
    finished_step: int | None
    """Newest finished step."""
    program: str = ""
    """Digest of its lowered train step; empty: unknown."""


@dataclass(frozen=True)
class RunFacts:
    """One run of a check."""

    name: str
    exit: int
    """Exit code of its last command."""
    rows: tuple[MetricsLine, ...]
    """The finished steps of all attempts, in order of attempts."""
    digests: Mapping[int, str]
    """Committed step -> content digest."""
    attempts: tuple[AttemptFacts, ...]
    breaks: tuple[Break, ...] = ()
    message: str = ""
    """Why it did not finish."""
    topology: str = ""
    """Where it was resumed, if that is another topology."""


@dataclass(frozen=True)
class Mismatch:
    """The first difference of two runs."""

    step: int
    what: str
    """The field of the step, `state` or `missing`."""
    a: Any
    b: Any
    attempt: int | None = None
    """Attempt of the broken run that has computed the step; None: it is about a state."""


@dataclass(frozen=True)
class RunComparison:
    """Result of the comparison of one run."""

    run: RunFacts
    mismatch: Mismatch | None
    unproven: tuple[Break, ...]
    """Breaks that did not happen, by the run log."""

    @property
    def is_equal(self) -> bool:
        """Whether the run was broken as planned, ended, and is equal to the unbroken one."""
        return self.mismatch is None and not self.unproven and self.run.exit == ExitCode.DONE


@dataclass(frozen=True)
class Verdict:
    """The guarantee that a check has found."""

    level: Literal["bitwise", "different", "not tested"]
    cause: str
    """The likely cause of a difference, or why it is not tested; empty: bitwise."""
    culprit: RunComparison | None
    """The first run that is not equal."""


def plan_breaks(
    *, steps: int, breaks: int, seed: int, round_: int, first: int = 1
) -> tuple[Break, ...]:
    """Returns breaks in turn by each kind, ascending by step, one in each part of the run.

    Args:
      steps: number of steps of the run; after the last one nothing is left to resume.
      breaks: how many.
      seed: chooses the steps, with the round.
      round_: number of the broken run; the kinds begin with another one in each.
      first: least step of a break; there are at least as many steps from there on as breaks.

    >>> [b.kind for b in plan_breaks(steps=12, breaks=3, seed=0, round_=0)]
    ['kill', 'notice', 'hang']
    """
    source = random.Random(f"{seed}-{round_}")
    size = steps - first
    return tuple(
        Break(
            KINDS[(number + round_) % len(KINDS)],
            first + source.randint(number * size // breaks, (number + 1) * size // breaks - 1),
        )
        for number in range(breaks)
    )


def breaks_that_happened(run: RunFacts) -> list[tuple[Break, AttemptFacts, AttemptFacts]]:
    """Returns each break with the attempt that it ended and the next one that trained."""
    found: list[tuple[Break, AttemptFacts, AttemptFacts]] = []
    left = list(run.attempts)
    for planned in run.breaks:
        while left:
            ended = left.pop(0)
            resumed = next((a for a in left if a.start_step is not None), None)
            is_there = ended.finished_step is not None and ended.finished_step >= planned.step
            if ended.exit in ENDS[planned.kind] and is_there and resumed is not None:
                found.append((planned, ended, resumed))
                break
    return found


def compare(reference: RunFacts, run: RunFacts) -> RunComparison:
    """Compares a run with the unbroken one."""
    happened = [planned for planned, _, _ in breaks_that_happened(run)]
    unproven = tuple(planned for planned in run.breaks if planned not in happened)
    order = {name: number for number, name in enumerate((*COMPARED, "missing", STATE))}
    # The loss of a step belongs to the state before its update, the digest to that after it.
    found = sorted(
        _mismatches(reference, run), key=lambda m: (m.step, m.what == STATE, order[m.what])
    )
    return RunComparison(run, found[0] if found else None, unproven)


def _mismatches(reference: RunFacts, run: RunFacts) -> Iterator[Mismatch]:
    expected = {row.step: row for row in reference.rows}
    for row in run.rows:
        wanted = expected.get(row.step)
        for name in COMPARED if wanted is not None else ():
            a, b = getattr(wanted, name), getattr(row, name)
            if not same_bits(a, b):
                yield Mismatch(row.step, name, a, b, row.attempt)
    if run.exit != ExitCode.DONE:
        return  # What is missing is reported as the end of the run.
    there = {row.step for row in run.rows}
    for step in expected:
        if step not in there:
            yield Mismatch(step, "missing", "computed", "not computed")
    for step, digest in reference.digests.items():
        if step not in run.digests:
            yield Mismatch(step, "missing", "committed", "not committed")
        elif run.digests[step] != digest:
            yield Mismatch(step, STATE, digest, run.digests[step])


def same_bits(a: Any, b: Any) -> bool:
    """Returns whether two values are equal; of floats, each bit.

    >>> same_bits(0.0, -0.0), same_bits(0.1, 0.1)
    (False, True)
    """
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    return type(a) is type(b) and a == b


def topology_level(reference: RunFacts, found: RunComparison) -> str:
    """Compares a run resumed on another topology with the unbroken run; returns the level.

    bitwise; statistical: the same samples with other bits; different; not tested.
    """
    if found.is_equal:
        return "bitwise"
    if found.unproven or found.run.exit != ExitCode.DONE:
        return "not tested"
    wanted = {row.step: row.samples for row in reference.rows}
    trained = {row.step: row.samples for row in found.run.rows}
    return "statistical" if trained == wanted else "different"


def decide(
    reference: RunFacts,
    again: RunComparison | None,
    broken: Sequence[RunComparison],
    *,
    rows_differ: bool = False,
) -> Verdict:
    """Returns the verdict of all runs.

    Args:
      again: a second unbroken run, compared with the first one as the broken ones are; None: there
        was none, as no broken run differs.
      rows_differ: whether two processes were seen to read other rows at equal positions.
    """
    unequal = [one for one in broken if one.mismatch is not None or one.run.exit != ExitCode.DONE]
    if again is not None and not again.is_equal:
        cause = _cause_between_processes(reference, again, rows_differ=rows_differ)
        return Verdict("different", cause, again)
    if unequal:
        return Verdict("different", cause_of_resume(unequal[0]), unequal[0])
    missing = [one for one in broken if one.unproven]
    if missing or not broken:
        text = "no run was broken"
        if missing:
            which = ", ".join(f"{NAMES[b.kind]} at step {b.step}" for b in missing[0].unproven)
            text = f"{missing[0].run.name}: the run log has no attempt that ended by {which}"
        return Verdict("not tested", text, missing[0] if missing else None)
    return Verdict("bitwise", "", None)


def _cause_between_processes(
    reference: RunFacts, twice: RunComparison, *, rows_differ: bool
) -> str:
    """Returns the likely cause if two unbroken runs differ."""
    prefix = "two unbroken runs differ, so it is not the resume"
    found = twice.mismatch
    if found is None:
        return f"{prefix}: the second one did not finish: {twice.run.message}"
    if found.what == "samples":
        why = "the order of the rows depends on more than seed and position"
    elif rows_differ:
        why = (
            "equal rows of the data set have other content in each process (jaxres data show "
            "twice), as of an unseeded shuffle or augmentation"
        )
    elif _programs(reference) != _programs(twice.run):
        why = (
            "the compiled step differs: a value that changes between processes, such as a global "
            "counter, is a constant in it"
        )
    elif found.what in ("loss", "grad_norm") and _relative(found) > ROUNDING:
        why = (
            "the loss has inputs that no seed determines, such as random numbers that do not come "
            "from the key"
        )
    else:
        why = "the computation is not deterministic; on a GPU set run.determinism=bitwise"
    return f"{prefix}: {why}"


def _programs(run: RunFacts) -> set[str]:
    return {attempt.program for attempt in run.attempts if attempt.program}


def _relative(found: Mismatch) -> float:
    """Returns the relative difference of two numbers; infinite if one is missing."""
    if not (isinstance(found.a, float) and isinstance(found.b, float)):
        return math.inf
    return abs(found.a - found.b) / max(abs(found.a), abs(found.b), 1e-30)


def cause_of_resume(found: RunComparison) -> str:
    """Returns the likely cause if only broken runs differ from the unbroken one."""
    run, mismatch = found.run, found.mismatch
    if mismatch is None:
        return f"the run could not be resumed: {run.message}"
    if run.topology and mismatch.what != "samples":
        return f"sums have another order on {run.topology}, which rounds differently"
    resumed = _start_before(run, mismatch)
    if resumed is None:
        return "it differs before the first break: the computation is not deterministic"
    after = f"after the resume at step {resumed.start_step} (attempt {resumed.attempt})"
    first = next((a for a in run.attempts if a.program), resumed)
    if resumed.program != first.program:
        return (
            f"the compiled step is another one {after}: the traced code depends on a global, such "
            "as a counter, that a resumed process has at another value"
        )
    if mismatch.what == "samples":
        return (
            f"other rows are read {after}: the data set's order depends on more than its position"
        )
    if mismatch.what == STATE:
        return f"the losses are equal and the state is not, {after}"
    is_first = resumed.start_step is not None and mismatch.step == resumed.start_step + 1
    where = f"at the first step {after}" if is_first else f"only later {after}"
    return (
        f"{where}: hidden state outside the training state, such as a global counter, an unseeded "
        "shuffle, or a cache that the data set or a callback keeps"
    )


def _start_before(run: RunFacts, found: Mismatch) -> AttemptFacts | None:
    """Returns the resumed attempt that has computed the step; None: the first attempt has."""
    resumed = [a for a in run.attempts[1:] if a.start_step is not None]
    if found.attempt is not None:
        return next((a for a in resumed if a.attempt == found.attempt), None)
    before = [a for a in resumed if a.start_step is not None and a.start_step < found.step]
    return before[-1] if before else None
