"""Schema of the watch over the machines of a run, and of tests of them."""

from __future__ import annotations

from typing import Literal

from jaxres.config.schema.base import PositiveFloat, Seconds, Section, free

HealthAction = Literal["warn", "save", "leave"]
"""What follows a fault: nothing; a save and exit 82; exit 82 at once, without a save."""


class HealthSection(Section):
    """Health guard of each host (docs/hardware.md), and what follows each class of faults.

    warn: training continues; save: saves the last finished step and exits with 82; leave: exits
    with 82 at once, and saves nothing.
    """

    poll_seconds: Seconds = free(10.0)
    """Seconds between two readings of all GPUs; Xid errors are received at once."""
    answer_seconds: Seconds = free(60.0)
    """Longest time that NVIDIA's library may take to answer."""
    lost: HealthAction = free("leave")
    """The driver has lost a GPU, or asks for its reset."""
    xid: HealthAction = free("leave")
    """Xid errors after which a GPU has to be reset; those of a program are warnings only."""
    ecc: HealthAction = free("leave")
    """Uncorrectable memory errors: the state may be wrong, so it is not saved."""
    row_remap: HealthAction = free("save")
    """The remapping of a row of memory is pending (until a reset of the GPU) or has failed."""
    thermal: HealthAction = free("warn")
    """Heat, the power supply or a fault slows the clocks for 5 minutes."""
    temperature_celsius: PositiveFloat | None = free(85.0)
    """Warns if a GPU is at least as hot, also before its clocks are slowed; null: never."""
    link: HealthAction = free("warn")
    """More than 100 errors of PCIe or NVLink in a minute, which the link repeats."""
    silent: HealthAction = free("warn")
    """NVIDIA's library has not answered for answer_seconds."""
    disk_free_gb: PositiveFloat | None = free(5.0)
    """Warns if the disk of the run's local files has fewer GB (1e9 bytes) left; null: never."""


class HardwareSection(Section):
    """Watch over the machines of a run, and tests of them."""

    preflight: Literal["auto", "off", "quick", "full"] = free("auto")
    """Tests of devices, links and disk before an attempt trains; a wrong answer ends it with 82.

    quick takes seconds, full minutes (most of each device's memory); auto: quick on accelerators,
    off on CPUs."""
    allow_fewer: bool = free(False)
    """Whether a host may train with fewer devices than are known to belong to it.

    false: it exits with 82, and is replaced or left out (docs/many-hosts.md)."""
    health: HealthSection | None = free(HealthSection())
    """Health guard of each host: GPUs of NVIDIA, memory, disk, clock, network; null: none."""
