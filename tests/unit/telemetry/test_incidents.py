"""Request bodies of each kind of webhook, the delivery log, and commit stalls."""

from __future__ import annotations

from typing import Any

from jaxres.config.schema_operations import AlertTarget, GenericTarget, PagerdutyTarget, SlackTarget
from jaxres.runlog.supervisor_events import HardwareFaultFound
from jaxres.telemetry import alert_delivery_log
from jaxres.telemetry.alert_delivery_log import Ledger
from jaxres.telemetry.alert_monitors import CommitStall
from jaxres.telemetry.incidents import Incident, Kind, key, messages, of_event

FAILURE = Incident(
    kind="gave_up",
    run="tiny-3f9c",
    attempt=3,
    step=40,
    host=1,
    code=137,
    reason="host 1 was <killed> & lost",
    next="look at it",
)


def bodies(
    target: AlertTarget,
    incident: Incident = FAILURE,
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


def test_slack_receives_one_text_without_markup():
    (body,) = bodies(SlackTarget(url_env="A"), left_out={"restarted": 2, "preempted": 1})
    assert body == {
        "text": "tiny-3f9c has given up: it will not be restarted "
        "(attempt 3, step 40 committed, host 1, exit 137 signal 9 (SIGKILL))\n"
        "host 1 was &lt;killed&gt; &amp; lost\n"
        "next: look at it\n"
        "not sent since the last message: 1 preempted, 2 restarted"
    }


def test_the_generic_body_has_a_field_for_each_fact():
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
        "exit": "signal 9 (SIGKILL)",
        "reason": "host 1 was <killed> & lost",
        "next": "look at it",
        "seq": 0,
        "time": "1970-01-01T00:00:00.500+00:00",
        "dropped": {"restarted": 2},
    }


def test_a_pagerduty_trigger_has_all_fields_that_its_events_api_requires():
    (body,) = bodies(PagerdutyTarget(key_env="A"))
    payload = body.pop("payload")
    assert body == {
        "routing_key": "routing-key",
        "event_action": "trigger",
        "dedup_key": "n-3-gave_up-0",
        "client": "jaxres",
    }
    details = payload.pop("custom_details")
    assert details["exit"] == "signal 9 (SIGKILL)"
    assert payload == {
        "summary": "tiny-3f9c has given up: it will not be restarted (attempt 3, step 40 "
        "committed, host 1, exit 137 signal 9 (SIGKILL)): host 1 was <killed> & lost",
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


def test_open_pagerduty_alerts_are_resolved_by_the_incidents_that_end_them():
    target = PagerdutyTarget(key_env="A")
    is_open = {"n-1-commits_stalled-1": "commits_stalled", "n-2-gave_up-0": "gave_up"}

    def resolved(kind: Kind) -> list[str]:
        found = bodies(target, Incident(kind=kind, run="r", attempt=3, step=4), is_open=is_open)
        for body in found:
            assert set(body) == {"routing_key", "event_action", "dedup_key"}
            assert body["event_action"] == "resolve"
        return [body["dedup_key"] for body in found]

    assert resolved("commits_resumed") == ["n-1-commits_stalled-1"]
    assert resolved("finished") == list(is_open)
    is_open.clear()
    assert resolved("finished") == []


def test_the_delivery_state_of_a_target_is_folded_from_its_own_lines_only():
    fields = {"kind": "gave_up", "run": "r", "attempt": 1, "step": 4, "from_a_later_version": 1}
    lines = [
        alert_delivery_log.line("a", "k1", "queued", time=1.0, incident=fields),
        alert_delivery_log.line("a", "k2", "queued", time=2.0, incident=fields),
        alert_delivery_log.line("b", "k3", "queued", time=3.0, incident=fields),
        {"something": "else"},
        {"target": "a", "state": "queued"},
        alert_delivery_log.line("a", "k1", "delivered", time=4.0),
        alert_delivery_log.line("a", "unknown", "delivered", time=4.0),
    ]
    found = alert_delivery_log.fold("a", lines)
    assert list(found.waiting) == ["k2"]
    assert found.waiting["k2"].incident == Incident(kind="gave_up", run="r", attempt=1, step=4)
    assert (found.known, found.sent) == ({"k1", "k2"}, [4.0])
    assert found.is_open == {"k1": "gave_up"}


def test_the_rate_limit_counts_the_last_hour_also_after_a_clock_jump():
    found = Ledger("a", sent=[100.0, 200.0])
    assert not found.is_allowed("restarted", now=300.0, max_per_hour=2)
    assert found.is_allowed("gave_up", now=300.0, max_per_hour=2)
    assert found.is_allowed("restarted", now=3750.0, max_per_hour=2)
    assert found.is_allowed("restarted", now=-3600.0, max_per_hour=2)


def test_a_commit_stall_is_reported_once_and_so_is_its_end():
    stall = CommitStall(60.0, step=0, since=100.0)
    observations = [(0, 159.0), (0, 160.0), (0, 500.0), (10, 510.0), (10, 569.0), (10, 570.0)]
    assert [stall.check(step, now=now) for step, now in observations] == [
        None,
        "commits_stalled",
        None,
        "commits_resumed",
        None,
        "commits_stalled",
    ]
    assert stall.num_stalls == 2
    assert CommitStall(None, step=0, since=0.0).check(0, now=1e9) is None


def test_a_fault_of_the_hardware_after_which_training_continues_is_an_incident():
    """One that ends the attempt is the incident of that end, with the fault as its reason."""

    def incident(action: str) -> Incident | None:
        event = HardwareFaultFound(
            *(2, 40, "thermal", "GPU 3", "its clocks are slowed"), action, host=1, number=4
        )
        return of_event(event, run="tiny")

    assert [incident(action) for action in ("save", "leave")] == [None, None]
    found = incident("warn")
    assert found is not None
    assert (found.kind, found.host, found.reason) == (
        *("hardware_fault", 1),
        "GPU 3: its clocks are slowed",
    )
    assert key(found, nonce="n") == "n-2-hardware_fault-4"
    (body,) = bodies(SlackTarget(url_env="A"), found)
    assert body["text"].startswith("tiny trains on hardware with a fault (attempt 2, step 40")
