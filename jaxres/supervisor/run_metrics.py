"""Metrics of a run as its supervisor knows them, for monitoring systems: names, and values.

The supervisor's loop passes on what it receives and does; a thread that serves the metrics reads
them at any time. Names and units follow Prometheus' conventions
(https://prometheus.io/docs/practices/naming); docs/watch.md lists them.
"""

from __future__ import annotations

import importlib.metadata
import math
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxres.clock import Clock
from jaxres.config import RunConfig, digest
from jaxres.exit_codes import ROWS, SIGNAL_BASE, RestartRule
from jaxres.goodput.intervals import BY_LAUNCHER
from jaxres.goodput.live_timeline import LiveTimeline
from jaxres.runlog import attempt_history, run_log
from jaxres.runlog.attempt_history import KILLED
from jaxres.runlog.attempt_result import PLANNED_CAUSES
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.run_log import AttemptEnded, Claim, Record
from jaxres.runlog.supervisor_events import HardwareFaultFound
from jaxres.supervisor.health import nvml
from jaxres.supervisor.health.gpu_health import CORRECTED, ECC, NVLINK, PCIE
from jaxres.supervisor.health.health_watcher import HealthWatcher
from jaxres.supervisor.health.nvml import BAD_REASONS
from jaxres.telemetry.heartbeat import (
    ExitMessage,
    GuardActed,
    PhaseEntered,
    SaveEnded,
    SpeedChanged,
    StatusMessage,
    StepFinished,
)


