"""Incidents reach a real HTTP server exactly once, and a dead server delays nothing else."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.config.schema.alert_kinds import Kind
from jaxres.config.schema.alerts import AlertsSection, GenericTarget, PagerdutyTarget, SlackTarget
from jaxres.faults import ConfigError
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Quarantine, RunLog
from jaxres.runlog.supervisor_events import (
    AttemptRestarted,
    GaveUp,
    SupervisionEnded,
    SupervisionStarted,
)
from jaxres.telemetry import alert_delivery_log, alert_sender, webhook
from jaxres.telemetry.alert_sender import Alerts, resolve, scrub_secrets
from jaxres.telemetry.incidents import Incident
from tests.unit.runlog.example_records import CLAIM
from tests.unit.telemetry.webhook_server import Hook, served
from tests.waiting import SURE_SECONDS

SECRET = "s3cret-token"


def incident(kind: str = "restarted", attempt: int = 1, **more: Any) -> Incident:
    return Incident(kind=Kind(kind), run="tiny", attempt=attempt, step=40, **more)


class Printed(list[str]):
    """Lines printed on the terminal."""

    def __call__(self, text: str) -> None:
        self.append(text)


def alerts(
    folder: Path,
    *hooks: Hook | str,
    printed: Printed | None = None,
    kinds: tuple[str, ...] | None = None,
    no_commit_minutes: float | None = None,
) -> Alerts:
    urls = {f"HOOK_{n}": h if isinstance(h, str) else h.url for n, h in enumerate(hooks)}
    section = AlertsSection(
        targets=tuple(GenericTarget(url_env=name, kinds=kinds) for name in urls),
        no_commit_minutes=no_commit_minutes,
    )
    if urls and not RunDir(folder).log.exists():
        RunLog.claim(RunDir(folder).log, CLAIM, after=[], clock=SystemClock())
    return Alerts(
        resolve(section, env=urls),
        RunDir(folder),
        section=section,
        clock=SystemClock(),
        report=Printed() if printed is None else printed,
        retry_seconds=0.02,
    )


def pages(folder: Path, hook: Hook, *, kinds: tuple[str, ...]) -> Alerts:
    target = PagerdutyTarget(key_env="KEY", url=hook.url, kinds=kinds)
    section = AlertsSection(targets=(target,), no_commit_minutes=None)
    return Alerts(
        resolve(section, env={"KEY": SECRET}),
        RunDir(folder),
        section=section,
        clock=SystemClock(),
        report=Printed(),
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunDir(folder).alerts.read_text().splitlines()]


def test_each_incident_is_delivered_once_even_after_errors(tmp_path):
    printed = Printed()
    with served(500, 503, 429, 500) as hook:
        with alerts(tmp_path, hook, printed=printed) as sender:
            for attempt in (1, 2, 3):
                sender.send(incident(attempt=attempt))
                sender.send(incident(attempt=attempt))
            hook.wait(lambda: len(hook.accepted) == 3)
        assert [body["attempt"] for body in hook.accepted] == [1, 2, 3]
        assert hook.keys == [body["id"] for body in hook.accepted]
        assert hook.keys == ["n-1-restarted-0", "n-2-restarted-0", "n-3-restarted-0"]
        assert len(hook.received) == 3 + 4, "each failure is tried again once"
    assert len(printed) == 1, "one line for a series of failures"
    assert "answered 500" in printed[0]


def test_a_hanging_target_delays_neither_the_exit_nor_another_target(tmp_path, monkeypatch):
    for name in ("WAIT_SECONDS", "TOTAL_SECONDS"):
        monkeypatch.setattr(webhook, name, SURE_SECONDS / 2)
    printed = Printed()
    with served(*[-1] * 9) as dead, served() as healthy:
        started = time.monotonic()
        with alerts(tmp_path, dead, healthy, printed=printed) as sender:
            sender.send(incident())
            healthy.wait(lambda: len(healthy.accepted) == 1)
        assert time.monotonic() - started < SURE_SECONDS / 2, "it has waited for the target"
        assert printed == ["alerts: 1 incidents were not delivered to generic:HOOK_0"]


def test_the_next_supervisor_sends_undelivered_incidents(tmp_path):
    with alerts(tmp_path, "http://127.0.0.1:9/s3cret-token") as sender:
        sender.send(incident())
        sender.send(incident("gave_up"))
        time.sleep(0.1)
    with served() as hook, alerts(tmp_path, hook) as sender:
        sender.send(incident("gave_up"))
        hook.wait(lambda: len(hook.accepted) == 2)
        time.sleep(0.1)
    assert [body["kind"] for body in hook.accepted] == ["restarted", "gave_up"]


def test_incidents_beyond_the_rate_limit_are_counted_in_the_next_message_and_final_ones_are_sent(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(alert_sender, "MAX_PER_HOUR", 2)
    with served() as hook, alerts(tmp_path, hook) as sender:
        for attempt in range(1, 6):
            sender.send(incident(attempt=attempt))
        sender.send(incident("preempted", attempt=6))
        sender.send(incident("gave_up", attempt=7))
        hook.wait(lambda: len(hook.accepted) == 3)
    assert [body["attempt"] for body in hook.accepted] == [1, 2, 7]
    assert hook.accepted[-1]["dropped"] == {"restarted": 3, "preempted": 1}
    assert "not sent since the last message: 1 preempted, 3 restarted" in hook.accepted[-1]["text"]
    with served() as hook, alerts(tmp_path, hook) as sender:
        sender.send(incident(attempt=8))
        sender.send(incident("finished", attempt=8))
        hook.wait(lambda: len(hook.accepted) == 1)
    assert hook.accepted[0]["kind"] == "finished", "the limit outlives the supervisor"
    assert hook.accepted[0]["dropped"] == {"restarted": 1}


def test_pagerduty_resolves_are_sent_beyond_the_rate_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(alert_sender, "MAX_PER_HOUR", 1)
    kinds = ("commits_stalled", "restarted", "gave_up")
    with served() as hook, pages(tmp_path, hook, kinds=kinds) as pager:
        for kind in ("commits_stalled", "restarted", "commits_resumed", "gave_up"):
            pager.send(incident(kind))
        hook.wait(lambda: "gave_up" in str(hook.accepted))
    sent = [(body["event_action"], body["dedup_key"]) for body in hook.accepted]
    assert sent[:2] == [
        ("trigger", "unclaimed-1-commits_stalled-0"),
        ("resolve", "unclaimed-1-commits_stalled-0"),
    ], "the alert stays open"


def test_what_resolves_nothing_takes_no_place_in_the_rate_limit_and_ends_no_summary(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(alert_sender, "MAX_PER_HOUR", 2)
    kinds = ("restarted", "gave_up")
    with served() as hook, pages(tmp_path, hook, kinds=kinds) as pager:
        for attempt in (1, 2):
            pager.send(incident("straggler_recovered", attempt=attempt))
        for attempt in (1, 2, 3):
            pager.send(incident("restarted", attempt=attempt))
        pager.send(incident("straggler_recovered", attempt=3))
        pager.send(incident("gave_up", attempt=3))
        hook.wait(lambda: "gave_up" in str(hook.accepted))
    sent = [(body["payload"]["class"], body["payload"]["component"]) for body in hook.accepted]
    assert sent == [
        ("restarted", "attempt 1"),
        ("restarted", "attempt 2"),
        ("gave_up", "attempt 3"),
    ]
    assert hook.accepted[-1]["payload"]["custom_details"]["dropped"] == {"restarted": 1}


def test_a_first_commit_that_resolves_nothing_is_no_undelivered_incident(tmp_path):
    printed = Printed()
    with alerts(tmp_path, "http://127.0.0.1:9/s3cret-token", printed=printed) as sender:
        sender.send(incident())
        sender.send(incident("saves_recovered"))  # It would wait for the one before.
        sender.send(incident("saves_failing"))
        sender.send(incident("saves_recovered", attempt=2))
    assert "3 incidents were not delivered" in printed[-1]
    with served() as hook, alerts(tmp_path, hook) as sender:
        sender.send(incident("finished", attempt=2))
        hook.wait(lambda: len(hook.accepted) == 4)
    assert [body["kind"] for body in hook.accepted] == [
        "restarted",
        "saves_failing",
        "saves_recovered",
        "finished",
    ]


def test_a_rejected_request_is_not_retried_and_a_redirect_is_not_followed(tmp_path):
    printed = Printed()
    with served() as other, served(403, 302, Location=other.url) as hook:
        with alerts(tmp_path, hook, printed=printed) as sender:
            for attempt in (1, 2, 3):
                sender.send(incident(attempt=attempt))
            hook.wait(lambda: len(hook.accepted) == 1)
        assert len(hook.received) == 3
        assert hook.accepted[0]["dropped"] == {"restarted": 2}
        assert other.received == []
    assert ["403" in printed[0], "302, a redirect" in printed[1], len(printed)] == [True, True, 2]


def test_only_the_configured_kinds_are_sent(tmp_path):
    with served() as hook, alerts(tmp_path, hook, kinds=("gave_up",)) as sender:
        sender.send(incident())
        sender.send(incident("gave_up"))
        hook.wait(lambda: len(hook.accepted) == 1)
    assert [body["kind"] for body in hook.received] == ["gave_up"]


def test_an_incident_is_sent_to_the_named_targets_only(tmp_path):
    with served() as one, served() as other:
        with alerts(tmp_path, one, other) as sender:
            sender.send(incident(), targets={"generic:HOOK_1"})
            other.wait(lambda: len(other.accepted) == 1)
        assert one.received == []


def test_an_incident_that_a_late_process_queues_again_is_not_sent_again():
    queued = {"time": 1.0, "target": "t", "key": "k", "state": "queued"}
    queued["incident"] = {"kind": "restarted", "run": "r", "attempt": 1, "step": 4}
    done = {"time": 2.0, "target": "t", "key": "k", "state": "delivered"}
    assert not alert_delivery_log.fold("t", [queued, done, queued]).waiting


@pytest.mark.parametrize(
    "written",
    [
        {"kind": "of_a_newer_version"},
        {"attempt": "one"},
        {"run": None},
        {"time": None},
        {"time": 1e300},
        {"time": math.nan},
    ],
)
def test_a_queued_incident_of_another_version_stops_no_alert(tmp_path, written):
    known = {"kind": "restarted", "run": "r", "attempt": 1, "step": 4} | written
    time = known.pop("time", 1.0)
    line = {"time": time, "target": "generic:HOOK_0", "key": "k", "state": "queued"}
    RunDir(tmp_path).alerts.write_text(json.dumps(line | {"incident": known}) + "\n")
    printed = Printed()
    with served() as hook:
        with alerts(tmp_path, hook, printed=printed) as sender:
            sender.send(incident(attempt=9))
        assert [body["attempt"] for body in hook.accepted] == [9], printed


SENDER = """
import sys, time
from pathlib import Path
from tests.unit.telemetry.test_alert_sender import alerts, incident
with alerts(Path(sys.argv[1]), sys.argv[2]) as sender:
    for attempt in range(1, 31):
        sender.send(incident(attempt=attempt))
    time.sleep(6000)
