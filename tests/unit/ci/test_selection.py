"""CI chooses the slow tests that are closest to a change, and those that have waited longest."""

from __future__ import annotations

from tools.ci.selection import Case, Selection, fill, longest_wait, select

LAUNCH, CHECKPOINT = "jaxres/launch/a.py", "jaxres/checkpoint/b.py"
NAMES_LAUNCH = Case("names-launch", names=frozenset({LAUNCH}), seconds=50, landing=5)
RAN_LAUNCH = Case("ran-launch", executed=frozenset({LAUNCH, CHECKPOINT}), seconds=50, landing=4)
RAN_BOTH = Case("ran-both", executed=frozenset({CHECKPOINT}), seconds=50, landing=3)
FAR = Case("far", seconds=50, landing=1)
FARTHER = Case("farther", seconds=50, landing=0)
NEVER = Case("never", seconds=50)
ALL = (FAR, RAN_BOTH, NEVER, RAN_LAUNCH, FARTHER, NAMES_LAUNCH)


def names(tests: tuple[Case, ...]) -> list[str]:
    return [test.name for test in tests]


def test_tests_that_name_a_changed_file_come_before_those_that_executed_it() -> None:
    selected = select(ALL, changed={LAUNCH}, share_seconds=0)
    assert names(selected.closest) == ["names-launch", "ran-launch"]
    assert selected.left_out == ()


def test_what_has_no_room_is_left_out_and_named() -> None:
    selected = select(ALL, changed={LAUNCH, CHECKPOINT}, closest_seconds=100, share_seconds=0)
    assert names(selected.closest) == ["names-launch", "ran-launch"]
    assert names(selected.left_out) == ["ran-both"]


def test_the_share_has_those_that_have_waited_longest_whatever_has_changed() -> None:
    selected = select(ALL, changed={LAUNCH}, share_seconds=120)
    assert names(selected.share) == ["never", "farther", "far"], "too few, or others"
    assert sum(test.seconds for test in selected.share) >= 120


def test_without_a_base_only_the_share_is_chosen() -> None:
    selected = select(ALL, changed=None)
    assert selected.closest == ()
    assert names(selected.share) == ["never", "farther", "far"]


def test_a_change_of_texts_chooses_nothing() -> None:
    assert select(ALL, changed={"docs/gce.md", "README.md"}) == Selection()


def test_a_change_of_texts_beside_code_is_one_of_code() -> None:
    assert select(ALL, changed={"docs/gce.md", LAUNCH}).closest[0] is NAMES_LAUNCH


def test_every_test_is_run_within_so_many_landings_as_there_are_shares() -> None:
    tests = [Case(f"t{number}", seconds=30) for number in range(20)]
    for landing in range(5):
        run = {test.name for test in select(tests, changed=None, share_seconds=120).share}
        tests = [
            Case(test.name, seconds=30, landing=landing if test.name in run else test.landing)
            for test in tests
        ]
    assert longest_wait(tests, 5) == 5
    assert min(test.landing for test in tests) == 0


def test_what_is_close_is_not_in_the_share_as_well() -> None:
    selected = select(ALL, changed={LAUNCH}, share_seconds=1000)
    assert len(selected.chosen) == len({test.name for test in selected.chosen}) == len(ALL)


def test_a_test_without_room_does_not_keep_a_shorter_one_out() -> None:
    long, short = Case("long", seconds=90), Case("short", seconds=10)
    assert fill([FAR, long, short], 100) == ([FAR, short], [long])
