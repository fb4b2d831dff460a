"""Promises of the port that an attempt holds."""

import socket

import pytest

from jaxres.cluster import connection
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


def test_every_attempt_has_its_own_port():
    with connection.reserved_address() as first, connection.reserved_address() as second:
        assert first != second
