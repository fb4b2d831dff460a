"""Home of: crash. Home of: crash_loop. What a supervisor does after an attempt has ended. Pure.

Only a new committed step is progress: it alone gives budgets and backoff back. Every cause has a
budget of its own that ends, so every row of ends without progress does. Reads no clock and draws no
random number: now, and the seed of the jitter, are arguments.

What the supervisors before this one have come to, as the run log tells it. Pure.

A supervisor may be killed at any moment, and something that starts it again may do so for ever. So
its successor counts on from what the log says, until a person has had a word: a supervisor that
gave up, or was told to stop, is only started again by somebody who means it.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from jaxres.config.schema import LaunchSection, RestartSection
from jaxres.faults import Exit
from jaxres.runlog.run_log import Claim, Commit, Leave, Record, Stop

KILLED = 128 + signal.SIGKILL
AGAIN = (Exit.PREEMPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""Ends of a supervisor after which a scheduler starts it again, and no person was asked."""
NO_WORD = "it left no word: it was killed with its supervisor, or the machine went down"


@dataclass(frozen=True)
class Past:
    """What a new supervisor goes on from."""

    outcomes: tuple[Outcome, ...] = ()
    """Of supervised attempts since the last end that nobody but a person follows; oldest first."""
    was_killed: bool = False
    """Whether the supervisor before this one has left no word; it may hang, too."""


@dataclass(frozen=True)
class _Open:
    """A supervised attempt whose end has not come yet, on the way through the records."""

    claim: Claim
    step_before: int


def recall(records: Sequence[Record]) -> Past:
    """Reads what earlier supervisors have left; none of their attempts is still at work."""
    outcomes: list[Outcome] = []
    attempt: _Open | None = None
    step, was_killed = 0, False
    for record in records:
        match record.body:
            case Claim():
                outcomes += _without_a_word(attempt, step)
                is_supervised = record.body.places is not None
                attempt, was_killed = None, is_supervised
                if is_supervised:
                    attempt = _Open(record.body, step)
            case Commit():
                step = max(step, record.body.step)
            case Stop() if attempt is not None and record.attempt == attempt.claim.attempt:
                outcomes.append(_outcome(attempt, record.body, step))
                attempt = None
            case Leave():
                outcomes += _without_a_word(attempt, step)
                attempt, was_killed = None, False
            case _:
                pass
        if isinstance(record.body, Stop | Leave) and _is_last(record.body):
            outcomes.clear()
    outcomes += _without_a_word(attempt, step)
    return Past(tuple(outcomes), was_killed)


def _is_last(end: Stop | Leave) -> bool:
    """Whether only a person goes on after this end."""
    return end.exit not in AGAIN if isinstance(end, Leave) else end.exit in FINAL


def _outcome(attempt: _Open, stop: Stop, step: int) -> Outcome:
    places, culprit = attempt.claim.places or (), stop.culprit
    place = places[culprit] if culprit is not None and culprit < len(places) else None
    return Outcome(stop.exit, stop.reason, attempt.step_before, step, place)


def _without_a_word(attempt: _Open | None, step: int) -> list[Outcome]:
    return [] if attempt is None else [Outcome(KILLED, NO_WORD, attempt.step_before, step)]


FINAL = (
    *(Exit.DONE, Exit.USAGE, Exit.STOPPED, Exit.CONFIG),
    *(Exit.DIVERGED, Exit.FENCED, Exit.NO_PROGRESS, Exit.UNRESTORABLE),
)
"""Ends after which another attempt would do the same, or is not wanted."""
FREE = (Exit.PREEMPTED, Exit.UNHEALTHY)
"""Ends that are no failure of the run."""
ACCUSING = (Exit.BUG, Exit.PEER_LOST, Exit.HUNG)
"""Ends that, like a crash, speak against their host if it is named twice in a row."""
PER_STEPS = 1000
"""Committed steps over which launch.max_restarts_per_1000_steps counts."""


