"""Promises of the port that an attempt holds."""

import socket

import pytest

from jaxres.cluster import connection


def test_nobody_else_gets_the_port_and_the_lead_may_listen_on_it():
    with connection.held() as address:
        host, _, number = address.partition(":")
        with socket.socket() as other, pytest.raises(OSError):
            other.bind((host, int(number)))
        with socket.socket() as lead:
            lead.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            lead.bind((host, int(number)))
            lead.listen()
            with socket.create_connection((host, int(number)), timeout=5):
                pass


def test_every_attempt_has_its_own():
    with connection.held() as first, connection.held() as second:
        assert first != second
