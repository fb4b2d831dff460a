"""An unauthenticated client of the coordinator's port cannot join, read or end a job."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from jaxres.cluster.messages import VERSION, Goodbye, Hello, JobResult, encode
from tests.promises.trainer import FAULTY, PACED, TrainingProcess, Workspace, free_address
from tests.waiting import SURE_SECONDS, wait_until

HELLO = Hello(
    host=1,
    num_hosts=2,
    name="stranger",
    pid=1,
    nonce="stranger",
    versions={},
    python="3.11",
    trajectory="0",
    run_dir="/",
)
WRONG = [{"challenge": "0" * 64}, {"proof": "0" * 64}]
END = encode(HELLO) + encode(Goodbye(78, "end")) + encode(JobResult(78, 1, "end", 1))
ATTACKS = [
    b"GET / HTTP/1.1\r\n\r\n",
    END,
    b"".join(json.dumps({"jaxres": VERSION, **fields}).encode() + b"\n" for fields in WRONG) + END,
]


def connect(at: str) -> socket.socket:
    """Returns a connection, made as soon as the job listens."""
    host, _, port = at.rpartition(":")

    def connected() -> socket.socket | None:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), timeout=SURE_SECONDS)
        return None

    found = wait_until(connected, f"job that listens at {at}")
    assert found is not None
    return found


def answer(connected: socket.socket) -> list[set[str]]:
    """Returns the kinds of all messages sent to the client until its connection ends."""
    data = b""
    try:
        while got := connected.recv(65536):
            data += got
    except ConnectionResetError:
        pass
    return [set(json.loads(line)) - {"jaxres"} for line in data.splitlines()]


def attack(at: str) -> None:
    """Attacks in every way; the client receives only a challenge and possibly a rejection."""
    for data in ATTACKS:
        with connect(at) as connected:
            connected.sendall(data)
            assert answer(connected) in ([{"challenge"}], [{"challenge"}, {"refused"}])
    with connect(at) as connected:
        challenge = connected.recv(65536)
        connected.sendall(challenge + challenge.replace(b"challenge", b"proof") + END)
        assert answer(connected) in ([], [{"refused"}]), "a reflection"


def train_on(trainers: list[TrainingProcess]) -> None:
    assert [trainer.wait_exit() for trainer in trainers] == [0, 0], [t.printed() for t in trainers]


@pytest.mark.slow
def test_an_unauthenticated_client_cannot_join_or_end_a_job(workspace: Workspace) -> None:
    at = free_address()
    join = ("hosts.join_seconds=1200",)
    held = PACED | {"HELD": "10"}
    lead = workspace.start_host("run", *join, host=0, hosts=2, at=at, config=FAULTY, env=held)
    silent = connect(at)
    attack(at)
    follower = workspace.start_host("run", *join, host=1, hosts=2, at=at, config=FAULTY, env=held)
    lead.attempt = follower.attempt = 1
    lead.wait_step(5)
    steps = lead.steps()[-1]
    attack(at)
    with silent:
        assert answer(silent) == [{"challenge"}]
    lead.go_on()
    lead.wait_step(steps + 1)
    train_on([lead, follower])
    assert lead.printed().count("was refused") == 1, "later ones are reported at a bounded rate"
    key = workspace.run_dir("run").secret.read_text().strip()
    for path in [*workspace.run_dir("run").local.rglob("*"), lead.output, follower.output]:
        if path.is_file() and path.name != "secret":
            assert key.encode() not in path.read_bytes(), f"{path} holds the secret"
