"""Judges readings of GPUs over time: hardware faults, and the action on each. Pure.

Home of: unhealthy_device. A counter that was not zero at the first reading is judged by its growth
alone; a state (a row remapping that is pending, a lost GPU) counts from the first reading on. A
reading that fails is unknown: it is neither healthy nor a fault, and the next value is compared
with the last one that could be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxres.config.schema.hardware import HealthAction, HealthSection
from jaxres.supervisor.health import nvml
from jaxres.supervisor.health.health_messages import GpuReading, XidReported
from jaxres.supervisor.health.nvml import BAD_REASONS, reason_names

ECC_XIDS: Mapping[int, str] = {
    48: "double-bit ECC error",
    94: "uncorrectable memory error, contained in one application",
    95: "uncorrectable memory error that is not contained",
    140: "unrecovered ECC error",
}
ROW_XIDS: Mapping[int, str] = {
    63: "a row of memory is to be remapped",
    64: "a row of memory can't be remapped",
}
FATAL_XIDS: Mapping[int, str] = {
    62: "an internal controller has halted",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    119: "the GPU's system processor (GSP) does not answer",
    120: "error of the GPU's system processor (GSP)",
    143: "the GPU can't be initialized",
}
APPLICATION_XIDS = frozenset({8, 11, 13, 31, 43, 45, 68, 69, 109})
"""Errors that a program causes itself, such as an access to an invalid address.

The meaning of each number is from NVIDIA's catalogue of Xid errors (docs.nvidia.com/deploy/
xid-errors/analyzing-xid-catalog.html). The numbers here are those whose immediate action is to
restart or check the application, and those that NVIDIA's device plugin of Kubernetes ignores.
"""
ECC, CORRECTED = "ecc_uncorrected_volatile", "ecc_corrected_volatile"
PCIE, NVLINK = "pcie_replays", "nvlink_errors"
CORRECTIONS: Mapping[str, str] = {
    PCIE: "PCIe replays",
    NVLINK: "NVLink errors",
    CORRECTED: "corrected ECC errors",
}
"""Name of each counter of errors that the hardware corrects -> their name in a finding."""
SLOW_MINUTES = 5.0
"""Minutes of slowed clocks after which it is a fault: a burst of heat ends sooner."""
WINDOW_SECONDS = 60.0
"""Time over which corrected errors are counted."""
LINK_ERRORS_PER_MINUTE = 100.0
CORRECTED_PER_MINUTE = 10.0
"""Most errors in a minute that a link repeats, or that memory corrects, without a fault; NVIDIA
states no number."""
COOLER_CELSIUS = 5.0
"""By how much a GPU has to cool below the limit until its heat is over."""
SAME_XID_SECONDS = 60.0
"""Longest time between the two reports of one Xid error, by NVML and in the kernel's log."""
MAX_WAITING = 16
"""Most reports of an Xid error that are remembered: a driver may report thousands a second."""
UNREADABLE_TIMES = 3
"""Readings in a row in which a value can't be read, if that is told: one call may fail."""


@dataclass(frozen=True)
class Finding:
    """A fault of the hardware, and the action on it."""

    kind: str
    device: str
    text: str
    """Description of the fault, without the device."""
    action: HealthAction

    def __str__(self) -> str:
        return f"{self.device}: {self.text}"


def judge_xid(message: XidReported, section: HealthSection) -> Finding:
    """Returns the finding of an Xid error; an application's error is a warning at most."""
    xid = message.xid
    kinds: Sequence[tuple[str, Mapping[int, str], HealthAction]] = (
        ("ecc", ECC_XIDS, section.ecc),
        ("row_remap", ROW_XIDS, section.row_remap),
        ("xid", FATAL_XIDS, section.xid),
    )
    for kind, texts, action in kinds:
        if xid in texts:
            return Finding(kind, message.gpu, f"Xid {xid}: {texts[xid]}", action)
    text = "not a fault of the hardware, as far as jaxres knows"
    if xid in APPLICATION_XIDS:
        text = "an error of the program, such as an access to an invalid address"
    return Finding("other_xid", message.gpu, f"Xid {xid}: {text}", "warn")


@dataclass(frozen=True)
class XidReports:
    """The Xid errors of one number and GPU that one source has reported, and the other not yet."""

    source: str = ""
    times: tuple[float, ...] = ()

    def add(self, source: str, *, now: float) -> tuple[XidReports, bool]:
        """Adds a report; returns the next state, and whether the error was not known yet.

        >>> reports, is_new = XidReports().add("nvml", now=0.0)
        >>> is_new, reports.add("kernel_log", now=1.0)[1], reports.add("nvml", now=1.0)[1]
        (True, False, True)
        """
        waiting = tuple(time for time in self.times if now - time < SAME_XID_SECONDS)
        if source == self.source or not waiting:
            return XidReports(source, (*waiting[1 - MAX_WAITING :], now)), True
        return replace(self, times=waiting[1:]), False


@dataclass(frozen=True)
class GpuState:
    """Remembered readings and conditions of one GPU."""

    last: Mapping[str, int] = field(default_factory=dict)
    """Name of each reading -> its last value."""
    windows: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Name of each counter of corrected errors -> begin of the window, value then."""
    slow_since: float | None = None
    """Since when heat or a fault slows the clocks; None: nothing does."""
    reported: frozenset[str] = frozenset()
    """Conditions that are in force, and were reported."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Name of each reading that fails -> how often in a row."""


