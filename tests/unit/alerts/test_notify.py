"""Incidents reach a real HTTP server exactly once, and one that is dead disturbs nobody."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.config.schema_operations import (
    AlertsSection,
    GenericTarget,
    PagerdutyTarget,
    SlackTarget,
)
from jaxres.faults import ConfigError
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, RunLog
from jaxres.telemetry import webhook
from jaxres.telemetry.alert_sender import CLOSE_SECONDS, Alerts, resolve, without_secrets
from jaxres.telemetry.incidents import Incident, Kind
from tests.unit.alerts.hooks import Hook, served
from tests.unit.records import CLAIM

SECRET = "s3cret-token"


def incident(kind: Kind = "restarted", attempt: int = 1, **more: Any) -> Incident:
    return Incident(kind=kind, run="tiny", attempt=attempt, step=40, **more)


class Said(list[str]):
    """What a person is told at the terminal."""

    def __call__(self, text: str) -> None:
        self.append(text)


def alerts(
    folder: Path,
    *hooks: Hook | str,
    said: Said | None = None,
    max_per_hour: int = 100,
    kinds: tuple[str, ...] | None = None,
    no_commit_minutes: float | None = None,
) -> Alerts:
    urls = {f"HOOK_{n}": h if isinstance(h, str) else h.url for n, h in enumerate(hooks)}
    section = AlertsSection(
        targets=tuple(GenericTarget(url_env=name, kinds=kinds) for name in urls),
        max_per_hour=max_per_hour,
        no_commit_minutes=no_commit_minutes,
    )
    if urls and not RunDir(folder).log.exists():
        RunLog.claim(RunDir(folder).log, CLAIM, after=[], clock=SystemClock())
    return Alerts(
        resolve(section, env=urls),
        RunDir(folder),
        section=section,
        clock=SystemClock(),
        say=Said() if said is None else said,
        retry_seconds=0.02,
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunDir(folder).alerts.read_text().splitlines()]


def test_each_incident_is_delivered_once_also_after_errors(tmp_path):
    said = Said()
    with served(500, 503, 429, 500) as hook:
        with alerts(tmp_path, hook, said=said) as told:
            for attempt in (1, 2, 3):
                told.tell(incident(attempt=attempt))
                told.tell(incident(attempt=attempt))
            hook.wait(lambda: len(hook.taken) == 3)
        assert [body["attempt"] for body in hook.taken] == [1, 2, 3]
        assert hook.keys == [body["id"] for body in hook.taken]
        assert hook.keys == ["n-1-restarted-0", "n-2-restarted-0", "n-3-restarted-0"]
        assert len(hook.asked) == 3 + 4, "each failure is tried again once"
    assert len(said) == 1, "one word for a row of failures"
    assert "answered 500" in said[0]


def test_a_target_that_hangs_delays_neither_the_end_nor_the_other_target(tmp_path, monkeypatch):
    monkeypatch.setattr(webhook, "WAIT_SECONDS", 60.0)
    said = Said()
    with served(*[-1] * 9) as dead, served() as well:
        started = time.monotonic()
        with alerts(tmp_path, dead, well, said=said) as told:
            told.tell(incident())
            assert time.monotonic() - started < CLOSE_SECONDS, "telling does not wait"
            well.wait(lambda: len(well.taken) == 1)
        assert time.monotonic() - started < 3 * CLOSE_SECONDS
        assert said == ["alerts: generic:HOOK_0 has not been told of 1 incidents"]


def test_what_nobody_took_is_told_by_the_next_supervisor(tmp_path):
    with alerts(tmp_path, "http://127.0.0.1:9/s3cret-token") as told:
        told.tell(incident())
        told.tell(incident("gave_up"))
        time.sleep(0.1)
    with served() as hook, alerts(tmp_path, hook) as told:
        told.tell(incident("gave_up"))
        hook.wait(lambda: len(hook.taken) == 2)
        time.sleep(0.1)
    assert [body["kind"] for body in hook.taken] == ["restarted", "gave_up"]


def test_beyond_the_limit_incidents_are_summed_up_in_the_next_and_the_last_word_is_told(tmp_path):
    with served() as hook, alerts(tmp_path, hook, max_per_hour=2) as told:
        for attempt in range(1, 6):
            told.tell(incident(attempt=attempt))
        told.tell(incident("preempted", attempt=6))
        told.tell(incident("gave_up", attempt=7))
        hook.wait(lambda: len(hook.taken) == 3)
    assert [body["attempt"] for body in hook.taken] == [1, 2, 7]
    assert hook.taken[-1]["left_out"] == {"restarted": 3, "preempted": 1}
    assert "not told since the last message: 1 preempted, 3 restarted" in hook.taken[-1]["text"]
    with served() as hook, alerts(tmp_path, hook, max_per_hour=2) as told:
        told.tell(incident(attempt=8))
        told.tell(incident("finished", attempt=8))
        hook.wait(lambda: len(hook.taken) == 1)
    assert hook.taken[0]["kind"] == "finished", "the limit outlives the supervisor"
    assert hook.taken[0]["left_out"] == {"restarted": 1}


def test_a_refusal_is_not_repeated_and_a_redirect_not_followed(tmp_path):
    said = Said()
    with served() as other, served(403, 302, Location=other.url) as hook:
        with alerts(tmp_path, hook, said=said) as told:
            for attempt in (1, 2, 3):
                told.tell(incident(attempt=attempt))
            hook.wait(lambda: len(hook.taken) == 1)
        assert len(hook.asked) == 3
        assert hook.taken[0]["left_out"] == {"restarted": 2}
        assert other.asked == []
    assert ["403" in said[0], "302, a redirect" in said[1], len(said)] == [True, True, 2]


def test_only_the_kinds_that_are_asked_for_are_told(tmp_path):
    with served() as hook, alerts(tmp_path, hook, kinds=("gave_up",)) as told:
        told.tell(incident())
        told.tell(incident("gave_up"))
        hook.wait(lambda: len(hook.taken) == 1)
    assert [body["kind"] for body in hook.asked] == ["gave_up"]


TELLER = """
import sys, time
from pathlib import Path
from tests.unit.alerts.test_notify import alerts, incident
with alerts(Path(sys.argv[1]), sys.argv[2]) as told:
    for attempt in range(1, 31):
        told.tell(incident(attempt=attempt))
    time.sleep(60)
