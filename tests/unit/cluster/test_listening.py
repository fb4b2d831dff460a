"""Promises of the ports: where the leader listens, and whom it shares a port with."""

import socket
from functools import partial

import pytest

from jaxres.cluster import connection
from jaxres.cluster.connection import reserve_port
from jaxres.cluster.detect import Address
from jaxres.faults import ConfigError
from tests.unit.cluster.supervisors import (
    ATTEMPT,
    begin,
    follow,
    free_address,
    hello,
    leader,
    together,
)


@pytest.fixture
def address():
    return free_address()


def test_a_port_in_use_is_one_clear_error(address, monkeypatch):
    monkeypatch.setattr(connection, "BIND_SECONDS", 0.2)
    with socket.socket() as other:
        other.bind((address.host, address.port))
        other.listen()
        with pytest.raises(ConfigError) as refused, leader(address):
            raise AssertionError
    assert str(address) in str(refused.value)
    assert "another program has this port" in str(refused.value)
    assert "--coordinator" in str(refused.value)


def test_a_port_in_use_on_one_interface_only_is_an_error(address, monkeypatch):
    monkeypatch.setattr(connection, "BIND_SECONDS", 0.2)
    with socket.create_server((address.host, address.port)):
        everywhere = Address("node0.example", address.port)
        with pytest.raises(ConfigError, match="has this port"), leader(everywhere):
            raise AssertionError


def test_the_leader_listens_only_at_a_numeric_address(address):
    with leader(address), socket.create_server(("127.0.0.2", address.port)) as elsewhere:
        assert elsewhere.getsockname()[1] == address.port


def test_a_leader_behind_the_address_of_a_service_listens_on_all_interfaces(address):
    _, announced = together(
        partial(begin, Address("192.0.2.1", address.port)), partial(follow, address, hello(1))
    )
    assert announced == ATTEMPT


@pytest.mark.parametrize(
    ("resolved", "listens_at"),
    [
        (["10.9.8.7"], ["10.9.8.7"]),
        (["fd00::1", "10.9.8.7"], ["fd00::1", "10.9.8.7"]),
        (["127.0.1.1"], []),
        (["::1", "10.9.8.7"], []),
        (OSError("unknown name"), []),
    ],
)
def test_a_name_means_its_addresses_unless_it_is_a_loopback_name(monkeypatch, resolved, listens_at):
    def getaddrinfo(host, port, **_):
        assert host == "node0.example"
        if isinstance(resolved, OSError):
            raise resolved
        return [(0, 0, 0, "", (address, 0)) for address in resolved]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert connection._addresses("node0.example") == listens_at


def test_a_leader_with_the_name_of_one_address_listens_only_there(address, monkeypatch):
    monkeypatch.setattr(connection, "_addresses", lambda host: ["192.0.2.1", "127.0.0.1"])
    named = Address("node0.example", address.port)
    with leader(named), socket.create_server(("127.0.0.2", address.port)) as elsewhere:
        assert elsewhere.getsockname()[1] == address.port


@pytest.mark.parametrize("seen_from_a_follower", ["127.0.0.1", "::1", "localhost"])
def test_a_leader_with_an_unknown_name_listens_on_all_interfaces(address, seen_from_a_follower):
    _, announced = together(
        partial(begin, Address("node0.example", address.port)),
        partial(follow, Address(seen_from_a_follower, address.port), hello(1)),
    )
    assert announced == ATTEMPT


def test_a_second_leader_does_not_share_the_port(address, monkeypatch):
    monkeypatch.setattr(connection, "BIND_SECONDS", 0.2)
    with leader(address), pytest.raises(ConfigError, match="has this port"), leader(address):
        raise AssertionError


def test_a_reserved_port_is_shared_only_with_sockets_that_set_reuse_port():
    with reserve_port() as kept:
        port = kept.getsockname()[1]
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as service:
            service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            service.bind(("::", port))
            service.listen()
            with socket.create_connection(("127.0.0.1", port)) as client:
                accepted, _ = service.accept()
                accepted.close()
                assert client.recv(1) == b""
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("0.0.0.0", port))
