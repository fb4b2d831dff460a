"""Where a run lives and who tells of it: what the story is given beside the config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.cluster.host_group import Peers
from jaxres.runlog.events import Emit
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, RunLog
from jaxres.train.stop_requests import Requests


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