"""


def test_killed_notifiers_repeat_nothing_that_is_on_record_and_forget_nothing(tmp_path):
    with served(*[500] * 5) as hook:
        for wanted in (4, 15):
            teller = subprocess.Popen([sys.executable, "-c", TELLER, str(tmp_path), hook.url])
            hook.wait(lambda n=wanted: len(hook.taken) >= n, seconds=60)
            teller.send_signal(signal.SIGKILL)
            teller.wait()
        on_record = {line["key"] for line in lines(tmp_path) if line["state"] == "delivered"}
        before = len(hook.taken)
        with alerts(tmp_path, hook) as told:
            for attempt in range(1, 31):
                told.tell(incident(attempt=attempt))
            hook.wait(lambda: len(set(hook.keys)) == 30)
    assert not on_record & set(hook.keys[before:]), "what is on record is not repeated"
    times = Counter(hook.keys)
    assert len(times) == 30
    assert sum(times.values()) <= 30 + 2, "at most the one in flight at each kill is repeated"


def test_a_secret_is_nowhere_but_in_the_requests(tmp_path):
    said = Said()
    url = f"http://127.0.0.1:9/{SECRET}"
    with alerts(tmp_path, url, said=said) as told:
        told.tell(incident())
        time.sleep(0.1)
    target = resolve(AlertsSection(targets=(SlackTarget(url_env="A"),)), env={"A": url})
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"restarted" in files
    assert SECRET not in files.decode() + "".join(said) + repr(target) + repr(told)
    assert said, "the refused connection was told"


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
    said = str(caught.value)
    assert "variable SLACK_URL is not set" in said
    assert "variable PAGER_KEY is not set" in said
    assert "variable HOOK does not hold an address" in said
    assert SECRET not in said


def test_workers_are_given_no_secret():
    section = AlertsSection(targets=(SlackTarget(url_env="A"), PagerdutyTarget(key_env="B")))
    assert without_secrets(section, {"A": "x", "B": "y", "C": "z"}) == {"C": "z"}


def test_storage_that_can_not_be_written_stops_no_alert(tmp_path):
    RunDir(tmp_path).alerts.mkdir()
    said = Said()
    with served() as hook, alerts(tmp_path, hook, said=said) as told:
        told.tell(incident())
        hook.wait(lambda: len(hook.taken) == 1)
    assert len(said) == 1
    assert "may be repeated" in said[0]


def test_without_targets_nothing_is_started_or_written(tmp_path):
    with alerts(tmp_path) as told:
        told.tell(incident())
    assert list(tmp_path.iterdir()) == []


def test_a_request_ends_however_slowly_the_other_side_answers(monkeypatch):
    monkeypatch.setattr(webhook, "WHOLE_SECONDS", 0.3)
    with served(-1) as hook:
        started = time.monotonic()
        answer = webhook.post(hook.url, {}, key="k")
        assert time.monotonic() - started < 2
    assert (answer.is_delivered, answer.may_be_repeated) == (False, True)
    assert SECRET not in answer.words


def test_silence_about_commits_is_told_and_so_is_its_end(tmp_path):
    with served() as hook, alerts(tmp_path, hook, no_commit_minutes=0.2 / 60) as _:
        hook.wait(lambda: len(hook.taken) == 1)
        log = RunLog(RunDir(tmp_path).log, attempt=1, last_seq=1, clock=SystemClock())
        log.append(Commit(step=40, path="p", manifest="m", bytes=1, known_good=True))
        hook.wait(lambda: len(hook.taken) >= 2)
    told = [(body["kind"], body["attempt"], body["step"]) for body in hook.taken]
    assert told[:2] == [("no_commit_for_too_long", 1, 0), ("commits_again", 1, 40)]


@dataclass(frozen=True)
class AttemptRestarted:
    """As the supervisor emits it."""

    attempt: int = 2
    exit: int = 137
    name: str = "SIGKILL"
    culprit: int | None = 1
    step: int = 40
    after_seconds: float = 1.2
    budget: str = "failure 1 of 5"
    reason: str = "host 1 was ended"


@dataclass(frozen=True)
class GaveUp:
    attempt: int = 3
    exit: int = 84
    step: int = 40
    reason: str = "5 attempts"


@dataclass(frozen=True)
class SupervisionEnded:
    exit: int
    attempt: int = 3
    step: int = 120
    reason: str = ""


@dataclass(frozen=True)
class SupervisionStarted:
    """As a supervisor's own event of that name."""

    after_kill: bool
    attempt: int = 2
    step: int = 40
    budget: str = "failure 2 of 5"