def readable(state: GpuState) -> Mapping[str, int]:
    """Returns the newest values of a GPU, without values that can't be read any more.

    >>> readable(GpuState(last={"power_mW": 7, "pcie_replays": 0}, failures={"power_mW": 1}))
    {'pcie_replays': 0}
    """
    return {name: value for name, value in state.last.items() if name not in state.failures}


def judge(
    state: GpuState, reading: GpuReading, section: HealthSection, *, now: float
) -> tuple[GpuState, list[Finding]]:
    """Returns the next state of a GPU, and the findings of a new reading.

    Args:
      state: the state after the readings before.
    """
    values, last = reading.values, state.last
    slow_since = state.slow_since
    if (reasons := values.get("clocks_event_reasons")) is not None:
        slow_since = (now if slow_since is None else slow_since) if reasons & BAD_REASONS else None
    windows, storms = _storms(state, values, section, now=now)
    failures = {name: 1 + state.failures.get(name, 0) for name in reading.errors}
    conditions = {
        **_states(reading, section),
        **_slowdown(reading, slow_since, section, now=now),
        **_heat(reading, state, section),
        **storms,
        **_unreadable(reading, last, failures),
    }
    found = [
        Finding(kind, reading.gpu, text, action)
        for condition, (kind, text, action) in conditions.items()
        if condition not in state.reported
    ]
    grown = values.get(ECC, 0) - last.get(ECC, values.get(ECC, 0))
    if grown > 0:
        before = f" ({last[ECC]} before)" if last[ECC] else ""
        text = f"{grown} uncorrectable ECC errors{before}"
        found.append(Finding("ecc", reading.gpu, text, section.ecc))
    unknown = {condition for condition in state.reported if _is_unknown(condition, reading)}
    reported = frozenset(conditions) | unknown
    kept = {name: value for name, value in last.items() if name not in nvml.EXPORTED}
    if (used := values.get(nvml.USED)) is not None:
        values = {**values, nvml.PEAK: max(used, last.get(nvml.PEAK, 0))}
    return GpuState({**kept, **values}, windows, slow_since, reported, failures), found


Conditions = dict[str, tuple[str, str, HealthAction]]
"""Name of a condition that lasts -> kind, text and action of its finding."""


def _states(reading: GpuReading, section: HealthSection) -> Conditions:
    found: Conditions = {}
    if reading.is_lost:
        found["lost"] = ("lost", "the driver has lost it, or asks for its reset", section.lost)
    for name in ("pending", "failed"):
        if reading.values.get(f"remapped_rows_{name}"):
            what = "is pending" if name == "pending" else "has failed"
            text = f"the remapping of a row of memory {what}"
            found[f"remapped_rows_{name}"] = ("row_remap", text, section.row_remap)
    return found


def _slowdown(
    reading: GpuReading, slow_since: float | None, section: HealthSection, *, now: float
) -> Conditions:
    reasons = reading.values.get("clocks_event_reasons")
    if reasons is None or slow_since is None or now - slow_since < 60 * SLOW_MINUTES:
        return {}
    why = reason_names(reasons & BAD_REASONS)
    degrees = reading.values.get("temperature_C")
    at = "" if degrees is None else f" at {degrees} °C"
    text = f"its clocks are slowed for {SLOW_MINUTES:g} minutes{at}: {why}"
    return {"thermal": ("thermal", text, section.thermal)}


def _heat(reading: GpuReading, state: GpuState, section: HealthSection) -> Conditions:
    limit, degrees = section.temperature_celsius, reading.values.get("temperature_C")
    if limit is None or degrees is None:
        return {}
    least = limit - COOLER_CELSIUS * ("temperature" in state.reported)
    text = f"{degrees} °C, with a limit of {limit:g} °C"
    return {"temperature": ("temperature", text, "warn")} if degrees >= least else {}


def _storms(
    state: GpuState, values: Mapping[str, int], section: HealthSection, *, now: float
) -> tuple[Mapping[str, tuple[float, int]], Conditions]:
    """Returns the windows of counters, and the storms: too many corrected errors in a window."""
    windows, found = dict(state.windows), Conditions()
    for name, label in CORRECTIONS.items():
        kind, action, most = "link", section.link, LINK_ERRORS_PER_MINUTE
        if name == CORRECTED:
            kind, action, most = "ecc_corrected", "warn", CORRECTED_PER_MINUTE
        if name not in values:
            continue
        since, before = windows.setdefault(name, (now, values[name]))
        seconds, grown = now - since, values[name] - before
        if grown < 0 or seconds >= WINDOW_SECONDS:
            windows[name] = (now, values[name])
        elif name in state.reported:
            found[name] = (kind, "", action)  # Until the window ends.
            continue
        if seconds >= WINDOW_SECONDS and 60 * grown / seconds > most:
            found[name] = (kind, f"{grown} {label} in {seconds:.0f} s", action)
    return windows, found


def _unreadable(
    reading: GpuReading, last: Mapping[str, int], failures: Mapping[str, int]
) -> Conditions:
    """Returns the readings that had a value before, and have failed several times in a row."""
    if reading.is_lost:
        return {}
    return {
        f"unreadable {name}": ("unreadable", f"{name} can't be read any more: {why}", "warn")
        for name, why in reading.errors.items()
        if name in last and failures[name] >= UNREADABLE_TIMES
    }


def _is_unknown(condition: str, reading: GpuReading) -> bool:
    """Returns whether a reading can't show that a reported condition is over."""
    needs = {"thermal": "clocks_event_reasons", "temperature": "temperature_C"}
    needed = needs.get(condition, condition)
    return needed in reading.errors
