"""Scenarios that make storage refuse, hang or lie: a full disk, and an emulated bucket.

Each function is called while every worker holds after the planned step, and returns what it did.
"""

from __future__ import annotations

import contextlib
import random
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxres.operate.chaos.held_run import HeldRun
from jaxres.operate.chaos.schedule import ScheduledFault
from jaxres.operate.chaos.verdict import Injection
from jaxres.storage.path import GcsPath

if TYPE_CHECKING:
    from jaxres_emulators.gcs import GcsServer

OTHER_BYTES = 64 * 2**10
"""Space that is left for the lines of logs and for small files on a disk that is full."""
REFUSALS = 5
"""Requests about a save that an outage refuses before it ends."""
OUTAGES = ("503", "429", "drop")
LATE_SECONDS = 0.5
"""Latency of every request to slow storage."""


def fill_disk(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Limits the file size of every worker below a save's, until the save has failed.

    The limit of a file's size (setrlimit(2), EFBIG) needs no mount and no root; the product takes
    that error as a full disk.
    """
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    newest = run.history().newest
    assert newest is not None
    saved = _largest(run, newest.path)
    limit = max(_largest(run, "attempts"), _largest(run, "log")) + OTHER_BYTES
    if saved <= limit:
        return Injection(fault, problem=f"the largest file of a save has only {saved} bytes")
    run.mark_fault()
    with _limited(run, number, limit), run.held_again(number, step=fault.step + 1):
        is_reported = not run.wait_saved(fault.step) and run.has_failed(fault.step)
    if is_reported:
        run.uncommitted.add(fault.step)
    return Injection(
        fault,
        f"no file above {limit} bytes could be written in the save of step {fault.step}",
        recovery_seconds=run.seconds(),
        unkept="" if is_reported else f"no event says that the save of step {fault.step} failed",
    )


def _largest(run: HeldRun, folder: str) -> int:
    paths = (run.disk / folder).rglob("*")
    return max((path.stat().st_size for path in paths if path.is_file()), default=0)


@contextlib.contextmanager
def _limited(run: HeldRun, number: int, size_bytes: int) -> Iterator[None]:
    """Limits the size of files that the workers write."""
    before: dict[int, tuple[int, int]] = {}
    for host in range(run.topology.hosts):
        pid = run.pid(number, host)
        before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, before[pid][1]))
    yield
    for pid, limits in before.items():
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def storage_outage(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Lets the bucket refuse every request until a save has met the outage."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    server, kind = _server(run), random.Random(f"{fault}").choice(OUTAGES)
    # It begins with the save: the one before may still prune, and must not be in the way.
    refused = server.fail(kind, path=f"{fault.step:08d}-", times=None)
    run.mark_fault()
    with run.held_again(number, step=fault.step + 1):  # The next save would not wait for long.
        is_met = run.wait_limited(
            lambda: refused.hits > 0, instead=lambda: run.history().step >= fault.step
        )
        server.fail(kind, times=None)
        is_met = is_met and run.wait_limited(lambda: refused.hits >= REFUSALS)
        server.faults.clear()
        if not is_met:
            return Injection(fault, problem=f"{refused.hits} requests of a save met the outage")
        did = f"{kind} for every request, {refused.hits} of them about the save"
        return _until_saved(run, fault, did)


def slow_storage(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Lets the bucket answer late until the next save is committed."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    server = _server(run)
    before, server.late_seconds = server.counts.total(), LATE_SECONDS
    run.mark_fault()
    with run.held_again(number, step=fault.step + 1):
        done = _until_saved(run, fault, f"every request took {LATE_SECONDS:g} s more")
    server.late_seconds = 0.0
    if server.counts.total() == before:
        return Injection(fault, problem="there was no request")
    return done


def _until_saved(run: HeldRun, fault: ScheduledFault, did: str) -> Injection:
    """Waits for the commit of the step after which the fault was injected."""
    is_saved = run.wait_saved(fault.step)
    unkept = "" if is_saved else f"step {fault.step} was not committed after it"
    return Injection(fault, did, recovery_seconds=run.seconds(), unkept=unkept)


def flip_in_bucket(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run, flips a bit of the newest checkpoint in the bucket, and starts it again."""
    if problem := run.wait_commit(fault.step) or run.stop(number):
        return Injection(fault, problem=problem)
    newest, root = run.history().newest, run.root
    if newest is None:
        return Injection(fault, problem="no step was committed")
    assert isinstance(root, GcsPath), root
    server = _server(run)
    prefix = f"{root.key}/{newest.path}/state/"
    names = [name for name in server.names(prefix, bucket=root.bucket) if "/d/" in name]  # Arrays.
    largest = max(names, key=lambda name: (len(server.body(name, bucket=root.bucket)), name))
    if (size := len(server.body(largest, bucket=root.bucket))) < OTHER_BYTES:
        # Of a tiny state a restore does not read each byte of its files.
        return Injection(fault, problem=f"the largest file of the arrays has only {size} bytes")
    where = server.flip_bit(largest, random.Random(f"{fault}"), bucket=root.bucket)
    run.mark_fault()
    run.resume(number)
    did = f"step {newest.step}: a bit of byte {where} of {largest[len(prefix) :]} is flipped"
    return Injection(fault, did, damaged_step=newest.step)


def _server(run: HeldRun) -> GcsServer:
    assert run.server is not None, "a scenario of a bucket"
    return run.server
