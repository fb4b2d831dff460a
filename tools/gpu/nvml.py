"""Readings of a GPU for the check's table; the health guard of a run reads with the same module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxres.supervisor.health import nvml

PCIE: Mapping[str, Callable[[Any, Any], int]] = {
    "pcie_generation": lambda n, d: n.nvmlDeviceGetCurrPcieLinkGeneration(d),
    "pcie_width": lambda n, d: n.nvmlDeviceGetCurrPcieLinkWidth(d),
    "pcie_max_generation": lambda n, d: n.nvmlDeviceGetMaxPcieLinkGeneration(d),
    "pcie_max_width": lambda n, d: n.nvmlDeviceGetMaxPcieLinkWidth(d),
    "nvlinks_active": lambda n, d: len(nvml.active_links(n, d)),
}
"""How a GPU is connected."""


def readings(index: int = 0) -> dict[str, object]:
    """Returns the readings of a GPU; where there is none the value is a text that says why."""
    try:
        library = nvml.load()
        gpus = nvml.gpus(library)
    except nvml.NvmlUnavailable as error:
        return {"nvml": f"not measured: {error}"}
    gpu = next((gpu for gpu in gpus if gpu.index == index), None)
    if gpu is None or gpu.handle is None:
        return {"nvml": f"not measured: no GPU {index}: {gpu.error if gpu else 'none found'}"}
    read = nvml.read(library, gpu.handle, {**nvml.READINGS, **PCIE})
    found: dict[str, object] = {"driver": nvml.driver_version(library), **read.values}
    found |= {name: f"not measured: {why}" for name, why in read.errors.items()}
    reasons = read.values.get("clocks_event_reasons")
    if reasons is not None:
        found["clocks_event_reasons"] = nvml.reason_names(reasons)
        found["clocks_slowed_by_fault"] = bool(reasons & nvml.BAD_REASONS)
    return found


def faults(found: dict[str, object]) -> list[str]:
    """Returns the names of the readings that a healthy GPU does not have."""
    must_be_zero = (
        *("ecc_uncorrected_volatile", "remapped_rows_pending", "remapped_rows_failed"),
        "clocks_slowed_by_fault",
    )
    return [name for name in must_be_zero if isinstance(found.get(name), int) and found[name]]
