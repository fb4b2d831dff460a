"""Promises of the handshake: one that does not hold the run's secret gets and changes nothing."""

import contextlib
import os
import secrets
import socket
import stat
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from jaxres.cluster import authentication, peer_connections
from jaxres.cluster.authentication import (
    MAX_LINE_BYTES,
    Handshake,
    NotAuthenticatedError,
    Secret,
    load_secret,
)
from jaxres.cluster.connection import Connection
from jaxres.cluster.messages import (
    Goodbye,
    Heartbeat,
    JobResult,
    ProtocolError,
    StartWorkers,
    decode,
    encode,
)
from jaxres.cluster.rendezvous import RendezvousFollower
from jaxres.faults import ConfigError, PeerLost, StorageUnavailable, UsageError
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from tests.unit.cluster.supervisors import (
    ATTEMPT,
    CLOCK,
    KEY,
    SECRET,
    StillClock,
    begin,
    dial,
    follow,
    free_address,
    hello,
    leader,
    line,
    proof,
    prove,
    read_line,
    settings,
    together,
    wait_message,
)
from tests.waiting import SURE_SECONDS

OTHER = Secret(b"o" * 32, "/runs/b/secret")


@pytest.fixture
def address():
    return free_address()


@contextlib.contextmanager
def running(address):
    """A job of two hosts after their rendezvous; yields the messages that host 0 has received."""
    received, over = [], threading.Event()

    def follower():
        with RendezvousFollower(settings(address, hello(1))) as joined:
            peers = joined.confirm(joined.join(), lambda *_: True)
            wait_message(peers, JobResult)

    def host_0():
        with leader(address) as running_leader:
            running_leader.wait_for_all()
            peers = running_leader.announce(ATTEMPT)
            started.set()
            while not over.wait(0.02):
                received.extend(peers.receive())
                peers.send_heartbeat(Heartbeat())
            peers.send(JobResult(0, None, "done", 1))

    started = threading.Event()
    threads = [threading.Thread(target=call) for call in (host_0, follower)]
    for thread in threads:
        thread.start()
    assert started.wait(SURE_SECONDS)
    try:
        yield received
    finally:
        over.set()
        for thread in threads:
            thread.join(SURE_SECONDS)
    assert all(message == Heartbeat() for _, message in received), received


def read_all(connected):
    """Returns every line that is sent until the connection ends."""
    connected.settimeout(SURE_SECONDS)
    lines = []
    with contextlib.suppress(ConnectionError):
        while (got := read_line(connected)) is not None:
            lines.append(got)
    return lines


def is_challenge(fields):
    return set(fields) == {"jaxres", "challenge"}


REFUSED = {"jaxres": 3, "refused": "the two sides hold different secrets"}


def sends_garbage(connected):
    connected.sendall(secrets.token_bytes(300) + b"\n")


def sends_hello_without_a_proof(connected):
    connected.sendall(encode(hello(1, nonce="unknown")))


def sends_goodbye_without_a_proof(connected):
    connected.sendall(encode(Goodbye(78, "end")) + encode(JobResult(78, 1, "end", 1)))


def sends_a_long_line(connected):
    connected.sendall(b'{"jaxres": 3, "challenge": "' + b"0" * MAX_LINE_BYTES)


def proves_without_a_challenge(connected):
    connected.sendall(line(proof="0" * 64))


def challenges_twice(connected):
    connected.sendall(2 * line(challenge="0" * 64))


def sends_a_wrong_proof(connected):
    connected.sendall(line(challenge="0" * 64) + line(proof="0" * 64))
    connected.sendall(encode(hello(1, nonce="unknown")))


def sends_an_empty_proof(connected):
    connected.sendall(line(challenge="0" * 64) + line(proof=""))


def proves_another_secret(connected):
    other = read_line(connected)["challenge"]
    words = proof("connecting", other, "0" * 64, key=OTHER.key)
    connected.sendall(line(challenge="0" * 64) + line(proof=words))


def proves_the_other_role(connected):
    other = read_line(connected)["challenge"]
    words = proof("accepting", other, "0" * 64)  # Cannot be known, but must not do either.
    connected.sendall(line(challenge="0" * 64) + line(proof=words))


def reflects_the_challenge(connected):
    other = read_line(connected)["challenge"]
    connected.sendall(line(challenge=other) + line(proof=other))


