"""A scenario that the devices do not fit is left out, with the reason."""

from __future__ import annotations

import pytest

from jaxres.operate.chaos import job_devices
from jaxres.operate.chaos.job_devices import JobDevices
from jaxres.operate.chaos.scenarios import ALL, BY_NAME


@pytest.mark.parametrize(
    ("name", "devices", "why"),
    [
        ("nan-state", JobDevices("1 x cpu cpu", (1,)), ""),
        ("nan-state", JobDevices("8 x gpu NVIDIA H100", (8,)), "8 x gpu NVIDIA H100"),
        ("flipped-copy", JobDevices("1 x cpu cpu", (1,)), "it needs 2 devices, here is 1"),
        ("flipped-copy", JobDevices("2 x cpu cpu on 2 hosts", (1, 1)), ""),
        ("missing-device", JobDevices("2 x cpu cpu on 2 hosts", (1, 1)), "JAX_NUM_CPU_DEVICES=2"),
        ("missing-device", JobDevices("2 x cpu cpu", (2,)), ""),
        ("worker-kill", JobDevices("1 x gpu NVIDIA H100", (1,)), ""),
    ],
)
def test_a_scenario_is_left_out_where_its_fault_can_not_be_caused(
    name: str, devices: JobDevices, why: str
) -> None:
    found = job_devices.why_not(BY_NAME[name], devices)
    assert why in found
    assert bool(found) == bool(why)


def test_a_run_with_settings_or_an_edited_state_has_no_other_fault() -> None:
    assert all(one.is_alone for one in ALL if one.settings or one.after_save)