@dataclass(frozen=True)
class Outcome:
    """How one attempt has ended."""

    code: int
    reason: str
    step_before: int
    """Newest committed step when it began."""
    step_after: int
    """Newest committed step when it had ended."""
    culprit: int | None = None
    """The host that is the cause, by its place on the machines, not in the attempt."""


@dataclass(frozen=True)
class Policy:
    """What is allowed; the same for the supervisor's whole life."""

    restart: RestartSection
    launch: LaunchSection
    num_hosts: tuple[int, ...]
    """Numbers of hosts that will do, ascending; the first attempt has the last."""
    began: float
    """When the supervisor began, on its monotonic clock."""
    seed: int
    """Of the jitter."""


@dataclass(frozen=True)
class Again:
    """Another attempt is to follow."""

    after_seconds: float
    without_hosts: frozenset[int]
    """Places that are not used any more."""
    reason: str
    """Which budget it takes from, for a person."""


@dataclass(frozen=True)
class GiveUp:
    """No other attempt is to follow."""

    exit: int
    reason: str


def decide(history: Sequence[Outcome], now: float, policy: Policy) -> Again | GiveUp:
    """Returns what follows the last of the attempts that have ended.

    Args:
      history: all attempts that count, of this supervisor and those before it (`past`), oldest
        first; at least one.
      now: the supervisor's monotonic clock.
      policy: what is allowed.
    """
    last = history[-1]
    is_over = ends_at(policy) <= now
    if last.code in FINAL and not (is_over and last.code == Exit.STOPPED):
        return GiveUp(last.code, last.reason)
    if is_over:
        hours = policy.launch.max_hours
        return GiveUp(Exit.NO_PROGRESS, f"launch.max_hours={hours:g} are over; {last.reason}")
    bound = policy.launch.max_restarts_per_1000_steps
    if bound is not None and (restarts := _restarts_of_late(history)) > bound:
        many = f"{restarts} attempts have ended within {PER_STEPS} steps"
        limit = f"launch.max_restarts_per_1000_steps={bound}"
        return GiveUp(Exit.NO_PROGRESS, f"{many} ({limit}); {last.reason}")
    without, since = _excluded(history, policy)
    if hosts(policy, without) is None:
        places = ", ".join(map(str, sorted(without)))
        few = f"too few hosts are left (at least {policy.num_hosts[0]}) without place {places}"
        return GiveUp(Exit.UNHEALTHY, f"{last.reason}; {few}")
    return _within_budgets(history, policy, without, is_new=since == len(history))


def hosts(policy: Policy, without: frozenset[int]) -> tuple[int, ...] | None:
    """Returns the places of the next attempt's hosts: as many as will do; None: too few are left.

    The place of a host stays the same over attempts, its number within an attempt does not.
    """
    left = [place for place in range(policy.num_hosts[-1]) if place not in without]
    fitting = [number for number in policy.num_hosts if number <= len(left)]
    return tuple(left[: fitting[-1]]) if fitting else None


def ends_at(policy: Policy) -> float:
    """Returns when launch.max_hours are over, on the supervisor's monotonic clock."""
    hours = policy.launch.max_hours
    return float("inf") if hours is None else policy.began + 3600 * hours


def _streak(history: Sequence[Outcome]) -> tuple[Sequence[Outcome], Sequence[Outcome]]:
    """Returns the attempts from the last one on that has made progress, and those after it."""
    highest, begins = history[0].step_before, None
    for number, outcome in enumerate(history):
        reached = max(highest, outcome.step_before, outcome.step_after)
        begins = number if reached > highest else begins
        highest = reached
    return (history, history) if begins is None else (history[begins:], history[begins + 1 :])


