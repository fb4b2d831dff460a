"""Promises of the port that an attempt holds."""

import socket

import pytest

from jaxres.cluster import connection
from jaxres.faults import ConfigError
from tests.waiting import SURE_SECONDS


def test_a_reserved_port_is_refused_to_others_and_the_service_may_listen_on_it():
    with connection.reserved_address() as address:
        host, _, number = address.partition(":")
        with socket.socket() as other, pytest.raises(OSError):
            other.bind((host, int(number)))
        with socket.socket() as leader:
            leader.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            leader.bind((host, int(number)))
            leader.listen()
            with socket.create_connection((host, int(number)), timeout=SURE_SECONDS):
                pass


def test_workers_of_a_machine_meet_at_the_loopback_address_that_it_has(monkeypatch):
    """192.0.2.1 is no address of any machine (RFC 5737)."""
    assert connection.loopback() in connection.LOOPBACK
    monkeypatch.setattr(connection, "LOOPBACK", ("192.0.2.1", "127.9.9.9"))
    assert connection.loopback() == "127.9.9.9"
    with connection.reserved_address() as address:
        assert address.startswith("127.9.9.9:")
    monkeypatch.setattr(connection, "LOOPBACK", ("192.0.2.1",))
    with pytest.raises(ConfigError, match="ip link set lo up"), connection.reserved_address():
        pass


def test_the_route_to_a_host_is_an_address_of_this_one():
    assert connection.route_to("127.0.0.1") == "127.0.0.1"


def test_every_attempt_has_its_own_port():
    with connection.reserved_address() as first, connection.reserved_address() as second:
        assert first != second
