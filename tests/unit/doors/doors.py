"""Doors for the tests of the roll call: in this process, and as a process of its own."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from jaxres.clock import SystemClock
from jaxres.cluster.detect import Address
from jaxres.cluster.messages import Announcement, Farewell, Hello, Here, Lost, Over, Verdict
from jaxres.cluster.rendezvous import Follower, Lead
from jaxres.faults import TypedEnd

CLOCK = SystemClock()
LIMITS = {"join_seconds": 20.0, "heartbeat_seconds": 10.0, "clock": CLOCK}
ATTEMPT = Announcement(attempt=3, nonce="c1a1", coordinator="127.0.0.1:1", threads=2)


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
            fields={"data.seq_len": "128"},
        ),
        **changes,
    )


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", probe.getsockname()[1])


def lead(address, *, num_hosts=2, **limits):
    return Lead(hello(0, num_hosts=num_hosts), address, **(LIMITS | limits))


def follow(address, said, *, sees=True, see_seconds=0.5, **limits):
    """Goes through the roll call and leaves; returns the announcement."""
    with Follower(said, address, **(LIMITS | limits)) as follower:
        announcement = follower.meet()
        follower.confirm(announcement, lambda attempt, nonce: sees, see_seconds=see_seconds)
        return announcement


def begin(address, *, num_hosts=2, see_seconds=0.5, **limits):
    """Leads through the roll call and leaves; returns the hellos."""
    with lead(address, num_hosts=num_hosts, **limits) as leading:
        hellos = leading.gather()
        leading.announce(ATTEMPT, see_seconds=see_seconds)
        return hellos


def together(*calls):
    """Calls all at once; returns what each returned, or its typed end."""

    def ended(call):
        try:
            return call()
        except TypedEnd as end:
            return end

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(ended, calls))


def hear(peers, kind, *, seconds=10.0, beat=None):
    """Returns the first word of a kind, and from whom."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for host, word in peers.hear():
            if isinstance(word, kind):
                return host, word
        peers.beat(beat or Here())
        time.sleep(0.02)
    raise AssertionError(f"no {kind.__name__} within {seconds} s")


@contextlib.contextmanager
def door(address, said, **limits):
    """Starts a follower's door as a process; it prints a line when it is started and at its end."""
    words = json.dumps([address.host, address.port, asdict(said), limits])
    command = [sys.executable, "-m", "tests.unit.doors.doors", words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main(host, port, fields, limits):
    try:
        with Follower(Hello(**fields), Address(host, port), **(LIMITS | limits)) as follower:
            peers = follower.confirm(follower.meet(), lambda attempt, nonce: True)
            print("started", flush=True)
            step = 0
            while True:
                time.sleep(0.05)
                step += 1
                for _, word in peers.hear():
                    if isinstance(word, Lost | Verdict | Over | Farewell):
                        print(word, flush=True)
                        return
                peers.beat(Here(step, "train"))
    except TypedEnd as end:
        print(f"{int(end.exit)} {end}", flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
