"""Parts about the machine: what it is, how fast it copies, whether it is healthy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import jax
import numpy as np

from tools.gpu.runs import NO_GPU, sized

Figures = dict[str, object]
MIB = 1 << 20


def environment(folder: Path) -> Figures:
    """Returns versions, device, memory, and GB/s of copies and of the local disk."""
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}) if device.platform == "gpu" else {}
    size = sized(1024, 16) * MIB
    host = np.ones(size, np.uint8)
    array = jax.block_until_ready(jax.device_put(host, device))
    begun = time.perf_counter()
    jax.block_until_ready(jax.device_put(host, device))
    put = time.perf_counter() - begun
    begun = time.perf_counter()
    np.asarray(array + np.uint8(1))
    fetched = time.perf_counter() - begun
    begun = time.perf_counter()
    with (folder / "disk").open("wb") as file:
        file.write(host.data)
        os.fsync(file.fileno())
    written = time.perf_counter() - begun
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform_version": " ".join(device.client.platform_version.split()),
        "cores": os.cpu_count() or 0,
        "memory_GiB": memory.get("bytes_limit", 0) / 2**30 or NO_GPU,
        "to_device_GB_per_s": size / put / 1e9,
        "to_host_GB_per_s": size / fetched / 1e9,
        "disk_GB_per_s": size / written / 1e9,
        **_query("name,driver_version,pcie.link.gen.current,pcie.link.width.current"),
    }


def health(folder: Path) -> Figures:
    """Returns what the driver reports about faults of the GPU."""
    del folder
    return _query(
        "temperature.gpu,power.draw,ecc.errors.uncorrected.volatile.total,"
        "ecc.errors.corrected.volatile.total,remapped_rows.uncorrectable,remapped_rows.pending,"
        "clocks_event_reasons.active,clocks_event_reasons.hw_thermal_slowdown"
    )


def _query(fields: str) -> Figures:
    """Returns fields of `nvidia-smi --query-gpu` of the first GPU."""
    names = fields.split(",")
    if shutil.which("nvidia-smi") is None:
        return dict.fromkeys(names, NO_GPU)
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    values = [value.strip() for value in answer.splitlines()[0].split(",")]
    return dict(zip(names, values, strict=True))
