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
    needs_hyperdisk: bool = False

    def num_gpus(self, machine_type: str) -> int | None:
        """Returns the number of GPUs, where the name tells it."""
        found = re.search(r"-([0-9]+)g$", machine_type)
        return int(found[1]) if found else None


SHAPES = (
    Shape(re.compile(r"a2-(high|mega)gpu-(1|2|4|8|16)g"), ANY, "A100 40 GB"),
    Shape(re.compile(r"a2-ultragpu-(1|2|4|8)g"), ANY, "A100 80 GB"),
    Shape(re.compile(r"a3-highgpu-(1|2|4)g"), ("spot", "flex_start"), "H100 80 GB"),
    Shape(re.compile(r"a3-(highgpu|megagpu)-8g"), ANY, "H100 80 GB"),
    Shape(
        re.compile(r"a3-ultragpu-8g"),
        ("spot", "flex_start", "reservation"),
        "H200 141 GB",
        needs_hyperdisk=True,
    ),
    Shape(
        re.compile(r"a4-highgpu-8g"),
        ("spot", "flex_start", "reservation"),
        "B200",
        needs_hyperdisk=True,
    ),
    Shape(re.compile(r"a4x-.*"), ("reservation",), "GB200", needs_hyperdisk=True),
    Shape(re.compile(r"g2-standard-[0-9]+"), ANY, "L4"),
    Shape(re.compile(r"g4-standard-[0-9]+"), ANY, "RTX PRO 6000"),
)


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
