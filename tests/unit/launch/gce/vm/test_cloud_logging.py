"""Promises of Cloud Logging: the Ops Agent is configured once, and a user's file is not touched."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from jaxres.launch.gce.vm import startup_parts
from tests.unit.launch.gce.vm.test_startup_script import RUNTIMES, rendered
from tests.waiting import SURE_SECONDS

SYSTEMCTL = """#!/bin/bash
case "$1 $2" in
'cat google-cloud-ops-agent.service') [ -e "$HOME/installed" ] ;;
*) echo "$*" >> "$HOME/calls"; [ ! -e "$HOME/refuses" ] ;;
esac
"""
DEFAULT = "# Copyright Google\n\n# <== Enter custom agent configurations in this file.\n"
"""The file of a fresh installation."""
OWN = f"{DEFAULT}logging:\n  service:\n    pipelines:\n      default_pipeline: {{receivers: []}}\n"
FILE = "/etc/google-cloud-ops-agent/config.yaml"
RUNTIME = RUNTIMES["bare"].model_dump(mode="json")


class Vm:
    """A VM whose folder stands in for /etc, on which the part of the script runs."""

    def __init__(self, root: Path) -> None:
        self.root, self.file = root, root / "etc" / "config.yaml"
        (root / "bin").mkdir()
        (root / "bin" / "systemctl").write_text(SYSTEMCTL)
        (root / "bin" / "systemctl").chmod(0o755)
        (root / ".jaxres-vm").mkdir()

    def run(self, **gce: object) -> str:
        """Runs the part of the startup script; returns what it prints."""
        script = rendered(RUNTIME, **gce)
        head = script.partition("name=$(metadata_value instance/name)\n")[0]
        part = script.partition('rm -f "$base/power_off"\n')[2].partition("\nbegin python\n")[0]
        part = part.partition('\nif [ "$gpus" -gt 0 ]')[0]
        done = subprocess.run(
            [
                "bash",
                "-c",
                f"{head}has_systemd() {{ true; }}\n{part}".replace(FILE, str(self.file)),
            ],
            env={"HOME": str(self.root), "PATH": f"{self.root / 'bin'}:/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SURE_SECONDS,
        )
        assert done.returncode == 0, f"it ends the startup script: {done.stdout}"
        return done.stdout

    def write(self, text: str) -> None:
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(text)

    def restarts(self) -> int:
        calls = self.root / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        assert set(lines) <= {"--no-block restart google-cloud-ops-agent"}
        return len(lines)


@pytest.fixture
def vm(tmp_path: Path) -> Vm:
    (tmp_path / "installed").touch()
    return Vm(tmp_path)


@pytest.mark.parametrize("before", [None, "", DEFAULT])
def test_the_ops_agent_is_configured_once(vm: Vm, before: str | None) -> None:
    if before is not None:
        vm.write(before)
    assert "console lines go to Cloud Logging" in vm.run()
    found = yaml.safe_load(vm.file.read_text())["logging"]
    assert found["receivers"]["jaxres"] == {
        "type": "files",
        "include_paths": [f"{vm.root}/.jaxres-vm/output-*.txt"],
    }
    assert set(found["service"]["pipelines"]) == {"jaxres", "jaxres_agent"}, (
        "the pipeline of the built-in configuration is replaced"
    )
    for pipeline in found["service"]["pipelines"].values():
        assert set(pipeline["receivers"]) <= set(found["receivers"])
        assert set(pipeline.get("processors", ())) <= set(found["processors"])
    assert vm.run() == "", "a second boot configures it again"
    assert vm.restarts() == 1


def test_a_file_of_an_older_jaxres_is_replaced(vm: Vm) -> None:
    vm.run()
    vm.file.write_text(vm.file.read_text().replace("output-*", "other"))
    vm.run()
    assert "output-*.txt" in vm.file.read_text()
    assert vm.restarts() == 2


def test_a_configuration_of_the_user_is_left_as_it_is(vm: Vm) -> None:
    vm.write(OWN)
    printed = vm.run()
    assert vm.file.read_text() == OWN, "the user's configuration is lost"
    assert "has a configuration already, which is left as it is" in printed
    assert vm.restarts() == 0


def test_nothing_happens_without_the_ops_agent_or_if_it_is_off(vm: Vm) -> None:
    assert vm.run(cloud_logging="off") == ""
    (vm.root / "installed").unlink()
    assert vm.run() == ""
    assert not vm.file.parent.exists()
    assert vm.restarts() == 0


def test_an_ops_agent_that_can_not_be_restarted_does_not_end_the_startup_script(vm: Vm) -> None:
    (vm.root / "refuses").touch()
    assert "the Ops Agent can't be configured" in vm.run()


def test_the_docs_have_the_lines_for_a_configuration_of_your_own() -> None:
    page = Path(__file__).parents[5] / "docs" / "gce-reference.md"
    assert startup_parts.OPS_AGENT_CONFIG.replace("@BASE@", "/root/.jaxres-vm") in page.read_text()
