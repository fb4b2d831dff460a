"""Where a run lives and who tells of it: what the story is given beside the config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.events import Emit
from jaxres.hosts import Peers
from jaxres.metrics import MetricsLine
from jaxres.rundir import RunDir
from jaxres.runlog import Claim, RunLog
from jaxres.train.requests import Requests


@dataclass(frozen=True)
class Seat:
    """One attempt's seat on one host."""

    run_dir: RunDir
    log: RunLog
    claim: Claim
    emit: Emit
    clock: Clock
    landed: Callable[[MetricsLine], None]
    """Told of every finished step, before its line is written."""
    requests: Requests
    peers: Peers
