"""Supervisors for the rendezvous tests: in this process, and as separate processes."""

import contextlib
import hmac
import json
import secrets
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from jaxres.clock import SystemClock
from jaxres.cluster.authentication import Secret
from jaxres.cluster.compatibility import key_digests
from jaxres.cluster.detect import Address
from jaxres.cluster.messages import (
    AttemptAnnounced,
    Disconnected,
    Goodbye,
    Heartbeat,
    Hello,
    JobResult,
)
from jaxres.cluster.rendezvous import RendezvousFollower, RendezvousLeader, RendezvousSettings
from jaxres.faults import RunError
from tests.waiting import SURE_SECONDS, wait_until

CLOCK = SystemClock()
KEY = b"k" * 32
SECRET = Secret(KEY, "/runs/a/secret")
LIMITS = {
    "join_seconds": SURE_SECONDS,
    "heartbeat_seconds": SURE_SECONDS,
    "clock": CLOCK,
    "secret": SECRET,
}
ATTEMPT = AttemptAnnounced(attempt=3, nonce="c1a1", coordinator="127.0.0.1:1")


def hello(host, *, num_hosts=2, **changes):
    return replace(
        Hello(
            host=host,
            num_hosts=num_hosts,
            name=f"node{host}",
            pid=1000 + host,
            nonce=f"nonce{host}",
            versions={"jax": "0.10.2", "jaxres": "0.1"},
            python="3.11.4",
            trajectory="9f3c9f3c9f3c",
            run_dir="/runs/a",
            key_digests=key_digests({"data.seq_len": "128"}, SECRET),
        ),
        **changes,
    )


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", probe.getsockname()[1])


def dial(address):
    """Connects as an unknown client, as soon as a socket listens."""

    def connected():
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((address.host, address.port))
        return None

    return wait_until(connected, f"server at {address}")


def proof(role, accepting, connecting, *, key=KEY):
    """Returns the proof that a side must send, computed independently of the code under test."""
    message = f"jaxres {role} side".encode() + bytes.fromhex(accepting) + bytes.fromhex(connecting)
    return hmac.new(key, message, "sha256").hexdigest()


def line(**fields):
    """Returns a line of the handshake."""
    return json.dumps({"jaxres": 3, **fields}).encode() + b"\n"


def read_line(connected):
    """Returns the next line of a blocking socket, decoded; None at its end."""
    data = b""
    while not data.endswith(b"\n"):
        if not (got := connected.recv(1)):
            assert not data, data
            return None
        data += got
    return json.loads(data)


def prove(connected, *, key=KEY):
    """Goes through the handshake as the connecting side of a blocking socket."""
    own = secrets.token_hex(32)
    connected.sendall(line(challenge=own))
    other = read_line(connected)["challenge"]
    connected.sendall(line(proof=proof("connecting", other, own, key=key)))
    answer = read_line(connected)
    assert answer == {"jaxres": 3, "proof": proof("accepting", other, own, key=key)}, answer


def settings(address, own, **changes):
    return RendezvousSettings(hello=own, address=address, **(LIMITS | changes))


def leader(address, *, num_hosts=2, **limits):
    return RendezvousLeader(settings(address, hello(0, num_hosts=num_hosts), **limits))


def follow(address, sent, *, is_visible=True, **limits):
    """Joins the rendezvous and leaves; returns the announcement."""
    visible_seconds = SURE_SECONDS if is_visible else 0.5
    with RendezvousFollower(settings(address, sent, **limits)) as follower:
        announcement = follower.join()
        follower.confirm(
            announcement, lambda attempt, nonce: is_visible, visible_seconds=visible_seconds
        )
        return announcement


def begin(address, *, num_hosts=2, lobby=None, **limits):
    """Leads the rendezvous and leaves; returns the hellos."""
    with leader(address, num_hosts=num_hosts, **limits) as running_leader:
        if lobby is not None:
            lobby.leader = running_leader
        hellos = running_leader.wait_for_all()
        running_leader.announce(ATTEMPT, visible_seconds=SURE_SECONDS)
        return hellos


class Lobby:
    """Tells other threads who has joined the rendezvous of a leader."""

    leader = None

    def has(self, *nonces):
        """Returns whether the hosts with these nonces have joined."""
        joined = [] if self.leader is None else self.leader._joined()
        return {each.nonce for each in joined} >= set(nonces)

    def wait_for(self, *nonces):
        """Waits until the hosts with these nonces have joined."""
        wait_until(lambda: self.has(*nonces), f"{nonces} in the rendezvous")


class PassingClock(SystemClock):
    """The clock of this machine, on which time passes at once when a condition is true.

    It advances in steps that no process takes for a suspension.
    """

    passed = 0.0

    def __init__(self, may_pass, *, step):
        object.__setattr__(self, "_may_pass", may_pass)
        object.__setattr__(self, "_step", step)

    def monotonic(self):
        if self._may_pass():
            object.__setattr__(self, "passed", self.passed + self._step)
        return super().monotonic() + self.passed


class StillClock(PassingClock):
    """A clock that stands still until time passes at once."""

    def monotonic(self):
        super().monotonic()
        return self.passed


def together(*calls):
    """Makes all calls at once; returns the result or the RunError of each."""

    def ended(call):
        try:
            return call()
        except RunError as end:
            return end

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(ended, calls))


def wait_message(peers, kind, *, heartbeat=None):
    """Returns the first message of a kind, with its host."""
    while_waiting = heartbeat or Heartbeat()

    def received():
        for host, message in peers.receive():
            if isinstance(message, kind):
                return host, message
        peers.send_heartbeat(while_waiting)
        return None

    return wait_until(received, kind.__name__)


@contextlib.contextmanager
def follower_process(address, sent, **limits):
    """Starts a follower in a process, which prints a line at its start and at its end.

    With `passes`, time passes at once in it from its start on.
    """
    words = json.dumps([address.host, address.port, asdict(sent), limits])
    command = [sys.executable, "-m", "tests.unit.cluster.supervisors", words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main(host, port, fields, limits):
    started = []
    if limits.pop("passes", False):
        limits["clock"] = PassingClock(lambda: bool(started), step=1.0)
    try:
        own = settings(Address(host, port), Hello(**fields), **limits)
        with RendezvousFollower(own) as follower:
            peers = follower.confirm(follower.join(), lambda attempt, nonce: True)
            print("started", flush=True)
            started.append(True)
            step = 0
            while True:
                time.sleep(0.05)
                step += 1
                for _, received in peers.receive():
                    if isinstance(received, Disconnected | JobResult | Goodbye):
                        print(received, flush=True)
                        return
                peers.send_heartbeat(Heartbeat(step, "train"))
    except RunError as end:
        print(f"{int(end.exit_code)} {end}", flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