def _excluded(history: Sequence[Outcome], policy: Policy) -> tuple[frozenset[int], int]:
    """Returns the places that are not to be used, and after how many attempts the last one went.

    One that says itself that it is unhealthy; one that two faults in a row name, with no new
    commit between them, if the job can do without it.
    """
    without: frozenset[int] = frozenset()
    since = 0
    for number in range(1, len(history) + 1):
        outcome = history[number - 1]
        if outcome.culprit is None:
            continue
        more = without | {outcome.culprit}
        fits = hosts(policy, more) is not None
        unhealthy = outcome.code == Exit.UNHEALTHY
        if more != without and (unhealthy or (fits and _named_twice(history[since:number]))):
            without, since = more, number
    return without, since


def _named_twice(history: Sequence[Outcome]) -> bool:
    if not history or not _is_accusing(history[-1]):
        return False
    streak, _ = _streak(history)
    faults = [outcome for outcome in streak if _is_failure(outcome)]
    named = [outcome.culprit for outcome in faults[-2:] if _is_accusing(outcome)]
    return named == [history[-1].culprit] * 2


def _is_accusing(outcome: Outcome) -> bool:
    return outcome.code in ACCUSING or outcome.code not in set(Exit)


def _restarts_of_late(history: Sequence[Outcome]) -> int:
    newest = max(outcome.step_after for outcome in history)
    return sum(outcome.step_after > newest - PER_STEPS for outcome in history)


def _within_budgets(
    history: Sequence[Outcome], policy: Policy, without: frozenset[int], *, is_new: bool
) -> Again | GiveUp:
    """Returns the restart that the last end's own budget allows."""
    streak, fruitless = _streak(history)
    last, limits = history[-1], policy.restart
    failures = sum(map(_is_failure, fruitless))
    same = sum(outcome.code == last.code for outcome in fruitless)
    if last.code == Exit.UNHEALTHY:
        again = Again(0.0, without, "without the unhealthy host; no budget used")
        return again if same < limits.max_attempts_without_commit else _no_progress(last, same)
    if last.code == Exit.PREEMPTED:
        again = Again(0.0, without, "preempted: at once, no budget used")
        return again if same < limits.max_preemptions_without_commit else _no_progress(last, same)
    if last.code == Exit.STORAGE:
        first, longest = limits.storage_backoff_seconds, limits.max_storage_backoff_seconds
        seconds = _backoff(same, first, longest, policy)
        again = Again(seconds, without, f"storage {same} of {limits.max_storage_attempts}")
        return again if same < limits.max_storage_attempts else _no_progress(last, same)
    if sum(outcome.code == Exit.OUT_OF_MEMORY for outcome in streak) > 1:
        return GiveUp(Exit.OUT_OF_MEMORY, f"a second time without a new commit: {last.reason}")
    first, longest = limits.backoff_seconds, limits.max_backoff_seconds
    seconds = _backoff(sum(map(_is_failure, streak)), first, longest, policy)
    reason = f"failure {failures} of {limits.max_attempts_without_commit} without a new commit"
    if not failures:
        reason = "it had committed a new step, so the whole budget is there"
    if is_new:
        reason = f"without a host that two faults in a row name; {reason}"
    if failures < limits.max_attempts_without_commit:
        return Again(seconds, without, reason)
    return _no_progress(last, failures)


def _is_failure(outcome: Outcome) -> bool:
    """Whether an end takes from the failure budget."""
    return outcome.code not in (*FREE, Exit.STORAGE)


def _no_progress(last: Outcome, times: int) -> GiveUp:
    many = f"{times} attempts have ended without a new committed step (newest: {last.step_after})"
    return GiveUp(Exit.NO_PROGRESS, f"{many}; the last: {last.reason}")


def _backoff(times: int, first: float, longest: float, policy: Policy) -> float:
    """Returns the wait before the next attempt: doubled each time, bounded, then spread out."""
    seconds = min(longest, first * 2.0 ** min(max(times - 1, 0), 60))
    spread = random.Random(f"{policy.seed}-{times}").random()
    return seconds * (1 + policy.restart.jitter * spread)
