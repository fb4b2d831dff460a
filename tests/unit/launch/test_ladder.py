"""Promises of the ladder: the best place that may be had, and no place asked for too soon again."""

import pytest

from jaxres.config.schema_gce import Rung, SpotRung, StandardRung
from jaxres.launch.capacity_options import (
    JITTER,
    NEVER,
    Cooling,
    Site,
    Trouble,
    choose,
    cooled,
    sites,
)

A, B = "us-central1-a", "us-east4-a"
LADDER: tuple[Rung, ...] = (
    SpotRung(zones=(A, B), machine_type="a2-highgpu-1g"),
    StandardRung(zones=(A,), machine_type="a2-highgpu-1g"),
)
HOUR = 3600.0
STOCKOUT: tuple[Trouble, ...] = ("stockout",)


def left_alone(*troubles: Trouble, now: float = 0.0, site: Site | None = None) -> Cooling:
    """Returns what follows from troubles in a row at one place."""
    site = site or Site(0, A)
    found: tuple[Cooling, ...] = ()
    for trouble in troubles:
        found = cooled(found, site, trouble, now=now, longest=HOUR, seed="jx-run")
    assert len(found) == 1
    return found[0]


def test_places_are_tried_rung_by_rung_and_zone_by_zone() -> None:
    assert list(sites(LADDER)) == [Site(0, A), Site(0, B), Site(1, A)]
    cooling: tuple[Cooling, ...] = ()
    for expected in (Site(0, A), Site(0, B), Site(1, A)):
        assert choose(LADDER, cooling, now=0.0) == expected
        cooling = cooled(cooling, expected, "stockout", now=0.0, longest=HOUR, seed="s")
    soonest = min(c.until for c in cooling)
    assert choose(LADDER, cooling, now=0.0) == soonest, "when to ask again"
    first = min(cooling, key=lambda c: c.until)
    assert choose(LADDER, cooling, now=soonest) == Site(first.rung, first.zone)


def test_a_better_place_is_taken_again_as_soon_as_it_may_be() -> None:
    cooling = cooled((), Site(0, A), "stockout", now=0.0, longest=HOUR, seed="s")
    assert choose(LADDER, cooling, now=1.0) == Site(0, B)
    assert choose(LADDER, cooling, now=cooling[0].until) == Site(0, A)


@pytest.mark.parametrize(
    ("trouble", "seconds"),
    [
        ("stockout", 300.0),
        ("quota", HOUR),
        ("rate_limit", 60.0),
        ("passing", 15.0),
        ("preempted", 0.0),
        ("exists", 0.0),
    ],
)
def test_a_place_is_left_alone_by_its_trouble_with_jitter_in_bounds(
    trouble: Trouble, seconds: float
) -> None:
    found = {
        cooled((), Site(0, A), trouble, now=5.0, longest=HOUR, seed=f"run-{n}")[0].until - 5.0
        for n in range(200)
    }
    assert all(seconds <= one <= seconds * (1 + JITTER) for one in found), sorted(found)
    assert len(found) > 100 or seconds == 0, "all launchers would come back at once"
    assert left_alone(trouble) == left_alone(trouble), "a successor reckons otherwise"


@pytest.mark.parametrize("trouble", ["wrong_zone", "refused"])
def test_a_place_that_can_never_do_is_never_asked_again(trouble: Trouble) -> None:
    assert left_alone(trouble, now=1.7e9).until == NEVER
    cooling: tuple[Cooling, ...] = ()
    for site in sites(LADDER):
        cooling = cooled(cooling, site, trouble, now=0.0, longest=HOUR, seed="s")
    assert choose(LADDER, cooling, now=1.8e9) == NEVER


def test_stockouts_in_a_row_are_waited_out_ever_longer_up_to_the_limit() -> None:
    waits = [left_alone(*(STOCKOUT * n)).until for n in range(1, 8)]
    for wait, seconds in zip(waits, (300, 600, 1200, 2400, 3600, 3600, 3600), strict=True):
        assert seconds <= wait <= seconds * (1 + JITTER)
    assert left_alone(*(STOCKOUT * 2000)).until <= HOUR * (1 + JITTER), "no overflow"
    assert left_alone("stockout", "stockout", "quota", "stockout").times == 1


def test_one_place_s_trouble_is_not_anothers() -> None:
    first = cooled((), Site(0, A), "quota", now=0.0, longest=HOUR, seed="s")
    both = cooled(first, Site(1, A), "stockout", now=0.0, longest=HOUR, seed="s")
    assert first[0] in both
    assert {(c.rung, c.zone): c.times for c in both} == {(0, A): 1, (1, A): 1}
