"""Restart policy: decides after an attempt's end between a restart and giving up. Pure.

Home of: crash. Home of: crash_loop. Only a new committed step is progress: it alone resets budgets
and backoff. Every cause has a finite budget of its own, so every series of ends without progress is
finite. The policy reads no clock and draws no random number: the time and the seed of the jitter
are arguments.

The history spans supervisors: one may be killed at any moment, and a scheduler may restart it
forever. So a new supervisor reads the outcomes of earlier ones from the run log, and continues
their budgets. After a final result (it gave up, or an operator stopped it) budgets are reset,
because only an operator starts the run again.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from jaxres.config.schema.run_config import RunConfig
from jaxres.config.schema.supervision import LaunchSection, RestartSection
from jaxres.exit_codes import ExitCode, RestartRule, exit_row
from jaxres.runlog.attempt_result import AttemptOutcome, is_named_twice, since_progress
from jaxres.runlog.run_log import AttemptEnded, Claim, Commit, Record, SupervisorEnded, in_force

KILLED = 128 + signal.SIGKILL
MAX_BACKOFF_SECONDS = 60.0
"""Longest wait after a failure, before jitter; the default budget ends at 16 s."""
MAX_STORAGE_BACKOFF_SECONDS = 600.0
"""Longest wait after a storage failure, before jitter: an outage of hours fits into its budget."""
NO_EXIT_RECORD = "no exit record: it was killed with its supervisor, or the machine went down"


@dataclass(frozen=True)
class RestartHistory:
    """The outcomes that a new supervisor continues from."""

    outcomes: tuple[AttemptOutcome[int], ...] = ()
    """Outcomes of supervised attempts since the last final result; oldest first."""
    was_killed: bool = False
    """Whether the previous supervisor left no exit record; it was killed, or it hangs."""


@dataclass(frozen=True)
class _OpenAttempt:
    """A supervised attempt without an end so far, while the records are read in order."""

    claim: Claim
    step_before: int


def load_history(
    records: Sequence[Record],
    *,
    forgotten: Container[str] = (),
    supervised_only: bool = True,
) -> RestartHistory:
    """Returns the outcomes of earlier supervisors; none of their attempts may still run.

    Args:
      forgotten: nonces of the claims of attempts whose faults are forgotten.
      supervised_only: whether attempts that were not started by a restart loop are left out.
    """
    outcomes: list[AttemptOutcome[int]] = []
    attempt: _OpenAttempt | None = None
    step, was_killed = 0, False
    for record in in_force(records):
        match record.body:
            case Claim():
                outcomes += _killed_outcome(attempt, step)
                is_supervised = record.body.slots is not None or not supervised_only
                attempt, was_killed = None, is_supervised
                if is_supervised:
                    attempt = _OpenAttempt(record.body, step)
            case Commit():
                step = max(step, record.body.step)
            case AttemptEnded() if attempt is not None and record.attempt == attempt.claim.attempt:
                outcome = _outcome(attempt, record.body, step)
                is_forgotten = attempt.claim.nonce in forgotten
                outcomes.append(replace(outcome, culprit=None) if is_forgotten else outcome)
                attempt = None
            case SupervisorEnded():
                outcomes += _killed_outcome(attempt, step)
                attempt, was_killed = None, False
            case _:
                pass
        if isinstance(record.body, AttemptEnded | SupervisorEnded) and _is_final(record.body):
            outcomes.clear()
    outcomes += _killed_outcome(attempt, step)
    return RestartHistory(tuple(outcomes), was_killed)


def is_restart(records: Sequence[Record]) -> bool:
    """Returns whether an attempt after these records continues a run without an operator.

    False: the run begins, or its newest end was final, so an operator has started it again.
    """
    for record in reversed(records):
        match record.body:
            case AttemptEnded() | SupervisorEnded():
                return not _is_final(record.body)
            case Claim():  # Its process was killed.
                return True
            case _:
                pass
    return False


def _is_final(end: AttemptEnded | SupervisorEnded) -> bool:
    """Whether only an operator starts the run again after this end."""
    row = exit_row(end.exit)
    if isinstance(end, SupervisorEnded):
        return not row.resumes_unattended
    return row.restart is RestartRule.NEVER


def _outcome(attempt: _OpenAttempt, stop: AttemptEnded, step: int) -> AttemptOutcome[int]:
    slots, culprit = attempt.claim.slots or (), stop.culprit
    slot = slots[culprit] if culprit is not None and culprit < len(slots) else None
    return AttemptOutcome(stop.exit, stop.reason, attempt.step_before, step, slot)


def _killed_outcome(attempt: _OpenAttempt | None, step: int) -> list[AttemptOutcome[int]]:
    return (
        []
        if attempt is None
        else [AttemptOutcome(KILLED, NO_EXIT_RECORD, attempt.step_before, step)]
    )


PER_STEPS = 1000
"""Number of committed steps over which launch.max_restarts_per_1000_steps counts restarts."""


@dataclass(frozen=True)
class RestartPolicy:
    """Limits of restarts; constant for the lifetime of the supervisor."""

    restart: RestartSection
    launch: LaunchSection
    num_hosts: tuple[int, ...]
    """Numbers of hosts that the job can run with, ascending; the first attempt uses the last."""
    began: float
    """When the supervisor began, on its monotonic clock."""
    seed: int
    """Seed of the jitter."""
    faulty_slots: frozenset[int] = frozenset()
    """Slots whose hardware has failed in an earlier attempt; no attempt uses them."""


@dataclass(frozen=True)
class Restart:
    """Decision: start another attempt."""

    after_seconds: float
    without_hosts: frozenset[int]
    """Slots that are excluded."""
    reason: str
    """The budget that is used, for messages."""


@dataclass(frozen=True)
class GiveUp:
    """Decision: start no other attempt."""

    exit: int
    reason: str


def decide(
    history: Sequence[AttemptOutcome[int]], now: float, policy: RestartPolicy
) -> Restart | GiveUp:
    """Decides between a restart and an end after the newest ended attempt.

    Args:
      history: outcomes of all attempts of this supervisor and of those before it (`load_history`),
        oldest first; at least one.
      now: the supervisor's monotonic clock.
      policy: the limits.
    """
    last = history[-1]
    is_over = deadline(policy) <= now
    was_stopped_by_limit = is_over and last.code == ExitCode.STOPPED
    if exit_row(last.code).restart is RestartRule.NEVER and not was_stopped_by_limit:
        return GiveUp(last.code, last.reason)
    if is_over:
        hours = policy.launch.max_hours
        return GiveUp(ExitCode.NO_PROGRESS, f"launch.max_hours={hours:g} is reached; {last.reason}")
    bound = policy.launch.max_restarts_per_1000_steps
    if bound is not None and (restarts := _recent_restarts(history)) > bound:
        many = f"{restarts} attempts have ended within {PER_STEPS} steps"
        limit = f"launch.max_restarts_per_1000_steps={bound}"
        return GiveUp(ExitCode.NO_PROGRESS, f"{many} ({limit}); {last.reason}")
    without, since = _excluded(history, policy)
    if choose_slots(policy, without) is None:
        slots = ", ".join(map(str, sorted(without)))
        few = f"too few hosts are left (at least {policy.num_hosts[0]}) without slot {slots}"
        return GiveUp(ExitCode.UNHEALTHY, f"{last.reason}; {few}")
    return _within_budgets(history, policy, without, is_new=since == len(history))


def decide_next(
    history: Sequence[AttemptOutcome[int]], config: RunConfig, *, seed: int
) -> Restart | GiveUp:
    """Decides as `decide`, for a launcher that counts hours and chooses hosts by itself.

    Args:
      history: outcomes of the attempts, oldest first; at least one.
      config: limits of restarts; `launch.max_hours` is left out.
    """
    unlimited = config.launch.model_copy(update={"max_hours": None})
    policy = RestartPolicy(config.restart, unlimited, num_hosts=(1,), began=0.0, seed=seed)
    return decide(history, 0.0, policy)


def choose_slots(policy: RestartPolicy, without: frozenset[int]) -> tuple[int, ...] | None:
    """Returns the slots of the next attempt's hosts, as many as possible; None: too few are left.

    The slot of a host stays the same over attempts; its number within an attempt may change.
    """
    left = [slot for slot in range(policy.num_hosts[-1]) if slot not in without]
    fitting = [number for number in policy.num_hosts if number <= len(left)]
    return tuple(left[: fitting[-1]]) if fitting else None


def deadline(policy: RestartPolicy) -> float:
    """Returns when launch.max_hours is reached, on the supervisor's monotonic clock."""
    hours = policy.launch.max_hours
    return float("inf") if hours is None else policy.began + 3600 * hours