@dataclass(frozen=True)
class Metric:
    """One metric: its name with the unit, its type and description."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()
    """Labels besides LABELS."""


LABELS = ("run", "host")
"""Labels of every metric: name of the run directory; first host of the job on this machine, or
`launcher`."""
METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "jaxres_run_info",
            "gauge",
            "1; version of jaxres, digest of the trajectory keys",
            ("version", "trajectory"),
        ),
        Metric(
            "jaxres_supervisor_start_time_seconds",
            "gauge",
            "Start of the supervisor, in seconds since the epoch",
        ),
        Metric("jaxres_attempt", "gauge", "Number of the newest attempt"),
        Metric(
            "jaxres_phase",
            "gauge",
            "1 for the phase of the worker; down: between attempts",
            ("phase",),
        ),
        Metric("jaxres_step", "gauge", "Newest finished step"),
        Metric("jaxres_target_step", "gauge", "train.steps"),
        Metric("jaxres_steps_total", "counter", "Finished steps, those trained again included"),
        Metric("jaxres_skipped_steps_total", "counter", "Finished steps whose update was masked"),
        Metric(
            "jaxres_last_step_timestamp_seconds",
            "gauge",
            "End of the newest step, in seconds since the epoch",
        ),
        Metric("jaxres_loss", "gauge", "Loss of the newest step; NaN: not finite"),
        Metric("jaxres_grad_norm", "gauge", "Its gradient norm before clipping; NaN: not finite"),
        Metric("jaxres_tokens", "gauge", "Tokens consumed up to the newest step"),
        Metric("jaxres_step_seconds", "gauge", "Mean duration of the last 50 steps of the attempt"),
        Metric(
            "jaxres_tokens_per_second",
            "gauge",
            "Tokens of all hosts per second in the last 50 steps",
        ),
        Metric(
            "jaxres_mfu_ratio",
            "gauge",
            "Model FLOP/s in these steps as a share of the devices' peak, attention in full; "
            "of known kinds of GPUs",
        ),
        Metric("jaxres_hosts", "gauge", "Hosts of the newest attempt"),
        Metric(
            "jaxres_target_hosts",
            "gauge",
            "Upper end of launch.gce.num_hosts, else the most hosts that an attempt of this "
            "supervisor had",
        ),
        Metric(
            "jaxres_goodput_seconds_total",
            "counter",
            "Time of this supervisor by class, as in jaxres report; save_stall: saves"
            " hold up training",
            ("class",),
        ),
        Metric(
            "jaxres_save_seconds", "gauge", "Newest committed save, from its start to the commit"
        ),
        Metric("jaxres_failed_saves_total", "counter", "Saves that storage has refused"),
        Metric("jaxres_last_commit_step", "gauge", "Newest committed step"),
        Metric(
            "jaxres_last_commit_timestamp_seconds",
            "gauge",
            "Time of that commit; time() minus this is its age",
        ),
        Metric(
            "jaxres_restarts_total",
            "counter",
            "Attempts of the run before the present one, by how they ended: name of "
            "the exit code, signal, killed (no recorded end), or planned_grow, planned_move and "
            "planned_drain (by the launcher); from the run log",
            ("cause",),
        ),
        Metric("jaxres_guard_verdicts_total", "counter", "Acts of the guards", ("verdict",)),
        Metric(
            "jaxres_hardware_faults_total", "counter", "Findings of the health guard", ("kind",)
        ),
        Metric("jaxres_gpu_temperature_celsius", "gauge", "Temperature", ("gpu",)),
        Metric("jaxres_gpu_power_watts", "gauge", "Power", ("gpu",)),
        Metric(
            "jaxres_gpu_ecc_uncorrected_errors_total",
            "counter",
            "Uncorrectable memory errors since the driver was loaded",
            ("gpu",),
        ),
        Metric(
            "jaxres_gpu_ecc_corrected_errors_total",
            "counter",
            "Corrected memory errors since the driver was loaded",
            ("gpu",),
        ),
        Metric(
            "jaxres_gpu_pcie_replays_total",
            "counter",
            "PCIe packets that were sent again",
            ("gpu",),
        ),
        Metric(
            "jaxres_gpu_nvlink_errors_total",
            "counter",
            "Replays, recoveries and CRC errors of all NVLinks",
            ("gpu",),
        ),
        Metric(
            "jaxres_gpu_utilization_ratio",
            "gauge",
            "Share of the driver's last interval in which a kernel ran, not of the GPU it used",
            ("gpu",),
        ),
        Metric(
            "jaxres_gpu_memory_used_bytes",
            "gauge",
            "Memory in use, by the driver: also what JAX has reserved and other processes use",
            ("gpu",),
        ),
        Metric(
            "jaxres_gpu_memory_peak_bytes",
            "gauge",
            "The most of the readings of this supervisor, one in health.poll_seconds",
            ("gpu",),
        ),
        Metric("jaxres_gpu_memory_total_bytes", "gauge", "Memory of the GPU", ("gpu",)),
        Metric(
            "jaxres_gpu_clocks_slowed",
            "gauge",
            "1: heat, the power supply or a fault slows the clocks",
            ("gpu",),
        ),
        Metric(
            "jaxres_disk_free_bytes",
            "gauge",
            "Free space for the run's local files, read once a minute",
        ),
        Metric(
            "jaxres_memory_available_bytes",
            "gauge",
            "Memory that the host or its container has left, read once a minute",
        ),
        Metric(
            "jaxres_spend_dollars_total",
            "counter",
            "Price of this host for the life of this supervisor, if all capacity "
            "options have one price",
        ),
        Metric(
            "jaxres_job_vms", "gauge", "Of the launcher, as the next three: created VMs of the job"
        ),
        Metric("jaxres_job_spares", "gauge", "Spares that are ready"),
        Metric("jaxres_job_target_spares", "gauge", "launch.gce.spares"),
        Metric(
            "jaxres_job_capacity_wait_seconds",
            "gauge",
            "Since when VMs of the job are lacking, also while it trains with fewer; 0: none is",
        ),
    )
}
"""Name -> metric."""
AS_READ: Mapping[str, str] = {
    ECC: "jaxres_gpu_ecc_uncorrected_errors_total",
    CORRECTED: "jaxres_gpu_ecc_corrected_errors_total",
    PCIE: "jaxres_gpu_pcie_replays_total",
    NVLINK: "jaxres_gpu_nvlink_errors_total",
    nvml.USED: "jaxres_gpu_memory_used_bytes",
    nvml.PEAK: "jaxres_gpu_memory_peak_bytes",
    nvml.TOTAL: "jaxres_gpu_memory_total_bytes",
}
"""Reading of a GPU -> the metric that has its value."""
WINDOW_STEPS = 50
CAUSES = (
    *(row.name.lower() for row in ROWS if row.restart is not RestartRule.NEVER),
    *("signal", KILLED),
    *sorted(cause.replace(" ", "_") for cause in PLANNED_CAUSES),
)
"""Causes of restarts, known ones: each is exported from the start, so that `increase` sees it."""
VERDICTS: tuple[str, ...] = (
    *("update_skipped", "warned", "rolled_back", "records_skipped", "corruption"),
    *("straggler", "throughput_dropped"),
)
FAULTS = (
    *("lost", "xid", "ecc", "row_remap", "thermal", "link", "silent", "other_xid", "unreadable"),
    *("temperature", "ecc_corrected"),
    *("host_memory", "disk", "clock", "network"),
)
"""Kinds of faults of the health guard (docs/hardware.md)."""


def table() -> str:
    """Returns the metrics as a table of docs/watch.md."""
    rows = ["| metric | kind | meaning |", "|---|---|---|"]
    for metric in METRICS.values():
        labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
        values = f": {', '.join(map('`{}`'.format, VERDICTS))}" * (metric.labels == ("verdict",))
        rows.append(f"| `{metric.name}{labels}` | {metric.kind} | {metric.help}{values} |")
    return "\n".join(rows)


@dataclass(frozen=True)
class Sample:
    """A value of a metric."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()
    """Values of the metric's labels."""


