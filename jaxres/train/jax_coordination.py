"""Operations across hosts through JAX's coordination service: join, broadcast, barrier, shutdown.

The service is a key-value store in the process of host 0; each attempt has a new one.
Decisions that all hosts need at every step are part of the step itself (train/consensus.py). This
module serves the few decisions between steps: which checkpoint to restore, whether to start a save,
whether it is committed. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import ipaddress
import math
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxres.clock import Clock
from jaxres.cluster import connection, coordination_tls
from jaxres.cluster.host_group import HostRank
from jaxres.faults import ConfigError, PeerLost

SHUTDOWN_SECONDS = 5
EXIT_SECONDS = 10.0
"""Longest wait of host 0, whose process has the store, for the others to exit."""
JOIN_SECONDS = 60
"""Longest wait for other workers: their supervisors have met, so only imports take time."""
PEER_LOST_MARKERS = (
    "Gloo ",
    "gloo",
    "NCCL",
    "coordination service",
    "Connection closed by peer",
    "Connection reset by peer",
    "heartbeat",
    "DEADLINE_EXCEEDED: Barrier",
    "Barrier timed out",
    "Socket closed",
    "failed to connect to all addresses",
)


class JaxCoordination:
    """The group of several hosts, over JAX's key-value store."""

    def __init__(self, member: HostRank, client: Any, *, clock: Clock) -> None:
        self.member = member
        self._client = client
        self._clock = clock

    def broadcast(self, topic: str, decide: Callable[[], str], *, seconds: float) -> str:
        """Returns host 0's decision."""
        if self.member.leads:
            message = decide()
            self.kv_set(f"broadcast/{topic}", message)
            return message
        return self.kv_get(f"broadcast/{topic}", host=0, seconds=seconds)

    def barrier(self, topic: str, *, seconds: float) -> None:
        """Waits until every host has reached the same point."""
        self.kv_set(f"barrier/{topic}/{self.member.host}", "1")
        self._kv_get_all(f"barrier/{topic}", range(self.member.num_hosts), seconds=seconds)

    def publish(self, topic: str, message: str) -> None:
        """Publishes a message of this host, which `poll` returns."""
        self.kv_set(f"published/{topic}/{self.member.host}", message)

    def poll(self, topic: str) -> Mapping[int, str]:
        """Returns the messages published so far, by the number of their host; does not wait."""
        messages = self._client.key_value_dir_get(f"published/{topic}/")
        return dict(sorted((int(key.rpartition("/")[2]), message) for key, message in messages))

    def gather(self, topic: str, message: str, *, seconds: float) -> Sequence[str]:
        """Returns the messages of all hosts on host 0, () elsewhere."""
        if not self.member.leads:
            self.kv_set(f"gathered/{topic}/{self.member.host}", message)
            return ()
        others = range(1, self.member.num_hosts)
        return (message, *self._kv_get_all(f"gathered/{topic}", others, seconds=seconds))

    def shutdown(self) -> None:
        """Call just before a voluntary exit: host 0 exits last.

        Its exit removes the store, and JAX then aborts every process that still uses it.
        """
        if not self.member.leads:
            # If host 0 has not waited its store is gone, and this host's result stays what it is.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.kv_set(f"exited/{self.member.host}", "1")
            return
        with contextlib.suppress(PeerLost):
            self._kv_get_all("exited", range(1, self.member.num_hosts), seconds=EXIT_SECONDS)

    def _kv_get_all(self, topic: str, hosts: Iterable[int], *, seconds: float) -> list[str]:
        end = self._clock.monotonic() + seconds
        messages: list[str] = []
        for host in hosts:
            rest = max(0.0, end - self._clock.monotonic())
            messages.append(self.kv_get(f"{topic}/{host}", host=host, seconds=rest))
        return messages

    def kv_set(self, key: str, message: str) -> None:
        """Stores a message for the other hosts; each key can be set once."""
        self._client.key_value_set(key, message)

    def kv_get(self, key: str, *, host: int, seconds: float) -> str:
        """Waits for a message of a host.

        Raises:
          PeerLost: it did not arrive in time; the error message names the host.
        """
        try:
            return self._client.blocking_key_value_get(key, max(1, math.ceil(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise PeerLost(
                f"host {host} did not send '{key}' within {seconds:.0f} s, or is gone: "
                f"{first_line(error)}"
            ) from error


def join(member: HostRank, *, heartbeat_seconds: float, clock: Clock) -> JaxCoordination:
    """Initializes jax.distributed; must be called before JAX looks for devices.

    JAX's preemption service, which intercepts SIGTERM, is disabled, and the limits are seconds
    instead of JAX's minutes. If another worker does not join, JAX aborts the process; the
    supervisors report the cause.
    """
    jax.config.update("jax_enable_preemption_service", False)
    coordinator = member.coordinator or ""
    address = coordinator.rpartition(":")[0]
    jax.distributed.initialize(
        coordinator,
        num_processes=member.num_hosts,
        process_id=member.host,
        initialization_timeout=JOIN_SECONDS,
        heartbeat_timeout_seconds=max(1, round(heartbeat_seconds)),
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        coordinator_bind_address=coordinator if member.leads and _is_loopback(address) else None,
        cluster_detection_method="deactivate",
        **coordination_tls.arguments(os.environ, host=member.host),
    )
    if (own := gloo_address(address)) is not None:
        _use_in_gloo(own)
    return joined(member, clock=clock)


def joined(member: HostRank, *, clock: Clock) -> JaxCoordination:
    """Returns the group of a process that has called jax.distributed.initialize."""
    # JAX has no public function for the store; Orbax uses this attribute too.
    from jax._src import distributed

    return JaxCoordination(member, distributed.global_state.client, clock=clock)


def gloo_address(coordinator: str) -> str | None:
    """Returns the address by which Gloo makes CPU hosts connect to this one; None: by its name.

    Gloo publishes the machine's name. On one machine that name may not resolve, or not to the
    loopback interface. Of several machines it may resolve to an address that the others can't
    reach, as on a freshly installed Debian, or not at all: then it is the address from which this
    host reaches host 0.

    Args:
      coordinator: host name or address of host 0, in brackets if it has a colon.

    Raises:
      ConfigError: all addresses that are known are of the loopback interface.
    """
    host = coordinator.strip("[]")
    if _is_loopback(coordinator):
        return connection.loopback() if host == "localhost" else host
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        if not ipaddress.ip_address(socket.gethostbyname(name)).is_loopback:
            return None
    with contextlib.suppress(OSError):
        own = connection.route_to(host)
        if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
            return own
        raise ConfigError(
            f"this host's name, {name}, and {host} are {own} here, which other hosts can't reach "
            "(CPU hosts communicate through Gloo). Give the name its network address in "
            "/etc/hosts, or host 0's address instead of its name."
        )
    return None


def _use_in_gloo(address: str) -> None:
    """Makes JAX give Gloo an address instead of the machine's name, for which it has no setting.

    A version of jaxlib that makes Gloo's connections in another way keeps to the name.
    """
    _jax: Any = importlib.import_module("jaxlib._jax")
    make = getattr(_jax, "make_gloo_tcp_collectives", None)
    if make is None:
        return
    given = functools.partial(getattr(make, "func", make), hostname=address)
    _jax.make_gloo_tcp_collectives = given


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "[::1]")


def is_peer_lost(error: BaseException) -> bool:
    """Returns whether an error of JAX, or of a library on top of it, means that a peer is lost."""
    return any(marker in str(error) for marker in PEER_LOST_MARKERS)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error message, without the stack of addresses."""
    lines: Sequence[str] = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
