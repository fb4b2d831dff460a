"""Which part of a job of many hosts this process is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """One host's place among the hosts of a job; host 0 leads: it alone writes shared files."""

    host: int = 0
    num_hosts: int = 1

    @property
    def leads(self) -> bool:
        """Whether this host writes what all share: log, metrics, commits."""
        return self.host == 0

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other host."""
        return self.num_hosts == 1


ALONE = Member()
