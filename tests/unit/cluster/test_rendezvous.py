"""Rendezvous: all hosts start, or all exit with one message that names the wrong host."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest

from jaxres.cluster import connection, peer_connections, rendezvous
from jaxres.cluster.compatibility import key_digests
from jaxres.cluster.connection import connect
from jaxres.cluster.detect import Address
from jaxres.cluster.messages import MAX_BYTES, Disconnected, JobResult, encode
from jaxres.cluster.rendezvous import RendezvousFollower, RendezvousLeader
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Fenced, PeerLost, PreemptedError, RunError, StoppedError
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import run_dir_watcher
from tests.manual_clock import ManualClock
from tests.unit.cluster.supervisors import (
    ATTEMPT,
    SECRET,
    Lobby,
    StillClock,
    begin,
    dial,
    follow,
    free_address,
    hello,
    leader,
    line,
    prove,
    read_line,
    settings,
    together,
    wait_message,
)
from tests.waiting import SURE_SECONDS


@pytest.fixture
def address():
    return free_address()


def assert_all_end(ends, kind, *texts):
    assert {type(end) for end in ends} == {kind}, ends
    assert len({str(end) for end in ends}) == 1, ends
    for text in texts:
        assert text in str(ends[0])


def test_all_hosts_join_and_start(address):
    hellos, *announced = together(
        partial(begin, address, num_hosts=3),
        partial(follow, address, hello(2, num_hosts=3)),
        partial(follow, address, hello(1, num_hosts=3)),
    )
    assert hellos == tuple(hello(host, num_hosts=3) for host in range(3))
    assert announced == [ATTEMPT, ATTEMPT]


def test_the_leader_may_start_later(address):
    def late():
        time.sleep(0.6)
        return begin(address)

    hellos, announced = together(late, partial(follow, address, hello(1)))
    assert len(hellos) == 2
    assert announced == ATTEMPT


def test_an_absent_host_is_named_to_all_that_joined(address):
    lobby = Lobby()
    clock = StillClock(lambda: lobby.has("nonce1"), step=0.1)
    ends = together(
        partial(begin, address, num_hosts=4, join_seconds=0.7, lobby=lobby, clock=clock),
        partial(follow, address, hello(1, num_hosts=4)),
    )
    assert_all_end(ends, PeerLost, "hosts 2, 3 of 4", str(address), "0.7 s", "host 1 (node1, pid")


@pytest.mark.parametrize(
    ("other", "texts"),
    [
        ({"num_hosts": 3}, ["--num-hosts 3 there, 2 on host 0"]),
        ({"host": 2}, ["--host-id 2: ids are 0 to 1"]),
        ({"versions": {"jax": "0.11.0", "jaxres": "0.1"}}, ["version of jax: 0.11.0", "0.10.2"]),
        ({"versions": {"jax": "0.10.2"}}, ["version of jaxres: (absent) there"]),
        ({"python": "3.12.0"}, ["Python 3.12.0 there, 3.11.4"]),
        (
            {"trajectory": "3c", "key_digests": {}},
            ["a different trajectory (3c there, 9f3c9f3c on host 0)"],
        ),
    ],
)
def test_an_incompatible_host_ends_all_with_one_message(address, other, texts, monkeypatch):
    monkeypatch.setattr(rendezvous, "MISMATCH_GRACE_SECONDS", 0.1)
    sent = replace(hello(1), **other)
    ends = together(partial(begin, address), partial(follow, address, sent))
    who = f"host {sent.host} (node1, pid 1001)"
    assert_all_end(ends, ConfigError, who, *texts)


def test_each_host_shows_its_own_value_of_a_key_and_sends_none(address, monkeypatch):
    monkeypatch.setattr(rendezvous, "MISMATCH_GRACE_SECONDS", 0.1)
    ours, theirs = {"data.args.token": '"secret 1"'}, {"data.args.token": '"secret 2"'}
    sent = []
    monkeypatch.setattr(connection, "encode", lambda m: sent.append(encode(m)) or sent[-1])

    def begin_with(values, **limits):
        own = hello(0, key_digests=key_digests(values, SECRET))
        with RendezvousLeader(settings(address, own, values=values, **limits)) as leader:
            leader.wait_for_all()

    other = hello(1, trajectory="3c", key_digests=key_digests(theirs, SECRET))
    leads, follows = together(
        partial(begin_with, ours), partial(follow, address, other, values=theirs)
    )
    assert 'data.args.token: "secret 1" on host 0, another value there' in str(leads)
    assert "data.args.token has another value" in str(follows)
    assert str(follows).endswith('On this host: data.args.token: "secret 2"')
    assert len(sent) >= 3
    assert not [line for line in sent if b"secret" in line]


def test_another_patch_release_of_python_may_join(address):
    _, announced = together(
        partial(begin, address), partial(follow, address, hello(1, python="3.11.9"))
    )
    assert announced == ATTEMPT


def test_compatible_hosts_also_end_if_one_is_incompatible(address):
    ends = together(
        partial(begin, address, num_hosts=3),
        partial(follow, address, hello(1, num_hosts=3, trajectory="a", key_digests={})),
        partial(follow, address, hello(2, num_hosts=3)),
    )
    assert_all_end(ends, ConfigError, "host 1 (node1")


def test_a_duplicate_id_is_refused_and_the_others_continue(address):
    lobby, refused = Lobby(), threading.Event()

    def double():
        lobby.wait_for("nonce1")
        try:
            return follow(address, hello(1, num_hosts=3, nonce="other", name="elsewhere"))
        finally:
            refused.set()

    def last():
        refused.wait(SURE_SECONDS)
        return follow(address, hello(2, num_hosts=3))

    hellos, first, doubled, other = together(
        partial(begin, address, num_hosts=3, lobby=lobby),
        partial(follow, address, hello(1, num_hosts=3)),
        double,
        last,
    )
    assert isinstance(doubled, ConfigError)
    assert "host 1 is already taken by node1 pid 1001; give each host its own" in str(doubled)
    assert [first, other] == [ATTEMPT, ATTEMPT]
    assert hellos[1].name == "node1"


def test_a_second_host_0_among_followers_is_refused(address):
    refused = threading.Event()

    def wrong():
        try:
            return follow(address, hello(0, nonce="other"))
        finally:
            refused.set()

    def last():
        refused.wait(SURE_SECONDS)
        return follow(address, hello(1))

    _, rejected, announced = together(partial(begin, address), wrong, last)
    assert isinstance(rejected, ConfigError)
    assert "host 0 is already taken by node0" in str(rejected)
    assert announced == ATTEMPT


def test_a_host_that_died_during_the_rendezvous_may_join_again(address):
    lobby = Lobby()

    def dies_and_joins_again():
        with dial(address) as gone:
            prove(gone)
            gone.sendall(encode(hello(1, num_hosts=3, nonce="dead")))
            assert b'"admitted"' in gone.recv(65536)
        return follow(address, hello(1, num_hosts=3))

    def last():
        lobby.wait_for("nonce1")
        return follow(address, hello(2, num_hosts=3))

    led = partial(begin, address, num_hosts=3, lobby=lobby)
    hellos, *announced = together(led, dies_and_joins_again, last)
    assert hellos[1].nonce == "nonce1"
    assert announced == [ATTEMPT, ATTEMPT]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01" * 100,
        b'{"jaxres": 3, "message": "hello", "host": "x"}\n',
        b'{"jaxres": 3, "message": "hello", "host": ' + b"[" * 60000 + b"\n",
        b'{"jaxres": 3, "message": "claim_visible", "visible": true}\n',
        b"x" * (MAX_BYTES + 2),
        b'{"jaxres": 3, "message": "hello", "name": "' + b"x" * (10 * MAX_BYTES),
        b"\n\n\n",
        b"",
    ],
)
def test_an_unknown_client_is_disconnected_and_the_rendezvous_continues(address, data):
    def unknown_client():
        with dial(address) as connected:
            connected.settimeout(SURE_SECONDS)
            try:
                connected.sendall(data)
                connected.shutdown(socket.SHUT_WR)
                while connected.recv(65536):
                    pass
            except ConnectionError:
                pass
        return follow(address, hello(1))

    hellos, announced = together(partial(begin, address), unknown_client)
    assert len(hellos) == 2
    assert announced == ATTEMPT


def test_a_client_whose_hello_is_late_is_disconnected(address, monkeypatch):
    monkeypatch.setattr(peer_connections, "HELLO_SECONDS", 0.3)
    with leader(address) as running_leader:
        gathering = threading.Thread(
            target=partial(together, running_leader.wait_for_all), daemon=True
        )
        gathering.start()
        with socket.create_connection((address.host, address.port)) as slow:
            slow.settimeout(SURE_SECONDS)
            slow.sendall(b"{")
            assert "challenge" in read_line(slow)
            assert slow.recv(10) == b""
        monkeypatch.setattr(peer_connections, "HELLO_SECONDS", SURE_SECONDS)
        follow_thread = threading.Thread(
            target=partial(together, partial(follow, address, hello(1)))
        )
        follow_thread.start()
        gathering.join(SURE_SECONDS)
        assert not gathering.is_alive()
        running_leader.announce(ATTEMPT)
    follow_thread.join(SURE_SECONDS)


def test_the_number_of_unidentified_clients_is_bounded(address, monkeypatch):
    monkeypatch.setattr(peer_connections, "MAX_UNIDENTIFIED", 4)

    def crowd():
        clients = [dial(address) for _ in range(20)]
        try:
            return follow(address, hello(1))
        finally:
            for unknown_client in clients:
                unknown_client.close()

    _, announced = together(partial(begin, address), crowd)
    assert announced == ATTEMPT


def test_an_absent_leader_is_named(address):
    with pytest.raises(PeerLost) as lost:
        follow(address, hello(1), join_seconds=0.5, clock=ManualClock())
    assert f"host 0 at {address} did not answer within 0.5 s" in str(lost.value)
    assert "refused" in str(lost.value)


def test_a_client_that_connects_to_itself_is_refused(address, monkeypatch):
    """The kernel may choose, for a client on the same machine, the very port it asks for."""

    def itself(place, timeout):
        client = socket.socket()
        client.bind(place)
        client.connect(place)
        return client

    monkeypatch.setattr(socket, "create_connection", itself)
    with pytest.raises(OSError, match="refused"):
        connect(address, secret=SECRET, seconds=SURE_SECONDS)
    monkeypatch.undo()
    with leader(address):
        pass


def test_a_leader_whose_name_does_not_resolve_is_named():
    with pytest.raises(PeerLost, match=r"no-such-host\.invalid:1 did not answer"):
        follow(Address("no-such-host.invalid", 1), hello(1), join_seconds=0.5, clock=ManualClock())


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.6\r\n", b"\x00\x00\x12\x04\x00", b"{}\n"])
def test_another_service_at_the_address_is_named(address, banner):
    with socket.create_server((address.host, address.port)) as server:

        def serve():
            connected, _ = server.accept()
            with connected:
                connected.sendall(banner)
                connected.shutdown(socket.SHUT_WR)
                connected.recv(65536)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConfigError, match="another service than host 0") as refused:
            follow(address, hello(1))
        thread.join()
    assert str(address) in str(refused.value)


def test_another_version_of_the_protocol_is_reported_on_both_sides(address, capsys):
    other = line(challenge="0" * 64).replace(b'"jaxres": 3', b'"jaxres": 4', 1)

    def unknown_client():
        with dial(address) as connected:
            connected.sendall(other)
            while connected.recv(65536):
                pass
        return follow(address, hello(1))

    _, announced = together(partial(begin, address), unknown_client)
    assert announced == ATTEMPT
    assert "install the same jaxres on all hosts" in capsys.readouterr().err
    with socket.create_server((address.host, address.port)) as server:

        def serve():
            connected, _ = server.accept()
            with connected:
                connected.sendall(other)
                connected.recv(65536)

        refused, _ = together(partial(follow, address, hello(1)), serve)
    assert isinstance(refused, ConfigError)
    assert "install the same jaxres on all hosts" in str(refused)


def test_an_unshared_run_directory_ends_all_with_one_message(address):
    ends = together(
        partial(begin, address, num_hosts=3),
        partial(follow, address, hello(1, num_hosts=3)),
        partial(follow, address, hello(2, num_hosts=3, run_dir="/mnt/b"), is_visible=False),
    )
    assert_all_end(
        ends, ConfigError, "attempt 3", "/runs/a", "host 2 (node2), in /mnt/b", "not shared"
    )


def test_a_claim_may_become_visible_late(address):
    looks = []

    def is_visible(attempt, nonce):
        looks.append((attempt, nonce))
        return len(looks) > 2

    def look():
        with RendezvousFollower(settings(address, hello(1))) as follower:
            follower.confirm(follower.join(), is_visible, visible_seconds=SURE_SECONDS)

    together(partial(begin, address), look)
    assert looks == [(3, "c1a1")] * 3


@dataclass
class Signalled:
    """A clock that raises once: it is asked all the time, as a signal may come at any."""

    end: RunError | None
    is_due: Callable[[], bool]

    def sleep(self, seconds):
        time.sleep(seconds)

    def monotonic(self):
        if self.end is not None and self.is_due():
            end, self.end = self.end, None
            raise end
        return time.monotonic()


@pytest.mark.parametrize("end", [StoppedError, PreemptedError, ConfigError])
def test_an_exit_of_one_host_before_the_start_ends_all(address, end):
    lobby = Lobby()
    clock = Signalled(end("SIGx"), lambda: lobby.has("nonce1", "nonce2"))
    led, ended, reported = together(
        partial(begin, address, num_hosts=4, lobby=lobby),
        partial(follow, address, hello(1, num_hosts=4), clock=clock),
        partial(follow, address, hello(2, num_hosts=4)),
    )
    assert_all_end([led, reported], end, "host 1 (node1): SIGx")
    assert str(ended) == "SIGx"


def test_a_stop_file_ends_the_wait_for_hosts_on_all_and_stops_no_later_start(address, tmp_path):
    run_dir = RunDir(tmp_path)

    def leads():
        watch = run_dir_watcher.stop_while_waiting(run_dir)
        with leader(address, num_hosts=3) as running_leader, watch as stopped:

            def end():
                if running_leader.peers.links:
                    run_dir.request("stop").touch()
                return stopped()

            running_leader.wait_for_all(end)

    led, reported = together(leads, partial(follow, address, hello(1, num_hosts=3)))
    assert_all_end([led, reported], StoppedError, "stopped before the hosts had connected")
    assert not run_dir.request("stop").exists()


def test_an_exit_of_the_leader_before_the_start_ends_all(address):
    def claims():
        with leader(address) as running_leader:
            running_leader.wait_for_all()
            raise Fenced("owned by another process")

    fenced, reported = together(claims, partial(follow, address, hello(1)))
    assert isinstance(reported, Fenced)
    assert str(reported) == f"host 0 (node0): {fenced}"


def test_a_follower_that_dies_before_the_claim_is_visible_ends_all(address):
    def dies():
        with RendezvousFollower(settings(address, hello(1, num_hosts=3))) as follower:
            follower.join()

    led, _, reported = together(
        partial(begin, address, num_hosts=3), dies, partial(follow, address, hello(2, num_hosts=3))
    )
    assert_all_end([led, reported], PeerLost, "host 1 (node1) is gone", "closed the connection")


def test_a_leader_that_dies_after_all_have_joined_is_lost(address):
    def dies():
        with leader(address) as running_leader:
            running_leader.wait_for_all()

    _, lost = together(dies, partial(follow, address, hello(1)))
    assert isinstance(lost, PeerLost)
    assert f"host 0 ({address}) is gone" in str(lost)


def test_late_and_duplicate_hosts_are_rejected_at_once(address):
    started, done = threading.Event(), threading.Event()

    def stays():
        with RendezvousFollower(settings(address, hello(1))) as follower:
            return wait_message(follower.confirm(follower.join(), lambda *_: True), JobResult)

    def leads():
        with leader(address) as running_leader:
            running_leader.wait_for_all()
            running = running_leader.announce(ATTEMPT)
            started.set()
            while not done.wait(0.02):
                assert not [
                    message for _, message in running.receive() if isinstance(message, Disconnected)
                ]
            running.send(JobResult(0, None, "done", 7))

    def join_late():
        started.wait(SURE_SECONDS)
        ends = together(
            partial(follow, address, hello(1, nonce="other")),
            partial(follow, address, hello(5, nonce="other")),
            partial(follow, address, hello(0, nonce="other")),
            partial(follow, address, hello(1, nonce="o", trajectory="a", key_digests={})),
        )
        done.set()
        return ends

    _, heard, ends = together(leads, stays, join_late)
    assert [end.exit_code for end in ends] == [
        ExitCode.FENCED,
        ExitCode.CONFIG,
        ExitCode.FENCED,
        ExitCode.CONFIG,
    ]
    assert "its host 1 is node1 pid 1001, which is alive" in str(ends[0])
    assert "ids are 0 to 1" in str(ends[1])
    assert heard == (0, JobResult(0, None, "done", 7))


def test_a_host_that_joins_for_the_next_attempt_waits_for_it(address):
    """Host 1's new supervisor starts while host 0's old one is still exiting."""
    gone = threading.Event()

    def first():
        with RendezvousFollower(settings(address, hello(1))) as follower:
            follower.confirm(follower.join(), lambda *_: True)
        gone.set()

    def leads():
        with leader(address) as running_leader:
            running_leader.wait_for_all()
            running = running_leader.announce(ATTEMPT)
            assert wait_message(running, Disconnected)[0] == 1
            until = time.monotonic() + 0.8
            while time.monotonic() < until:
                running.receive()
                time.sleep(0.02)
        return begin(address)

    def second():
        gone.wait(SURE_SECONDS)
        return follow(address, hello(1, nonce="second"))

    hellos, _, announced = together(leads, first, second)
    assert hellos[1].nonce == "second"
    assert announced == ATTEMPT
