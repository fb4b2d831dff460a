"""Takes the lease of a run for a command; waits for the lease of a launcher that may be gone."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.faults import Fenced, RunError, StorageRefused, StorageUnavailable
from jaxres.host import signals
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.lease import Lease
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.storage.path import GcsPath
from jaxres.storage.threads import spawn_thread

WATCH_SECONDS = 1.0
RENEW_CHECK_SECONDS = 0.5
"""Time between two checks of the thread whether the lease is due for a renewal."""


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

    With `waits` this outlasts a bucket that does not answer.

    Raises:
      Fenced: another launcher holds and renews it.
      StoppedError, PreemptedError: a signal has arrived.
    """
    epoch = 0 if desired is None else desired.epoch
    first, answers = None, True
    while True:
        signals.raise_again()
        try:
            if lease.acquire(after_epoch=epoch, may_be_led=may_be_led):
                return
        except StorageUnavailable as error:
            if not waits or isinstance(error, StorageRefused):
                raise
            if answers:
                console(f"the bucket does not answer; waiting for the launcher lease ({error})")
            answers = False
            clock.sleep(WATCH_SECONDS)
            continue
        answers = True
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


@contextlib.contextmanager
def holding(lease: Lease) -> Iterator[None]:
    """Renews the lease in a thread during the block, however long its calls take.

    If the block fails, the lease is released, so that another launcher can take it at once.
    """
    ended = threading.Event()
    spawn_thread("lease", lambda: _renew_until(ended, lease), daemon=True)
    try:
        yield
    except BaseException:
        ended.set()
        with contextlib.suppress(StorageUnavailable):  # Then the lease expires.
            lease.release()
        raise
    finally:
        ended.set()


def _renew_until(ended: threading.Event, lease: Lease) -> None:
    while not ended.wait(RENEW_CHECK_SECONDS):
        try:
            lease.renew_if_held()
        except Fenced:
            return  # The block's next use of the lease raises it too.
        except RunError:
            continue  # The bucket does not answer, or refuses; the block finds that itself.