def _excluded(
    history: Sequence[AttemptOutcome[int]], policy: RestartPolicy
) -> tuple[frozenset[int], int]:
    """Returns the excluded slots, and the number of attempts before the last exclusion.

    Excluded are a host that reports itself unhealthy, and a host that two consecutive failures name
    with no new commit between them, if the job can run without it.
    """
    without = policy.faulty_slots
    since = 0
    for number in range(1, len(history) + 1):
        outcome = history[number - 1]
        if outcome.culprit is None:
            continue
        more = without | {outcome.culprit}
        fits = choose_slots(policy, more) is not None
        unhealthy = exit_row(outcome.code).restart is RestartRule.WITHOUT_HOST
        if more != without and (unhealthy or (fits and is_named_twice(history[since:number]))):
            without, since = more, number
    return without, since


def _recent_restarts(history: Sequence[AttemptOutcome[int]]) -> int:
    newest = max(outcome.step_after for outcome in history)
    unplanned = (outcome for outcome in history if not outcome.planned)
    return sum(outcome.step_after > newest - PER_STEPS for outcome in unplanned)


def _within_budgets(
    history: Sequence[AttemptOutcome[int]],
    policy: RestartPolicy,
    without: frozenset[int],
    *,
    is_new: bool,
) -> Restart | GiveUp:
    """Returns the restart that the budget of the last end's cause allows, or gives up."""
    streak, fruitless = since_progress(history)
    last, limits = history[-1], policy.restart
    failures = sum(map(_is_failure, fruitless))
    same = sum(outcome.code == last.code and not outcome.planned for outcome in fruitless)
    rule = exit_row(last.code).restart
    if last.planned:
        return Restart(0.0, without, "ended as planned; no budget used")
    if rule is RestartRule.WITHOUT_HOST:
        most = limits.max_attempts_without_commit
        decision = Restart(0.0, without, f"without the unhealthy host; {_used(same, most)}")
        return decision if same < most else _no_progress(last, same)
    if rule is RestartRule.PREEMPTION_BUDGET:
        most = limits.max_preemptions_without_commit
        decision = Restart(0.0, without, f"restarts at once; {_used(same, most)}")
        return decision if same < most else _no_progress(last, same)
    if rule is RestartRule.STORAGE_BUDGET:
        first, longest = limits.storage_backoff_seconds, MAX_STORAGE_BACKOFF_SECONDS
        seconds = _backoff(same, first, longest, policy)
        decision = Restart(seconds, without, f"storage {same} of {limits.max_storage_attempts}")
        return decision if same < limits.max_storage_attempts else _no_progress(last, same)
    once = [
        outcome
        for outcome in streak
        if exit_row(outcome.code).restart is RestartRule.FAILURE_BUDGET_ONCE
    ]
    if len(once) > 1:
        return GiveUp(once[-1].code, f"a second such failure without a new commit: {last.reason}")
    first, longest = limits.backoff_seconds, MAX_BACKOFF_SECONDS
    seconds = _backoff(sum(map(_is_failure, streak)), first, longest, policy)
    reason = f"failure {failures} of {limits.max_attempts_without_commit} without a new commit"
    if not failures:
        reason = "the attempt committed a new step, so the full budget is available"
    if is_new:
        reason = f"without the host that two consecutive failures name; {reason}"
    if failures < limits.max_attempts_without_commit:
        return Restart(seconds, without, reason)
    return _no_progress(last, failures)


