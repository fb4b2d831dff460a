"""Process that reads the GPUs of a host: `python -m jaxres.supervisor.health.health_process`.

It writes one JSON line a reading to its standard output, and one for each Xid error as soon as the
driver reports it: by an event of NVML, or in the kernel's log, which a thread reads also while NVML
hangs. The driver may hang in any call, which then hangs this process alone: its supervisor sees the
silence. The process ends when the supervisor no longer reads.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxres.clock import Clock, SystemClock
from jaxres.host import processes
from jaxres.storage.threads import spawn_thread
from jaxres.supervisor.health import kernel_log, nvml
from jaxres.supervisor.health.health_messages import (
    KERNEL_LOG,
    MESSAGES,
    GpuReading,
    Message,
    WatchStarted,
    WatchUnavailable,
    XidReported,
    gpu_label,
    is_visible,
)
from jaxres.supervisor.health.kernel_log import KernelLog, KernelLogUnreadable
from jaxres.supervisor.health.nvml import Gpu, NvmlUnavailable

XID = "xid"
"""Name of the Xid errors among the unreadable readings."""
KERNEL_LOG_SECONDS = 1.0
"""Time between two looks at the kernel's log."""
_writes = threading.Lock()


def main(arguments: list[str]) -> int:
    """Reads until the output is closed; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--poll-seconds", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--visible", help="CUDA_VISIBLE_DEVICES, if it is set")
    parser.add_argument("--kernel-log", type=Path, default=kernel_log.PATH)
    options = parser.parse_args(arguments)
    processes.kill_me_with_parent(options.parent)  # Also while it hangs in the driver.
    with contextlib.suppress(BrokenPipeError):
        try:
            log = _open(options.kernel_log)  # Before NVML, which may hang.
            library, clock = nvml.load(), SystemClock()
            _watch(library, log, options.poll_seconds, clock, visible=options.visible)
        except NvmlUnavailable as error:
            _send(WatchUnavailable(str(error)))
    os._exit(0)  # An exit of the library may hang as well.


def _open(path: Path) -> KernelLog | str:
    """Returns the kernel's log, or why it can't be read."""
    try:
        return kernel_log.open_log(path)
    except KernelLogUnreadable as error:
        return str(error)


def _watch(
    library: Any,
    log: KernelLog | str,
    poll_seconds: float,
    clock: Clock,
    *,
    visible: str | None,
) -> None:
    gpus = [g for g in nvml.gpus(library) if is_visible(g.index, g.uuid, visible)]
    if not gpus:
        raise NvmlUnavailable("this machine has no GPU, or CUDA_VISIBLE_DEVICES names none")
    labels = {gpu.index: gpu_label(gpu.index, gpu.uuid, gpu.name) for gpu in gpus}
    events, why = _register(library, gpus)
    first = _read(library, gpus, labels)
    unreadable = {name: why for reading in first for name, why in reading.errors.items()}
    by_address = {gpu.address: labels[gpu.index] for gpu in gpus if gpu.address}
    if events is None and (isinstance(log, str) or not by_address):
        unreadable[XID] = f"{why}; {log}" if isinstance(log, str) else why
    _send(WatchStarted(nvml.driver_version(library), tuple(labels.values()), unreadable))
    if isinstance(log, KernelLog):
        spawn_thread("kernel-log", lambda: _follow(log, by_address, clock), daemon=True)
    readings = first
    while True:
        for reading in readings:
            _send(reading)
        _wait(library, events, gpus, labels, until=clock.monotonic() + poll_seconds, clock=clock)
        readings = _read(library, gpus, labels)


def _follow(log: KernelLog, labels: Mapping[str, str], clock: Clock) -> None:
    """Sends the Xid errors in the kernel's log until it ends.

    Args:
      labels: PCI address of each GPU that is watched -> its label; others are not the run's.
    """
    with contextlib.suppress(BrokenPipeError, KernelLogUnreadable), log:
        while True:
            for address, xid in log.read():
                if address in labels:
                    _send(XidReported(labels[address], xid, KERNEL_LOG))
            clock.sleep(KERNEL_LOG_SECONDS)


def _read(library: Any, gpus: Sequence[Gpu], labels: Mapping[int, str]) -> list[GpuReading]:
    found: list[GpuReading] = []
    for gpu in gpus:
        label = labels[gpu.index]
        if gpu.handle is None:
            errors = dict.fromkeys(nvml.READINGS, gpu.error)
            found.append(GpuReading(label, {}, errors, gpu.is_lost))
        else:
            read = nvml.read(library, gpu.handle)
            exported = nvml.read(library, gpu.handle, nvml.EXPORTED)
            is_lost = read.is_lost or exported.is_lost
            found.append(GpuReading(label, exported.values | read.values, read.errors, is_lost))
    return found


def _register(library: Any, gpus: Sequence[Gpu]) -> tuple[Any, str]:
    """Registers for the Xid errors of all GPUs; returns None and why if one can't be."""
    try:
        events = library.nvmlEventSetCreate()
        for gpu in gpus:
            if gpu.handle is not None:
                library.nvmlDeviceRegisterEvents(
                    gpu.handle, library.nvmlEventTypeXidCriticalError, events
                )
    except library.NVMLError as error:
        return None, str(error)
    return events, ""


def _wait(
    library: Any,
    events: Any,
    gpus: Sequence[Gpu],
    labels: Mapping[int, str],
    *,
    until: float,
    clock: Clock,
) -> None:
    """Waits until the next reading is due; sends the Xid errors that are reported meanwhile."""
    while (left := until - clock.monotonic()) > 0:
        if events is None:
            clock.sleep(left)
            return
        try:
            event = library.nvmlEventSetWait_v2(events, max(1, int(1000 * left)))
        except library.NVMLError_Timeout:
            continue
        except library.NVMLError:  # The readings show what it is.
            clock.sleep(left)
            return
        where = {_address(gpu.handle): labels[gpu.index] for gpu in gpus if gpu.handle is not None}
        label = where.get(_address(event.device), "a GPU that can't be named")
        _send(XidReported(label, int(event.eventData)))


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _send(message: Message) -> None:
    with _writes:
        sys.stdout.write(json.dumps(MESSAGES.encode(message)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
