"""A cut network loses what supervisors send, a slow one delays it; each host has its own way."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.operate.chaos.faults import network as network_faults
from jaxres.operate.chaos.job_network import ProxiedNetwork
from jaxres_emulators.proxy import Proxy
from tests.waiting import SURE_SECONDS, wait_until


@contextlib.contextmanager
def connected(server: socket.socket, proxy: Proxy) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yields both ends of a connection that passes a proxy."""
    host, _, port = proxy.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=SURE_SECONDS) as near:
        far, _ = server.accept()
        with far:
            far.settimeout(SURE_SECONDS)
            yield near, far


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.settimeout(SURE_SECONDS)
        yield found


def address(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_cut_proxy_loses_what_comes_and_closes_nothing(server: socket.socket) -> None:
    with Proxy(address(server)) as proxy, connected(server, proxy) as (near, far):
        near.sendall(b"before")
        assert far.recv(6) == b"before"
        proxy.cut()
        far.sendall(b"late")
        near.sendall(b"after")
        wait_until(lambda: proxy.lost_bytes == 9, "cut of both directions")
        near.setblocking(False)
        with pytest.raises(BlockingIOError):
            near.recv(1)


def test_a_slow_proxy_delays_and_loses_nothing(server: socket.socket) -> None:
    with Proxy(address(server)) as proxy, connected(server, proxy) as (near, far):
        proxy.delay(0.01)
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        assert (proxy.num_late, proxy.lost_bytes) == (1, 0)


def test_host_0_is_cut_from_all_and_another_from_host_0_alone() -> None:
    network = ProxiedNetwork(3)
    with contextlib.closing(network):
        leader, *others = network.open()
        assert [proxy.address for proxy in network.proxies] == others
        assert len({leader, *others}) == 3
        assert network.of(0) == network.proxies
        assert network.of(2) == [network.proxies[1]]
        before = network.proxies
        assert set(network.open()).isdisjoint(others)
        assert network.proxies != before, "a cut connection is not used again"


@pytest.mark.parametrize(
    ("codes", "text"),
    [
        ((ExitCode.PEER_LOST, ExitCode.PEER_LOST), ""),
        ((ExitCode.PEER_LOST, ExitCode.HUNG), "HUNG"),
        ((ExitCode.DONE,), "DONE"),
        ((-9,), "-9"),
    ],
)
def test_a_partition_ends_every_supervisor_with_peer_lost(
    codes: tuple[int, ...], text: str
) -> None:
    ended: Any = [SimpleNamespace(returncode=code) for code in codes]
    found = network_faults._not_peer_lost(ended)
    assert text in found
    assert bool(found) == bool(text)
