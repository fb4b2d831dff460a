"""Connections of supervisors: a dead peer is lost at once, a suspended process blames no peer."""

import json
import select
import signal
import socket
import threading

import pytest

from jaxres.clock import Awake
from jaxres.cluster import peer_connections
from jaxres.cluster.authentication import Secret
from jaxres.cluster.compatibility import MAX_KEYS_BYTES, key_digests, values_of
from jaxres.cluster.connection import MAX_UNSENT_BYTES, Connection
from jaxres.cluster.detect import Address
from jaxres.cluster.messages import (
    MAX_BYTES,
    MAX_KEYS,
    ClaimVisible,
    Disconnected,
    Goodbye,
    Heartbeat,
    JobResult,
    LeaderHeartbeat,
    ProtocolError,
    StartWorkers,
    StopMessage,
    WorkerExited,
    decode,
    encode,
)
from jaxres.cluster.peer_connections import PeerLinks
from tests.unit.cluster.supervisors import (
    ATTEMPT,
    CLOCK,
    SECRET,
    PassingClock,
    follower_process,
    free_address,
    hello,
    leader,
    wait_message,
)
from tests.waiting import SURE_SECONDS


class Hand:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with PeerLinks(clock=CLOCK, silence_seconds=SURE_SECONDS) as peers:
        peers.add(1, "node1", Connection(ours, None))
        yield peers, theirs
        theirs.close()


@pytest.fixture
def still_pair():
    """A pair whose time stands still."""
    ours, theirs = socket.socketpair()
    clock = Hand()
    peers = PeerLinks(clock=clock, silence_seconds=10.0)
    link = peers.add(1, "node1", Connection(ours, None))
    yield clock, peers, theirs
    link.connection.close()
    theirs.close()
    peers.close()


def test_messages_are_received_as_sent(pair):
    peers, theirs = pair
    sent = [
        Heartbeat(3, "train"),
        WorkerExited(70, "é\n" * 10, committed=False, announced=True, step=3),
        StopMessage(75, "SIGTERM"),
        LeaderHeartbeat((3, 2)),
        JobResult(79, 1, "host 1 is gone", 3),
        StartWorkers(),
    ]
    theirs.sendall(b"".join(encode(message) for message in sent))
    assert peers.receive() == [(1, message) for message in sent]
    assert peers.links[1].step == 3


def test_a_message_received_in_parts_is_one_message(pair):
    peers, theirs = pair
    line = encode(Heartbeat(7, "x"))
    for at in range(len(line)):
        assert peers.receive() == []
        theirs.sendall(line[at : at + 1])
    assert peers.receive() == [(1, Heartbeat(7, "x"))]


def test_the_last_messages_are_received_before_the_loss_and_none_after_it(pair):
    peers, theirs = pair
    theirs.sendall(encode(Heartbeat(5, "train")) + encode(Goodbye(76, "SIGINT")))
    theirs.close()
    assert peers.receive() == [
        (1, Heartbeat(5, "train")),
        (1, Goodbye(76, "SIGINT")),
        (1, Disconnected("host 1 (node1) is gone after step 5: it closed the connection")),
    ]
    assert peers.receive() == []
    peers.send(StartWorkers())
    peers.send_heartbeat(LeaderHeartbeat((1,)))


def test_close_waits_until_a_slow_reader_has_received_the_last_message(monkeypatch):
    monkeypatch.setattr(peer_connections, "LINGER_SECONDS", SURE_SECONDS)
    ours, theirs = socket.socketpair()
    peers = PeerLinks(clock=CLOCK, silence_seconds=SURE_SECONDS)
    peers.add(1, "node1", Connection(ours, None))
    for _ in range(10):
        peers.send(StopMessage(75, "x" * 60000))
    peers.send(JobResult(82, 1, "unhealthy", 40))
    assert peers.links[1].connection.wants_to_write
    closing = threading.Thread(target=peers.close)
    closing.start()
    data = b""
    while got := theirs.recv(4096):
        data += got
    theirs.close()
    closing.join()
    assert decode(data.splitlines()[-1]) == JobResult(82, 1, "unhealthy", 40)


