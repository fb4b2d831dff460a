"""Per-attempt context of a worker: run directory, run log, event sink, clock, other hosts."""

from __future__ import annotations

from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.cluster.host_group import ALONE, HostGroup, HostRank
from jaxres.cluster.program_transfer import AttemptKey
from jaxres.runlog.events import Emit
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, RunLog
from jaxres.telemetry.observers import Observers
from jaxres.train.stop_requests import StopRequests


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker runs."""

    member: HostRank = ALONE
    min_devices: int = 0
    """Number of devices that its host must have, as given by JAXRES_MIN_DEVICES."""
    platform: str = ""
    """Platform that they must have, as given by JAXRES_PLATFORM; empty: not given."""
    is_forked: bool = False
    """Whether the fork server has forked it."""


WORKER_ALONE = WorkerPlace()
NO_KEY = AttemptKey()


@dataclass(frozen=True)
class AttemptContext:
    """Context of one attempt on one host."""

    run_dir: RunDir
    log: RunLog
    claim: Claim
    emit: Emit
    clock: Clock
    observers: Observers
    """Receives every event, and every completed step before its metrics line is written."""
    requests: StopRequests
    peers: HostGroup
    place: WorkerPlace = WORKER_ALONE
    programs_key: AttemptKey = NO_KEY
    """The key under which the hosts send each other compiled steps."""
