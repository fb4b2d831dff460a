"""Programs between two hosts, over real connections: whole and of the asked host, or not there."""

import contextlib
import hashlib
import json
import secrets
import socket
import threading

import pytest

from jaxres.clock import SystemClock
from jaxres.cluster import program_transfer
from jaxres.cluster.authentication import Secret
from jaxres.cluster.program_transfer import AttemptKey, ProgramServer, TransferFailed
from jaxres.faults import UsageError

PROGRAMS = {"a": b"first" * 500_000, "b": b"second"}
KEY = bytes(32)


def fetch(address, names=("a", "b"), *, key=KEY, most_seconds=60.0, clock=None):
    return program_transfer.fetch(
        address,
        names,
        key=key,
        num_takers=1,
        most_seconds=most_seconds,
        clock=clock or SystemClock(),
    )


@pytest.fixture
def server():
    with ProgramServer(PROGRAMS, address="127.0.0.1", key=KEY) as server:
        yield server


@contextlib.contextmanager
def answering(answer):
    """Yields the address of a host that reads a request, and then calls `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                connected, _ = listener.accept()
                with connected, connected.makefile("rb") as lines:
                    answer(connected, lines.readline())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    thread.join()


def head_and_programs(line, programs=PROGRAMS, *, key=KEY):
    asked = json.loads(line)
    contents = [programs[name] for name in asked["names"]]
    return program_transfer.head(asked["names"], asked["challenge"], contents, key=key), contents


def test_programs_come_as_they_are(server):
    assert fetch(server.address) == list(PROGRAMS.values())
    assert fetch(server.address, ("b",)) == [b"second"]


def test_each_attempt_and_secret_has_its_own_key():
    def key(secret, nonce, num_hosts=2):
        env = program_transfer.variables(secret, nonce, num_hosts=num_hosts)
        taken = program_transfer.take_key(env)
        assert not env, "subprocesses of the worker have it"
        return taken

    first, other = Secret(b"1" * 32, "x"), Secret(b"2" * 32, "x")
    keys = [key(first, "a"), key(first, "b"), key(other, "a")]
    assert len({each.key for each in keys}) == 3
    assert [each.refusal for each in keys] == [""] * 3
    assert key(first, "a") == keys[0], "another host of the attempt"
    assert key(None, "a").refusal == program_transfer.ONE_FOLDER
    public = key(Secret(b"1" * 32, "gs://bucket/run/secret", is_private=False), "a")
    assert public == AttemptKey(b"", program_transfer.PUBLIC_SECRET)
    assert key(first, "a", num_hosts=1).key == b""


def test_a_secret_for_programs_alone_replaces_that_of_the_bucket():
    public = Secret(b"1" * 32, "gs://bucket/run/secret", is_private=False)

    def key(given, nonce="a"):
        env = program_transfer.variables(public, nonce, num_hosts=2, given=given)
        return program_transfer.take_key(env)

    assert key("x" * 64).refusal == ""
    assert key("x" * 64) == key("x" * 64)
    assert len({key(given, nonce).key for given in ("x" * 64, "y" * 64) for nonce in "ab"}) == 4
    with pytest.raises(UsageError, match="JAXRES_PROGRAMS_SECRET: expected at least 32"):
        key("short")


def test_a_host_without_the_key_receives_nothing(server):
    with pytest.raises(TransferFailed, match="it closed the connection"):
        fetch(server.address, key=b"another attempt's key")


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"GET / HTTP/1.1\n",
        b"[" * 60_000 + b"\n",
        b'{"names": [], "challenge": ""}\n',
        json.dumps({"names": ["a"], "challenge": "0" * 64, "proof": "0" * 64}).encode() + b"\n",
        json.dumps({"names": ["a"], "challenge": "0" * 64}).encode() + b"\n",
        b"x" * 70_000,
    ],
)
def test_a_stranger_receives_nothing_and_holds_up_no_host(server, line):
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(line)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
    assert fetch(server.address, ("b",)) == [b"second"]


def flipped(connected, line):
    head, (first, second) = head_and_programs(line)
    connected.sendall(head + first[:1000] + b"!" + first[1001:] + second)


def truncated(connected, line):
    head, (first, _) = head_and_programs(line)
    connected.sendall(head + first)


def without_key(connected, line):
    head, contents = head_and_programs(line, key=b"read in the bucket")
    connected.sendall(head + b"".join(contents))


def others_digests(connected, line):
    """Changes a program, and the digest with it."""
    head, (first, second) = head_and_programs(line)
    fields = json.loads(head)
    fields["digests"][1] = hashlib.sha256(b"attack").hexdigest()
    connected.sendall(json.dumps(fields).encode() + b"\n" + first + b"attack")
    assert len(second) == len(b"attack")


def other_programs(connected, line):
    """The answer of another name, by a host that has the key."""
    challenge = json.loads(line)["challenge"]
    contents = [PROGRAMS["b"], PROGRAMS["a"]]
    head = program_transfer.head(["b", "a"], challenge, contents, key=KEY)
    connected.sendall(head + b"".join(contents))


def replayed(connected, line):
    """The answer of another request of the same attempt."""
    contents = list(PROGRAMS.values())
    head = program_transfer.head(["a", "b"], secrets.token_hex(32), contents, key=KEY)
    connected.sendall(head + b"".join(contents))


def fewer(connected, line):
    challenge = json.loads(line)["challenge"]
    fields = {"sizes": [6], "digests": [hashlib.sha256(b"second").hexdigest()]}
    bound = {**fields, "names": ["a", "b"], "challenge": challenge}
    proof = program_transfer._proof(KEY, "answer", bound)
    connected.sendall(json.dumps({**fields, "proof": proof}).encode() + b"\nsecond")


def too_large(connected, line):
    challenge = json.loads(line)["challenge"]
    fields = {"sizes": [1 << 60, 1], "digests": ["0" * 64] * 2}
    bound = {**fields, "names": ["a", "b"], "challenge": challenge}
    proof = program_transfer._proof(KEY, "answer", bound)
    connected.sendall(json.dumps({**fields, "proof": proof}).encode() + b"\n")


def nothing(connected, line):
    pass


def endless_line(connected, line):
    connected.sendall(b"x" * 100_000)


def no_json(connected, line):
    connected.sendall(b"[" * 50_000 + b"\n")


ANSWERS = {
    flipped: "do not match their digest",
    truncated: "it closed the connection",
    without_key: "does not have the key of this attempt",
    others_digests: "does not have the key of this attempt, or has changed it",
    other_programs: "does not have the key of this attempt, or has changed it",
    replayed: "does not have the key of this attempt, or has changed it",
    fewer: "it sends 1 programs instead of 2",
    too_large: "more than",
    nothing: "it closed the connection",
    endless_line: "a line of more than 65536 bytes",
    no_json: "not JSON",
}


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
def test_another_answer_is_refused_with_its_reason(answer):
    with answering(answer) as address, pytest.raises(TransferFailed, match=ANSWERS[answer]):
        fetch(address)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "head:80", "127.0.0.1:x", "[::1]:99999999"])
def test_a_bad_address_is_a_failure(address):
    with pytest.raises(TransferFailed):
        fetch(address)


def test_a_host_that_is_gone_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(TransferFailed, match="refused"):
        fetch(address)


class Ticking(SystemClock):
    """A clock that is a second later at each look."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1.0
        return self.now


def test_a_host_that_freezes_in_a_transfer_is_given_up(monkeypatch):
    monkeypatch.setattr(program_transfer, "SILENCE_SECONDS", 0.2)
    ended = threading.Event()

    def frozen(connected, line):
        head, (first, _) = head_and_programs(line)
        connected.sendall(head + first[:1000])
        ended.wait()

    with answering(frozen) as address:
        with pytest.raises(TransferFailed, match="it sent nothing more in time"):
            fetch(address)
        ended.set()


def test_a_host_that_sends_byte_by_byte_is_given_up():
    """Each byte comes in time, and all of them would not."""
    ended = threading.Event()

    def slow(connected, line):
        head, (first, _) = head_and_programs(line)
        connected.sendall(head)
        for begin in range(len(first)):
            connected.sendall(first[begin : begin + 1])
            if ended.wait(0.001):
                return

    with answering(slow) as address:
        with pytest.raises(TransferFailed, match="it did not send all in time"):
            fetch(address, clock=Ticking())
        ended.set()
