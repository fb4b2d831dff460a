"""What the words of a metadata server mean, and what follows from the time that they leave."""

import json
from datetime import UTC, datetime

import pytest

from jaxres.config.schema.supervision import PreemptionSection
from jaxres.supervisor.preemption.notices import (
    EVENT,
    NEAR_SECONDS,
    PREEMPTED,
    UPCOMING,
    MetadataValue,
    NoEvent,
    PreemptionNotice,
    SaveTimings,
    apply,
    decide,
    most_urgent,
    parse,
    save_now,
)

SECTION = PreemptionSection()
WALL, NOW = 1_800_000_000.0, 50.0


def parsed(key, text, *, policy=""):
    return MetadataValue(key, text, received_at=NOW, wall=WALL, policy=policy)


def means(key, text, *, section=SECTION, policy=""):
    return parse(parsed(key, text, policy=policy), section)


def window(seconds, status="PENDING", **facts):
    start = datetime.fromtimestamp(WALL + seconds, UTC).isoformat()
    reported = {"maintenance_status": status, "window_start_time": start, "type": "SCHEDULED"}
    return json.dumps(reported | facts)


def test_a_preemption_notice_has_its_configured_seconds():
    notice = means(PREEMPTED, "TRUE\n")
    assert isinstance(notice, PreemptionNotice)
    assert notice.seconds_left(NOW + 1) == 29
    longer = PreemptionSection(notice_seconds=120.0)
    assert means(PREEMPTED, "TRUE", section=longer).seconds_left(NOW) == 120
    assert means(PREEMPTED, "FALSE") == NoEvent()


def test_an_event_without_a_window_has_the_configured_time_or_an_unknown_one():
    assert means(EVENT, "TERMINATE_ON_HOST_MAINTENANCE").seconds_left(NOW) is None
    gpu = PreemptionSection(maintenance_seconds=3600.0)
    assert means(EVENT, "TERMINATE_ON_HOST_MAINTENANCE", section=gpu).seconds_left(NOW) == 3600
    assert means(EVENT, "NONE") == NoEvent()
    assert isinstance(means(EVENT, "MIGRATE_ON_HOST_MAINTENANCE"), NoEvent)


@pytest.mark.parametrize("text", ["{}", "NONE", '{"error":"no notifications have been received"}'])
def test_no_upcoming_maintenance_is_parsed_in_all_three_forms(text):
    assert means(UPCOMING, text) == NoEvent()


@pytest.mark.parametrize("start", ["2027-01-15T08:01:40Z", "2027-01-15T09:01:40.000+01:00"])
def test_a_maintenance_window_becomes_a_deadline_on_the_monotonic_clock(start):
    assert datetime(2027, 1, 15, 8, 0, tzinfo=UTC).timestamp() == WALL
    notice = means(UPCOMING, window(0, window_start_time=start))
    assert isinstance(notice, PreemptionNotice)
    assert notice.seconds_left(NOW) == 100


def test_a_started_window_waits_for_its_event_and_ongoing_maintenance_does_not():
    assert isinstance(means(UPCOMING, window(-60)), NoEvent)
    assert means(UPCOMING, window(-60, "ONGOING")).seconds_left(NOW) is None


def test_maintenance_does_not_stop_a_vm_that_migrates():
    assert isinstance(means(UPCOMING, window(60), policy="MIGRATE"), NoEvent)
    assert isinstance(means(UPCOMING, window(60), policy="TERMINATE"), PreemptionNotice)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (PREEMPTED, ""),
        (PREEMPTED, "<html>TRUE</html>"),
        (EVENT, "TRUE"),
        (UPCOMING, "TRUE"),
        (UPCOMING, "[]"),
        (UPCOMING, "{"),
        (UPCOMING, window(60, "UNDEFINED")),
        (UPCOMING, window(60, window_start_time="soon")),
        (UPCOMING, window(60, window_start_time="2027-01-15T08:01:40")),
        (UPCOMING, window(60, window_start_time=None)),
    ],
)
def test_an_unrecognised_metadata_value_changes_nothing(key, text):
    assert means(key, text) is None
    active = {key: PreemptionNotice(key, "words", NOW, None)}
    assert apply(active, key, None) == active
    assert apply({}, key, None) == {}


