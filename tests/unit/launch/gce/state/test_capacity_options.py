"""Capacity options: the preferred available zone is chosen, and none is retried too soon."""

import pytest

from jaxres.config.schema.gce import CapacityOption, SpotOption, StandardOption
from jaxres.launch.gce.state.capacity_options import (
    JITTER,
    NEVER,
    Backoff,
    CreateErrorKind,
    ZoneChoice,
    choose,
    with_backoff,
    without_quota,
    zone_choices,
)

A, B = "us-central1-a", "us-east4-a"
OPTIONS: tuple[CapacityOption, ...] = (
    SpotOption(zones=(A, B), machine_type="a2-highgpu-1g"),
    StandardOption(zones=(A,), machine_type="a2-highgpu-1g"),
)
HOUR = 3600.0
STOCKOUT: tuple[CreateErrorKind, ...] = ("stockout",)


def backoff_after(
    *errors: CreateErrorKind, now: float = 0.0, site: ZoneChoice | None = None
) -> Backoff:
    """Returns the backoff after errors in a row in one zone."""
    site = site or ZoneChoice(0, A)
    found: tuple[Backoff, ...] = ()
    for error in errors:
        found = with_backoff(found, site, error, now=now, longest=HOUR, seed="jx-run")
    assert len(found) == 1
    return found[0]


def test_zones_are_tried_option_by_option() -> None:
    assert list(zone_choices(OPTIONS)) == [ZoneChoice(0, A), ZoneChoice(0, B), ZoneChoice(1, A)]
    backoffs: tuple[Backoff, ...] = ()
    for expected in (ZoneChoice(0, A), ZoneChoice(0, B), ZoneChoice(1, A)):
        assert choose(OPTIONS, backoffs, now=0.0) == expected
        backoffs = with_backoff(backoffs, expected, "stockout", now=0.0, longest=HOUR, seed="s")
    soonest = min(c.until for c in backoffs)
    assert choose(OPTIONS, backoffs, now=0.0) == soonest, "when to retry"
    first = min(backoffs, key=lambda c: c.until)
    assert choose(OPTIONS, backoffs, now=soonest) == ZoneChoice(first.option, first.zone)


def test_a_preferred_zone_is_chosen_again_when_its_backoff_ends() -> None:
    backoffs = with_backoff((), ZoneChoice(0, A), "stockout", now=0.0, longest=HOUR, seed="s")
    assert choose(OPTIONS, backoffs, now=1.0) == ZoneChoice(0, B)
    assert choose(OPTIONS, backoffs, now=backoffs[0].until) == ZoneChoice(0, A)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        ("stockout", 300.0),
        ("quota", HOUR),
        ("not_freed", 15.0),
        ("rate_limit", 60.0),
        ("passing", 15.0),
        ("preempted", 0.0),
        ("exists", 0.0),
    ],
)
def test_a_backoff_depends_on_the_error_with_bounded_jitter(
    error: CreateErrorKind, seconds: float
) -> None:
    found = {
        with_backoff((), ZoneChoice(0, A), error, now=5.0, longest=HOUR, seed=f"run-{n}")[0].until
        - 5.0
        for n in range(200)
    }
    assert all(seconds <= one <= seconds * (1 + JITTER) for one in found), sorted(found)
    assert len(found) > 100 or seconds == 0, "all launchers would retry at once"
    assert backoff_after(error) == backoff_after(error), "a successor computes another backoff"


@pytest.mark.parametrize("error", ["wrong_zone", "refused"])
def test_a_zone_that_can_never_work_is_never_retried(error: CreateErrorKind) -> None:
    assert backoff_after(error, now=1.7e9).until == NEVER
    backoffs: tuple[Backoff, ...] = ()
    for site in zone_choices(OPTIONS):
        backoffs = with_backoff(backoffs, site, error, now=0.0, longest=HOUR, seed="s")
    assert choose(OPTIONS, backoffs, now=1.8e9) == NEVER


def test_stockouts_in_a_row_have_growing_backoffs_up_to_the_limit() -> None:
    waits = [backoff_after(*(STOCKOUT * n)).until for n in range(1, 8)]
    for wait, seconds in zip(waits, (300, 600, 1200, 2400, 3600, 3600, 3600), strict=True):
        assert seconds <= wait <= seconds * (1 + JITTER)
    assert backoff_after(*(STOCKOUT * 2000)).until <= HOUR * (1 + JITTER), "no overflow"
    assert backoff_after("stockout", "stockout", "quota", "stockout").failures == 1


def test_a_zone_whose_capacity_is_freed_soon_is_waited_for() -> None:
    backoffs = with_backoff((), ZoneChoice(0, B), "not_freed", now=0.0, longest=HOUR, seed="s")
    assert choose(OPTIONS, backoffs, now=1.0) == ZoneChoice(0, A), "a preferred zone"
    backoffs = with_backoff(backoffs, ZoneChoice(0, A), "quota", now=0.0, longest=HOUR, seed="s")
    until = backoffs[0].until
    assert choose(OPTIONS, backoffs, now=1.0) == until, "a more expensive option is used"
    assert choose(OPTIONS, backoffs, now=until) == ZoneChoice(0, B)
    assert choose(OPTIONS, without_quota(backoffs), now=1.0) == ZoneChoice(0, A)


def test_the_backoff_of_one_zone_does_not_affect_another() -> None:
    first = with_backoff((), ZoneChoice(0, A), "quota", now=0.0, longest=HOUR, seed="s")
    both = with_backoff(first, ZoneChoice(1, A), "stockout", now=0.0, longest=HOUR, seed="s")
    assert first[0] in both
    assert {(c.option, c.zone): c.failures for c in both} == {(0, A): 1, (1, A): 1}
