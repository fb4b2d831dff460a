"""Default values of `jaxres plan` with their sources; `--from RUN` replaces measured ones.

"Assumed" means that no measurement is known for these machines: measure, and give the flag.
"""

from __future__ import annotations

from dataclasses import dataclass

LLAMA3_GPU_HOURS = 16_384 * 54 * 24
"""GPU hours of the 54 days in which Llama 3's training was interrupted (arXiv 2407.21783)."""
LLAMA3_TOTAL = 419


@dataclass(frozen=True)
class Assumption:
    """A default value."""

    flag: str
    value: float
    unit: str
    source: str


ASSUMPTIONS = (
    Assumption(
        "--mtbf-hours",
        LLAMA3_GPU_HOURS / LLAMA3_TOTAL,
        "h per GPU, all causes",
        "Llama 3: 419 unexpected interruptions in 54 days of 16,384 H100 (arXiv 2407.21783)",
    ),
    Assumption(
        "--host-share",
        0.25,
        "of the failures take the host",
        "DLRover's blog: about 75 % of faults recover by a restart of the processes",
    ),
    Assumption(
        "--write-mb-per-s",
        1000.0,
        "MB/s a host, to storage",
        "assumed unless `jaxres doctor CONFIG --storage` has measured the place",
    ),
    Assumption(
        "--stall-seconds",
        1.0,
        "s of training lost to an asynchronous save",
        "assumed by jaxres too until the first save is measured; DLRover states 0.2 s",
    ),
    Assumption(
        "--detect-seconds",
        15.0,
        "s from a failure to the restart",
        "15 s: whole recovery of jaxres on emulated VMs, the slowest kind of failure but hangs",
    ),
    Assumption(
        "--restart-seconds",
        10.0,
        "s until the first step, without reading the state",
        "assumed: load of compiled steps",
    ),
    Assumption(
        "--boot-seconds",
        180.0,
        "s until a replaced VM is ready",
        "assumed, as in experiments/goodput_at_one_failure_an_hour",
    ),
    Assumption(
        "--memory-mb-per-s",
        10_000.0,
        "MB/s a host, to and from host memory",
        "assumed, as in experiments/goodput_at_one_failure_an_hour",
    ),
    Assumption(
        "--neighbor-share",
        0.1,
        "of the losses of a host take its neighbor too",
        "assumed, as in experiments/goodput_at_one_failure_an_hour",
    ),
    Assumption(
        "--repair-hours", 24.0, "h until a host that has failed is a spare again", "assumed"
    ),
    Assumption(
        "--gpu-hour-price",
        11.0,
        "$ a GPU and hour",
        "assumed: $88 an hour for a3-highgpu-8g on demand; prices change",
    ),
    Assumption(
        "--spot-price",
        3.125,
        "$ a GPU and hour",
        "assumed: $25 an hour for a3-highgpu-8g as a Spot VM; prices change",
    ),
    Assumption(
        "--spot-rate",
        0.15,
        "preemptions of a Spot VM a day, if the first capacity option is spot",
        "Compute Engine has observed 5 to 15 % a day",
    ),
    Assumption(
        "--notice-seconds",
        30.0,
        "s that a Spot VM runs on after its notice",
        "Compute Engine: best effort, 30 s at most; 120 by a preview feature (docs/many-hosts.md)",
    ),
    Assumption(
        "--storage-price",
        0.02,
        "$ a GB (1e9 bytes) and month",
        "assumed: Cloud Storage, Standard class, one region; prices change",
    ),
    Assumption(
        "--stockout-share",
        0.0,
        "of the lost hosts for which no machine is free",
        "assumed: capacity is there; Spot VMs often have none",
    ),
    Assumption("--capacity-wait-seconds", 3600.0, "s until one is, on average", "assumed"),
    Assumption(
        "--outages-per-day",
        0.0,
        "outages of storage a day",
        "assumed; Cloud Storage's SLA allows 0.1 % of a month in one region (Standard class)",
    ),
    Assumption("--outage-seconds", 600.0, "s of an outage, on average", "assumed"),
    Assumption("--days", 30.0, "days of training", "assumed"),
    Assumption("--gpus-per-host", 8.0, "GPUs a host", "a3-highgpu-8g"),
)

DEFAULTS = {one.flag: one.value for one in ASSUMPTIONS}

BY_HAND_SAVE_HOURS = 24.0
"""Without fault tolerance: a save a day (assumed)."""
BY_HAND_RESTART_HOURS = 4.0
"""Without fault tolerance: until someone has seen the failure and restarted the job (assumed)."""
