"""Takes the lease of a run for a command, and waits for that of a launcher that may be gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.faults import Fenced
from jaxres.launch.desired_state import DesiredState
from jaxres.launch.lease import Lease
from jaxres.launch.paths import LaunchPaths
from jaxres.storage.path import GcsPath

WATCH_SECONDS = 1.0


def new_lease(paths: LaunchPaths, config: RunConfig, console: Callable[[str], None]) -> Lease:
    """Returns the lease of a run for this process, which does not hold it yet."""
    assert config.launch.gce is not None, config
    holder = f"{socket.gethostname()} (pid {os.getpid()})"
    seconds = config.launch.gce.lease_seconds
    return Lease(paths.lease, holder=holder, seconds=seconds, console=console)


def acquire(
    lease: Lease,
    run: GcsPath,
    clock: Clock,
    *,
    waits: bool,
    desired: DesiredState | None,
    may_be_led: bool,
    console: Callable[[str], None],
) -> None:
    """Takes the lease as soon as its holder no longer renews it.

    Raises:
      Fenced: another launcher holds and renews it.
    """
    epoch = 0 if desired is None else desired.epoch
    first = None
    while not lease.acquire(after_epoch=epoch, may_be_led=may_be_led):
        if lease.other_generation is None:
            continue
        if first is None:
            first = lease.other_generation
            console(
                f"{lease.other} holds the launcher lease; checking for up to "
                f"{lease.wait_seconds:.0f} s whether it is still active"
            )
        elif lease.other_generation != first and not waits:
            raise Fenced(
                f"{run}: {lease.other} holds the lease of this run. Let that launcher continue, "
                "stop it (training continues), or wait for its end with --standby."
            )
        clock.sleep(WATCH_SECONDS)
