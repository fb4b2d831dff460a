"""A fresh port for one attempt, where its workers find each other.

JAX's service binds with SO_REUSEPORT, so that the services of an old and a new attempt would share
a port without an error. A socket that is bound in the same way and does not listen keeps the port
for the attempt: nobody else is given it, and the lead's service can still start on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxres.doors.wire import reserve_port

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def held(host: str = LOOPBACK) -> Iterator[str]:
    """Yields `host:port`, and keeps the port until the end of the block."""
    with reserve_port(host) as holder:
        yield f"{host}:{holder.getsockname()[1]}"