def reflects_every_line(connected):
    with contextlib.suppress(OSError):
        while got := connected.recv(4096):
            connected.sendall(got)


UNKNOWN_CLIENTS = [
    sends_garbage,
    sends_hello_without_a_proof,
    sends_goodbye_without_a_proof,
    sends_a_long_line,
    proves_without_a_challenge,
    challenges_twice,
    sends_a_wrong_proof,
    sends_an_empty_proof,
    proves_another_secret,
    proves_the_other_role,
    reflects_the_challenge,
    reflects_every_line,
]


@pytest.fixture(params=UNKNOWN_CLIENTS)
def act(request, monkeypatch):
    """What an unknown client does; one that says all that it hears is only ended by its time."""
    if request.param is reflects_every_line:
        monkeypatch.setattr(peer_connections, "HELLO_SECONDS", 1.0)
    return request.param


@pytest.mark.slow
def test_an_unknown_client_of_a_running_job_gets_only_a_challenge(address, act, capsys):
    with running(address), socket.create_connection((address.host, address.port)) as connected:
        connected.settimeout(SURE_SECONDS)
        act(connected)
        lines = read_all(connected)
        time.sleep(0.1)
    assert all(is_challenge(fields) or fields == REFUSED for fields in lines), lines
    assert capsys.readouterr().err.count("was refused") == 1


def test_an_unknown_client_takes_no_slot_during_the_rendezvous(address, act):
    def unknown_client():
        with dial(address) as connected:
            connected.settimeout(SURE_SECONDS)
            act(connected)
            read_all(connected)
        return follow(address, hello(1))

    hellos, announced = together(partial(begin, address), unknown_client)
    assert [each.nonce for each in hellos] == ["nonce0", "nonce1"]
    assert announced == ATTEMPT


def test_a_silent_client_is_disconnected_and_the_job_continues(address, monkeypatch, capsys):
    with running(address):
        monkeypatch.setattr(peer_connections, "HELLO_SECONDS", 0.5)  # The other host has joined.
        with socket.create_connection((address.host, address.port)) as connected:
            assert [is_challenge(fields) for fields in read_all(connected)] == [True]
            time.sleep(0.1)
    assert "has not proven within 0.5 s that it holds the secret" in capsys.readouterr().err


def test_a_replayed_handshake_is_refused(address):
    """The lines of a host that was admitted are sent again by someone else."""
    sent = []

    class Recorded:
        def __init__(self, connected):
            self.connected, self.recv = connected, connected.recv

        def sendall(self, data):
            sent.append(data)
            self.connected.sendall(data)

    with running(address):
        with socket.create_connection((address.host, address.port)) as first:
            first.settimeout(SURE_SECONDS)
            prove(Recorded(first))
        assert len(sent) == 2
        with socket.create_connection((address.host, address.port)) as again:
            again.sendall(b"".join(sent) + encode(hello(1, nonce="replayed")))
            lines = read_all(again)
    assert is_challenge(lines[0])
    assert lines[1:] == [REFUSED]


def test_a_follower_sends_nothing_to_a_server_that_reflects_its_proof(address):
    received = []
    with socket.create_server((address.host, address.port)) as server:

        def serve():
            connected, _ = server.accept()
            with connected:
                connected.settimeout(SURE_SECONDS)
                connected.sendall(line(challenge="0" * 64))
                assert is_challenge(read_line(connected))
                connected.sendall(line(proof=read_line(connected)["proof"]))
                received.extend(read_all(connected))

        refused, _ = together(partial(follow, address, hello(1)), serve)
    assert received == [], "messages were sent to one that holds no secret"
    assert isinstance(refused, ConfigError)
    assert "has a different secret" in str(refused)


def test_a_reflected_proof_is_refused():
    connecting = Handshake(SECRET, accepts=False)
    reflected = connecting.receive(line(challenge="0" * 64))
    with pytest.raises(NotAuthenticatedError, match="different secrets"):
        connecting.receive(reflected)
    assert not connecting.is_done, "a reflected proof was accepted"


def test_a_proof_with_another_key_is_refused():
    accepting, other = Handshake(SECRET, accepts=True), Handshake(OTHER, accepts=False)
    accepting.receive(other.opening)
    with pytest.raises(NotAuthenticatedError, match="different secrets"):
        accepting.receive(other.receive(accepting.opening))
    assert not accepting.is_done, "a wrong proof was accepted"


