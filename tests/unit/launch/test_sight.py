"""Promises of what a leader sees: silence counts only while whoever is asked answers."""

from __future__ import annotations

from jaxres.launch.observed_state import (
    AWAY_SECONDS,
    HOST_ERROR,
    MOST_SECONDS,
    Log,
    Observed,
    Report,
    Seen,
    Sight,
)

NAME = "jx-0000"
READY = Report("ready", "b").words()
THERE = {NAME: Observed(NAME, "us-central1-a", "RUNNING", "10.0.0.1", 7)}


def look(sight: Sight) -> Seen:
    return sight.seen(wall=0.0, creation=None, unasked_seconds=0.0)


def heard(*looks: tuple[float, int], sight: Sight | None = None, waited: float = 0.0) -> float:
    """Returns the silence after looks, each a time and the generation that was found."""
    sight = sight or Sight()
    for now, generation in looks:
        sight.heard({NAME: (generation, READY)}, now=now, waited=waited)
    return look(sight).silent[NAME]


def test_an_agent_is_silent_for_as_long_as_nothing_new_is_heard() -> None:
    assert heard((0, 1)) == 0
    assert heard((0, 1), (1, 1), (2.5, 1)) == 2.5
    assert heard((0, 1), (1, 1), (2, 2)) == 0
    assert heard((0, 2), (1, 1)) == 0, "generations are compared, not ordered"


def test_a_report_that_was_deleted_is_a_silence() -> None:
    sight = Sight()
    sight.heard({NAME: (1, READY)}, now=0.0)
    for now in (1.0, 2.0, 3.0):
        sight.heard({}, now=now)
    assert look(sight).silent[NAME] == 3.0


def test_who_has_slept_has_not_listened() -> None:
    assert heard((0, 1), (1, 1), (10_000, 1)) == 1 + MOST_SECONDS


def test_a_bucket_that_is_away_makes_nobody_look_dead() -> None:
    sight = Sight()
    heard((0, 1), (1, 1), (2, 1), sight=sight)
    sight.bucket_silent()
    assert heard((60, 1), sight=sight) == 0, "agents had no answer either"
    assert heard((61, 1), (62, 1), sight=sight) == 2


def test_a_bucket_that_answers_late_was_away_for_the_agents_too() -> None:
    sight = Sight()
    heard((0, 1), (1, 1), (2, 1), (3, 1), sight=sight)
    late = heard((28, 1), sight=sight, waited=AWAY_SECONDS + 0.1)
    assert late == 0, "a slow answer counts as silence"
    assert heard((29, 1), sight=sight, waited=AWAY_SECONDS) == 1


def test_absence_counts_while_the_service_answers() -> None:
    sight = Sight()
    for now in (0.0, 1.0, 2.0):
        sight.listed({}, {NAME: True}, now=now)
    assert look(sight).absent == {NAME: 2.0}
    sight.listed(None, {NAME: True}, now=3.0)
    assert look(sight).absent == {NAME: 2.0}
    assert look(sight).vms is None
    sight.listed({}, {NAME: True}, now=100.0)
    assert look(sight).absent == {NAME: 2.0}, "nobody knows what was in between"
    sight.listed({}, {NAME: True}, now=101.0)
    assert look(sight).absent == {NAME: 3.0}
    sight.listed(THERE, {NAME: True}, now=102.0)
    assert look(sight).absent == {}


def test_how_long_a_vm_took_to_be_made_does_not_count_as_absence() -> None:
    sight = Sight()
    for now in range(60):
        sight.listed({}, {NAME: False}, now=float(now))
    sight.listed(None, {NAME: True}, now=60.0)
    assert look(sight).absent[NAME] == 0.0, "lost at the moment when it was made"
    sight.listed({}, {NAME: True}, now=61.0)
    sight.listed({}, {NAME: True}, now=62.0)
    assert look(sight).absent[NAME] == 1.0


def test_what_the_service_did_to_a_vm_is_not_forgotten() -> None:
    sight = Sight()
    sight.listed(THERE, {NAME: True}, now=0.0)
    sight.told({7: HOST_ERROR})
    sight.listed({}, {NAME: True}, now=1.0)
    sight.told({})
    assert look(sight).events == {NAME: HOST_ERROR}


def test_what_the_service_did_to_another_vm_of_that_name_is_not_this_ones() -> None:
    """A run was deleted, and another one begins in its place: the names begin anew."""
    sight = Sight()
    sight.listed(THERE, {NAME: True}, now=0.0)
    sight.told({6: HOST_ERROR})
    assert look(sight).events == {}


def test_an_attempt_stands_still_by_its_own_commits_alone() -> None:
    sight = Sight()

    def progressed(step: int, attempt: int = 1, *, is_on: bool = True, any_ended: bool = False):
        sight.progressed(Log(step), attempt, is_on=is_on, any_ended=any_ended, since=1.0)
        return look(sight).still_seconds, look(sight).ended_seconds

    assert [progressed(0) for _ in range(3)] == [(0.0, None), (1.0, None), (2.0, None)]
    assert progressed(10) == (0.0, None)
    assert progressed(10) == (1.0, None)
    assert progressed(10, 2) == (0.0, None), "another attempt has its own time"
    assert progressed(10, 2, any_ended=True) == (1.0, 0.0)
    assert progressed(10, 2, any_ended=True) == (2.0, 1.0)
    assert progressed(10, 2, is_on=False) == (0.0, None)
