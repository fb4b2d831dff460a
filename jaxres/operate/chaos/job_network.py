"""The connections of a job in which each host has a supervisor of its own, as on several machines.

The supervisors of hosts 1 and later reach that of host 0 by a proxy, which can lose or delay what
they send. Sums of the workers do not pass the proxies.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxres_emulators.proxy import Proxy


@dataclass
class ProxiedNetwork:
    """Addresses and proxies of the newest start of a job."""

    num_hosts: int
    proxies: list[Proxy] = field(default_factory=list)
    """Of host 1 and later, in order."""

    def open(self) -> list[str]:
        """Opens new proxies; returns the address of the rendezvous for each host."""
        from jaxres_emulators.proxy import Proxy

        self.close()
        with socket.create_server(("127.0.0.1", 0)) as free:
            leader = f"127.0.0.1:{free.getsockname()[1]}"
        self.proxies = [Proxy(leader) for _ in range(1, self.num_hosts)]
        return [leader, *(proxy.address for proxy in self.proxies)]

    def of(self, host: int) -> Sequence[Proxy]:
        """Returns the proxies between a host and the others; all of them for host 0."""
        return self.proxies if host == 0 else [self.proxies[host - 1]]

    def close(self) -> None:
        """Takes no more connections."""
        for proxy in self.proxies:
            with contextlib.suppress(OSError):
                proxy.close()


def why_not(num_hosts: int) -> str:
    """Returns why a job has no such connections; empty: it has.

    >>> why_not(2), why_not(1)[:15]
    ('', 'needs --hosts 2')
    """
    if num_hosts > 1:
        return ""
    return "needs --hosts 2 or more: each host has a supervisor of its own"
