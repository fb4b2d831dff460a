"""On emulated VMs the config stays the same run; a loss counts as repaired only by its events."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxres import config as configs
from jaxres.operate.chaos import emulated_vms, emulators
from jaxres.operate.chaos.faults import vm as vm_faults
from jaxres.operate.chaos.short_runs import shortened
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.storage.path import GcsPath
from jaxres.train.chaos_hooks import break_hook

TINY = Path(__file__).parents[5] / "tests" / "promises" / "tiny.yaml"
OWN = """
base: {base}
launch:
  gce:
    project: mine
    num_hosts: 64
    spares: 2
    image: projects/p/global/images/mine
    capacity_options: [{{kind: spot, zones: [us-east4-a], machine_type: a3-highgpu-8g}}]
    env: {{NCCL_DEBUG: INFO}}
"""
LOSS = LaunchEvent(7, "vm_lost", 1.0, vms=("vm-0",), cause="silent")
REPAIR = (
    LOSS,
    LaunchEvent(8, "vms_requested", 2.0, vms=("vm-1",)),
    LaunchEvent(9, "vms_created", 3.0, vms=("vm-1",)),
    LaunchEvent(10, "attempt_started", 4.0, vms=("vm-1",)),
)


def test_the_config_on_vms_is_the_same_run_with_vms_of_the_emulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "caches").mkdir()
    given = tmp_path / "given.yaml"
    given.write_text(OWN.format(base=TINY))
    short = shortened(configs.load(given).config, steps=12, save_every=3, breaks=1)
    config = configs.load(given, [*short, "data.cache_dir=caches"]).config
    run = GcsPath("bucket", "run-1")
    path = ("/jaxres", "/here", "")
    found = emulated_vms._on_vms(config, run, hosts=2, project="emulated", python_path=path)
    written = tmp_path / "written.yaml"
    written.write_text(configs.dump_yaml(found))
    again = configs.load(written).config
    assert configs.digest(again) == configs.digest(config), "it is another run"
    assert again.data.cache_dir == tmp_path / "caches", "a VM would look in its own home"
    (hook,) = again.hooks
    assert hook.args == {"folder": str(break_hook.folder_of(run))}
    assert (vms := again.launch.gce) is not None
    assert (vms.project, vms.most_hosts, vms.spares) == ("emulated", 2, 0)
    assert vms.env == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/jaxres:/here"}
    assert [option.kind for option in vms.capacity_options] == ["spot", "standard"]


@pytest.mark.parametrize(
    ("events", "text"),
    [
        (REPAIR, ""),
        (REPAIR[1:], "0 events of the loss of vm-0"),
        ((LOSS, *REPAIR), "2 events of the loss of vm-0"),
        (REPAIR[:2], "no VM was created instead of vm-0"),
        (REPAIR[:3], "no attempt has begun on vm-1"),
        ((*REPAIR[:3], dataclasses.replace(REPAIR[3], vms=("vm-0",))), "no attempt has begun"),
    ],
)
def test_a_lost_vm_is_replaced_only_if_an_attempt_has_begun_on_a_new_one(
    events: tuple[LaunchEvent, ...], text: str
) -> None:
    run: Any = None
    found = vm_faults._not_replaced(run, "vm-0", events)
    assert text in found
    assert bool(found) == bool(text)


def test_vms_are_not_applicable_without_the_packages_and_programs_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configs.load(TINY).config
    assert emulated_vms.why_not(config) == ""
    monkeypatch.setenv("PATH", "/nowhere")
    assert emulated_vms.why_not(config) == "bash is not installed: VMs boot with it"
    monkeypatch.setattr(emulators, "is_there", lambda name: name != emulated_vms.PACKAGE)
    assert "the extra `gce`" in emulated_vms.why_not(config)
    monkeypatch.setattr(emulators, "is_there", lambda _: False)
    assert "the extra `gcs`" in emulated_vms.why_not(config)
