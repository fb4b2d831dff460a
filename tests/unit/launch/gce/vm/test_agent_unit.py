"""Promises of the agent's unit: systemd accepts it, keeps the agent alive, and lets a save end."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxres.launch.gce.vm import instance_spec
from tests.unit.launch.gce.vm.test_startup_script import RUNTIMES, rendered
from tests.unit.launch.gce_config import config
from tests.waiting import SURE_SECONDS

SECRET = "se-cret.1"
ANALYZE = shutil.which("systemd-analyze")


def unit_of(script: str, base: Path) -> str:
    """Returns the unit that the script writes on a VM with that folder."""
    _, begin, rest = script.partition("  escaped=")
    body, end, _ = rest.partition("\nUNIT\n")
    assert begin, "the script writes no unit"
    assert end, "the script writes no unit"
    text = (begin + body + end).replace("> /run/systemd/system/jaxres-agent.service", "")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env={"base": str(base), "name": "jx-0000", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=SURE_SECONDS,
    )
    return done.stdout


def settings(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def unit(kind: str, base: Path, **gce: Any) -> str:
    return unit_of(rendered(RUNTIMES[kind].model_dump(mode="json"), **gce), base)


@pytest.mark.parametrize("kind", RUNTIMES)
@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is missing")
def test_systemd_accepts_the_unit(kind: str, tmp_path: Path) -> None:
    assert ANALYZE is not None
    base = tmp_path / "100% a home" / ".jaxres-vm"
    base.mkdir(parents=True)
    for name in ("agent", "stopped"):
        (base / name).write_text("#!/bin/sh\n")
        (base / name).chmod(0o755)
    path = tmp_path / "jaxres-agent.service"
    path.write_text(unit(kind, base))
    done = subprocess.run(
        [ANALYZE, "verify", "--man=no", path], capture_output=True, text=True, timeout=SURE_SECONDS
    )
    found = [line for line in done.stderr.splitlines() if "jaxres" in line]
    assert (done.returncode, found) == (0, []), done.stderr


def test_the_agent_is_started_again_without_a_limit_and_alone_gets_sigterm(tmp_path: Path) -> None:
    found = settings(unit("bare", tmp_path / ".jaxres-vm"))
    assert found["Restart"] == "always"
    assert found["StartLimitIntervalSec"] == "0", "systemd gives the agent up after some restarts"
    assert float(found["RestartSec"]) < 8, "a VM whose agent is silent for so long is suspected"
    assert found["KillMode"] == "mixed"
    assert found["OOMPolicy"] == "continue"
    assert found["Environment"] == f'"HOME={tmp_path}"'


def test_a_save_may_take_as_long_as_the_deadlines_of_the_config_let_it(tmp_path: Path) -> None:
    usual = config()
    longer = usual.model_copy(
        update={"deadlines": usual.deadlines.model_copy(update={"save_seconds": 7200.0})}
    )
    assert instance_spec.stop_seconds(longer) > 7200 + usual.deadlines.step_seconds
    assert settings(unit("bare", tmp_path))["TimeoutStopSec"] == str(
        instance_spec.stop_seconds(usual)
    )


def test_only_the_unit_of_a_container_waits_for_docker(tmp_path: Path) -> None:
    for key in ("After", "Wants"):
        expected = "network-online.target"
        assert settings(unit("bare", tmp_path))[key] == expected
        assert settings(unit("container", tmp_path))[key] == f"{expected} docker.service"


@pytest.mark.parametrize("kind", RUNTIMES)
def test_no_value_of_the_environment_is_in_the_unit(kind: str, tmp_path: Path) -> None:
    assert SECRET not in unit(kind, tmp_path, env={"WANDB_API_KEY": SECRET})
