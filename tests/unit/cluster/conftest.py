"""Limits of a rendezvous that no machine reaches; a test of a limit sets it."""

import pytest

from jaxres.cluster import peer_connections, rendezvous
from tests.waiting import SURE_SECONDS


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(peer_connections, "HELLO_SECONDS", SURE_SECONDS)
    for name in ("HELLO_SECONDS", "CONNECT_SECONDS", "CLAIM_SECONDS"):
        monkeypatch.setattr(rendezvous, name, SURE_SECONDS)
    for name in ("MARGIN_SECONDS", "DOUBT_SECONDS"):
        monkeypatch.setattr(rendezvous, name, SURE_SECONDS)
