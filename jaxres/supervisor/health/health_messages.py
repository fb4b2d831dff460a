"""Messages of the health process to its supervisor: JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxres.storage.codec import TaggedCodec

NVML, KERNEL_LOG = "nvml", "kernel_log"
"""Sources of Xid errors."""


@dataclass(frozen=True)
class WatchStarted:
    """The health process reads the GPUs."""

    driver: str
    gpus: tuple[str, ...]
    """Label of each GPU."""
    unreadable: Mapping[str, str]
    """Unreadable reading of some GPU -> the reason: the guard does not see it."""


@dataclass(frozen=True)
class WatchUnavailable:
    """The health process can't read any GPU, and ends."""

    reason: str


@dataclass(frozen=True)
class GpuReading:
    """One reading of one GPU."""

    gpu: str
    """Label of the GPU."""
    values: Mapping[str, int]
    errors: Mapping[str, str]
    """Name of a reading -> why there is no value."""
    is_lost: bool


@dataclass(frozen=True)
class XidReported:
    """The driver has reported an Xid error."""

    gpu: str
    """Label of the GPU."""
    xid: int
    source: str = NVML
    """NVML or KERNEL_LOG: one error may be reported by both."""


Message = WatchStarted | WatchUnavailable | GpuReading | XidReported
MESSAGES: TaggedCodec[Message] = TaggedCodec(
    "message",
    {
        "watch_started": WatchStarted,
        "watch_unavailable": WatchUnavailable,
        "gpu_reading": GpuReading,
        "xid_reported": XidReported,
    },
)
"""Name of each message of the health process."""


def gpu_label(index: int, uuid: str, name: str) -> str:
    """Returns the name of a GPU in messages.

    >>> gpu_label(3, "GPU-5e6f", "NVIDIA H100"), gpu_label(0, "", "")
    ('GPU 3 (NVIDIA H100, GPU-5e6f)', 'GPU 0')
    """
    known = ", ".join(part for part in (name, uuid) if part)
    return f"GPU {index}" + (f" ({known})" if known else "")


def gone(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Returns the labels of GPUs that were there and are not: numbers change where one is gone.

    >>> gone(("GPU 0 (H100, GPU-a)", "GPU 1 (H100, GPU-b)"), ("GPU 0 (H100, GPU-b)",))
    ['GPU 0 (H100, GPU-a)']
    """
    here = {part for label in now for part in (label.partition(" (")[0], _uuid(label))}
    return [label for label in before if (_uuid(label) or label.partition(" (")[0]) not in here]


def _uuid(label: str) -> str:
    last = label.rstrip(")").replace("(", ", ").rpartition(", ")[2]
    return last if last.startswith("GPU-") else ""


def is_visible(index: int, uuid: str, setting: str | None) -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES names a GPU.

    Numbers are taken for NVML's, which CUDA's differ from only where a machine has GPUs of several
    kinds. Parts of a GPU (MIG) are not distinguished.

    >>> [is_visible(1, "GPU-5e6f", each) for each in (None, "0,1", "0", "GPU-5e", "MIG-1")]
    [True, True, False, True, True]
    """
    if setting is None:
        return True
    entries = [entry.strip() for entry in setting.split(",")]
    return any(
        entry.startswith("MIG-")
        or entry == str(index)
        or (entry.startswith("GPU-") and uuid.startswith(entry))
        for entry in entries
    )