def test_a_supervisor_that_follows_a_killed_one_is_told_of_once(tmp_path):
    with served() as hook, alerts(tmp_path / "tiny", hook) as told:
        for after_kill, attempt in [(False, 2), (True, 2), (True, 2), (True, 3)]:
            told.hear(SupervisionStarted(after_kill, attempt))
        hook.wait(lambda: len(hook.taken) == 2)
    assert [(body["kind"], body["attempt"]) for body in hook.taken] == [
        ("came_back", 2),
        ("came_back", 3),
    ]
    assert hook.taken[0]["text"] == (
        "tiny is supervised again: its supervisor had left no word (attempt 2, step 40 committed)\n"
        "(failure 2 of 5)"
    )


def test_a_supervisors_events_are_told(tmp_path):
    decided = [
        *(AttemptRestarted(), AttemptRestarted(exit=75, attempt=3), GaveUp()),
        *(SupervisionEnded(76), SupervisionEnded(75, attempt=4), SupervisionEnded(0), object),
    ]
    with served() as hook, alerts(tmp_path / "tiny", hook) as told:
        for event in decided:
            told.hear(event)
        hook.wait(lambda: len(hook.taken) == 5)
    kinds = [body["kind"] for body in hook.taken]
    assert kinds == ["restarted", "preempted", "gave_up", "preempted", "finished"]
    first = hook.taken[0]
    assert (first["run"], first["host"], first["code"], first["exit"]) == (
        "tiny",
        1,
        137,
        "signal 9",
    )
    assert first["reason"] == "host 1 was ended (failure 1 of 5)"
    assert first["next"] == "attempt 3 from step 40 in 1 s"


@pytest.mark.parametrize(("asked", "waits"), [("7", 7.0), ("99999", 300.0), ("soon", 0.0)])
def test_a_target_that_wants_to_be_left_alone_says_for_how_long(asked: str, waits: float):
    with served(429, Retry_After=asked) as hook:
        answer = webhook.post(hook.url, {}, key="k")
    assert (answer.may_be_repeated, answer.wait_seconds) == (True, waits)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_a_server_whose_certificate_nobody_vouches_for_gets_no_word(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate}"
    subprocess.run([*words.split(), "-subj", "/CN=127.0.0.1"], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    heard: list[bytes] = []

    def listen(listening: socket.socket) -> None:
        with contextlib.suppress(OSError), listening.accept()[0] as raw:
            heard.append(tls.wrap_socket(raw, server_side=True).recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=listen, args=[listening])
        thread.start()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}/{SECRET}"
        answer = webhook.post(url, {}, key="k")
        thread.join()
    assert heard == []
    assert (answer.is_delivered, answer.words) == (False, "SSLCertVerificationError")
