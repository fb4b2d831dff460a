"""The rank of a host among the hosts of a job, and the operations across hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class HostRank:
    """A host's rank in the job; only host 0 writes shared files."""

    host: int = 0
    num_hosts: int = 1
    coordinator: str | None = None
    """host:port of JAX's service for the workers of this attempt; None with one host."""

    @property
    def leads(self) -> bool:
        """Whether this is host 0, which writes run log, metrics and commits."""
        return self.host == 0

    @property
    def is_alone(self) -> bool:
        """Whether the job has one host only."""
        return self.num_hosts == 1


ALONE = HostRank()
MESSAGE_SECONDS = 60.0
"""Longest wait for a message that costs host 0 one storage access."""


class HostGroup(Protocol):
    """Operations across the hosts of a job, apart from the training step."""

    member: HostRank

    def broadcast(self, topic: str, decide: Callable[[], str], *, seconds: float) -> str:
        """Returns host 0's decision on every host.

        Args:
          topic: unique within the attempt.
          decide: called on host 0 only; its exception is raised there, and no message is sent.
          seconds: how long the other hosts wait for the message.

        Raises:
          PeerLost: the message did not arrive in time.
        """
        ...

    def barrier(self, topic: str, *, seconds: float) -> None:
        """Waits until every host has reached the same point.

        Raises:
          PeerLost: a host did not reach it in time; the error message names the host.
        """
        ...

    def publish(self, topic: str, message: str) -> None:
        """Publishes a message of this host, which `poll` returns."""
        ...

    def poll(self, topic: str) -> Mapping[int, str]:
        """Returns the messages published so far, by the number of their host; does not wait."""
        ...

    def gather(self, topic: str, message: str, *, seconds: float) -> Sequence[str]:
        """Sends a message of every host to host 0.

        Returns:
          On host 0 the messages of all hosts in order, elsewhere ().

        Raises:
          PeerLost: on host 0, if a message did not arrive; names the host.
        """
        ...

    def shutdown(self) -> None:
        """Call just before a voluntary exit: host 0 exits last."""
        ...


class SingleHost:
    """The group of one host: no operation waits."""

    member = ALONE

    def broadcast(self, topic: str, decide: Callable[[], str], *, seconds: float) -> str:
        """Returns the decision of this host."""
        return decide()

    def barrier(self, topic: str, *, seconds: float) -> None:
        """No-op."""

    def publish(self, topic: str, message: str) -> None:
        """No-op."""

    def poll(self, topic: str) -> Mapping[int, str]:
        """Returns no messages."""
        return {}

    def gather(self, topic: str, message: str, *, seconds: float) -> Sequence[str]:
        """Returns the message of this host."""
        return (message,)

    def shutdown(self) -> None:
        """No-op."""
