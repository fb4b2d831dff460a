"""A VM that was made with a notice of preemption tells its door how long that is; others do not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.launch import instance_spec
from jaxres.launch.instance_spec import NOTICE, Machine
from jaxres.launch.paths import Places
from jaxres.launch.vm_agent import Agent
from jaxres.storage.path import BucketPath
from tests.unit.launch.gce_config import RUNG, config

RUN = BucketPath("bkt", "runs/first")


def asked(rung: dict[str, Any], *, is_refused: bool = False) -> tuple[int, str | None]:
    """Returns the seconds that are asked for, and those that the VM is told."""
    gce = config(ladder=[rung]).launch.gce
    assert gce is not None
    machine = Machine(gce, gce.ladder[0], "us-central1-a", {}, {"a": "b"})
    found = machine.without_notice(is_refused).properties()
    items = {item["key"]: item["value"] for item in found["metadata"]["items"]}
    assert items.pop("a") == "b"
    told = items.pop(NOTICE, None)
    assert not items
    return found["scheduling"].get("preemption_notice_duration", {}).get("seconds", 0), told


def test_a_vm_is_told_of_a_notice_exactly_if_it_was_made_with_one() -> None:
    assert asked(RUNG) == (120, "120")
    assert asked(RUNG, is_refused=True) == (0, None)
    assert asked(RUNG | {"notice_seconds": 0}) == (0, None)
    assert asked(RUNG | {"kind": "standard"}) == (0, None)


@pytest.mark.parametrize(
    ("curl", "seconds"),
    [("echo 120", "120"), ("exit 22", "0"), ("echo '<html>'", "0"), ("echo; exit 7", "0")],
)
def test_a_metadata_server_that_does_not_tell_means_no_notice(
    tmp_path: Path, curl: str, seconds: str
) -> None:
    gce = config().launch.gce
    assert gce is not None
    text = instance_spec.script(gce, RUN, RUN / "launch/code/0.tar.gz", 64 * "0")
    head, _, rest = text.partition("name=$(ask instance/name)\n")
    reads = rest.partition('mkdir -p "$base"\n')[0]
    fake = tmp_path / "curl"
    fake.write_text(f'#!/bin/bash\ncase "$*" in *attributes/{NOTICE}) {curl} ;; esac\n')
    fake.chmod(0o755)
    found = subprocess.run(
        ["bash", "-c", f'{head}{reads}echo "$notice"'],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    assert found.stdout == f"{seconds}\n"


@pytest.mark.parametrize(("told", "seconds"), [(0.0, 30.0), (120.0, 120.0), (10.0, 30.0)])
def test_an_agent_believes_a_longer_notice_than_the_configs_and_no_shorter(
    tmp_path: Path, told: float, seconds: float
) -> None:
    agent = Agent(
        Places(RUN), name="jx-0", folder=tmp_path, clock=SystemClock(), notice_seconds=told
    )
    assert agent._preemption(config()).notice_seconds == seconds
