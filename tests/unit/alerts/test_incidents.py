"""Every shape field by field, and when silence about commits is told."""

from __future__ import annotations

from typing import Any

from jaxres.config.schema_operations import AlertTarget, GenericTarget, PagerdutyTarget, SlackTarget
from jaxres.telemetry import alert_delivery_log
from jaxres.telemetry.alert_delivery_log import Ledger
from jaxres.telemetry.alert_monitors import CommitWatch
from jaxres.telemetry.incidents import Incident, Kind, key, messages

FALL = Incident(
    kind="gave_up",
    run="tiny-3f9c",
    attempt=3,
    step=40,
    host=1,
    code=137,
    reason="host 1 was <killed> & buried",
    next="look at it",
)


def bodies(
    target: AlertTarget,
    incident: Incident = FALL,
    *,
    left_out: dict[str, int] | None = None,
    is_open: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    found = messages(
        target,
        incident,
        key=key(incident, nonce="n"),
        time=0.5,
        secret="routing-key",
        left_out=left_out or {},
        is_open=is_open or {},
    )
    return [message.body for message in found]


def test_slack_gets_one_text_that_can_not_hold_markup():
    (body,) = bodies(SlackTarget(url_env="A"), left_out={"restarted": 2, "preempted": 1})
    assert body == {
        "text": "tiny-3f9c has given up: nobody starts it again "
        "(attempt 3, step 40 committed, host 1, exit 137 signal 9)\n"
        "host 1 was &lt;killed&gt; &amp; buried\n"
        "next: look at it\n"
        "not told since the last message: 1 preempted, 2 restarted"
    }


def test_the_generic_shape_has_every_fact_in_a_field_of_its_own():
    (body,) = bodies(GenericTarget(url_env="A"), left_out={"restarted": 2})
    text = body.pop("text")
    assert text.startswith("tiny-3f9c has given up")
    assert body == {
        "id": "n-3-gave_up-0",
        "kind": "gave_up",
        "run": "tiny-3f9c",
        "attempt": 3,
        "step": 40,
        "host": 1,
        "code": 137,
        "exit": "signal 9",
        "reason": "host 1 was <killed> & buried",
        "next": "look at it",
        "seq": 0,
        "time": "1970-01-01T00:00:00.500+00:00",
        "left_out": {"restarted": 2},
    }


def test_pagerduty_is_triggered_with_all_that_its_events_api_requires():
    (body,) = bodies(PagerdutyTarget(key_env="A"))
    payload = body.pop("payload")
    assert body == {
        "routing_key": "routing-key",
        "event_action": "trigger",
        "dedup_key": "n-3-gave_up-0",
        "client": "jaxres",
    }
    details = payload.pop("custom_details")
    assert details["exit"] == "signal 9"
    assert payload == {
        "summary": "tiny-3f9c has given up: nobody starts it again (attempt 3, step 40 committed, "
        "host 1, exit 137 signal 9): host 1 was <killed> & buried",
        "source": "tiny-3f9c",
        "severity": "critical",
        "timestamp": "1970-01-01T00:00:00.500+00:00",
        "component": "attempt 3",
        "class": "gave_up",
    }
    long = Incident(kind="restarted", run="r" * 500, attempt=1, step=0, reason="x" * 5000)
    (body,) = bodies(PagerdutyTarget(key_env="A", kinds=None), long)
    assert len(body["payload"]["summary"]) <= 1024
    assert len(body["dedup_key"]) <= 255


def test_pagerdutys_open_alerts_are_resolved_by_what_ends_them():
    target = PagerdutyTarget(key_env="A")
    is_open = {"n-1-no_commit_for_too_long-1": "no_commit_for_too_long", "n-2-gave_up-0": "gave_up"}

    def resolved(kind: Kind) -> list[str]:
        found = bodies(target, Incident(kind=kind, run="r", attempt=3, step=4), is_open=is_open)
        for body in found:
            assert set(body) == {"routing_key", "event_action", "dedup_key"}
            assert body["event_action"] == "resolve"
        return [body["dedup_key"] for body in found]

    assert resolved("commits_again") == ["n-1-no_commit_for_too_long-1"]
    assert resolved("finished") == list(is_open)
    is_open.clear()
    assert resolved("finished") == []


def test_a_target_is_folded_from_its_own_lines_only():
    told = {"kind": "gave_up", "run": "r", "attempt": 1, "step": 4, "from_a_later_version": 1}
    lines = [
        alert_delivery_log.line("a", "k1", "told", time=1.0, incident=told),
        alert_delivery_log.line("a", "k2", "told", time=2.0, incident=told),
        alert_delivery_log.line("b", "k3", "told", time=3.0, incident=told),
        {"something": "else"},
        {"target": "a", "state": "told"},
        alert_delivery_log.line("a", "k1", "delivered", time=4.0),
        alert_delivery_log.line("a", "unknown", "delivered", time=4.0),
    ]
    found = alert_delivery_log.fold("a", lines)
    assert list(found.waiting) == ["k2"]
    assert found.waiting["k2"].incident == Incident(kind="gave_up", run="r", attempt=1, step=4)
    assert (found.known, found.sent) == ({"k1", "k2"}, [4.0])
    assert found.is_open == {"k1": "gave_up"}


def test_the_limit_counts_the_messages_of_the_last_hour_also_after_a_jump_of_the_clock():
    found = Ledger("a", sent=[100.0, 200.0])
    assert not found.is_allowed("restarted", now=300.0, max_per_hour=2)
    assert found.is_allowed("gave_up", now=300.0, max_per_hour=2)
    assert found.is_allowed("restarted", now=3750.0, max_per_hour=2)
    assert found.is_allowed("restarted", now=-3600.0, max_per_hour=2)


def test_silence_about_commits_is_told_once_and_so_is_its_end():
    watch = CommitWatch(60.0, step=0, since=100.0)
    looks = [(0, 159.0), (0, 160.0), (0, 500.0), (10, 510.0), (10, 569.0), (10, 570.0)]
    assert [watch.look(step, now=now) for step, now in looks] == [
        None,
        "no_commit_for_too_long",
        None,
        "commits_again",
        None,
        "no_commit_for_too_long",
    ]
    assert watch.times_told == 2
    assert CommitWatch(None, step=0, since=0.0).look(0, now=1e9) is None
