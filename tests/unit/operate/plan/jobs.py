"""Jobs that the tests plan."""

from __future__ import annotations

from typing import Any

from jaxres.estimate.failure_model import Component, FleetModel
from jaxres.estimate.job import Job


def job(*, num_gpus: int = 64, gpu_mtbf_hours: float = 640.0, **changes: Any) -> Job:
    """Returns a job of hosts with 8 GPUs; by default a failure every 10 hours."""
    fields: dict[str, Any] = {
        "fleet": FleetModel(num_gpus, 8, (Component("gpu", "gpu", gpu_mtbf_hours),)),
        "hours": 720.0,
        "state_bytes": 64e9,
        "write_seconds": 8.0,
        "read_seconds": 8.0,
        "memory_seconds": 1.0,
        "stall_seconds": 1.0,
        "detect_seconds": 15.0,
        "restart_seconds": 10.0,
        "boot_seconds": 180.0,
        "host_share": 0.25,
        "neighbor_share": 0.1,
        "repair_hours": 24.0,
    }
    return Job(**fields | changes)
