"""A watchman and a server that speaks the metadata server's protocol."""

import os
import select
import subprocess
import sys
import threading
import time

import pytest

from jaxres.clock import SystemClock
from jaxres.config.schema_operations import PreemptionSection
from jaxres.faults import ConfigError
from jaxres.runlog.events import Noted, NoticeSeen, NoticesWatched
from jaxres.supervisor import gce_metadata, preemption_watcher
from jaxres.supervisor.gce_metadata import Answer, Server, Unanswered
from jaxres.supervisor.preemption_watcher import Watchman
from tests.emulators.metadata import EVENT, PREEMPTED, UPCOMING, MetadataServer


@pytest.fixture
def server():
    with MetadataServer() as server:
        yield server


@pytest.fixture
def watch(server):
    with watching(server) as man:
        yield man


def watching(server, **words):
    man = Watchman(PreemptionSection(**words), env=server.env, clock=SystemClock(), product="")
    man.take()  # From now on a notice is ours to take; before, it ends the process.
    return man


def there(server):
    host, _, port = server.address.partition(":")
    return Server(host, int(port), is_named=True)


def news(man, *, seconds=10):
    """Waits for what is to be told next."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        select.select([man.wakeup], [], [], 0.1)
        if told := man.take():
            return told
    raise AssertionError("nothing to be told")


def test_a_key_is_answered_with_its_etag_and_a_change_ends_the_wait(server):
    first = gce_metadata.ask(there(server), PREEMPTED)
    assert isinstance(first, Answer)
    assert first.text == "FALSE"
    threading.Timer(0.3, server.preempt).start()
    second = gce_metadata.ask(there(server), PREEMPTED, after=first.etag)
    assert isinstance(second, Answer)
    assert (second.text, second.etag != first.etag) == ("TRUE", True)


def test_only_200_is_an_answer(server, monkeypatch):
    monkeypatch.setattr(gce_metadata, "ANSWER_SECONDS", 0.2)
    assert gce_metadata.ask(there(server), "instance/none") == Unanswered(
        f"{server.address}: HTTP 404", is_absent=True
    )
    for kind in ("403", "429", "503", "hang", "drop"):
        server.fail(kind)
        answer = gce_metadata.ask(there(server), PREEMPTED)
        assert isinstance(answer, Unanswered), kind
        assert not answer.is_absent
    nobody = Server("127.0.0.1", 1, is_named=True)
    assert isinstance(gce_metadata.ask(nobody, PREEMPTED), Unanswered)


def test_the_emulator_is_as_strict_as_the_real_one(server, monkeypatch):
    monkeypatch.setattr(gce_metadata, "FLAVOR", ("X-Other", "Google"))
    assert gce_metadata.ask(there(server), PREEMPTED) == Unanswered(f"{server.address}: HTTP 403")
    assert not server.warn(), "the early warning is given only to who has asked"


def test_a_server_that_was_not_named_must_say_that_it_is_googles(server, monkeypatch):
    found = Server("127.0.0.1", there(server).port, is_named=False)
    assert isinstance(gce_metadata.ask(found, PREEMPTED), Answer)
    monkeypatch.setattr(gce_metadata, "FLAVOR", ("Metadata-Flavor", "google"))
    # The emulator refuses the question already; a captive portal would not.
    assert isinstance(gce_metadata.ask(found, PREEMPTED), Unanswered)


@pytest.mark.parametrize("value", ["host:port", "[::1", ":80"])
def test_a_variable_that_names_no_server_is_refused(value):
    with pytest.raises(ConfigError, match="GCE_METADATA_HOST"):
        gce_metadata.find({"GCE_METADATA_HOST": value}, product="")


def test_all_keys_are_asked_for_at_once_and_a_change_is_told(server, watch):
    until = time.monotonic() + 10
    while len(set(server.asked)) < 3:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert set(server.asked) == {PREEMPTED, EVENT, UPCOMING}
    assert watch.pressing() is None
    server.preempt()
    (event,) = news(watch)
    assert isinstance(event, NoticeSeen)
    assert watch.pressing().source == PREEMPTED


def test_notices_are_found_through_every_kind_of_failure(server):
    for kind in ("503", "drop"):
        server.fail(kind, key=PREEMPTED)
    server.preempt()
    with watching(server) as man:
        news(man)
        assert man.pressing().source == PREEMPTED


def test_a_maintenance_is_called_off_by_an_answer_and_by_nothing_else(server, watch):
    server.announce(seconds=3600)
    (event,) = news(watch)
    assert 3590 < event.seconds_left < 3600
    server.fail("503", key=UPCOMING, times=2)
    server.set(UPCOMING, "{")
    (event,) = news(watch)
    assert isinstance(event, Noted)
    assert watch.pressing() is not None
    server.set(UPCOMING, "{}")
    (event,) = news(watch)
    assert (event.words, watch.pressing()) == ("called off", None)


def test_a_vm_that_moves_is_told_of_and_not_stopped(server, watch):
    server.set("instance/scheduling/on-host-maintenance", "MIGRATE")
    server.announce(seconds=30)
    (event,) = news(watch)
    assert "no stop" in event.words
    assert watch.pressing() is None


def test_a_server_that_does_not_hold_its_answer_back_is_not_asked_without_end(server):
    server.holds = False
    with watching(server) as man:
        time.sleep(1.2)
        assert len(server.asked) <= 3 * 4, server.asked
        server.preempt()
        news(man)
        assert man.pressing().source == PREEMPTED


def test_silence_is_told_once_and_its_end_too(server, monkeypatch):
    monkeypatch.setattr(preemption_watcher, "SILENT_SECONDS", 0.1)
    server.fail("503", key=PREEMPTED, times=2)
    with watching(server) as man:
        (silence,) = news(man)
        assert "no answer for" in silence.message
        (again,) = news(man)
        assert again.message == f"{PREEMPTED}: answers again"


@pytest.mark.parametrize(
    ("words", "env", "why"),
    [
        ({}, {}, "this machine is no GCE VM"),
        ({"metadata": "off"}, {"GCE_METADATA_HOST": "127.0.0.1:1"}, "preemption.metadata is off"),
    ],
)
def test_where_there_is_nobody_to_ask_there_is_no_thread(words, env, why):
    before = set(threading.enumerate())  # Of which some may end meanwhile: another test's.
    man = Watchman(PreemptionSection(**words), env=env, clock=SystemClock(), product="ThinkPad")
    with man:
        assert man.take() == [NoticesWatched(None, why)]
        assert man.take() == []
        assert set(threading.enumerate()) <= before


def test_a_notice_before_anybody_takes_it_is_a_sigterm_that_says_why(server):
    body = """
import os, time
from jaxres.clock import SystemClock
from jaxres.config.schema_operations import PreemptionSection
from jaxres.faults import Preempted
from jaxres.supervise import signals
from jaxres.supervisor.preemption_watcher import Watchman
signals.raise_stops()
try:
    with Watchman(PreemptionSection(), env=os.environ, clock=SystemClock(), product=""):
        time.sleep(30)
except Preempted as end:
    print(end)
"""
    server.preempt()
    words = [sys.executable, "-c", body]
    ended = subprocess.run(
        words, env=os.environ | server.env, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.startswith("this VM is being preempted, before the run had begun")
