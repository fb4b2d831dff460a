"""The table of permissions in docs/gce-reference.md has exactly those that a launcher needs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from jaxres.launch.gce import command
from jaxres_emulators.gce import GceEmulator
from jaxres_emulators.gcs import GcsServer
from tests.promises.trainer import TINY

TABLE = Path(__file__).parents[4] / "docs" / "gce-reference.md"
OPTION = {"kind": "spot", "machine_type": "a2-highgpu-1g", "zones": ["us-central1-a"]}
CREATION = "instances.bulkInsert"


@pytest.fixture
def gce() -> Iterator[GceEmulator]:
    """The emulator; its VMs have no processes, so no attempt ever starts."""
    with GceEmulator(speed=60, is_simulated=True) as gce:
        yield gce
    assert gce.bugs == []


def config(folder: Path, run: str, project: str, **section: Any) -> str:
    fields = {"project": project, "lease_seconds": 4.0, **section}
    path = folder / f"{run.rpartition('/')[2]}.yaml"
    document = {"base": str(TINY), "run": {"dir": run}, "launch": {"gce": fields}}
    path.write_text(json.dumps(document))
    return str(path)


def run_job(up: str, run: str, gce: GceEmulator, during: Any, env: Mapping[str, str]) -> None:
    """Leads a job with `up`, calls `during` in between, and ends it with `stop`."""
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(command.main, ["up", up], env=env)
        try:
            during()
        finally:
            command.main(["stop", run], env=env)
        assert leading.result(30) == ExitCode.STOPPED
    assert gce.vms() == {}


def run_queued_job(folder: Path, run: str, gce: GceEmulator, *, image: str) -> None:
    """Leads a job of two VMs that come from a queue, and ends it."""
    queue = {**OPTION, "kind": "flex_start"}
    fields = {"num_hosts": 2, "image": image, "max_run_hours": 24.0}
    queued = config(folder, run, gce.project, **fields, capacity_options=[queue])
    run_job(queued, run, gce, lambda: gce.wait_for(lambda: len(gce.vms()) == 2), gce.env)


def table() -> tuple[set[str], set[str]]:
    """Returns the permissions that the table compares with the emulator's, and the others."""
    compared, others = set[str](), set[str]()
    rows = re.findall(
        r"^\| ((?:compute|iam)\.[^|]+) \| ([^|]+) \|", TABLE.read_text(), re.MULTILINE
    )
    for names, why in rows:
        (others if "not compared" in why else compared).update(names.split(", "))
    return compared, others


@pytest.mark.slow
def test_the_table_has_exactly_the_permissions_that_are_needed(
    gce: GceEmulator, gcs_server: GcsServer, gcs_bucket: str, tmp_path: Path, capsys: Any
) -> None:
    where = {"location": "US-CENTRAL1", "locationType": "region"}
    gcs_server.objects.facts[gcs_bucket] = where
    one, two, three = (f"gs://{gcs_bucket}/{name}" for name in ("one", "two", "three"))
    short = {**OPTION, "zones": ["us-central1-b"]}
    family = "projects/debian-cloud/global/images/family/debian-12"
    gce.add_policy("us-central1", "compact")
    options = {"capacity_options": [short, OPTION], "resource_policies": ["compact"]}
    first = config(tmp_path, one, gce.project, num_hosts=2, image=family, **options)

    def lose_one() -> None:
        gce.wait_for(lambda: list(gce.vms().values()) == ["RUNNING"] * 2)
        lost, _ = gce.vms()
        gce.host_error(lost)
        gce.wait_for(lambda: lost not in gce.vms() and len(gce.vms()) == 2)
        assert command.main(["status", one], env=gce.env) == ExitCode.DONE
        assert command.main(["logs", one], env=gce.env) == ExitCode.DONE
        assert command.main(["ssh", one], env=gce.env) == ExitCode.DONE

    gce.stockout(zone="us-central1-b")
    gce.fail("drop after", call=CREATION)  # So the launcher looks up the operation.
    run_job(first, one, gce, lose_one, gce.env)

    gce.add_image(gce.project, "mine-1", family="mine")
    gce.add_subnetwork("us-central1", "inner")
    open_to_all = {"network": "global/networks/default", "accessConfigs": [{}]}
    gce.add_template("t", {"tags": {"items": ["a"]}, "networkInterfaces": [open_to_all]})
    fields = {"template": "t", "image": f"projects/{gce.project}/global/images/mine-1"}
    second = config(tmp_path, two, gce.project, **fields, capacity_options=[OPTION])

    def reach_one() -> None:
        gce.wait_for(gce.vms)
        assert command.main(["ssh", two], env=gce.env) == ExitCode.DONE

    assert capsys.readouterr().out.count(" --tunnel-through-iap\n") == 1
    run_job(second, two, gce, reach_one, gce.env)
    (line,) = (
        n for n in capsys.readouterr().out.splitlines() if n.startswith("gcloud compute ssh")
    )
    assert line.endswith(f" --zone us-central1-a --project {gce.project}"), "it has an address"

    run_queued_job(tmp_path, f"gs://{gcs_bucket}/four", gce, image=family)
    gce.remove_machine("us-east4-a", "a2-highgpu-1g")
    absent = {**OPTION, "zones": ["us-east4-a"]}
    gce.end_private_access("us-central1", "inner")
    gce.add_nat("us-central1")
    gce.reserve("us-central1-a", "mine", machine="a2-highgpu-1g", count=1)
    reserved = {**OPTION, "kind": "reservation", "reservation": "mine"}
    options = [OPTION, absent, reserved, {**reserved, "reservation": "none"}]
    fields = {"image": family, "subnetworks": ["inner"], "capacity_options": options}
    with pytest.raises(ConfigError, match="us-east4-a has no a2-highgpu-1g"):
        command.main(["up", config(tmp_path, three, gce.project, **fields)], env=gce.env)

    compared, others = table()
    needed = set(gce.calls().permissions)
    assert needed <= compared | others, "the table lacks some permissions"
    assert compared <= needed, "some are not needed: mark them as not compared, with the reason"
    assert not others & needed, "some are needed: mark them as compared"