def _used(times: int, most: int) -> str:
    """Returns the used part of a budget, for messages."""
    return f"{times} of {most} without a new commit" if times else "no budget used"


def _is_failure(outcome: AttemptOutcome[int]) -> bool:
    """Whether an end uses up the failure budget."""
    return exit_row(outcome.code).restart.uses_failure_budget


def _no_progress(last: AttemptOutcome[int], times: int) -> GiveUp:
    many = f"{times} attempts have ended without a new committed step (newest: {last.step_after})"
    return GiveUp(ExitCode.NO_PROGRESS, f"{many}; the last: {last.reason}")


def longest_delay(restart: RestartSection) -> float:
    """Returns the longest wait before an attempt that `decide` gives, in seconds."""
    first = max(restart.backoff_seconds, restart.storage_backoff_seconds)
    return max(first, MAX_BACKOFF_SECONDS, MAX_STORAGE_BACKOFF_SECONDS) * (1 + restart.jitter)


def _backoff(times: int, first: float, longest: float, policy: RestartPolicy) -> float:
    """Returns the wait before the next attempt: exponential, bounded, with jitter.

    A first wait beyond the bound is one of the user's own, and all waits are as long.
    """
    seconds = min(max(first, longest), first * 2.0 ** min(max(times - 1, 0), 60))
    spread = random.Random(f"{policy.seed}-{times}").random()
    return seconds * (1 + policy.restart.jitter * spread)
