"""The preemption watcher and a server that speaks the metadata server's protocol."""

import os
import select
import subprocess
import sys
import threading
import time

import pytest

from jaxres.clock import SystemClock
from jaxres.config.schema.supervision import PreemptionSection
from jaxres.faults import ConfigError
from jaxres.runlog.events import Noted
from jaxres.runlog.supervisor_events import PreemptionNoticeReceived, PreemptionWatchStarted
from jaxres.supervisor.preemption import gce_metadata
from jaxres.supervisor.preemption import watcher as preemption_watcher
from jaxres.supervisor.preemption.gce_metadata import NoResponse, Response, Server
from jaxres.supervisor.preemption.watcher import PreemptionWatcher
from jaxres_emulators.metadata import EVENT, PREEMPTED, UPCOMING, MetadataServer
from tests.waiting import SURE_SECONDS, wait_until


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A slow machine may take longer for an answer than the metadata server."""
    monkeypatch.setattr(gce_metadata, "RESPONSE_SECONDS", SURE_SECONDS)


@pytest.fixture
def server():
    with MetadataServer() as server:
        yield server


@pytest.fixture
def watch(server):
    with watching(server) as watcher:
        yield watcher


def watching(server, **words):
    watcher = PreemptionWatcher(
        PreemptionSection(**words), env=server.env, clock=SystemClock(), product=""
    )
    watcher.poll()  # From now on a notice is ours to take; before, it ends the process.
    return watcher


def there(server):
    host, _, port = server.address.partition(":")
    return Server(host, int(port), is_named=True)


def news(watcher, number=1):
    """Waits for the next events, at least this many."""
    events = []

    def have_come():
        select.select([watcher.wakeup], [], [], 0.1)
        events.extend(watcher.poll())
        return len(events) >= number

    wait_until(have_come, "event")
    return events


def test_a_response_has_an_etag_and_a_change_ends_the_long_poll(server):
    first = gce_metadata.get(there(server), PREEMPTED)
    assert isinstance(first, Response)
    assert first.text == "FALSE"
    threading.Timer(0.3, server.preempt).start()
    second = gce_metadata.get(there(server), PREEMPTED, after=first.etag)
    assert isinstance(second, Response)
    assert (second.text, second.etag != first.etag) == ("TRUE", True)


def test_only_status_200_is_a_response(server, monkeypatch):
    assert gce_metadata.get(there(server), "instance/none") == NoResponse(
        f"{server.address}: HTTP 404", is_absent=True
    )
    for kind in ("403", "429", "503", "hang", "drop"):
        server.fail(kind)
        seconds = 0.2 if kind == "hang" else SURE_SECONDS
        monkeypatch.setattr(gce_metadata, "RESPONSE_SECONDS", seconds)
        answer = gce_metadata.get(there(server), PREEMPTED)
        assert isinstance(answer, NoResponse), kind
        assert not answer.is_absent
    closed = Server("127.0.0.1", 1, is_named=True)
    assert isinstance(gce_metadata.get(closed, PREEMPTED), NoResponse)


def test_the_emulator_is_as_strict_as_the_real_one(server, monkeypatch):
    monkeypatch.setattr(gce_metadata, "FLAVOR", ("X-Other", "Google"))
    assert gce_metadata.get(there(server), PREEMPTED) == NoResponse(f"{server.address}: HTTP 403")
    assert not server.warn(), "the early warning is given only to who has asked"


def test_an_unnamed_server_must_send_googles_flavor_header(server, monkeypatch):
    found = Server("127.0.0.1", there(server).port, is_named=False)
    assert isinstance(gce_metadata.get(found, PREEMPTED), Response)
    monkeypatch.setattr(gce_metadata, "FLAVOR", ("Metadata-Flavor", "google"))
    # The emulator refuses the question already; a captive portal would not.
    assert isinstance(gce_metadata.get(found, PREEMPTED), NoResponse)


@pytest.mark.parametrize("value", ["host:port", "[::1", ":80"])
def test_an_invalid_metadata_host_variable_is_rejected(value):
    with pytest.raises(ConfigError, match="GCE_METADATA_HOST"):
        gce_metadata.detect({"GCE_METADATA_HOST": value}, product="")


def test_all_keys_are_polled_concurrently_and_a_change_is_reported(server, watch):
    wait_until(lambda: len(set(server.requests)) == 3, "request of each key")
    assert set(server.requests) == {PREEMPTED, EVENT, UPCOMING}
    assert watch.most_urgent() is None
    server.preempt()
    (event,) = news(watch)
    assert isinstance(event, PreemptionNoticeReceived)
    assert watch.most_urgent().source == PREEMPTED


def test_notices_are_received_despite_failures_of_the_server(server):
    for kind in ("503", "drop"):
        server.fail(kind, key=PREEMPTED)
    server.preempt()
    with watching(server) as watcher:
        news(watcher)
        assert watcher.most_urgent().source == PREEMPTED


def test_only_a_valid_response_cancels_a_maintenance(server, watch):
    server.announce(seconds=3600)
    (event,) = news(watch)
    assert 3600 - SURE_SECONDS < event.seconds_left < 3600
    server.fail("503", key=UPCOMING, times=2)
    server.set(UPCOMING, "{")
    (event,) = news(watch)
    assert isinstance(event, Noted)
    assert watch.most_urgent() is not None
    server.set(UPCOMING, "{}")
    (event,) = news(watch)
    assert (event.value, watch.most_urgent()) == ("cancelled", None)


def test_maintenance_of_a_vm_that_migrates_is_reported_and_does_not_stop_it(server, watch):
    server.set("instance/scheduling/on-host-maintenance", "MIGRATE")
    server.announce(seconds=30)
    (event,) = news(watch)
    assert "no stop" in event.value
    assert watch.most_urgent() is None


def test_a_server_without_long_polling_is_polled_at_a_limited_rate(server):
    server.holds = False
    since = time.monotonic()
    with watching(server) as watcher:
        time.sleep(1.2)
        number, seconds = len(server.requests), time.monotonic() - since
        assert number <= 3 * (2 + seconds / preemption_watcher.PACE_SECONDS), server.requests
        server.preempt()
        news(watcher)
        assert watcher.most_urgent().source == PREEMPTED


def test_an_outage_of_the_server_and_its_end_are_each_reported_once(server, monkeypatch):
    monkeypatch.setattr(preemption_watcher, "SILENT_SECONDS", 0.1)
    server.fail("503", key=PREEMPTED, times=2)
    with watching(server) as watcher:
        silence, again = news(watcher, 2)
        assert "no answer for" in silence.message
        assert again.message == f"{PREEMPTED}: answers again"


@pytest.mark.parametrize(
    ("words", "env", "why"),
    [
        ({}, {}, "this machine is no GCE VM"),
        ({"metadata": "off"}, {"GCE_METADATA_HOST": "127.0.0.1:1"}, "preemption.metadata is off"),
    ],
)
def test_without_a_metadata_server_no_thread_starts(words, env, why):
    before = set(threading.enumerate())  # Of which some may end meanwhile: another test's.
    watcher = PreemptionWatcher(
        PreemptionSection(**words), env=env, clock=SystemClock(), product="ThinkPad"
    )
    with watcher:
        assert watcher.poll() == [PreemptionWatchStarted(None, why)]
        assert watcher.poll() == []
        assert set(threading.enumerate()) <= before


@pytest.mark.slow
def test_a_notice_before_the_first_poll_is_a_sigterm_with_its_reason(server):
    body = f"""
import os, time
from jaxres.clock import SystemClock
from jaxres.config.schema.supervision import PreemptionSection
from jaxres.faults import PreemptedError
from jaxres.host import signals
from jaxres.supervisor.preemption.watcher import PreemptionWatcher
signals.raise_on_stop()
try:
    with PreemptionWatcher(PreemptionSection(), env=os.environ, clock=SystemClock(), product=""):
        time.sleep({SURE_SECONDS})
except PreemptedError as end:
    print(end)
"""
    server.preempt()
    words = [sys.executable, "-c", body]
    ended = subprocess.run(
        words,
        env=os.environ | server.env,
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
        check=True,
    )
    assert ended.stdout.startswith("this VM is being preempted, before the run had begun")