def test_both_sides_prove_the_secret_to_each_other():
    accepting, connecting = Handshake(SECRET, accepts=True), Handshake(SECRET, accepts=False)
    assert accepting.receive(connecting.opening) == b""
    answer = accepting.receive(connecting.receive(accepting.opening))
    assert not connecting.is_done, "the accepting side has proven nothing yet"
    assert connecting.receive(answer) == b""
    assert accepting.is_done
    assert connecting.is_done


def test_no_message_is_sent_or_decoded_before_the_proof():
    ours, theirs = socket.socketpair()
    connection = Connection(ours, Handshake(SECRET, accepts=True))
    with theirs:
        connection.send(StartWorkers())
        assert is_challenge(read_line(theirs))
        theirs.sendall(encode(Heartbeat(7, "train")))
        assert connection.receive() == []
        assert connection.is_foreign
        connection.close()
        assert theirs.recv(4096) == b""


def test_queued_messages_follow_the_handshake():
    ours, theirs = socket.socketpair()
    accepting = Connection(ours, Handshake(SECRET, accepts=True))
    connecting = Connection(theirs, Handshake(SECRET, accepts=False))
    connecting.send(Heartbeat(1, "train"))
    accepting.send(StartWorkers())
    received = []
    for _ in range(4):
        received += accepting.receive() + connecting.receive()
    heartbeat = "Heartbeat(step=1, phase='train', num_phases=0)"
    assert sorted(map(str, received)) == [heartbeat, "StartWorkers()"]
    accepting.close()
    connecting.close()


def test_different_secrets_are_reported_on_both_sides(address, capsys):
    over = threading.Event()

    def other():
        try:
            return follow(address, hello(1), secret=OTHER)
        finally:
            over.set()

    clock = StillClock(over.is_set, step=0.1)
    lost, refused = together(partial(begin, address, join_seconds=2.0, clock=clock), other)
    assert isinstance(refused, ConfigError)
    assert f"{address}: host 0 there has a different secret" in str(refused)
    assert OTHER.source in str(refused)
    assert "Is it the same shared directory?" in str(refused)
    assert isinstance(lost, PeerLost)
    assert "a connection was refused, the last from 127.0.0.1" in str(lost)
    assert SECRET.source in str(lost)
    assert "the two sides hold different secrets" in capsys.readouterr().err
    assert KEY.hex() not in f"{SECRET}{lost}{refused}"


def test_refusals_are_reported_at_a_bounded_rate(address):
    reports, awake = [], peer_connections.Awake(CLOCK)
    refusals = peer_connections.Refusals(secret=SECRET, report=reports.append, awake=awake)
    for number in range(100):
        refusals.add("10.0.0.9", f"reason {number}")
    assert len(reports) == 1
    assert "reason 0" in reports[0]
    refusals._next_at = awake.now()
    refusals.add("10.0.0.9", "reason 100")
    assert "(99 others before it)" in reports[1]
    assert "101 connections were refused, the last from 10.0.0.9: reason 100" in refusals.summary


@pytest.mark.parametrize(
    "line",
    [
        b'{"jaxres": 3, "message": "stop_requested", "code": 75, "reason": "", "step": -1}',
        b'{"jaxres": 3, "message": "admitted", "seconds_left": NaN}',
        b'{"jaxres": 3, "message": "admitted", "seconds_left": 1e999}',
        b'{"jaxres": 3, "message": "admitted", "seconds_left": 1e18}',
        b'{"jaxres": 3, "message": "heartbeat", "step": -1}',
        b'{"jaxres": 3, "message": "leader_heartbeat", "steps": [99999999999999999999999]}',
        b'{"jaxres": 3, "message": "goodbye", "code": 100000, "reason": ""}',
    ],
)
def test_a_number_out_of_range_is_a_protocol_error(line):
    with pytest.raises(ProtocolError):
        decode(line)


