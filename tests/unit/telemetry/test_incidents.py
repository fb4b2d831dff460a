"""Request bodies of each kind of webhook, the delivery log, and commit stalls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jaxres.config.schema.alert_kinds import Kind
from jaxres.config.schema.alerts import AlertTarget, GenericTarget, PagerdutyTarget, SlackTarget
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.skip_causes import SkipCause
from jaxres.runlog.supervisor_events import HardwareFaultFound
from jaxres.telemetry import alert_delivery_log, incidents
from jaxres.telemetry.alert_delivery_log import Ledger
from jaxres.telemetry.alert_monitors import CommitStall
from jaxres.telemetry.incidents import Incident, key, messages, of_event
from jaxres.telemetry.masked_steps import MaskedSteps

FAILURE = Incident(
    kind=Kind.GAVE_UP,
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
    long = Incident(kind=Kind.RESTARTED, run="r" * 500, attempt=1, step=0, reason="x" * 5000)
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

    assert resolved(Kind.COMMITS_RESUMED) == ["n-1-commits_stalled-1"]
    assert resolved(Kind.FINISHED) == list(is_open)
    is_open.clear()
    assert resolved(Kind.FINISHED) == []


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
    assert found.waiting["k2"].incident == Incident(kind=Kind.GAVE_UP, run="r", attempt=1, step=4)
    assert (found.known, found.sent) == ({"k1", "k2"}, [4.0])
    assert found.is_open == {"k1": "gave_up"}


def test_the_rate_limit_counts_the_last_hour_also_after_a_clock_jump():
    found = Ledger("a", sent=[100.0, 200.0])
    assert not found.is_allowed(Kind.RESTARTED, now=300.0, max_per_hour=2)
    assert found.is_allowed(Kind.GAVE_UP, now=300.0, max_per_hour=2)
    assert found.is_allowed(Kind.RESTARTED, now=3750.0, max_per_hour=2)
    assert found.is_allowed(Kind.RESTARTED, now=-3600.0, max_per_hour=2)


def test_a_commit_stall_is_reported_once_and_so_is_its_end():
    stall = CommitStall(60.0, newest=0, since=100.0)
    observations = [(0, 159.0), (0, 160.0), (0, 500.0), (1, 510.0), (1, 569.0), (1, 570.0)]
    assert [stall.check(commits, now=now) for commits, now in observations] == [
        None,
        "commits_stalled",
        None,
        "commits_resumed",
        None,
        "commits_stalled",
    ]
    assert stall.num_stalls == 2
    assert CommitStall(None, newest=0, since=0.0).check(0, now=1e9) is None


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


def event(number: int, kind: str, *, time: float = 1.0, **fields: Any) -> LaunchEvent:
    return LaunchEvent(number, kind, time, attempt=3, step=40, **fields)


def of_events(*events: LaunchEvent) -> list[tuple[str, int]]:
    return [(one.kind, one.seq) for _, one in incidents.of_launch_events(events, run="r")]


def test_the_launchers_events_that_are_incidents_and_those_that_are_none():
    assert of_events(
        event(0, "vms_requested", time=0.0),
        event(1, "vms_created", time=1.0),
        event(2, "attempt_started", time=2.0),
        event(3, "attempt_ended", time=3.0, cause="75"),
        event(4, "attempt_ended", time=4.0, cause="137"),
        event(5, "commits_stalled", time=5.0),
        event(6, "commits_resumed", time=6.0),
        event(7, "no_capacity", time=7.0),
        event(8, "capacity_found", time=8.0),
        event(9, "spend_exceeded", time=9.0),
        event(14, "spare_lost", time=9.5),
        event(15, "spares_ready", time=9.6),
        event(10, "attempt_ended", time=10.0, cause="0", is_last=True),
        event(11, "job_ending", time=10.0, cause="0"),
        event(12, "job_ended", time=11.0, cause="0"),
        event(13, "of a newer version", time=12.0),
    ) == [
        ("preempted", 3),
        ("restarted", 4),
        ("commits_stalled", 5),
        ("commits_resumed", 6),
        ("no_capacity", 7),
        ("capacity_found", 8),
        ("spend_exceeded", 9),
        ("spare_lost", 14),
        ("spares_ready", 15),
        ("finished", 11),
    ]
    assert of_events(event(0, "job_ending", cause="84", reason="5 attempts")) == [("gave_up", 0)]
    assert of_events(event(0, "job_ending", cause="76")) == [], "an operator has ended it"


def test_a_planned_end_is_no_preemption_and_a_degraded_job_is_told():
    ended = event(0, "attempt_ended", cause="75", planned="grow")
    assert of_events(ended, event(1, "grown", time=2.0)) == [("grown", 1)]
    assert of_events(event(0, "attempt_ended", cause="75", planned="drain")) == []
    assert of_events(event(0, "shrunk", lacking=2), event(1, "grown", time=2.0, lacking=1)) == [
        ("shrunk", 0),
        ("shrunk", 1),
    ], "it still lacks a host"
    assert of_events(event(0, "moved")) == [("moved", 0)]
    assert Kind.GROWN.resolves == ("shrunk",)


def test_vms_that_are_lost_with_an_attempt_are_one_incident_with_its_end():
    ended = event(0, "attempt_ended", cause="75", reason="vm-1: it was preempted")
    lost = [event(n, "vm_lost", vms=(f"vm-{n}",), cause="preempted") for n in (1, 2)]
    assert of_events(ended, *lost) == [("preempted", 0)]
    ((_, found),) = incidents.of_launch_events(lost, run="r")
    assert (found.kind, found.seq) == ("vm_lost", 1)
    assert found.reason == "vm-1: preempted; vm-2: preempted"
    later = event(3, "vm_lost", time=2.0, vms=("vm-3",), cause="silent")
    assert of_events(ended, *lost, later) == [("preempted", 0), ("vm_lost", 3)]


def test_each_kind_has_a_headline_and_either_a_severity_or_what_it_resolves():
    for kind in Kind:
        assert kind.row.headline, kind
        assert (kind.row.severity is None) == bool(kind.resolves), kind
        assert set(kind.resolves) <= {begun for begun in Kind if begun.row.severity}, kind


def test_the_page_says_when_each_kind_is_sent_and_what_to_do():
    text = (Path(__file__).parents[3] / "docs" / "watch.md").read_text()
    table = text.partition("| incident | when | PagerDuty | what to do |\n")[2]
    lines = table.partition("\n\n")[0].splitlines()[1:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert sorted(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows))) == sorted(Kind)
    assert all(len(row) == 4 and all(row) for row in rows), rows


def test_masked_steps_are_reported_once_for_a_series():
    masked, reports = MaskedSteps(2, window_steps=10), {}
    for step in range(1, 40):
        if step in (3, 4, 5, 6, 30):
            masked.add(step, SkipCause.NORM_SPIKE)
        if (kind := masked.check(step)) is not None:
            reports[step] = kind
    assert reports == {5: "masked_steps", 15: "masked_steps_recovered"}
    told = [step for step in (2, 11, 12, 30) if masked.is_new_spike(step, SkipCause.NORM_SPIKE)]
    assert (told, masked.num_spikes) == ([2, 12, 30], 3)
    assert not masked.is_new_spike(99, SkipCause.NONFINITE_LOSS)
    assert not MaskedSteps(None, window_steps=10).is_new_spike(1, SkipCause.NORM_SPIKE)
    masked.add(41, None)
    masked.rewind(40)
    assert masked.steps == {30: SkipCause.NORM_SPIKE}, "it is computed again"