@pytest.mark.parametrize(
    "data",
    [
        b"x\n",
        b"{}\n",
        b"x" * (MAX_BYTES + 1),
        b'{"jaxres": 3, "message": "heartbeat", "step": "x"}\n',
    ],
)
def test_a_peer_that_sends_invalid_data_is_lost(pair, data):
    peers, theirs = pair
    theirs.sendall(data)
    [(host, message)] = peers.receive()
    assert host == 1
    assert isinstance(message, Disconnected)


def test_a_peer_that_does_not_read_is_lost_and_delays_no_other(pair):
    peers, _theirs = pair

    def send():
        for _ in range(10 * MAX_UNSENT_BYTES // 30000):
            peers.send(StopMessage(75, "x" * 30000))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(SURE_SECONDS)
    assert not sending.is_alive(), "it waits for a peer that does not read"
    assert isinstance(peers.receive()[-1][1], Disconnected)


def test_heartbeats_are_omitted_for_a_peer_that_does_not_read(still_pair):
    clock, peers, _theirs = still_pair
    for _ in range(2000):
        clock.now += 1.0
        peers.send_heartbeat(LeaderHeartbeat(tuple(range(1000))))
    assert not peers.links[1].is_lost


def test_heartbeats_are_sent_once_a_second(still_pair):
    clock, peers, theirs = still_pair
    for _ in range(100):
        clock.now += 0.1
        peers.send_heartbeat(Heartbeat(1, "train"))
    assert 9 <= theirs.recv(65536).count(b"\n") <= 10


def test_silence_beyond_the_limit_is_a_loss(still_pair):
    clock, peers, theirs = still_pair
    for _ in range(10):
        clock.now += 1.0
        assert peers.receive() == []
    clock.now += 1.0
    [(_, message)] = peers.receive()
    assert "nothing was received from it for 10 s (hosts.heartbeat_seconds)" in message.reason
    assert theirs.recv(1) == b""


def test_a_suspension_of_this_process_loses_no_peer(still_pair):
    clock, peers, _ = still_pair
    clock.now += 3600.0
    assert peers.receive() == []
    clock.now += 9.5
    assert peers.receive() == []


def test_a_resumed_process_detects_a_closed_connection(still_pair):
    clock, peers, theirs = still_pair
    clock.now += 3600.0
    theirs.sendall(encode(JobResult(79, 1, "silent", 8)))
    theirs.close()
    assert [type(message) for _, message in peers.receive()] == [JobResult, Disconnected]


def test_a_new_connection_of_a_host_replaces_a_dead_one(pair):
    peers, theirs = pair
    theirs.close()
    peers._collect()  # The loss is known, and not told yet.
    ours, again = socket.socketpair()
    with again:
        peers.add(1, "node1", Connection(ours, None))
        again.sendall(encode(Heartbeat(1, "train")))
        assert peers.receive() == [(1, Heartbeat(1, "train"))]
        again.shutdown(socket.SHUT_WR)


def test_select_wakes_when_a_message_arrives(pair):
    peers, theirs = pair
    assert select.select([peers], [], [], 0)[0] == []
    theirs.sendall(encode(StartWorkers()))
    assert select.select([peers], [], [], SURE_SECONDS)[0] == [peers]
    assert peers.receive() == [(1, StartWorkers())]
    assert select.select([peers], [], [], 0)[0] == []


def test_awake_time_excludes_suspension():
    clock = Hand()
    awake = Awake(clock)
    started = awake.now()
    for seconds in (1.0, 50.0, 1.5, 2.0, 3.0):
        clock.now += seconds
        awake.now()
    assert awake.now() - started == 4.5


def start(address, process_count, **limits):
    """Leads the rendezvous of some processes; returns the leader, which the caller closes."""
    running_leader = leader(address, num_hosts=process_count + 1, **limits).__enter__()
    running_leader.wait_for_all()
    return running_leader, running_leader.announce(ATTEMPT)


@pytest.mark.slow
def test_a_killed_supervisor_is_lost_at_once_and_a_suspended_one_after_the_limit():
    address, is_suspended = free_address(), threading.Event()
    clock = PassingClock(is_suspended.is_set, step=1.5)
    with (
        follower_process(address, hello(1, num_hosts=3)) as first,
        follower_process(address, hello(2, num_hosts=3)) as second,
    ):
        running_leader, peers = start(address, 2, heartbeat_seconds=120.0, clock=clock)
        try:
            beat, phase = LeaderHeartbeat((0, 0, 0)), ""
            while phase != "train":  # The first ones may be of before.
                phase = wait_message(peers, Heartbeat, heartbeat=beat)[1].phase
            first.kill()
            host, lost = wait_message(peers, Disconnected, heartbeat=beat)
            assert host == 1
            assert "host 1 (node1) is gone" in lost.reason
            assert "nothing was received" not in lost.reason
            second.send_signal(signal.SIGSTOP)
            is_suspended.set()
            host, lost = wait_message(peers, Disconnected, heartbeat=beat)
            assert host == 2
            assert "nothing was received from it for 120 s" in lost.reason
            second.send_signal(signal.SIGCONT)
            assert "closed the connection" in second.stdout.read()
        finally:
            running_leader.__exit__(None, None, None)


@pytest.mark.slow
def test_the_job_result_is_received_even_if_the_leader_exits_at_once():
    address = free_address()
    with follower_process(address, hello(1)) as follower:
        running_leader, peers = start(address, 1)
        peers.send(JobResult(82, 1, "host 1 is unhealthy", 40))
        running_leader.__exit__(None, None, None)
        assert "host 1 is unhealthy" in follower.stdout.read()


@pytest.mark.slow
def test_a_frozen_leader_is_lost_after_the_limit():
    address = free_address()
    with follower_process(address, hello(1), heartbeat_seconds=120.0, passes=True) as follower:
        running_leader, _ = start(address, 1)
        try:
            assert follower.stdout.readline() == "started\n"
            message = follower.stdout.readline()  # This process says nothing meanwhile.
            assert f"host 0 ({address}) is gone: nothing was received from it for 120 s" in message
        finally:
            running_leader.__exit__(None, None, None)


@pytest.mark.parametrize("text", ["x", "é", "\U0001f525", "\n", "\x00", "\udcff", '"'])
@pytest.mark.parametrize("length", [0, 100, 100_000])
def test_no_message_exceeds_the_maximum_size(text, length):
    line = encode(Goodbye(70, text * length))
    assert len(line) <= MAX_BYTES
    assert line.count(b"\n") == 1
    back = decode(line)
    assert isinstance(back, Goodbye)
    assert len(back.reason) >= min(length, 1000)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"jaxres": 3}',
        b'{"jaxres": 3, "message": "disconnected", "reason": "x"}',
        b'{"jaxres": 3, "message": "claim_visible"}',
        b'{"jaxres": 3, "message": ["claim_visible"]}',
        b'{"jaxres": 3, "Seen": {"seen": true}}',
        b"[" * 60000,
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_no_message_is_a_protocol_error(line):
    with pytest.raises(ProtocolError):
        decode(line)


