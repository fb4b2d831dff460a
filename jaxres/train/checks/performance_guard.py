"""Names slow hosts and devices, and reports a throughput below the attempt's own usual.

Every host computes the same from the same times; host 0 reports. Nothing here changes the run.
The decisions are in stragglers.py, the measurements in host_times.py and device_probe.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxres.clock import Clock
from jaxres.config.schema.training import ThroughputSection
from jaxres.runlog.events import (
    Emit,
    Event,
    PartCommitted,
    PhaseChanged,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    StragglerFound,
    StragglerRecovered,
    ThroughputDropped,
    ThroughputRecovered,
    TrainingStarted,
)
from jaxres.runlog.metrics import MetricsLine
from jaxres.train.checks import stragglers
from jaxres.train.checks.host_times import Times
from jaxres.train.checks.stragglers import Comparison, Series, Slow

PAUSES = ("evaluate", "hook", "save")
"""Phases that delay the next steps."""
STEPS_AFTER_PAUSE = 3
"""Steps after such a phase that are not measured: the devices run ahead of the host again."""
STEPS_AFTER_START = 10
"""Steps after the start of training that are not measured: compilation, cold caches."""
EVALUATIONS_PER_BLOCK = 2
RECENT_RECORDS = 5
"""Newest times that the cause of a lower throughput is sought in."""
Kind = Literal["steps", "steps_beside_saves", "evaluations"]
KINDS: tuple[Kind, ...] = ("steps", "steps_beside_saves", "evaluations")


@dataclass(frozen=True)
class DevicePlace:
    """A device of the mesh: its host, its id and its name."""

    host: int
    device: int
    name: str


def places_of(devices: Sequence[Any]) -> list[DevicePlace]:
    """Returns the places of the devices of a mesh."""
    return [DevicePlace(one.process_index, one.id, one.device_kind) for one in devices]


class PerformanceGuard:
    """The times of an attempt; an observer of events, called with each completed step."""

    def __init__(
        self,
        section: ThroughputSection,
        *,
        places: Sequence[DevicePlace],
        tokens_per_step: int,
        reports: bool,
        emit: Emit,
        clock: Clock,
    ) -> None:
        """Starts without any times.

        Args:
          section: the setting guards.throughput.
          places: the devices in the order of the mesh.
          tokens_per_step: tokens that a step trains on.
          reports: whether this host reports.
          clock: measures how long something is slow.
        """
        self._section, self._places, self._tokens = section, places, tokens_per_step
        self._reports, self._emit, self._clock = reports, emit, clock
        self._hosts, self._devices = Comparison(), Comparison()
        self._series: dict[Kind, Series] = {kind: Series() for kind in KINDS}
        self._probes = Series()
        """Durations of the probe on the median device: all devices may become slower."""
        self._times = Times()
        self._last_probes: tuple[float, ...] = ()
        self._recent: list[tuple[Times, float]] = []
        """The newest times, with the median step time since the ones before."""
        self._steps: list[float] = []
        self._left_out = STEPS_AFTER_START
        self._is_saving = False
        self._evaluation_began: float | None = None
        self._numbers = {"straggler": 0, "throughput": 0}
        self._open: dict[Kind, int] = {}
        """Reported drops without a recovery -> their numbers."""
        self._step = 0

    def usual_step_seconds(self) -> float | None:
        """Returns the attempt's usual step time; None: too few steps are measured."""
        return self._series["steps"].usual_seconds()

    def on_event(self, event: Event) -> None:
        """Marks the steps that are not measured: the ones beside saves, evaluations and starts."""
        match event:
            case PhaseChanged("evaluate"):
                self._evaluation_began = self._clock.monotonic()
                self._left_out = max(self._left_out, STEPS_AFTER_PAUSE)
            case PhaseChanged("train") if self._evaluation_began is not None:
                seconds = self._clock.monotonic() - self._evaluation_began
                self._evaluation_began = None
                self._measure("evaluations", seconds, block_size=EVALUATIONS_PER_BLOCK)
            case PhaseChanged(phase) if phase in PAUSES:
                self._left_out = max(self._left_out, STEPS_AFTER_PAUSE)
            case TrainingStarted():
                self._left_out, self._is_saving = STEPS_AFTER_START, False
                self._evaluation_began = None
            case SaveStarted():
                self._is_saving = True
            case SaveCommitted() | PartCommitted() | SaveFailed():
                self._is_saving = False
            case _:
                pass

    def on_step(self, line: MetricsLine) -> None:
        """No-op: see on_times."""

    def on_times(self, step: int, step_seconds: float, times: Times) -> None:
        """Receives a completed step and the newest times of all hosts and devices."""
        self._step = step
        if self._left_out > 0:
            self._left_out -= 1
            return
        kind: Kind = "steps_beside_saves" if self._is_saving else "steps"
        self._steps.append(step_seconds)
        if times != self._times:
            usual = self._series[kind].usual_seconds()
            self._compare_hosts(times, usual_seconds=usual)
            self._compare_devices(times.probe_seconds)
            self._times = times
            self._steps.clear()
        self._measure(kind, step_seconds, block_size=self._section.window_steps)

    def _compare_hosts(self, times: Times, *, usual_seconds: float | None) -> None:
        step_seconds = statistics.median(self._steps)
        self._recent = [*self._recent, (times, step_seconds)][-RECENT_RECORDS:]
        if times.busy_seconds == self._times.busy_seconds:
            return
        drop = self._section.drop
        is_usual = usual_seconds is None or step_seconds * (1 - drop) < usual_seconds
        # The mean, since busy seconds are means too: a pause is in both.
        mean = statistics.fmean(self._steps)
        shares = stragglers.host_shares(times.busy_seconds, mean, is_usual=is_usual)
        self._hosts, found, recovered = self._compared(self._hosts, shares)
        for one in found:
            self._found_host(one.index, one.ratio)
        for host in recovered:
            self._recovered(host, ())

    def _compare_devices(self, probe_seconds: tuple[float, ...]) -> None:
        if not self._is_measured_again(probe_seconds):
            return
        self._last_probes = probe_seconds
        self._probes, _ = stragglers.measure(
            self._probes,
            statistics.median_low(probe_seconds),
            block_size=RECENT_RECORDS,
            drop=self._section.drop,
            min_seconds=0.0,
            now=self._clock.monotonic(),
        )
        self._devices, found, recovered = self._compared(self._devices, probe_seconds)
        for host in sorted({self._places[one.index].host for one in found}):
            own = [one for one in found if self._places[one.index].host == host]
            self._found_devices(host, [one.index for one in own], max(o.ratio for o in own))
        for host in sorted({self._places[index].host for index in recovered}):
            devices = [i for i in recovered if self._places[i].host == host]
            self._recovered(host, tuple(self._places[i].device for i in devices))

    def _compared(
        self, state: Comparison, times: Sequence[float]
    ) -> tuple[Comparison, tuple[Slow, ...], tuple[int, ...]]:
        section = self._section
        return stragglers.compare(
            state,
            times,
            factor=stragglers.SLOW_FACTOR,
            min_seconds=section.min_seconds,
            now=self._clock.monotonic(),
        )

    def _is_measured_again(self, probe_seconds: tuple[float, ...]) -> bool:
        """Returns whether every device was measured since the last record of them."""
        last = self._last_probes or (0.0,) * len(probe_seconds)
        return bool(probe_seconds) and all(
            seconds not in (0.0, before)
            for seconds, before in zip(probe_seconds, last, strict=True)
        )

    def _found_host(self, host: int, ratio: float) -> None:
        cause = self._cause_on(host)
        busy, data, step = self._host_times(host)
        text = (
            f"host {host} holds up the others: it works {busy:.3g} s by itself for a step of "
            f"{step:.3g} s ({data:.3g} s of it for its data), the usual host at most "
            f"{busy / ratio:.3g} s"
        )
        self._report_straggler(host, (), ratio, cause, text)

    def _found_devices(self, host: int, indices: Sequence[int], ratio: float) -> None:
        names = ", ".join(f"{self._places[i].device} ({self._places[i].name})" for i in indices)
        text = (
            f"host {host} is slow: a fixed program takes {ratio:.2f} times as long as on the "
            f"usual device, on device {names}"
        )
        devices = tuple(self._places[i].device for i in indices)
        self._report_straggler(host, devices, ratio, "device", text)

    def _report_straggler(
        self, host: int, devices: tuple[int, ...], ratio: float, cause: str, reason: str
    ) -> None:
        self._numbers["straggler"] += 1
        if self._reports:
            self._emit(
                StragglerFound(
                    step=self._step,
                    host=host,
                    devices=devices,
                    ratio=round(ratio, 3),
                    cause=cause,
                    reason=reason,
                    number=self._numbers["straggler"],
                )
            )

    def _recovered(self, host: int, devices: tuple[int, ...]) -> None:
        if self._reports:
            num_left = len(self._hosts.slow) + len(self._devices.slow)
            self._emit(StragglerRecovered(self._step, host, devices, num_left))

    def _host_times(self, host: int) -> tuple[float, float, float]:
        """Returns a host's busy and data seconds and the step time: medians of the newest."""
        return (
            statistics.median(times.busy_seconds[host] for times, _ in self._recent),
            statistics.median(times.data_seconds[host] for times, _ in self._recent),
            statistics.median(step for _, step in self._recent),
        )

    def _cause_on(self, host: int) -> str:
        busy, data, _ = self._host_times(host)
        return "data" if data >= busy / 2 else "host"

    def _measure(self, kind: Kind, seconds: float, *, block_size: int) -> None:
        """Adds a duration of a kind; reports if it has become longer than usual, or usual again."""
        self._series[kind], is_changed = stragglers.measure(
            self._series[kind],
            seconds,
            block_size=block_size,
            drop=self._section.drop,
            min_seconds=self._section.min_seconds,
            now=self._clock.monotonic(),
        )
        if is_changed:
            self._report_throughput(kind, self._series[kind])

    def _report_throughput(self, kind: Kind, series: Series) -> None:
        usual, seconds = series.usual_seconds(), series.seconds()
        assert usual is not None
        if not series.is_slow:
            number = self._open.pop(kind, None)
            if number is not None and self._reports:
                self._emit(
                    ThroughputRecovered(self._step, kind, seconds, usual, number, len(self._open))
                )
            return
        if kind == "steps_beside_saves" and "steps" in self._open:
            return  # The same cause.
        self._numbers["throughput"] += 1
        self._open[kind] = number = self._numbers["throughput"]
        if not self._reports:
            return
        cause, host, text = self._cause_of(kind)
        what = {
            "steps": f"{self._tokens / seconds:,.0f} tokens/s instead of the usual "
            f"{self._tokens / usual:,.0f}",
            "steps_beside_saves": f"beside saves a step takes {seconds:.3g} s instead of the usual "
            f"{usual:.3g} s",
            "evaluations": f"an evaluation takes {seconds:.3g} s instead of the usual "
            f"{usual:.3g} s",
        }[kind]
        share = usual / seconds
        self._emit(
            ThroughputDropped(
                step=self._step,
                kind=kind,
                seconds=seconds,
                usual_seconds=usual,
                cause=cause,
                host=host,
                reason=f"{what} ({share - 1:+.0%}); {text}",
                number=number,
            )
        )

    def _cause_of(self, kind: Kind) -> tuple[str, int | None, str]:
        """Returns the cause of a lower throughput, its host if it is one, and a text."""
        if kind == "evaluations":
            return "evaluation", None, "cause: evaluations"
        if self._recent:
            hosts = range(len(self._recent[-1][0].busy_seconds))
            host = max(hosts, key=lambda one: self._host_times(one)[0])
            busy, data, step = self._host_times(host)
            if busy >= stragglers.HIDDEN_SHARE * step:
                cause = self._cause_on(host)
                what = f"waits {data:.3g} s a step for its data" if cause == "data" else "is busy"
                return cause, host, f"cause: host {host} {what}"
        levels = self._devices.levels() if self._devices.num_records else (0.0,)
        if self._devices.is_high(max(levels), factor=stragglers.SLOW_FACTOR):
            place = self._places[levels.index(max(levels))]
            return "device", place.host, f"cause: device {place.device} of host {place.host}"
        usual = self._probes.usual_seconds()
        if usual is not None and self._probes.seconds() >= usual / (1 - self._section.drop):
            return "devices", None, "cause: all devices are slower (heat, power, clocks)"
        if kind == "steps_beside_saves":
            return "save", None, "cause: saves"
        return "unknown", None, "cause: unknown; neither a host's own work nor a single device"
