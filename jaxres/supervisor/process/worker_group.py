"""Rendezvous of a job's hosts before an attempt is claimed, and which workers run where.

A single host needs no rendezvous. `launch local` runs all workers under one supervisor. Hosts with
a supervisor each connect to the supervisor of host 0 (`cluster.rendezvous`).
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from jaxres.cluster.authentication import Secret, load_secret
from jaxres.cluster.compatibility import key_digests, values_of
from jaxres.cluster.connection import reserve_port
from jaxres.cluster.detect import Address
from jaxres.cluster.host_group import HostRank
from jaxres.cluster.host_identity import HostIdentity
from jaxres.cluster.messages import AttemptAnnounced, Goodbye, Hello
from jaxres.cluster.peer_connections import PeerLinks
from jaxres.cluster.rendezvous import (
    VISIBLE_SECONDS,
    RendezvousFollower,
    RendezvousLeader,
    RendezvousSettings,
)
from jaxres.config import RunConfig
from jaxres.faults import ConfigError
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim
from jaxres.storage import files
from jaxres.supervisor import run_dir_watcher

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File with a random id of this boot (Linux, proc(5))."""


def _ignore_claim(claim: Claim) -> None:
    """No-op: there is no other supervisor."""


def _ignore_cancel(code: int, reason: str) -> None:
    """No-op: there is no other supervisor."""


@dataclass(frozen=True)
class WorkerGroup:
    """The hosts of an attempt, after their rendezvous."""

    num_hosts: int = 1
    hosts: tuple[int, ...] = (0,)
    """Hosts whose workers run under this supervisor."""
    slots: tuple[int, ...] | None = None
    """Slots of the hosts, of which a restart loop may exclude some; None: no restart loop."""
    coordinator: str | None = None
    """Address of the JAX coordinator; None: there is a single worker."""
    secret: Secret | None = None
    """The run's secret; None: all workers run under this supervisor."""
    announce: Callable[[Claim], PeerLinks | None] = _ignore_claim
    """Sends the claim to the other hosts; returns once all have read it in the run directory."""
    cancel: Callable[[int, str], None] = _ignore_cancel
    """Sends the other hosts that no attempt starts, and the reason."""


Rendezvous = Callable[[RunConfig, RunDir], AbstractContextManager[WorkerGroup]]


@contextlib.contextmanager
def single_host(config: RunConfig, run_dir: RunDir) -> Iterator[WorkerGroup]:
    """Yields a group of one host, without a rendezvous."""
    yield WorkerGroup()


@contextlib.contextmanager
def local_hosts(
    config: RunConfig, run_dir: RunDir, *, num_hosts: int, slots: tuple[int, ...] | None = None
) -> Iterator[WorkerGroup]:
    """Yields a group of workers on this machine, with a local port for their JAX coordinator."""
    alone = contextlib.nullcontext(None)
    with connection.reserved_address() if num_hosts > 1 else alone as coordinator:
        yield WorkerGroup(num_hosts, tuple(range(num_hosts)), slots, coordinator)


@dataclass(frozen=True)
class Membership:
    """The rank of a host in a job, and how it reaches the supervisor of host 0."""

    member: HostRank
    address: Address
    secret: str
    """JAXRES_SECRET; empty: the run directory holds the secret."""