@pytest.mark.parametrize(
    "changes",
    [
        {"host": -1},
        {"host": 10**9},
        {"num_hosts": 0},
        {"name": "n" * 257},
        {"run_dir": "d" * 8193},
        {"versions": {f"{number}": "1" for number in range(65)}},
        {"versions": {"jax": "1" * 257}},
        {"key_digests": {"k" * 513: "0" * 16}},
        {"key_digests": {"key": "a value"}},
        {"key_digests": {f"{number}": "0" * 16 for number in range(513)}},
    ],
)
def test_a_hello_out_of_range_is_a_protocol_error(changes):
    with pytest.raises(ProtocolError):
        decode(encode(replace(hello(1), **changes)))


def test_a_secret_is_created_once_and_readable_by_its_user_only(tmp_path):
    run_dir = RunDir(tmp_path / "runs" / "a")
    found = together(*[partial(load_secret, run_dir.secret, given="", clock=CLOCK)] * 8)
    assert len({secret.key for secret in found}) == 1
    assert len(found[0].key) == 32
    assert stat.S_IMODE(run_dir.secret.stat().st_mode) == 0o600
    assert found[0].source == str(run_dir.secret)
    assert [path.name for path in run_dir.root.iterdir()] == ["secret"]


def test_all_hosts_read_the_same_secret_from_a_bucket(gcs_bucket):
    run_dir = RunDir(GcsPath(gcs_bucket, "runs/a"))
    found = together(*[partial(load_secret, run_dir.secret, given="", clock=CLOCK)] * 4)
    assert len({secret.key for secret in found}) == 1
    assert found[0].source == f"gs://{gcs_bucket}/runs/a/secret"
    assert not found[0].is_private, "accounts that may read the bucket have it"


@pytest.mark.parametrize(
    ("kind", "is_private"),
    [("ext4", True), ("nfs4", True), ("fuse.gcsfuse", False), ("fuse", False), ("fuseblk", False)],
)
def test_a_secret_on_a_fuse_mount_is_not_private(tmp_path, monkeypatch, kind, is_private):
    run_dir, mounts = RunDir(tmp_path / "a"), tmp_path / "mountinfo"
    device = tmp_path.stat().st_dev
    own = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_text(
        "22 1 250:250 / /other rw,noatime shared:1 - fuse.gcsfuse bucket rw\n"
        f"23 1 {own} / /run rw,noatime shared:1 - {kind} source rw\n"
    )
    monkeypatch.setattr(authentication, "MOUNTS", mounts)
    secret = load_secret(run_dir.secret, given="", clock=CLOCK)
    assert secret.is_private == is_private
    assert load_secret(run_dir.secret, given="x" * 32, clock=CLOCK).is_private


def test_a_given_secret_writes_no_file(tmp_path):
    run_dir = RunDir(tmp_path / "a")
    given = load_secret(run_dir.secret, given="x" * 32 + "\n", clock=CLOCK)
    assert given == Secret(b"x" * 32, "the variable JAXRES_SECRET")
    assert not run_dir.root.exists()
    with pytest.raises(UsageError, match="JAXRES_SECRET: has 5 characters, expected at least 32"):
        load_secret(run_dir.secret, given="short", clock=CLOCK)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o666])
def test_a_secret_that_other_users_can_read_or_write_is_refused(tmp_path, mode):
    run_dir = RunDir(tmp_path)
    load_secret(run_dir.secret, given="", clock=CLOCK)
    run_dir.secret.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {run_dir.secret}"):
        load_secret(run_dir.secret, given="", clock=CLOCK)
    run_dir.secret.chmod(0o400)
    load_secret(run_dir.secret, given="", clock=CLOCK)


def test_a_file_without_a_secret_is_refused(tmp_path):
    run_dir = RunDir(tmp_path)
    descriptor = os.open(run_dir.secret, os.O_WRONLY | os.O_CREAT, 0o600)
    os.close(descriptor)
    with pytest.raises(ConfigError, match="expected the secret of this run, 64 hexadecimal"):
        load_secret(run_dir.secret, given="", clock=CLOCK)


def test_a_secret_that_stays_unreadable_is_unavailable_storage(tmp_path, monkeypatch):
    monkeypatch.setattr(authentication, "APPEAR_SECONDS", 0.1)
    monkeypatch.setattr(authentication.files, "read", lambda path: None)
    (tmp_path / "secret").write_text("x")
    with pytest.raises(StorageUnavailable, match="can't be read after"):
        load_secret(RunDir(tmp_path).secret, given="", clock=CLOCK)
