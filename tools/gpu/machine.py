"""Parts about the machine: its description, its speed of copies, its health."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from tools.gpu import nvml
from tools.gpu.runs import NO_GPU, Figures, every, seconds, sized

MIB = 1 << 20
QUERY_SECONDS = 20.0
ABOUT = ("name", "driver_version", "vbios_version", "memory.total", "power.limit")
LINK = ("pcie.link.gen.current", "pcie.link.width.current", "pcie.link.gen.max")
FAULTS = (
    *("temperature.gpu", "power.draw", "ecc.errors.uncorrected.volatile.total"),
    *("ecc.errors.corrected.volatile.total", "remapped_rows.uncorrectable"),
    *("remapped_rows.pending", "clocks_event_reasons.active"),
    "clocks_event_reasons.hw_thermal_slowdown",
)
"""Fields of `nvidia-smi --query-gpu`."""


def environment(folder: Path) -> Iterator[Figures]:
    """Yields versions, device, XLA flags, and GB/s of copies and of the local disk."""
    yield from every(
        versions=_versions,
        device=_device,
        copies=_copies,
        disk=lambda: _disk(folder),
        nvidia_smi=lambda: query([*ABOUT, *LINK]),
        topology=_topology,
    )


def _versions() -> Figures:
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "cores": os.cpu_count() or 0,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") or "none",
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "") or "none",
        "MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "") or "default",
    }


def _device() -> Figures:
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}) if device.platform == "gpu" else {}
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "platform_version": " ".join(device.client.platform_version.split()),
        "memory_GiB": memory.get("bytes_limit", 0) / 2**30 or NO_GPU,
        "memory_kinds": " ".join(kind.kind for kind in device.addressable_memories()),
    }


def _copies() -> Figures:
    """Returns GB/s to and from the device; the first copies set up buffers and are not counted."""
    device, size = jax.devices()[0], sized(1024, 16) * MIB
    host = np.ones(size, np.uint8)
    array = jax.block_until_ready(jax.device_put(host, device))
    put = seconds(lambda: jax.block_until_ready(jax.device_put(host, device)))
    fetched = []
    for number in range(2):
        fresh = jax.block_until_ready(
            array + np.uint8(number)
        )  # JAX keeps a copy of a fetched one.
        fetched.append(seconds(lambda array=fresh: np.asarray(array)))
    return {"to_device_GB_per_s": size / put / 1e9, "to_host_GB_per_s": size / fetched[1] / 1e9}


def _disk(folder: Path) -> Figures:
    """Returns GB/s of a write with fsync, and of a read whose pages are not in the file cache."""
    data, path = np.ones(sized(1024, 16) * MIB, np.uint8), folder / "disk"
    begun = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, data.nbytes, 16 * MIB):
            file.write(data[start : start + 16 * MIB].data)
        os.fsync(file.fileno())
        written = time.perf_counter() - begun
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(16 * MIB):
            pass
    read = time.perf_counter() - begun
    path.unlink()
    return {
        "disk_write_GB_per_s": data.nbytes / written / 1e9,
        "disk_read_GB_per_s": data.nbytes / read / 1e9,
    }


def _topology() -> Figures:
    """Returns the driver's table of links between GPUs, which is in the part's output too."""
    if shutil.which("nvidia-smi") is None:
        return {"topology": NO_GPU}
    text, why = _output(["nvidia-smi", "topo", "-m"])
    print(text)
    row = next((line for line in text.splitlines() if line.startswith("GPU0\t")), "")
    return {"topology": " ".join(row.split()) or why or "not measured: no row of GPU0"}


def health(folder: Path) -> Iterator[Figures]:
    """Yields the driver's report on faults; fails if the GPU has some."""
    del folder
    found = nvml.readings()
    yield {f"nvml {name}" if name != "nvml" else name: value for name, value in found.items()}
    yield query(FAULTS)
    faults = nvml.faults(found)
    assert not faults, f"the GPU is not healthy, so its figures may be wrong: {', '.join(faults)}"


def query(fields: Sequence[str]) -> Figures:
    """Returns fields of `nvidia-smi --query-gpu` of the first GPU.

    One unknown field makes the command refuse all; then each is asked by itself.
    """
    if shutil.which("nvidia-smi") is None:
        return dict.fromkeys(fields, NO_GPU)
    together, _ = _values(fields)
    if together is not None:
        return dict(zip(fields, together, strict=True))
    found: Figures = {}
    for field in fields:
        values, why = _values([field])
        found[field] = f"not measured: {why}" if values is None else values[0]
    return found


def _values(fields: Sequence[str]) -> tuple[list[str] | None, str]:
    """Returns the values of fields, or None and why there are none."""
    text, why = _output(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    )
    values = [value.strip() for value in (text.splitlines() or [""])[0].split(",")]
    if why or len(values) != len(fields):
        return None, why or f"nvidia-smi has answered: {text[:100]}"
    return values, ""


def _output(command: list[str]) -> tuple[str, str]:
    """Returns the output of a command, and why it has failed (empty: it has not)."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    said = " ".join((ended.stdout + ended.stderr).split())[:100]
    return ended.stdout, "" if ended.returncode == 0 else f"exit {ended.returncode}: {said}"