@contextlib.contextmanager
def as_leader(
    config: RunConfig, run_dir: RunDir, *, member: HostRank, address: Address, secret: str
) -> Iterator[WorkerGroup]:
    """Waits for the supervisors of the other hosts; connections last until the end of the block.

    Args:
      member: this host's rank.
      address: the address to listen on.
      secret: JAXRES_SECRET; empty: the run directory holds the secret.

    Raises:
      ConfigError: the address is not available, or hosts differ in what must be equal.
      PeerLost: some hosts did not connect in time.
      StoppedError: a `stop` file was put into the run directory meanwhile; it is deleted.
    """
    settings = _settings(config, run_dir, member, address, secret=secret, clock=SystemClock())
    with reserve_port() as kept, RendezvousLeader(settings) as leader:
        with run_dir_watcher.stop_while_waiting(run_dir) as stopped:
            leader.wait_for_all(stopped)
        workers_at = str(Address(address.host, kept.getsockname()[1]))

        def announce(claim: Claim) -> PeerLinks:
            message = AttemptAnnounced(claim.attempt, claim.nonce, workers_at)
            return leader.announce(message, visible_seconds=_visible_seconds(config))

        yield WorkerGroup(
            member.num_hosts,
            (member.host,),
            coordinator=workers_at,
            secret=settings.secret,
            announce=announce,
            cancel=lambda code, reason: leader.peers.send(Goodbye(code, reason)),
        )


@contextlib.contextmanager
def as_follower(
    config: RunConfig,
    run_dir: RunDir,
    member: HostRank,
    address: Address,
    *,
    secret: str,
    identity: HostIdentity,
    clock: Clock,
) -> Iterator[tuple[int, PeerLinks, Secret]]:
    """Connects to the leader; yields the attempt that it has claimed, connection and secret.

    The secret is as for `as_leader`; `identity` is that of this machine.

    Raises:
      RunError: the error that the leader sent, or PeerLost if the leader does not answer.
    """
    settings = _settings(config, run_dir, member, address, secret=secret, clock=clock)
    hello = dataclasses.replace(settings.hello, identity=identity)
    settings = dataclasses.replace(settings, hello=hello)
    with RendezvousFollower(settings) as follower:
        announcement = follower.join()
        can_read = functools.partial(_can_read_claim, run_dir)
        peers = follower.confirm(announcement, can_read, visible_seconds=_visible_seconds(config))
        yield announcement.attempt, peers, settings.secret


def _settings(
    config: RunConfig,
    run_dir: RunDir,
    member: HostRank,
    address: Address,
    *,
    secret: str,
    clock: Clock,
) -> RendezvousSettings:
    values = values_of(configs.trajectory(config))
    key = load_secret(run_dir.secret, given=secret, clock=clock)
    return RendezvousSettings(
        hello=_hello(config, run_dir, member, key_digests(values, key)),
        address=address,
        secret=key,
        values=values,
        join_seconds=config.hosts.join_seconds,
        heartbeat_seconds=config.hosts.heartbeat_seconds,
        clock=clock,
    )


def _visible_seconds(config: RunConfig) -> float:
    return min(VISIBLE_SECONDS, config.hosts.join_seconds)


def _can_read_claim(run_dir: RunDir, attempt: int, nonce: str) -> bool:
    """Whether a claim, and the config that is recorded after it, can be read on this host."""
    recorded = run_dir.attempt(attempt) / "config.yaml"
    claims = run_log.fold(run_log.read_records(run_dir.log)).claims
    is_claimed = any(claim.attempt == attempt and claim.nonce == nonce for claim in claims)
    return is_claimed and files.read(recorded) is not None


def _hello(config: RunConfig, run_dir: RunDir, member: HostRank, digests: dict[str, str]) -> Hello:
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
        key_digests=digests,
    )


def versions() -> dict[str, str]:
    """Returns the versions of the libraries that affect results bit for bit; imports none."""
    names = ("jaxres", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {name: importlib.metadata.version(name) for name in names}


def boot_id() -> str:
    """Returns the id of this boot of the machine.

    Raises:
      ConfigError: /proc is not there, by which processes are told apart.
    """
    try:
        return BOOT_ID.read_text().splitlines()[0]
    except OSError as error:
        raise ConfigError(
            f"{BOOT_ID}: can't be read ({error.strerror}). jaxres needs /proc: mount it in this "
            "container or chroot (mount -t proc proc /proc)."
        ) from error


def is_claim_of(claim: Claim, *, pid: int) -> bool:
    """Returns whether a process of this machine has written a claim."""
    return (claim.host, claim.pid, claim.boot_id) == (socket.gethostname(), pid, boot_id())
