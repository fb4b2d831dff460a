"""Readings of a GPU through NVIDIA's management library (libnvidia-ml.so.1), by ctypes.

Every reading is optional: an older driver lacks functions, a virtual machine refuses some. The
numbers are those of nvml.h (https://docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
PATHS = (LIBRARY, f"/usr/local/nvidia/lib64/{LIBRARY}", f"/usr/lib/x86_64-linux-gnu/{LIBRARY}")
"""Where the loader looks, and where containers have it."""
CORRECTED, UNCORRECTED = 0, 1
VOLATILE, AGGREGATE = 0, 1
"""ECC errors since the driver was loaded, and of the device's life."""
MAX_LINKS = 18
REASONS = {
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power limit",
    0x8: "HW slowdown",
    0x10: "sync boost",
    0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown",
    0x80: "HW power brake",
    0x100: "display clocks",
}
"""nvmlClocksEventReason* -> name."""
BAD_REASONS = 0x8 | 0x20 | 0x40 | 0x80
Values = list[int]
Show = Callable[[Values], dict[str, object]]


@dataclass(frozen=True)
class Reading:
    """A function that fills numbers of one type."""

    functions: tuple[str, ...]
    """Its names, the newest first."""
    arguments: tuple[int, ...]
    """What is passed between the device and the results."""
    names: tuple[str, ...]
    """Names of the results."""
    type: Any = ctypes.c_uint


READINGS = (
    Reading(("nvmlDeviceGetTemperature",), (0,), ("temperature_C",)),
    Reading(("nvmlDeviceGetPowerUsage",), (), ("power_mW",)),
    *(
        Reading(
            ("nvmlDeviceGetTotalEccErrors",),
            (kind, since),
            (f"ecc_{kind_name}_{since_name}",),
            ctypes.c_ulonglong,
        )
        for kind, kind_name in ((CORRECTED, "corrected"), (UNCORRECTED, "uncorrected"))
        for since, since_name in ((VOLATILE, "volatile"), (AGGREGATE, "aggregate"))
    ),
    Reading(
        ("nvmlDeviceGetRemappedRows",),
        (),
        (
            *("remapped_rows_corrected", "remapped_rows_uncorrected"),
            *("remapped_rows_pending", "remapped_rows_failed"),
        ),
    ),
    Reading(
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        (),
        ("clocks_event_reasons",),
        ctypes.c_ulonglong,
    ),
    Reading(("nvmlDeviceGetCurrPcieLinkGeneration",), (), ("pcie_generation",)),
    Reading(("nvmlDeviceGetCurrPcieLinkWidth",), (), ("pcie_width",)),
    Reading(("nvmlDeviceGetMaxPcieLinkGeneration",), (), ("pcie_max_generation",)),
    Reading(("nvmlDeviceGetMaxPcieLinkWidth",), (), ("pcie_max_width",)),
    Reading(("nvmlDeviceGetPcieReplayCounter",), (), ("pcie_replays",)),
)


def readings(index: int = 0) -> dict[str, object]:
    """Returns the readings of a GPU; where there is none the value is a text that says why."""
    library = _library()
    if library is None:
        return {"nvml": f"not measured: no {LIBRARY}"}
    if (code := library.nvmlInit_v2()) != 0:
        return {"nvml": f"not measured: nvmlInit_v2: {_error(library, code)}"}
    device = ctypes.c_void_p()
    code = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    if code != 0:
        return {"nvml": f"not measured: no GPU {index}: {_error(library, code)}"}
    found: dict[str, object] = {"driver": _driver(library)}
    for reading in READINGS:
        found |= _read(library, device, reading)
    reasons = found["clocks_event_reasons"]
    if isinstance(reasons, int):
        found["clocks_event_reasons"] = reason_names(reasons)
        found["clocks_slowed_by_fault"] = bool(reasons & BAD_REASONS)
    return found | {"nvlinks_active": _active_links(library, device)}


def faults(found: dict[str, object]) -> list[str]:
    """Returns the names of the readings that a healthy GPU does not have."""
    must_be_zero = (
        *("ecc_uncorrected_volatile", "remapped_rows_pending", "remapped_rows_failed"),
        "clocks_slowed_by_fault",
    )
    return [name for name in must_be_zero if isinstance(found.get(name), int) and found[name]]


def reason_names(bits: int) -> str:
    """Returns the names of reasons for which clocks are below their maximum.

    >>> reason_names(0), reason_names(0x41), reason_names(0x1004)
    ('none', 'idle + HW thermal slowdown', 'power limit + 0x1000')
    """
    known = [name for bit, name in REASONS.items() if bits & bit]
    rest = bits & ~sum(REASONS)
    return " + ".join([*known, *([hex(rest)] if rest else [])]) or "none"


def _library() -> ctypes.CDLL | None:
    for path in PATHS:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    return None


def _read(library: ctypes.CDLL, device: ctypes.c_void_p, reading: Reading) -> dict[str, object]:
    function = next((f for name in reading.functions if (f := _function(library, name))), None)
    if function is None:
        why = f"not measured: this driver has no {reading.functions[0]}"
        return dict.fromkeys(reading.names, why)
    values = [reading.type() for _ in reading.names]
    code = function(device, *reading.arguments, *map(ctypes.byref, values))
    if code != 0:
        return dict.fromkeys(reading.names, f"not measured: {_error(library, code)}")
    return {name: value.value for name, value in zip(reading.names, values, strict=True)}


def _function(library: ctypes.CDLL, name: str) -> Any:
    return getattr(library, name, None)


def _driver(library: ctypes.CDLL) -> str:
    function = _function(library, "nvmlSystemGetDriverVersion")
    if function is None:
        return "not measured: this driver has no nvmlSystemGetDriverVersion"
    text = ctypes.create_string_buffer(80)
    if (code := function(text, len(text))) != 0:
        return f"not measured: {_error(library, code)}"
    return text.value.decode(errors="replace")


def _active_links(library: ctypes.CDLL, device: ctypes.c_void_p) -> object:
    """Returns the number of active NVLinks; a device without NVLink has none."""
    function, active = _function(library, "nvmlDeviceGetNvLinkState"), 0
    if function is None:
        return "not measured: this driver has no nvmlDeviceGetNvLinkState"
    for link in range(MAX_LINKS):
        state = ctypes.c_uint()
        active += function(device, link, ctypes.byref(state)) == 0 and state.value == 1
    return active


def _error(library: ctypes.CDLL, code: int) -> str:
    function = _function(library, "nvmlErrorString")
    if function is None:
        return f"error {code}"
    function.restype = ctypes.c_char_p
    return f"{function(code).decode(errors='replace')} ({code})"
