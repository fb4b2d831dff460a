"""What Google sells: by family of machine types, the ways to get them and how many GPUs they have.

Source: cloud.google.com/compute/docs/accelerator-optimized-machines, read in 2026. Machine types
that are not here are not questioned: the service knows better.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ANY = ("spot", "flex_start", "reservation", "standard")


@dataclass(frozen=True)
class Shape:
    """A family of machine types that have GPUs."""

    pattern: re.Pattern[str]
    """Of the machine type."""
    kinds: tuple[str, ...]
    """Kinds of rungs by which it can be had."""
    gpu: str
    metric: str
    """Of the quota of its GPUs; those of spot and flex_start have one apart."""
    needs_hyperdisk: bool = False

    def num_gpus(self, machine_type: str) -> int | None:
        """Returns the number of GPUs, where the name tells it."""
        found = re.search(r"-([0-9]+)g$", machine_type)
        return int(found[1]) if found else None


SHAPES = (
    Shape(re.compile(r"a2-(high|mega)gpu-(1|2|4|8|16)g"), ANY, "A100 40 GB", "NVIDIA_A100_GPUS"),
    Shape(re.compile(r"a2-ultragpu-(1|2|4|8)g"), ANY, "A100 80 GB", "NVIDIA_A100_80GB_GPUS"),
    Shape(
        re.compile(r"a3-highgpu-(1|2|4)g"), ("spot", "flex_start"), "H100 80 GB", "NVIDIA_H100_GPUS"
    ),
    Shape(re.compile(r"a3-highgpu-8g"), ANY, "H100 80 GB", "NVIDIA_H100_GPUS"),
    Shape(re.compile(r"a3-megagpu-8g"), ANY, "H100 80 GB", "NVIDIA_H100_MEGA_GPUS"),
    Shape(
        re.compile(r"a3-ultragpu-8g"),
        ("spot", "flex_start", "reservation"),
        "H200 141 GB",
        "NVIDIA_H200_GPUS",
        needs_hyperdisk=True,
    ),
    Shape(
        re.compile(r"a4-highgpu-8g"),
        ("spot", "flex_start", "reservation"),
        "B200",
        "NVIDIA_B200_GPUS",
        needs_hyperdisk=True,
    ),
    Shape(
        re.compile(r"a4x-.*"), ("reservation",), "GB200", "NVIDIA_GB200_GPUS", needs_hyperdisk=True
    ),
    Shape(re.compile(r"g2-standard-[0-9]+"), ANY, "L4", "NVIDIA_L4_GPUS"),
    Shape(re.compile(r"g4-standard-[0-9]+"), ANY, "RTX PRO 6000", "NVIDIA_RTX_PRO_6000_GPUS"),
)


def quota_of(machine_type: str, kind: str) -> tuple[str, int] | None:
    """Returns the quota that a VM takes from, and how much; None: of no GPUs, or not known.

    >>> quota_of("a2-highgpu-4g", "spot")
    ('PREEMPTIBLE_NVIDIA_A100_GPUS', 4)
    """
    shape = shape_of(machine_type)
    number = None if shape is None else shape.num_gpus(machine_type)
    if shape is None or number is None or kind == "reservation":
        return None
    return ("PREEMPTIBLE_" if kind in ("spot", "flex_start") else "") + shape.metric, number


def shape_of(machine_type: str) -> Shape | None:
    """Returns the family of a machine type; None: it has no GPUs of its own, or is not known.

    >>> shape_of("a3-ultragpu-8g").kinds
    ('spot', 'flex_start', 'reservation')
    """
    return next((shape for shape in SHAPES if shape.pattern.fullmatch(machine_type)), None)


def region_of(zone: str) -> str:
    """Returns the region that a zone is in.

    >>> region_of("us-central1-a")
    'us-central1'
    """
    return zone.rpartition("-")[0]
