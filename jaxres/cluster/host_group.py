"""Which part of a job of many hosts this process is, and what it may ask of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Member:
    """One host's place among the hosts of a job; host 0 leads: it alone writes shared files."""

    host: int = 0
    num_hosts: int = 1
    coordinator: str | None = None
    """host:port where the workers of this attempt meet; None for a host that is alone."""

    @property
    def leads(self) -> bool:
        """Whether this host writes what all share: log, metrics, commits."""
        return self.host == 0

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other host."""
        return self.num_hosts == 1


ALONE = Member()
WORD_SECONDS = 60.0
"""Longest wait for a word that takes the lead one look at storage."""


class Peers(Protocol):
    """What the parts of a run may ask of the job's other hosts."""

    member: Member

    def same(self, topic: str, decide: Callable[[], str], *, seconds: float) -> str:
        """Returns the lead's word on a topic, on every host; only the lead decides.

        Args:
          topic: unique within the attempt.
          decide: called on the lead only; what it raises is raised there, and is no word.
          seconds: how long the others wait for the word.

        Raises:
          PeerLost: the word did not come.
        """
        ...

    def meet(self, topic: str, *, seconds: float) -> None:
        """Waits until every host has come to the same point.

        Raises:
          PeerLost: somebody did not come; the message names who.
        """
        ...

    def tell(self, topic: str, word: str) -> None:
        """Leaves a word of this host's for whoever asks for it."""
        ...

    def told(self, topic: str) -> Sequence[str]:
        """Returns what hosts have told so far, each with its name; waits for nobody."""
        ...

    def collect(self, topic: str, word: str, *, seconds: float) -> Sequence[str]:
        """Hands a word of every host's to the lead: all of them there, in order; () elsewhere.

        Raises:
          PeerLost: on the lead, if a word did not come; the message names whose.
        """
        ...

    def leave(self) -> None:
        """Comes right before the process ends by its own word: the lead goes last."""
        ...


class Alone:
    """The job of one host: decides at once, waits for nobody."""

    member = ALONE

    def same(self, topic: str, decide: Callable[[], str], *, seconds: float) -> str:
        """Returns its own word."""
        return decide()

    def meet(self, topic: str, *, seconds: float) -> None:
        """Has nobody to wait for."""

    def tell(self, topic: str, word: str) -> None:
        """Has nobody to tell."""

    def told(self, topic: str) -> Sequence[str]:
        """Was told nothing."""
        return ()

    def collect(self, topic: str, word: str, *, seconds: float) -> Sequence[str]:
        """Has its own word."""
        return (word,)

    def leave(self) -> None:
        """Has nobody to take leave of."""
