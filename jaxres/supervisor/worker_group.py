"""How the hosts of a job come together before an attempt is claimed, and who runs where.

One host is alone; `launch local` has all workers behind its own door; hosts with a door each meet
by the roll call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from jaxres import config as configs
from jaxres.clock import Clock, SystemClock
from jaxres.cluster import connection
from jaxres.cluster.connection import reserve_port
from jaxres.cluster.detect import Address
from jaxres.cluster.host_group import Member
from jaxres.cluster.messages import Announcement, Farewell, Hello, fields_of
from jaxres.cluster.peer_connections import Peers
from jaxres.cluster.rendezvous import SEE_SECONDS, Follower, Lead
from jaxres.config import RunConfig
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim
from jaxres.storage import files


def _nobody(claim: Claim) -> None:
    """Has nobody to tell of the claim."""


def _silently(code: int, reason: str) -> None:
    """Has nobody to send away."""


@dataclass(frozen=True)
class Job:
    """The hosts of an attempt, who have met."""

    num_hosts: int = 1
    hosts: tuple[int, ...] = (0,)
    """Whose workers run behind this door."""
    places: tuple[int, ...] | None = None
    """Where the hosts sit, if a supervisor has chosen; it alone may leave one out."""
    coordinator: str | None = None
    """Where the workers find each other; None: there is one."""
    announce: Callable[[Claim], Peers | None] = _nobody
    """Tells the others of the claim; returns once they all have seen it in the run directory."""
    dismiss: Callable[[int, str], None] = _silently
    """Tells the others that there is no attempt, and why."""


Meet = Callable[[RunConfig, RunDir], AbstractContextManager[Job]]


@contextlib.contextmanager
def alone(config: RunConfig, run_dir: RunDir) -> Iterator[Job]:
    """Has nobody to meet."""
    yield Job()


@contextlib.contextmanager
def behind_one_door(
    config: RunConfig, run_dir: RunDir, *, num_hosts: int, places: tuple[int, ...] | None = None
) -> Iterator[Job]:
    """Gives all hosts' workers a port of this machine to find each other at."""
    with connection.held() as address:
        coordinator = address if num_hosts > 1 else None
        yield Job(num_hosts, tuple(range(num_hosts)), places, coordinator)


@contextlib.contextmanager
def leading(
    config: RunConfig, run_dir: RunDir, *, member: Member, address: Address
) -> Iterator[Job]:
    """Waits for the doors of the other hosts; the connections last until the end of the block.

    Raises:
      ConfigError: the address can't be had, or hosts differ in what must be equal.
      PeerLost: some did not come.
    """
    clock = SystemClock()
    hello = _hello(config, run_dir, member)
    with reserve_port() as kept, Lead(hello, address, **_limits(config), clock=clock) as lead:
        lead.gather()
        workers_at = str(Address(address.host, kept.getsockname()[1]))

        def announce(claim: Claim) -> Peers:
            told = Announcement(claim.attempt, claim.nonce, workers_at, claim.threads)
            return lead.announce(told, see_seconds=_see_seconds(config))

        yield Job(
            member.num_hosts,
            (member.host,),
            coordinator=workers_at,
            announce=announce,
            dismiss=lambda code, reason: lead.peers.tell(Farewell(code, reason)),
        )


@contextlib.contextmanager
def following(
    config: RunConfig, run_dir: RunDir, member: Member, address: Address, *, clock: Clock
) -> Iterator[tuple[int, Peers]]:
    """Meets the lead's door; yields the attempt that it has claimed, and the connection to it.

    Raises:
      TypedEnd: as the lead says, or PeerLost if it does not answer.
    """
    hello = _hello(config, run_dir, member)
    with Follower(hello, address, **_limits(config), clock=clock) as follower:
        announcement = follower.meet()
        sees = functools.partial(_sees, run_dir)
        peers = follower.confirm(announcement, sees, see_seconds=_see_seconds(config))
        yield announcement.attempt, peers


def _limits(config: RunConfig) -> dict[str, float]:
    hosts = config.hosts
    return {"join_seconds": hosts.join_seconds, "heartbeat_seconds": hosts.heartbeat_seconds}


def _see_seconds(config: RunConfig) -> float:
    return min(SEE_SECONDS, config.hosts.join_seconds)


def _sees(run_dir: RunDir, attempt: int, nonce: str) -> bool:
    """Whether a claim, and the config that was recorded after it, are to be seen here."""
    recorded = run_dir.attempt(attempt) / "config.yaml"
    claims = run_log.fold(run_log.read_records(run_dir.log)).claims
    seen = any(claim.attempt == attempt and claim.nonce == nonce for claim in claims)
    return seen and files.read(recorded) is not None


def _hello(config: RunConfig, run_dir: RunDir, member: Member) -> Hello:
    return Hello(
        host=member.host,
        num_hosts=member.num_hosts,
        name=socket.gethostname(),
        pid=os.getpid(),
        nonce=secrets.token_hex(8),
        versions=versions(),
        python=platform.python_version(),
        trajectory=configs.digest(config),
        run_dir=str(run_dir.root.absolute()),
        boot_id=boot_id(),
        fields=fields_of(configs.trajectory(config)),
    )


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that decide bits, without importing them."""
    names = ("jaxres", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {name: importlib.metadata.version(name) for name in names}


def boot_id() -> str:
    """Returns what tells one boot of this machine from the next."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().splitlines()[0]
