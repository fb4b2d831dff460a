"""A bandwidth is judged only where it can be compared, and one far below the figure is told."""

from __future__ import annotations

import pytest

from jaxres.config.gce_machine_types import SHAPES, Published, shape_of
from jaxres.launch.gce.checks.hardware_report import (
    LEAST_MESSAGE_BYTES,
    LEAST_SHARE,
    judge_bandwidth,
)

MEGA = Published(181.9, "all_gather, a page, read 2026-11")


def test_a_bandwidth_below_the_share_is_low_and_says_what_was_compared() -> None:
    found = judge_bandwidth(0.49 * 181.9e9, MEGA, num_hosts=2, message_bytes=2**30)
    assert found.is_low, "a bandwidth below the share is taken for good"
    assert found.text == (
        "89.1 GB/s bus bandwidth, 181.9 GB/s expected (all_gather, a page, read 2026-11): 0.49 of "
        "it, below 0.5. Is the NCCL plug-in of the machine type used? See launch.gce.env and "
        "configs/gce/"
    )


@pytest.mark.parametrize(
    ("share", "published", "hosts", "size", "text"),
    [
        (0.51, MEGA, 2, 2**30, "0.51 of it"),
        (2.0, MEGA, 2, LEAST_MESSAGE_BYTES, "2.00 of it"),
        (0.01, MEGA, 2, 2**26, "by 64 MiB a device, 181.9 GB/s expected"),
        (0.01, MEGA, 1, 2**30, "within one VM: not judged"),
        (0.01, None, 2, 2**30, "no published figure of this machine type: not judged"),
    ],
)
def test_a_bandwidth_that_suffices_or_has_no_figure_is_not_low(
    share: float, published: Published | None, hosts: int, size: int, text: str
) -> None:
    found = judge_bandwidth(share * 181.9e9, published, num_hosts=hosts, message_bytes=size)
    assert not found.is_low
    assert text in found.text


def test_every_figure_has_its_source_and_a_wrong_network_is_below_the_share_of_each() -> None:
    """Without its plug-in a VM reaches others by one interface of 200 Gbit/s: 25 GB/s."""
    figures = [shape.two_vms for shape in SHAPES if shape.two_vms is not None]
    assert len(figures) == 3
    assert all("read 2026" in figure.source for figure in figures)
    for name in ("a3-megagpu-8g", "a4-highgpu-8g"):
        shape = shape_of(name)
        assert shape is not None
        assert shape.two_vms is not None
        assert LEAST_SHARE * shape.two_vms.gb_per_second > 25