def test_a_field_of_a_later_version_is_ignored():
    assert decode(
        b'{"jaxres": 3, "message": "claim_visible", "visible": true, "why": 3}'
    ) == ClaimVisible(True)


@pytest.mark.parametrize(
    "section",
    [{str(n): 1 for n in range(1000)}, {"x" * 600: 1}, {f"{n:0100}": 1 for n in range(400)}],
    ids=["many", "long", "large"],
)
def test_a_huge_config_is_compared_as_a_whole_only(section):
    assert key_digests(values_of({"model": section}), SECRET) == {}


def test_digests_of_values_are_keyed_and_differ_between_keys():
    values = {"data.args.token": '"abc"', "data.args.other": '"abc"'}
    found = key_digests(values, SECRET)
    assert set(found) == set(values)
    assert len(set(found.values())) == 2
    assert set(found.values()).isdisjoint(key_digests(values, Secret(b"o" * 32, "")).values())


def test_the_largest_hello_fits_a_line():
    keys = {f"{n:030}": f"{n:016x}" for n in range(MAX_KEYS)}
    assert len(json.dumps(list(keys))) > MAX_KEYS_BYTES
    assert decode(encode(hello(1, key_digests=keys))).key_digests == keys


def test_an_address_is_printed_as_given():
    assert str(Address("::1", 5)) == "[::1]:5"