"""


@pytest.mark.slow
def test_killed_senders_repeat_no_recorded_delivery_and_lose_no_incident(tmp_path):
    with served(*[500] * 5) as hook:
        for wanted in (4, 15):
            process = subprocess.Popen([sys.executable, "-c", SENDER, str(tmp_path), hook.url])
            hook.wait(lambda n=wanted: len(hook.accepted) >= n)
            process.send_signal(signal.SIGKILL)
            process.wait()
        on_record = {line["key"] for line in lines(tmp_path) if line["state"] == "delivered"}
        before = len(hook.accepted)
        with alerts(tmp_path, hook) as sender:
            for attempt in range(1, 31):
                sender.send(incident(attempt=attempt))
            hook.wait(lambda: len(set(hook.keys)) == 30)
    assert not on_record & set(hook.keys[before:]), "recorded deliveries are not repeated"
    times = Counter(hook.keys)
    assert len(times) == 30
    assert sum(times.values()) <= 30 + 2, "at most the one in flight at each kill is repeated"


def test_a_secret_appears_only_in_the_requests(tmp_path):
    printed = Printed()
    url = f"http://127.0.0.1:9/{SECRET}"
    with alerts(tmp_path, url, printed=printed) as sender:
        sender.send(incident())
        time.sleep(0.1)
    target = resolve(AlertsSection(targets=(SlackTarget(url_env="A"),)), env={"A": url})
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"restarted" in files
    assert SECRET not in files.decode() + "".join(printed) + repr(target) + repr(sender)
    assert printed, "the refused connection was reported"


def test_missing_and_unusable_variables_are_one_clear_error_without_their_values():
    section = AlertsSection(
        targets=(
            SlackTarget(url_env="SLACK_URL"),
            PagerdutyTarget(key_env="PAGER_KEY"),
            GenericTarget(url_env="HOOK"),
        )
    )
    with pytest.raises(ConfigError) as caught:
        resolve(section, env={"HOOK": f"hooks.example/{SECRET}", "PAGER_KEY": ""})
    printed = str(caught.value)
    assert "variable SLACK_URL is not set" in printed
    assert "variable PAGER_KEY is not set" in printed
    assert "variable HOOK does not hold an address" in printed
    assert SECRET not in printed


def test_a_url_in_the_config_that_is_none_is_named_as_such():
    section = AlertsSection(targets=(PagerdutyTarget(key_env="KEY", url="https://a b/"),))
    with pytest.raises(ConfigError) as caught:
        resolve(section, env={"KEY": SECRET})
    assert "alerts.targets[0].url: 'https://a b/' is no address" in str(caught.value)
    assert "variable KEY" not in str(caught.value)


def test_workers_receive_no_secret():
    section = AlertsSection(targets=(SlackTarget(url_env="A"), PagerdutyTarget(key_env="B")))
    assert scrub_secrets(section, {"A": "x", "B": "y", "C": "z"}) == {"C": "z"}


def test_unwritable_storage_stops_no_alert(tmp_path):
    RunDir(tmp_path).alerts.mkdir()
    printed = Printed()
    with served() as hook, alerts(tmp_path, hook, printed=printed) as sender:
        sender.send(incident())
        hook.wait(lambda: len(hook.accepted) == 1)
    assert len(printed) == 1
    assert "may be repeated" in printed[0]


def test_without_targets_no_thread_starts_and_no_file_is_written(tmp_path):
    with alerts(tmp_path) as sender:
        sender.send(incident())
    assert list(tmp_path.iterdir()) == []


def test_a_request_ends_within_its_timeout_however_slow_the_server_is(monkeypatch):
    monkeypatch.setattr(webhook, "TOTAL_SECONDS", 0.3)
    monkeypatch.setattr(webhook, "WAIT_SECONDS", 2 * SURE_SECONDS)
    with served(-1) as hook:
        started = time.monotonic()
        answer = webhook.post(hook.url, {}, key="k")
        assert time.monotonic() - started < SURE_SECONDS, "only the end of the server ends it"
    assert (answer.is_delivered, answer.may_be_repeated) == (False, True)
    assert SECRET not in answer.description


def test_stalled_and_resumed_commits_are_reported(tmp_path):
    with served() as hook, alerts(tmp_path, hook, no_commit_minutes=0.2 / 60) as _:
        hook.wait(lambda: len(hook.accepted) == 1)
        log = RunLog(RunDir(tmp_path).log, attempt=1, last_seq=1, clock=SystemClock())
        log.append(Commit(step=40, path="p", manifest="m", bytes=1))
        hook.wait(lambda: len(hook.accepted) >= 2)
    sent = [(body["kind"], body["attempt"], body["step"]) for body in hook.accepted]
    assert sent[:2] == [("commits_stalled", 1, 0), ("commits_resumed", 1, 40)]


def test_a_commit_below_a_quarantined_step_ends_a_stall(tmp_path):
    with served() as hook, alerts(tmp_path, hook, no_commit_minutes=0.2 / 60) as _:
        log = RunLog(RunDir(tmp_path).log, attempt=1, last_seq=1, clock=SystemClock())
        log.append(Commit(step=40, path="p", manifest="m", bytes=1))
        hook.wait(lambda: ("commits_stalled", 40) in kinds_and_steps(hook))
        num_sent = len(hook.accepted)
        log.append(Quarantine(step=40, path="p", evidence="a bit flip"))
        log.append(Commit(step=20, path="q", manifest="m", bytes=1))
        hook.wait(lambda: len(hook.accepted) > num_sent)
    assert kinds_and_steps(hook)[num_sent] == ("commits_resumed", 20)


def kinds_and_steps(hook: Hook) -> list[tuple[str, int]]:
    return [(body["kind"], body["step"]) for body in hook.accepted]


def test_a_supervisor_that_follows_a_killed_one_reports_that_commits_have_resumed(tmp_path):
    with served() as hook:
        with alerts(tmp_path, hook, no_commit_minutes=0.2 / 60) as _:
            hook.wait(lambda: len(hook.accepted) == 1)
        log = RunLog(RunDir(tmp_path).log, attempt=1, last_seq=1, clock=SystemClock())
        log.append(Commit(step=40, path="p", manifest="m", bytes=1))
        for _ in range(2):
            with alerts(tmp_path, hook, no_commit_minutes=100) as _:
                hook.wait(lambda: len(hook.accepted) >= 2)
    sent = [(body["kind"], body["step"]) for body in hook.accepted]
    assert sent == [("commits_stalled", 0), ("commits_resumed", 40)]


RESTARTED = AttemptRestarted(
    attempt=2,
    exit=137,
    name="signal 9",
    culprit=1,
    step=40,
    after_seconds=1.2,
    num_hosts=2,
    excluded_slots=(),
    budget="failure 1 of 5",
    reason="host 1 was ended",
)
GAVE_UP = GaveUp(attempt=3, exit=84, name="NO_PROGRESS", step=40, reason="5 attempts")


def supervision_ended(code: int, *, attempt: int = 3) -> SupervisionEnded:
    return SupervisionEnded(attempt=attempt, exit=code, name="", step=120, reason="")


def supervision_started(*, after_kill: bool, attempt: int) -> SupervisionStarted:
    return SupervisionStarted(
        host="node-a",
        pid=7,
        attempt=attempt,
        step=40,
        after_kill=after_kill,
        num_ended_attempts=0,
        budget="failure 2 of 5",
        excluded_slots=(),
        num_hosts=(1,),
        policy={},
    )


def test_a_supervisor_that_follows_a_killed_one_is_reported_once(tmp_path):
    with served() as hook, alerts(tmp_path / "tiny", hook) as sender:
        for after_kill, attempt in [(False, 2), (True, 2), (True, 2), (True, 3)]:
            sender.on_event(supervision_started(after_kill=after_kill, attempt=attempt))
        hook.wait(lambda: len(hook.accepted) == 2)
    assert [(body["kind"], body["attempt"]) for body in hook.accepted] == [
        ("supervisor_restarted", 2),
        ("supervisor_restarted", 3),
    ]
    assert hook.accepted[0]["text"] == (
        "tiny has a new supervisor: the previous one left no exit record "
        "(attempt 2, step 40 committed)\n"
        "(failure 2 of 5)"
    )


def test_a_supervisors_events_send_incidents(tmp_path):
    supervisor_events = [
        *(RESTARTED, replace(RESTARTED, exit=75, attempt=3), GAVE_UP),
        *(supervision_ended(76), supervision_ended(75, attempt=4), supervision_ended(0), object()),
    ]
    with served() as hook, alerts(tmp_path / "tiny", hook) as sender:
        for event in supervisor_events:
            sender.on_event(event)
        hook.wait(lambda: len(hook.accepted) == 5)
    kinds = [body["kind"] for body in hook.accepted]
    assert kinds == ["restarted", "preempted", "gave_up", "preempted", "finished"]
    first = hook.accepted[0]
    assert (first["run"], first["host"], first["code"], first["exit"]) == (
        "tiny",
        1,
        137,
        "signal 9 (SIGKILL)",
    )
    assert first["reason"] == "host 1 was ended (failure 1 of 5)"
    assert first["next"] == "attempt 3 from step 40 in 1 s"


@pytest.mark.parametrize(("retry_after", "waits"), [("7", 7.0), ("99999", 300.0), ("soon", 0.0)])
def test_the_wait_of_a_retry_after_header_is_respected_up_to_a_limit(
    retry_after: str, waits: float
):
    with served(429, Retry_After=retry_after) as hook:
        answer = webhook.post(hook.url, {}, key="k")
    assert (answer.may_be_repeated, answer.wait_seconds) == (True, waits)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_a_server_with_an_untrusted_certificate_receives_no_request(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate}"
    subprocess.run([*command.split(), "-subj", "/CN=127.0.0.1"], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    received: list[bytes] = []

    def listen(listening: socket.socket) -> None:
        with contextlib.suppress(OSError), listening.accept()[0] as raw:
            received.append(tls.wrap_socket(raw, server_side=True).recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=listen, args=[listening])
        thread.start()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}/{SECRET}"
        answer = webhook.post(url, {}, key="k")
        thread.join()
    assert received == []
    assert (answer.is_delivered, answer.description) == (False, "SSLCertVerificationError")
