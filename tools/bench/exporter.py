"""Benchmark of the metrics for Prometheus: processor time per step of 20 ms.

    python tools/bench/exporter.py [--rounds 40] [--steps 1000]

Per step: what the worker's message has more than its number and duration, and what the supervisor
does with it. Per scrape, every 15 s: a real request over loopback, the client's part included, with
the readings of 8 GPUs. The fastest round of each counts, since other processes on the machine only
slow a round down. A second figure is the part of the live ledger in it, the classes of time of
`jaxres/goodput/live_timeline.py`, alone. Ends with 1 if the sum is above 0.2 % of the step.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.goodput.live_timeline import LiveTimeline
from jaxres.runlog.paths import RunDir
from jaxres.storage.codec import TaggedCodec
from jaxres.supervisor.companions.prometheus_exporter import PrometheusExporter
from jaxres.supervisor.health.host_health import HostReading
from jaxres.supervisor.run_metrics import RunMetrics
from jaxres.telemetry.heartbeat import PhaseEntered, StepFinished, decode, encode

STEP_SECONDS, SCRAPE_SECONDS, AIM = 0.020, 15.0, 0.002
NUM_GPUS = 8


class Machine:
    """Readings of a host with GPUs, in place of the health guard's."""

    def gpu_values(self) -> Mapping[str, Mapping[str, int]]:
        """Returns readings of NUM_GPUS GPUs."""
        values = {"temperature_C": 60, "power_mW": 500000, "ecc_uncorrected_volatile": 0}
        return {f"GPU {n}": values | {"clocks_event_reasons": 0} for n in range(NUM_GPUS)}

    def host_reading(self) -> HostReading:
        """Returns a reading."""
        return HostReading(at=0, used_bytes=1, left_bytes=1, disk_free_bytes=1)


@dataclass(frozen=True)
class Earlier:
    """A message without the exported fields: number and duration of the step."""

    step: int
    seconds: float


EARLIER = TaggedCodec("message", {"step_finished": Earlier})


def without(step: int) -> None:
    """Sends and reads the message of a step as it would be without metrics."""
    line = json.dumps(EARLIER.encode(Earlier(step, STEP_SECONDS))).encode() + b"\n"
    EARLIER.decode(json.loads(line))


def with_metrics(step: int, metrics: RunMetrics) -> None:
    """Sends, reads and counts the message."""
    line = encode(StepFinished(step, STEP_SECONDS, 2.345678, 4096 * step, False))
    metrics.on_status(decode(line))


def of_ledger(step: int, timeline: LiveTimeline) -> None:
    """Gives the time of a step its class."""
    timeline.on_step(step, skipped=False, now=STEP_SECONDS * step)


def seconds_of(call: Callable[[int], None], count: int) -> float:
    """Returns the processor time of one call."""
    began = time.process_time()
    for number in range(1, count + 1):
        call(number)
    return (time.process_time() - began) / count


def scrape(url: str) -> None:
    """Reads the metrics."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert b"jaxres_step" in answer.read()


def main() -> int:
    """Measures; returns the exit code."""
    parser = argparse.ArgumentParser("tools/bench/exporter.py")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = RunConfig.model_validate(
        {
            "data": {"source": {"kind": "text", "path": "x"}},
            "train": {"steps": 1},
            "telemetry": {"prometheus": {"address": address}},
        }
    )
    before, after, scrapes, ledger = [], [], [], []
    timeline = LiveTimeline(since=0.0)
    timeline.on_phase("train", now=0.0)
    run_dir = RunDir(Path(tempfile.gettempdir()) / "bench-run")  # Only its name is used.
    with PrometheusExporter(config, run_dir, clock=SystemClock()) as exporter:
        metrics = exporter.metrics
        assert metrics is not None
        exporter.ensure_started(host=0, health=None)
        metrics.health = Machine()  # type: ignore[assignment]
        metrics.on_attempt_started(1, num_hosts=1)
        metrics.on_status(PhaseEntered("train"))
        for _ in range(options.rounds):
            before.append(seconds_of(without, options.steps))
            ledger.append(seconds_of(lambda step: of_ledger(step, timeline), options.steps))
            after.append(seconds_of(lambda step: with_metrics(step, metrics), options.steps))
            scrapes.append(seconds_of(lambda _: scrape(f"http://{address}/metrics"), 20))
    per_step, per_scrape = min(after) - min(before), min(scrapes)
    total = per_step + per_scrape * STEP_SECONDS / SCRAPE_SECONDS
    share = total / STEP_SECONDS
    for name, found in (("without", before), ("with", after)):
        usual = statistics.median(found)
        print(f"a step {name}: {min(found) * 1e6:.1f} us, median {usual * 1e6:.1f}")
    print(f"the ledger alone: {min(ledger) * 1e6:.1f} us")
    print(f"a scrape: {per_scrape * 1e3:.2f} ms, median {statistics.median(scrapes) * 1e3:.2f}")
    print(f"together {total * 1e6:.1f} us a step, {100 * share:.3f} % of {STEP_SECONDS * 1e3:g} ms")
    print("ok" if share <= AIM else f"FAIL: above {100 * AIM:g} %")
    return 0 if share <= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
