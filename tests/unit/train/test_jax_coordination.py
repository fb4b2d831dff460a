"""Promises of what hosts say outside the step, over a store like JAX's: no wait lacks a limit."""

import functools
import socket
import threading

import jax
import pytest

from jaxres.clock import SystemClock
from jaxres.cluster import connection
from jaxres.cluster.host_group import HostRank, SingleHost
from jaxres.faults import ConfigError, PeerLost
from jaxres.train import jax_coordination
from tests.waiting import SURE_SECONDS


class FakeKeyValueStore:
    """Stands where JAX's key-value store stands: write-once keys, reads that wait."""

    def __init__(self):
        self._words = {}
        self._changed = threading.Condition()

    def key_value_set(self, key, word):
        with self._changed:
            if key in self._words:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self._words[key] = word
            self._changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._words, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}\nand a stack")
            return self._words[key]

    def key_value_dir_get(self, folder):
        return [(key, word) for key, word in self._words.items() if key.startswith(folder)]


def hosts(count):
    store = FakeKeyValueStore()
    return [
        jax_coordination.JaxCoordination(HostRank(host, count), store, clock=SystemClock())
        for host in range(count)
    ]


def not_called():
    raise AssertionError("only the leader decides")


def test_host_0_decides_and_all_hosts_receive_its_value():
    leader, *others = hosts(3)
    assert leader.broadcast("restore", lambda: "step 8", seconds=SURE_SECONDS) == "step 8"
    assert [one.broadcast("restore", not_called, seconds=SURE_SECONDS) for one in others] == [
        "step 8"
    ] * 2


def test_a_missing_value_names_host_0_in_one_line():
    _, other = hosts(2)
    with pytest.raises(PeerLost, match="host 0 did not send") as error:
        other.broadcast("restore", not_called, seconds=0.05)
    assert "\n" not in str(error.value)


def test_published_messages_are_known_by_the_number_of_their_host():
    members = hosts(12)
    for host in reversed(range(12)):
        members[host].publish("bad_records/1", f"host 0: rows {host}")
    messages = [(host, f"host 0: rows {host}") for host in range(12)]
    assert list(members[3].poll("bad_records/1").items()) == messages
    assert members[3].poll("bad_records/2") == {}


def test_a_host_missing_at_a_barrier_is_named():
    leader, one, _ = hosts(3)
    one.kv_set("barrier/built/1", "1")
    with pytest.raises(PeerLost, match="host 2 did not"):
        leader.barrier("built", seconds=0.2)


def test_host_0_exits_last_and_waits_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(jax_coordination, "EXIT_SECONDS", SURE_SECONDS)
    leader, one = hosts(2)
    left = []
    leaving = threading.Thread(target=lambda: (leader.shutdown(), left.append("lead")))
    leaving.start()
    leaving.join(0.1)
    assert left == [], "it has gone before the other"
    one.shutdown()
    leaving.join(SURE_SECONDS)
    assert left == ["lead"]
    monkeypatch.setattr(jax_coordination, "EXIT_SECONDS", 0.1)
    hosts(2)[0].shutdown()


def test_a_host_whose_result_is_decided_exits_with_it_although_host_0_is_gone():
    """An error here would replace the result that the host has already announced."""
    _, one = hosts(2)

    def gone(key, word):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses")

    one._client.key_value_set = gone
    one.shutdown()


def test_single_host_never_waits():
    alone = SingleHost()
    assert alone.broadcast("restore", lambda: "step 8", seconds=0) == "step 8"
    alone.barrier("built", seconds=0)
    alone.shutdown()


@pytest.mark.parametrize(
    "text",
    [
        "UNKNOWN: Gloo all-reduce failed: [pair.cc:538] Connection closed by peer",
        "UNAVAILABLE: The tasks have stopped sending heartbeats",
        "INTERNAL: NCCL operation ncclAllReduce failed: unhandled system error",
    ],
)
def test_jax_errors_of_a_lost_peer_are_recognised(text):
    assert jax_coordination.is_peer_lost(jax.errors.JaxRuntimeError(text))


def test_other_errors_of_jax_are_bugs():
    assert not jax_coordination.is_peer_lost(
        jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes differ")
    )


@pytest.fixture
def names(monkeypatch):
    """Returns a function that sets what this host's name resolves to, and its route to host 0."""

    def set_names(own, route):
        def resolve(name):
            if own is None:
                raise socket.gaierror("Name or service not known")
            return own

        monkeypatch.setattr(socket, "gethostbyname", resolve)
        monkeypatch.setattr(connection, "route_to", lambda host: route)

    return set_names


def test_gloo_gets_an_address_that_the_other_hosts_can_reach(names):
    wrong = []
    for own, coordinator, expected in (
        ("10.0.0.7", "127.0.0.1", "127.0.0.1"),
        (None, "[::1]", "::1"),
        ("10.0.0.7", "10.0.0.9", None),
        ("127.0.1.1", "10.0.0.9", "10.0.0.8"),
        (None, "host0", "10.0.0.8"),
    ):
        names(own, "10.0.0.8")
        if (given := jax_coordination.gloo_address(coordinator)) != expected:
            wrong.append((own, coordinator, expected, given))
    assert wrong == []
    names("127.0.1.1", "fe80::1%eth0")
    assert jax_coordination.gloo_address("[fe80::9]") == "fe80::1%eth0"


def test_names_that_all_resolve_to_loopback_are_refused_with_the_remedy(names):
    names("127.0.1.1", "127.0.0.1")
    with pytest.raises(ConfigError, match="/etc/hosts"):
        jax_coordination.gloo_address("host0")


def test_the_address_reaches_gloo(monkeypatch):
    from jaxlib import _jax

    given = []
    make = functools.partial(lambda *, hostname: given.append(hostname), hostname="earlier")
    monkeypatch.setattr(_jax, "make_gloo_tcp_collectives", make)
    jax_coordination._use_in_gloo("::1")
    _jax.make_gloo_tcp_collectives()
    assert given == ["::1"]
