"""Promises of the decision after an attempt: each cause its budget, and every row of ends ends."""

import dataclasses
import itertools
import random
import signal

import pytest

from jaxres.config.schema.supervision import LaunchSection, RestartSection
from jaxres.exit_codes import ExitCode
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.supervisor import restart_policy
from jaxres.supervisor.restart_policy import GiveUp, Restart, RestartPolicy

KILLED = 128 + signal.SIGKILL
FAILURES = (ExitCode.BUG, ExitCode.PEER_LOST, ExitCode.HUNG, KILLED, 128 + signal.SIGABRT)
NOBODY_RESTARTS = (0, 64, 76, 78, 81, 83, 85)
STEADY = RestartSection(jitter=0.0)
POLICY = RestartPolicy(STEADY, LaunchSection(), num_hosts=(1,), began=0.0, seed=7)
MANY = dataclasses.replace(POLICY, num_hosts=(2, 3, 4))


def history(*ends):
    """Each end is a code, or (code, steps newly committed), or these and the culprit."""
    outcomes, step = [], 0
    for number, end in enumerate(ends):
        code, commits, culprit = (*end, None)[:3] if isinstance(end, tuple) else (end, 0, None)
        reason = f"end {number}"
        outcomes.append(AttemptOutcome(code, reason, step, step + commits, culprit))
        step += commits
    return outcomes


def decide(*ends, policy=POLICY, now=100.0):
    return restart_policy.decide(history(*ends), now, policy)


@pytest.mark.parametrize("code", NOBODY_RESTARTS)
@pytest.mark.parametrize("commits", [0, 1])
def test_a_permanent_failure_exits_with_its_code(code, commits):
    assert decide((code, commits)) == GiveUp(code, "end 0")


@pytest.mark.parametrize("code", FAILURES)
def test_repeated_failures_back_off_exponentially_and_then_give_up(code):
    waits = [decide(*[code] * n).after_seconds for n in range(1, 5)]
    assert waits == [1, 2, 4, 8]
    last = decide(*[code] * 5)
    assert isinstance(last, GiveUp)
    assert last.exit == ExitCode.NO_PROGRESS
    assert "5 attempts have ended without a new committed step (newest: 0)" in last.reason
    assert "end 4" in last.reason, "the cause"


@pytest.mark.parametrize("code", FAILURES)
def test_progress_resets_budget_and_backoff(code):
    four = [code] * 4
    assert decide(*four, (code, 1)).after_seconds == 1
    assert decide(*four, (code, 1), code).after_seconds == 2
    assert isinstance(decide(*four, (code, 1), *four), Restart)
    assert isinstance(decide(*four, (code, 1), *four, code), GiveUp)
    assert isinstance(decide(*[(code, 1)] * 1000), Restart)


def test_the_backoff_is_bounded_and_its_jitter_depends_on_the_seed():
    patient = RestartSection(max_attempts_without_commit=200, jitter=0.5)
    policy = dataclasses.replace(POLICY, restart=patient)
    waits = [decide(*[70] * n, policy=policy).after_seconds for n in range(1, 200)]
    assert waits == [decide(*[70] * n, policy=policy).after_seconds for n in range(1, 200)]
    other = dataclasses.replace(policy, seed=8)
    assert waits != [decide(*[70] * n, policy=other).after_seconds for n in range(1, 200)]
    assert all(60 <= wait <= 90 for wait in waits[6:])
    assert len(set(waits[6:])) > 100


def test_a_planned_end_uses_no_budget_of_preemptions_and_is_no_restart_of_a_storm():
    strict = dataclasses.replace(POLICY, launch=LaunchSection(max_restarts_per_1000_steps=1))
    planned = AttemptOutcome[int](75, "more hosts are ready", 0, 0, planned="grow")
    found = restart_policy.decide([planned] * 101, 0.0, strict)
    assert found == Restart(0.0, frozenset(), "ended as planned; no budget used")
    preempted = AttemptOutcome[int](75, "", 0, 0)
    found = restart_policy.decide([planned] * 100 + [preempted], 0.0, strict)
    assert found == Restart(0.0, frozenset(), "restarts at once; 1 of 100 without a new commit")