class RunMetrics:
    """The metrics of one supervisor; its loop updates them, any thread may read them."""

    def __init__(self, config: RunConfig, *, clock: Clock) -> None:
        """Begins now."""
        self._lock = threading.Lock()
        self._clock = clock
        self.health: HealthWatcher | None = None
        """Source of the machine's readings; None: there is none."""
        self._trajectory = digest(config)
        self._price = config.launch.dollars_per_host_hour
        self._began, self._began_wall = clock.monotonic(), _epoch(clock)
        self._timeline = LiveTimeline(since=self._began)
        self._phase = "down"
        self._attempt = 0
        self._step: StepFinished | None = None
        self._step_at = 0.0
        self._tokens_per_step = 0.0
        self._durations = deque[float](maxlen=WINDOW_STEPS)
        self._commit: tuple[int, float] | None = None
        """Newest committed step, and when it was committed."""
        self._save_seconds: float | None = None
        self._counts = Counter[tuple[str, tuple[str, ...]]]()
        """Name and labels of a counter -> its value."""
        for name, kinds in (
            ("jaxres_guard_verdicts_total", VERDICTS),
            ("jaxres_hardware_faults_total", FAULTS),
        ):
            self._counts.update({(name, (kind,)): 0 for kind in kinds})
        for name in ("steps", "skipped_steps", "failed_saves"):
            self._counts[f"jaxres_{name}_total", ()] = 0
        self._target, self._num_hosts = config.last_step, 0
        gce = config.launch.gce
        self._target_hosts = 0 if gce is None else gce.most_hosts

    def on_history(self, records: Sequence[Record], *, reached: int = 0) -> None:
        """Takes over the progress of earlier attempts, before another attempt starts.

        Args:
          records: the run log up to the end of the newest of them.
          reached: highest step that they are known to have finished.
        """
        history = run_log.fold(records)
        with self._lock:
            if history.commits:
                newest = max(history.commits, key=lambda record: record.time)
                self._commit = history.step, newest.time
            self._timeline.reached = max(self._timeline.reached, reached)

    def on_restarts(self, records: Sequence[Record], events: Sequence[LaunchEvent] = ()) -> None:
        """Takes over how earlier attempts have ended; before, restarts have no sample.

        Args:
          records: the run log up to the end of the newest of them.
          events: events of the launcher of VMs, which has planned some ends.
        """
        causes = restart_causes(records, events)
        with self._lock:
            for cause in {*CAUSES, *causes}:
                key = "jaxres_restarts_total", (cause,)
                self._counts[key] = max(self._counts[key], causes.get(cause, 0))

    def on_attempt_started(self, attempt: int, *, num_hosts: int) -> None:
        """Workers of an attempt start on so many hosts."""
        with self._lock:
            self._num_hosts = num_hosts
            self._target_hosts = max(num_hosts, self._target_hosts)
            self._attempt, self._phase = attempt, "start"
            self._durations.clear()
            self._tokens_per_step = 0.0
            self._timeline.on_attempt_started(now=self._clock.monotonic())

    def on_attempt_ended(self, *, announced: bool) -> None:
        """The workers are gone; `announced`: one has reported its end."""
        with self._lock:
            self._phase = "down"
            self._timeline.on_attempt_ended(announced=announced, now=self._clock.monotonic())

    def on_fault(self, fault: HardwareFaultFound) -> None:
        """The health guard has found a fault of this machine."""
        with self._lock:
            self._counts["jaxres_hardware_faults_total", (fault.kind,)] += 1

    def on_status(self, message: StatusMessage) -> None:
        """The worker has sent a message."""
        now = self._clock.monotonic()
        with self._lock:
            match message:
                case StepFinished():
                    self._on_step(message, now=now)
                case PhaseEntered(phase):
                    self._phase = phase
                    self._timeline.on_phase(phase, now=now)
                case SaveEnded(step, seconds):
                    if seconds is None:
                        self._counts["jaxres_failed_saves_total", ()] += 1
                    else:
                        self._commit = step, _epoch(self._clock)
                        self._save_seconds = seconds
                case GuardActed(verdict=verdict):
                    self._counts["jaxres_guard_verdicts_total", (verdict,)] += 1
                case SpeedChanged(kind="straggler" | "throughput_dropped" as verdict):
                    self._counts["jaxres_guard_verdicts_total", (verdict,)] += 1
                case ExitMessage():
                    self._timeline.on_exit_announced(now=now)
                case _:
                    pass

    def _on_step(self, message: StepFinished, *, now: float) -> None:
        before = self._step
        if before is not None and message.step > before.step:
            tokens, steps = message.tokens - before.tokens, message.step - before.step
            self._tokens_per_step = tokens / steps
        self._step, self._step_at = message, _epoch(self._clock)
        self._durations.append(message.seconds)
        self._counts["jaxres_steps_total", ()] += 1
        if message.skipped:
            self._counts["jaxres_skipped_steps_total", ()] += 1
        self._timeline.on_step(message.step, skipped=message.skipped, now=now)

    def samples(self) -> list[Sample]:
        """Returns the present values; a metric that is not known yet has none."""
        with self._lock:
            found = [*self._of_run(), *self._of_steps(), *self._of_time()]
            found += [Sample(name, value, kind) for (name, kind), value in self._counts.items()]
        return [*found, *_of_machine(self.health)]

    def _of_run(self) -> Iterator[Sample]:
        version = importlib.metadata.version("jaxres")
        yield Sample("jaxres_run_info", 1, (version, self._trajectory))
        yield Sample("jaxres_supervisor_start_time_seconds", self._began_wall)
        if self._target is not None:
            yield Sample("jaxres_target_step", self._target)
        yield Sample("jaxres_attempt", self._attempt)
        yield Sample("jaxres_phase", 1, (self._phase,))
        if self._num_hosts:
            yield Sample("jaxres_hosts", self._num_hosts)
            yield Sample("jaxres_target_hosts", self._target_hosts)
        if self._commit is not None:
            step, at = self._commit
            yield Sample("jaxres_last_commit_step", step)
            yield Sample("jaxres_last_commit_timestamp_seconds", at)
        if self._save_seconds is not None:
            yield Sample("jaxres_save_seconds", self._save_seconds)

    def _of_steps(self) -> Iterator[Sample]:
        if (newest := self._step) is None:
            return
        yield Sample("jaxres_step", newest.step)
        yield Sample("jaxres_last_step_timestamp_seconds", self._step_at)
        yield Sample("jaxres_loss", math.nan if newest.loss is None else newest.loss)
        norm = newest.grad_norm
        yield Sample("jaxres_grad_norm", math.nan if norm is None else norm)
        yield Sample("jaxres_tokens", newest.tokens)
        if total := sum(self._durations):
            mean = total / len(self._durations)
            yield Sample("jaxres_step_seconds", mean)
            if self._tokens_per_step:
                yield Sample("jaxres_tokens_per_second", self._tokens_per_step / mean)
            if newest.peak_seconds:
                yield Sample("jaxres_mfu_ratio", newest.peak_seconds / mean)

    def _of_time(self) -> Iterator[Sample]:
        now = self._clock.monotonic()
        for activity, seconds in self._timeline.seconds(now=now).items():
            if activity not in BY_LAUNCHER:
                yield Sample("jaxres_goodput_seconds_total", seconds, (activity.value,))
        if self._price is not None:
            dollars = (now - self._began) / 3600 * self._price
            yield Sample("jaxres_spend_dollars_total", dollars)


