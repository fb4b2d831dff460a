"""Reads GPUs through NVIDIA's management library, with nvidia-ml-py (the module `pynvml`).

Any call may hang in the driver, so only a process that may be killed calls these functions. Every
reading is optional: an older driver lacks functions, a virtual machine refuses some. A reading that
fails is never a number. Numbers of counters and reasons: nvml.h
(https://docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
FOLDERS = (
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"),
    *("/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"),
)
"""Where the driver's library is, in containers too."""
CORRECTED, UNCORRECTED = 0, 1
VOLATILE, AGGREGATE = 0, 1
"""ECC errors since the driver was loaded, and of the device's life."""
MAX_LINKS = 18
NOT_A_LINK = (2, 3)
"""NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED: there is no NVLink of this number."""
LINK_ERRORS = (0, 1, 2)
"""Replays, recoveries, CRC errors of flits: repetitions of an NVLink after errors."""
LOST = (15, 16)
"""NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED."""


class NvmlUnavailable(Exception):
    """There is no library, no driver, no GPU, or nvidia-ml-py is not installed."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine."""

    index: int
    uuid: str
    name: str
    handle: Any
    """None: the driver has not given one."""
    error: str = ""
    """Why there is no handle."""
    is_lost: bool = False
    address: str = ""
    """PCI address, as kernel_log.pci_address returns it; empty: unknown."""


def find_library(search_path: str) -> Path | None:
    """Returns the driver's library, without loading it.

    Args:
      search_path: LD_LIBRARY_PATH.
    """
    folders = [folder for folder in search_path.split(":") if folder]
    paths = [Path(folder) / LIBRARY for folder in (*folders, *FOLDERS)]
    return next((path for path in paths if path.exists()), None)


def load() -> Any:
    """Returns the module pynvml, connected to the driver.

    Raises:
      NvmlUnavailable: that is not possible; the message says why.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        raise NvmlUnavailable("nvidia-ml-py is not installed") from None
    for path in (LIBRARY, *(f"{folder}/{LIBRARY}" for folder in FOLDERS)):
        with contextlib.suppress(OSError):
            ctypes.CDLL(path)  # pynvml asks for the bare name, which is this library then.
            break
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlUnavailable(_why(error)) from None
    return nvml


def gpus(nvml: Any) -> list[Gpu]:
    """Returns the GPUs of this machine; raises NvmlUnavailable if they can't be counted."""
    try:
        count = int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        raise NvmlUnavailable(f"the GPUs can't be counted: {_why(error)}") from None
    return [_gpu(nvml, index) for index in range(count)]


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return Gpu(index, "", "", None, _why(error), error.value in LOST)
    texts = {"uuid": "", "name": ""}
    for key, call in (("uuid", nvml.nvmlDeviceGetUUID), ("name", nvml.nvmlDeviceGetName)):
        with contextlib.suppress(nvml.NVMLError, ValueError):  # Bytes that are no text.
            texts[key] = str(call(handle))
    address = ""
    with contextlib.suppress(nvml.NVMLError):
        pci = nvml.nvmlDeviceGetPciInfo(handle)
        address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"
    return Gpu(index, texts["uuid"], texts["name"], handle, address=address)


def driver_version(nvml: Any) -> str:
    """Returns the version of the driver, or why it is unknown."""
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        return f"not measured: {_why(error)}"
    except ValueError:
        return "not measured: no text"


def _why(error: Exception) -> str:
    """Returns the text of an error; the library has no valid one for some."""
    with contextlib.suppress(ValueError):
        return str(error)
    return f"NVML error {getattr(error, 'value', '')}"


def _clocks_event_reasons(nvml: Any, device: Any) -> int:
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(device)
    except nvml.NVMLError_FunctionNotFound:  # A driver before 535.
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)


def active_links(nvml: Any, device: Any) -> Sequence[int]:
    """Returns the numbers of the active NVLinks; a device without NVLink has none."""
    active: list[int] = []
    for link in range(MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(device, link):
                active.append(link)
        except nvml.NVMLError as error:
            if error.value not in NOT_A_LINK:
                raise
    return active


def _nvlink_errors(nvml: Any, device: Any) -> int:
    return sum(
        nvml.nvmlDeviceGetNvLinkErrorCounter(device, link, counter)
        for link in active_links(nvml, device)
        for counter in LINK_ERRORS
    )


READINGS: Mapping[str, Callable[[Any, Any], int]] = {
    "temperature_C": lambda n, d: n.nvmlDeviceGetTemperature(d, 0),
    "power_mW": lambda n, d: n.nvmlDeviceGetPowerUsage(d),
    **{
        f"ecc_{kind_name}_{since_name}": (
            lambda n, d, kind=kind, since=since: n.nvmlDeviceGetTotalEccErrors(d, kind, since)
        )
        for kind, kind_name in ((CORRECTED, "corrected"), (UNCORRECTED, "uncorrected"))
        for since, since_name in ((VOLATILE, "volatile"), (AGGREGATE, "aggregate"))
    },
    **{
        f"remapped_rows_{name}": (lambda n, d, at=at: n.nvmlDeviceGetRemappedRows(d)[at])
        for at, name in enumerate(("corrected", "uncorrected", "pending", "failed"))
    },
    "clocks_event_reasons": _clocks_event_reasons,
    "pcie_replays": lambda n, d: n.nvmlDeviceGetPcieReplayCounter(d),
    "nvlink_errors": _nvlink_errors,
}
"""Name of each reading of the health guard -> its call."""
USED, TOTAL, PEAK = "memory_used_bytes", "memory_total_bytes", "memory_peak_bytes"
UTILIZATION = "utilization_percent"
EXPORTED: Mapping[str, Callable[[Any, Any], int]] = {
    UTILIZATION: lambda n, d: n.nvmlDeviceGetUtilizationRates(d).gpu,
    USED: lambda n, d: n.nvmlDeviceGetMemoryInfo(d).used,
    TOTAL: lambda n, d: n.nvmlDeviceGetMemoryInfo(d).total,
}
"""Readings that are exported and not judged: parts of a GPU (MIG) and some VMs have none."""


@dataclass(frozen=True)
class Readings:
    """Readings of one GPU; each name is in one of the two maps."""

    values: dict[str, int]
    errors: dict[str, str]
    """Name -> why there is no value."""
    is_lost: bool
    """Whether the driver has lost the GPU, or asks for its reset."""


def read(
    nvml: Any, device: Any, readings: Mapping[str, Callable[[Any, Any], int]] = READINGS
) -> Readings:
    """Reads one GPU.

    Args:
      nvml: see `load`.
      device: the handle of the GPU.
    """
    values: dict[str, int] = {}
    errors: dict[str, str] = {}
    is_lost = False
    for name, call in readings.items():
        try:
            values[name] = int(call(nvml, device))
        except nvml.NVMLError as error:
            errors[name] = _why(error)
            is_lost = is_lost or error.value in LOST
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            errors[name] = f"{type(error).__name__}: {error}"  # No number, or no such function.
    return Readings(values, errors, is_lost)


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


def reason_names(bits: int) -> str:
    """Returns the names of reasons for which clocks are below their maximum.

    >>> reason_names(0), reason_names(0x41), reason_names(0x1004)
    ('none', 'idle + HW thermal slowdown', 'power limit + 0x1000')
    """
    known = [name for bit, name in REASONS.items() if bits & bit]
    rest = bits & ~sum(REASONS)
    return " + ".join([*known, *([hex(rest)] if rest else [])]) or "none"