def test_no_budget_is_said_to_be_used_only_after_a_new_commit():
    assert decide((75, 1)).reason == "restarts at once; no budget used"
    assert decide(75, 75).reason == "restarts at once; 2 of 100 without a new commit"
    unhealthy = decide((82, 1, 1), policy=MANY).reason
    assert unhealthy == "without the unhealthy host; no budget used"


def test_a_preemption_restarts_at_once_and_uses_no_budget_of_failures():
    assert decide(75).after_seconds == 0
    assert decide(*[70] * 4, *[75] * 50).after_seconds == 0
    assert decide(*[70] * 3, *[75] * 50, 70).after_seconds == 8, "neither charged nor given back"
    assert decide(*[75] * 100).exit == ExitCode.NO_PROGRESS
    assert isinstance(decide(*[75] * 99, (75, 1), *[75] * 99), Restart)


def test_storage_failures_have_a_long_backoff_and_their_own_budget():
    assert [decide(*[74] * n).after_seconds for n in (1, 2, 3, 6, 19)] == [30, 60, 120, 600, 600]
    assert decide(*[74] * 20).exit == ExitCode.NO_PROGRESS
    assert decide(*[74] * 19, 70).after_seconds == 1
    assert decide(*[70] * 4, 74).after_seconds == 30
    assert decide(*[74] * 10, (74, 1)).after_seconds == 30


def test_two_out_of_memory_exits_without_progress_give_up():
    assert isinstance(decide(86), Restart)
    assert decide(86, 86).exit == ExitCode.OUT_OF_MEMORY
    assert decide((86, 1), 86).exit == ExitCode.OUT_OF_MEMORY
    assert decide(86, 75, 86).exit == ExitCode.OUT_OF_MEMORY
    assert isinstance(decide((86, 1), (86, 1)), Restart)


def test_an_unhealthy_host_is_excluded_at_once():
    assert decide((82, 0, 1), policy=MANY) == Restart(
        0.0, frozenset({1}), "without the unhealthy host; 1 of 5 without a new commit"
    )
    assert decide((82, 0, 1), 70, (82, 0, 3), policy=MANY).without_hosts == {1, 3}
    third = decide((82, 0, 1), (82, 0, 3), (82, 0, 0), policy=MANY)
    assert third.exit == ExitCode.UNHEALTHY
    assert "too few hosts are left (at least 2)" in third.reason
    assert decide((82, 0, 0)).exit == ExitCode.UNHEALTHY, "one that is alone can't be left out"


def test_a_slot_that_has_failed_in_an_earlier_run_of_the_command_is_excluded_from_the_beginning():
    known = dataclasses.replace(MANY, faulty_slots=frozenset({2}))
    assert decide(1, policy=known).without_hosts == {2}
    assert decide((82, 0, 1), policy=known).without_hosts == {1, 2}
    third = decide((82, 0, 1), (82, 0, 3), policy=known)
    assert "too few hosts are left (at least 2) without slot 1, 2, 3" in third.reason


@pytest.mark.parametrize("code", FAILURES)
def test_a_host_named_by_two_consecutive_faults_is_excluded(code):
    twice = decide((code, 0, 2), (code, 0, 2), policy=MANY)
    assert twice.without_hosts == {2}
    assert "two consecutive failures name" in twice.reason
    assert not decide((code, 0, 2), (code, 0, 1), policy=MANY).without_hosts
    assert not decide((code, 0, 2), (code, 0, 1), (code, 0, 2), policy=MANY).without_hosts
    assert not decide((code, 1, 2), (code, 1, 2), policy=MANY).without_hosts, "it makes progress"
    assert decide((code, 1, 2), (code, 0, 2), policy=MANY).without_hosts == {2}
    assert decide((code, 0, 2), 75, (code, 0, 2), policy=MANY).without_hosts == {2}


def test_a_required_host_is_not_excluded_for_faults():
    needed = dataclasses.replace(POLICY, num_hosts=(2,))
    ends = [(KILLED, 0, 1)] * 4
    assert decide(*ends, policy=needed) == Restart(
        8.0, frozenset(), "failure 4 of 5 without a new commit"
    )
    assert decide(*ends, KILLED, policy=needed).exit == ExitCode.NO_PROGRESS


