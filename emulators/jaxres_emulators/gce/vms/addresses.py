"""Loopback networks, so that each VM of each emulator on this machine has an address of its own."""

from __future__ import annotations

import socket
import uuid

RESERVED_PORT = 47007
"""Port on the first address of a network; the process that listens there owns the network."""


def reserve() -> tuple[int, socket.socket]:
    """Returns n of a free network 127.n.0.0 and the socket that reserves it."""
    first = 1 + uuid.uuid4().int % 250
    for number in (*range(first, 251), *range(1, first)):
        held = socket.socket()
        try:
            held.bind((f"127.{number}.0.1", RESERVED_PORT))
            held.listen(1)
        except OSError:
            held.close()
            continue
        return number, held
    raise RuntimeError("no loopback network is free")
