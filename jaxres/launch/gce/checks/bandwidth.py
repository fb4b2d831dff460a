"""Judges the measured bandwidth between VMs by the figure of their machine type. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from jaxres.config.gce_machine_types import Published

LEAST_SHARE = 0.5
"""Least share of the published figure that is no warning. A network plug-in that is not used
costs more than that; another version of NCCL, or jaxres' smaller messages, do not."""
LEAST_MESSAGE_BYTES = 2**28
"""Least message that is judged: at a smaller one the latency decides."""


@dataclass(frozen=True)
class Judgement:
    """The measured bandwidth beside the figure of the machine type."""

    is_low: bool
    text: str


def judge(
    bus_bytes_per_second: float,
    published: Published | None,
    *,
    num_hosts: int,
    message_bytes: int,
) -> Judgement:
    """Compares the bus bandwidth of a sum over all devices of a job with the published figure.

    Args:
      bus_bytes_per_second: the measured one.
      published: the figure of the machine type, over several VMs; None: there is none.
      num_hosts: number of VMs; the links within one VM have no figure.
      message_bytes: what each device has added.

    >>> judge(90e9, Published(181.9, "all_gather, X"), num_hosts=2, message_bytes=2**30).is_low
    True
    """
    measured = f"{bus_bytes_per_second / 1e9:,.1f} GB/s bus bandwidth"
    if num_hosts < 2:
        return Judgement(False, f"{measured}, within one VM: not judged")
    if published is None:
        return Judgement(False, f"{measured}; no published figure of this machine type: not judged")
    expected = f"{published.gb_per_second:,.1f} GB/s expected ({published.source})"
    if message_bytes < LEAST_MESSAGE_BYTES:
        size = f"{message_bytes / 2**20:,.0f} MiB a device"
        return Judgement(False, f"{measured} by {size}, {expected}: too small to be judged")
    share = bus_bytes_per_second / 1e9 / published.gb_per_second
    if share < LEAST_SHARE:
        return Judgement(
            True,
            f"{measured}, {expected}: {share:.2f} of it, below {LEAST_SHARE}. Is the NCCL plug-in "
            "of the machine type used? See launch.gce.env and configs/gce/",
        )
    return Judgement(False, f"{measured}, {expected}: {share:.2f} of it")