def test_too_few_hosts_after_exclusions_end_the_run():
    """As after a supervisor that could do with fewer."""
    needed = dataclasses.replace(POLICY, num_hosts=(2,))
    found = decide((82, 0, 1), 75, policy=needed)
    assert found.exit == ExitCode.UNHEALTHY
    assert "too few hosts are left (at least 2) without slot 1" in found.reason


def test_the_largest_allowed_number_of_slots_is_chosen():
    assert restart_policy.choose_slots(MANY, frozenset()) == (0, 1, 2, 3)
    assert restart_policy.choose_slots(MANY, frozenset({0})) == (1, 2, 3)
    assert restart_policy.choose_slots(MANY, frozenset({0, 2})) == (1, 3)
    assert restart_policy.choose_slots(MANY, frozenset({0, 1, 2})) is None
    only = dataclasses.replace(POLICY, num_hosts=(1, 4))
    assert restart_policy.choose_slots(only, frozenset({0})) == (1,)


def test_the_time_limit_ends_the_run():
    limited = dataclasses.replace(POLICY, launch=LaunchSection(max_hours=2), began=50.0)
    assert isinstance(decide(70, policy=limited, now=7249.0), Restart)
    for code in (70, 75, 76):
        over = decide((code, 1), policy=limited, now=7250.0)
        assert over.exit == ExitCode.NO_PROGRESS
        assert "launch.max_hours=2" in over.reason
    assert decide(0, policy=limited, now=7250.0).exit == ExitCode.DONE


def test_too_many_restarts_per_1000_steps_end_the_run():
    limited = dataclasses.replace(POLICY, launch=LaunchSection(max_restarts_per_1000_steps=3))
    often, seldom = [(KILLED, 100)] * 4, [(KILLED, 400)] * 50
    assert isinstance(decide(*often[:3], policy=limited), Restart)
    assert "launch.max_restarts_per_1000_steps=3" in decide(*often, policy=limited).reason
    assert isinstance(decide(*seldom, policy=limited), Restart)


CODES = (70, 74, 75, 79, 80, 82, 86, KILLED, 134, 1)
"""All that a supervisor may try again."""


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_every_sequence_of_failures_without_progress_gives_up(first):
    for seed in range(first, first + 20):
        assert_gives_up(seed)


def assert_gives_up(seed):
    chance = random.Random(seed)
    codes = chance.sample(CODES, chance.randint(1, len(CODES)))
    policy = chance.choice([POLICY, MANY])
    limits, ends = policy.restart, []
    bound = limits.max_attempts_without_commit + limits.max_preemptions_without_commit
    bound += limits.max_storage_attempts + 2 * policy.num_hosts[-1]
    ends.append((chance.choice(codes), chance.randint(0, 1), None))
    for _ in range(bound):
        decision = decide(*ends, policy=policy)
        if isinstance(decision, GiveUp):
            return
        assert 0 <= decision.after_seconds < 1000
        places = restart_policy.choose_slots(policy, decision.without_hosts)
        assert places, "there is somewhere to go on"
        ends.append((chance.choice(codes), 0, chance.choice([None, *places])))
    pytest.fail(f"seed {seed}: still going on after {bound} attempts without progress: {codes}")


def test_only_a_new_commit_is_progress():
    """Steps that are committed again after a loss do not give a budget back."""
    again = [dataclasses.replace(o, step_before=0, step_after=8) for o in history(*[KILLED] * 7)]
    decisions = [restart_policy.decide(again[:n], 0.0, POLICY) for n in range(1, 8)]
    assert [type(decision) for decision in decisions[:6]] == [Restart] * 5 + [GiveUp]


def test_decisions_are_pure():
    for ends in itertools.product(CODES[:6], repeat=3):
        outcomes = history(*[(code, 0, 1) for code in ends])
        copy = list(outcomes)
        first = restart_policy.decide(outcomes, 5.0, MANY)
        assert first == restart_policy.decide(tuple(copy), 5.0, MANY)
        assert outcomes == copy
