"""Each config of `configs/gce/` is accepted as a base, by the checks of `up`, by the service."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxres import config as configs
from jaxres.config import RunConfig
from jaxres.config.gce_machine_types import num_gpus, region_of
from jaxres.faults import ConfigError
from jaxres.launch.gce.api.compute import Compute
from jaxres.launch.gce.checks import preflight
from jaxres.launch.gce.controller import machine_for, new_state
from jaxres.launch.gce.state.desired_state import PendingCreate, VmSpec
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator

FOLDER = Path(__file__).parents[4] / "configs" / "gce"
NAMES = ("a2-highgpu", "a3-highgpu", "a3-megagpu", "a3-ultragpu", "a4-highgpu", "g2")
RUN = GcsPath("bucket", "run")


def load(name: str, folder: Path, project: str, **gce: Any) -> RunConfig:
    """Loads a config that only names a recipe, its project and its run directory."""
    path = folder / f"my-{name}.yaml"
    more = "".join(f", {key}: {value}" for key, value in gce.items())
    path.write_text(
        f"base: [quickstart, gce/{name}]\nrun: {{dir: gs://bucket/run}}\n"
        f"launch: {{gce: {{project: {project}, num_hosts: 2{more}}}}}\n"
    )
    return configs.load(path).config


def test_every_recipe_is_listed_and_says_where_it_is_from() -> None:
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.yaml"))) == NAMES
    for name in NAMES:
        text = (FOLDER / f"{name}.yaml").read_text()
        assert "Not run on Google's cloud" in text
        assert "# Sources:" in text
        (devices,) = [line for line in text.splitlines() if line.startswith("# Devices:")]
        machine_type = text.partition("machine_type: ")[2].partition("}")[0]
        assert int(devices.split()[2]) == num_gpus(machine_type), name


def test_every_recipe_passes_the_checks_and_its_first_request_is_accepted(
    gce: GceEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_bucket", lambda *_, **__: [])
    for name in NAMES:
        config = load(name, tmp_path, gce.project)
        section = config.launch.gce
        assert section is not None
        (zone,) = {zone for option in section.capacity_options for zone in option.zones}
        for subnetwork, nic_type in zip(section.subnetworks, section.nic_types, strict=False):
            gce.add_subnetwork(region_of(zone), subnetwork, is_rdma=nic_type == "MRDMA")
        assert section.image is not None
        owner, family = section.image.split("/")[1], section.image.rpartition("/")[2]
        if owner == "my-project":
            gce.add_image(owner, f"{family}-1", family=family)
        compute = Compute(section, endpoint=gce.url)
        assert preflight.check(section, compute, RUN) == [], name
        plan = "\n".join(preflight.lines(config, RUN))
        option = section.capacity_options[0]
        assert f"{num_gpus(option.machine_type)} x " in plan, plan
        desired = new_state("jx", "0" * 64, "0" * 64, now=1.0, after=None)
        vms = [VmSpec(f"{name}-{n}", zone, 0, 1.0) for n in range(2)]
        names = tuple(vm.name for vm in vms)
        machine = machine_for(LaunchPaths(RUN), config, desired, vms[0])
        machine = replace(machine, metadata={})  # The VMs run no startup script here.
        operation = compute.create(PendingCreate(names, str(uuid.uuid4())), vms, machine)
        assert isinstance(operation, str), operation
        assert {vm.name for vm in gce.vms_so_far()} >= set(names), name


def test_a_file_beside_the_config_comes_before_a_recipe_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "gce").mkdir()
    (tmp_path / "gce" / "g2").write_text("launch: {gce: {disk_gb: 77}}")
    with pytest.raises(ConfigError, match="capacity_options"):
        load("g2", tmp_path, "p")
    with pytest.raises(ConfigError, match="no such file"):
        load("none", tmp_path, "p")
