"""The hosts of a job speaking outside the step: joining, one word for all, leaving. Nothing waits
without a limit.

It rides on JAX's own coordination service, a key-value store in the lead's process that is fresh in
every attempt. What must be decided alike at every step goes through the step itself
(train/consensus.py); this is for the few decisions between steps: what to restore, whether a save
is begun, whether it counts.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxres.clock import Clock
from jaxres.cluster.host_group import Member
from jaxres.faults import ConfigError, PeerLost

SHUTDOWN_SECONDS = 5
LEAVE_SECONDS = 10.0
"""How long the lead, whose process holds the store, waits at the end for the others to leave."""
JOIN_SECONDS = 60
"""All doors have met before a worker starts, so that workers only wait for each other's imports."""
SIGNS_OF_A_LOST_PEER = (
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


class Job:
    """The job of many hosts, over JAX's key-value store."""

    def __init__(self, member: Member, client: Any, *, clock: Clock) -> None:
        self.member = member
        self._client = client
        self._clock = clock

    def same(self, topic: str, decide: Callable[[], str], *, seconds: float) -> str:
        """Returns the lead's word on a topic."""
        if self.member.leads:
            word = decide()
            self.say(f"word/{topic}", word)
            return word
        return self.hear(f"word/{topic}", host=0, seconds=seconds)

    def meet(self, topic: str, *, seconds: float) -> None:
        """Waits until every host has come to the same point."""
        self.say(f"here/{topic}/{self.member.host}", "1")
        self._hear_all(f"here/{topic}", range(self.member.num_hosts), seconds=seconds)

    def tell(self, topic: str, word: str) -> None:
        """Leaves a word of this host's for whoever asks for it."""
        self.say(f"told/{topic}/{self.member.host}", word)

    def told(self, topic: str) -> Sequence[str]:
        """Returns what hosts have told so far, each with its name; waits for nobody."""
        prefix = f"told/{topic}/"
        words = self._client.key_value_dir_get(prefix)
        return [f"host {key.rpartition('/')[2]}: {word}" for key, word in sorted(words)]

    def collect(self, topic: str, word: str, *, seconds: float) -> Sequence[str]:
        """Hands a word of every host's to the lead: all of them there, in order; () elsewhere."""
        if not self.member.leads:
            self.say(f"word/{topic}/{self.member.host}", word)
            return ()
        others = range(1, self.member.num_hosts)
        return (word, *self._hear_all(f"word/{topic}", others, seconds=seconds))

    def leave(self) -> None:
        """Comes right before the process ends by its own word: the lead goes last.

        Its end takes the store away, upon which JAX aborts whoever is still there.
        """
        if not self.member.leads:
            self.say(f"left/{self.member.host}", "1")
            return
        with contextlib.suppress(PeerLost):
            self._hear_all("left", range(1, self.member.num_hosts), seconds=LEAVE_SECONDS)

    def _hear_all(self, topic: str, hosts: Iterable[int], *, seconds: float) -> list[str]:
        end = self._clock.monotonic() + seconds
        words = []
        for host in hosts:
            rest = max(0.0, end - self._clock.monotonic())
            words.append(self.hear(f"{topic}/{host}", host=host, seconds=rest))
        return words

    def say(self, key: str, word: str) -> None:
        """Puts a word where the others can hear it; once for each key."""
        self._client.key_value_set(key, word)

    def hear(self, key: str, *, host: int, seconds: float) -> str:
        """Waits for a host's word.

        Raises:
          PeerLost: it did not come; the message names the host.
        """
        try:
            return self._client.blocking_key_value_get(key, max(1, math.ceil(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise PeerLost(
                f"host {host} did not say '{key}' within {seconds:.0f} s, or is gone: "
                f"{first_line(error)}"
            ) from error


def join(member: Member, *, heartbeat_seconds: float, clock: Clock) -> Job:
    """Makes this process one of the job's; must come before JAX has looked for devices.

    The service is off that swallows SIGTERM, and the limits are seconds where JAX's are minutes.
    Where another worker doesn't come, JAX aborts the process: the doors tell why.
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
    )
    if jax.default_backend() == "cpu" and not _is_loopback(address):
        refuse_unreachable_name()
    # The store has no public door; Orbax and JAX's own libraries take this one too.
    from jax._src import distributed

    return Job(member, distributed.global_state.client, clock=clock)


def refuse_unreachable_name() -> None:
    """Gloo tells the other hosts this host's name, and connects to what it stands for.

    Raises:
      ConfigError: it stands for this very machine, as in many a fresh Debian.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
        if address.startswith("127."):
            raise ConfigError(
                f"this host's name, {name}, stands for {address} here, where other hosts can't "
                "reach it (CPU hosts talk through Gloo, which uses the name). Give the name its "
                "network address in /etc/hosts."
            )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "[::1]")


def is_loss(error: BaseException) -> bool:
    """Says whether an error of JAX's, or of what stands on it, means that a peer is gone."""
    return any(sign in str(error) for sign in SIGNS_OF_A_LOST_PEER)


def first_line(error: BaseException) -> str:
    """Returns what an error says, without its stack of addresses."""
    lines: Sequence[str] = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