def test_a_preemption_is_permanent_and_a_maintenance_can_be_cancelled():
    active = {}
    for key, text in ((PREEMPTED, "TRUE"), (UPCOMING, window(9e3))):
        active = apply(active, key, means(key, text))
    assert set(active) == {PREEMPTED, UPCOMING}
    for key, text in ((PREEMPTED, "FALSE"), (UPCOMING, "{}")):
        active = apply(active, key, means(key, text))
    assert set(active) == {PREEMPTED}


def active(**texts):
    names = {"preempted": PREEMPTED, "event": EVENT, "upcoming": UPCOMING}
    return {names[name]: means(names[name], text) for name, text in texts.items()}


def test_the_earliest_deadline_is_most_urgent_and_an_event_uses_its_window():
    terminate = "TERMINATE_ON_HOST_MAINTENANCE"
    assert most_urgent({}) is None
    assert most_urgent(active(preempted="TRUE", upcoming=window(3600))).source == PREEMPTED
    assert most_urgent(active(event=terminate, upcoming=window(3600))).source == UPCOMING
    assert most_urgent(active(event=terminate, upcoming=window(90 * 24 * 3600))).source == EVENT
    assert most_urgent(active(event=terminate)).source == EVENT


def notice(seconds):
    """One that was seen just now, and leaves so many seconds."""
    return PreemptionNotice(PREEMPTED, "words", NOW, None if seconds is None else NOW + seconds)


def action(seconds, *, later=0.0, margin=5.0, **measured):
    facts = SaveTimings(**measured)
    return decide(notice(seconds), facts, now=NOW + later, margin_seconds=margin).action


@pytest.mark.parametrize(
    ("seconds", "measured", "expected"),
    [
        (30, {"write_seconds": 20}, "save"),
        (30, {"write_seconds": 26}, "exit"),
        (30, {"write_seconds": 20, "step_seconds": 2.0}, "save"),
        (30, {"write_seconds": 20, "step_seconds": 2.0, "num_hosts": 2}, "exit"),
        (120, {"write_seconds": 26}, "save"),
        (120, {"write_seconds": 70}, "save"),
        # Of a save that takes 20 s, 15 are over: the rest fits, another one after it does not.
        (30, {"write_seconds": 20, "writing_seconds": 15}, "save"),
        (30, {"write_seconds": 20, "writing_seconds": 14}, "exit"),
        # Storage is slower than it was.
        (30, {"write_seconds": 1, "writing_seconds": 40}, "exit"),
        # Nothing is known yet.
        (30, {}, "save"),
        (30, {"writing_seconds": 20}, "save"),
        (30, {"writing_seconds": 26}, "exit"),
        (4, {}, "exit"),
        (None, {"write_seconds": 1e6}, "save"),
    ],
)
def test_a_save_is_started_only_if_it_can_finish_in_time(seconds, measured, expected):
    assert action(seconds, **measured) == expected


def test_training_continues_until_the_last_safe_moment_before_a_distant_deadline():
    facts = {"write_seconds": 60.0, "step_seconds": 1.0}
    assert action(3600, **facts) == "continue"
    last_safe = 3600 - 5 - 2 - 2 * 60
    assert action(3600, later=last_safe - 1, **facts) == "continue"
    assert action(3600, later=last_safe, **facts) == "save"
    assert action(3600, later=3600 - 5 - 2 - 60, **facts) == "save"
    assert action(3600, later=3600 - 5 - 2 - 59, **facts) == "exit"


def test_a_save_right_before_the_last_safe_moment_leaves_time_for_the_last_one():
    facts = {"write_seconds": 60.0, "step_seconds": 1.0}
    last_safe = 3600 - 5 - 2 - 2 * 60
    assert action(3600, later=last_safe - 1, writing_seconds=0.0, **facts) == "save"


def test_a_distant_deadline_before_any_save_leaves_time_for_a_slow_save():
    assert action(3600) == "continue"
    assert action(3600, later=3600 - 590) == "save"


def test_training_stops_at_once_before_a_near_deadline():
    assert action(NEAR_SECONDS, write_seconds=0.1) == "save"
    assert action(NEAR_SECONDS + 1, write_seconds=0.1) == "continue"
    far = decide(notice(600), SaveTimings(write_seconds=0.1), now=NOW, margin_seconds=0.0)
    assert (far.action, save_now(far).action) == ("continue", "save")