def _of_machine(health: HealthWatcher | None) -> Iterator[Sample]:
    """Yields the newest readings of the machine."""
    if health is None:
        return
    for gpu, values in health.gpu_values().items():
        if (degrees := values.get("temperature_C")) is not None:
            yield Sample("jaxres_gpu_temperature_celsius", degrees, (gpu,))
        if (milliwatts := values.get("power_mW")) is not None:
            yield Sample("jaxres_gpu_power_watts", milliwatts / 1000, (gpu,))
        if (percent := values.get(nvml.UTILIZATION)) is not None:
            yield Sample("jaxres_gpu_utilization_ratio", percent / 100, (gpu,))
        for reading, name in AS_READ.items():
            if (value := values.get(reading)) is not None:
                yield Sample(name, value, (gpu,))
        if (reasons := values.get("clocks_event_reasons")) is not None:
            yield Sample("jaxres_gpu_clocks_slowed", bool(reasons & BAD_REASONS), (gpu,))
    if (host := health.host_reading()) is not None:
        yield Sample("jaxres_memory_available_bytes", host.left_bytes)
        if host.disk_free_bytes is not None:
            yield Sample("jaxres_disk_free_bytes", host.disk_free_bytes)


def restart_causes(
    records: Sequence[Record], events: Sequence[LaunchEvent] = ()
) -> Mapping[str, int]:
    """Returns the number of ended attempts by cause, one of CAUSES or the name of an exit code.

    Args:
      records: the run log up to the end of its newest attempt.
      events: events of the launcher, for ends that it has planned.
    """
    claims = [record for record in records if isinstance(record.body, Claim)]
    by_launcher = {
        claim.attempt: attempt_history.launcher_end(claims[number : number + 2], events)
        for number, claim in enumerate(claims)
    }
    causes = {a: attempt_history.unrecorded_end(end)[0] for a, end in by_launcher.items()}
    for record in records:
        if isinstance(stop := record.body, AttemptEnded):
            name, _ = attempt_history.recorded_end(stop, by_launcher.get(record.attempt))
            causes[record.attempt] = "signal" if stop.exit > SIGNAL_BASE else name
    return Counter(cause.lower().replace(" ", "_") for cause in causes.values())


def _epoch(clock: Clock) -> float:
    """Returns the time that is exported: the age is computed by who reads it, with its clock."""
    return clock.wall()
