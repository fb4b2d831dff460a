"""Promises of the agent's container: at most one at a time, whichever process dies; it may save."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxres.launch.gce.vm import instance_spec
from tests.emulators import docker
from tests.unit.launch.gce.vm.test_startup_script import agent_script, rendered
from tests.unit.launch.gce_config import config
from tests.waiting import SURE_SECONDS, wait_until

NAME = "jaxres-jx-0000"
SECRET = "se-cret.1"
PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then exit 0; fi
trap 'echo SIGTERM >> "$HOME/signals"; exit 0' TERM
echo started >> "$HOME/starts"
while :; do sleep 0.05; done
"""
"""In the place of the agent: records a SIGTERM and ends."""


class Vm:
    """A VM with docker, and the script that starts its agent."""

    def __init__(self, root: Path) -> None:
        self.docker, self.home = root / "docker", root / "home"
        self.home.mkdir()
        docker.install(root / "bin", state=self.docker)
        python = root / "bin" / "python3"
        python.write_text(PYTHON)
        python.chmod(0o755)
        runtime = {"kind": "container", "image": "gcr.io/p/i", "flags": ["--name=other"]}
        self.agent = agent_script(rendered(runtime, env={"WANDB_API_KEY": SECRET}), self.home)
        self.env = {"PATH": f"{root / 'bin'}:/usr/bin:/bin"}
        self.clients: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the agent's script, which becomes the client of docker."""
        self.clients.append(subprocess.Popen([self.agent], env=self.env))
        return self.clients[-1]

    def start_and_wait(self) -> subprocess.Popen[bytes]:
        before = len(docker.started(self.docker, NAME))
        client = self.start()

        def is_started() -> bool:
            assert client.poll() is None, "no container is started"
            assert {*docker.running(self.docker)} <= {NAME}, "it has not the name of its VM"
            return len(docker.started(self.docker, NAME)) > before

        wait_until(is_started)
        wait_until(lambda: self.written("starts").count("started") > before)
        return client

    def written(self, name: str) -> str:
        """Returns the text that processes in the agent's place have written to a file."""
        path = self.agent.parent / name
        return path.read_text() if path.exists() else ""

    def signals(self) -> str:
        return self.written("signals")

    def end(self) -> None:
        (self.docker / "down").unlink(missing_ok=True)
        for client in self.clients:
            client.kill()
            client.wait()
        for name in docker.running(self.docker):
            done = subprocess.run(
                ["docker", "rm", "--force", name], env=self.env, timeout=SURE_SECONDS
            )
            assert done.returncode == 0
        assert docker.running(self.docker) == {}


@pytest.fixture
def vm(tmp_path: Path) -> Iterator[Vm]:
    vm = Vm(tmp_path)
    yield vm
    vm.end()


@pytest.mark.slow
def test_a_container_whose_client_was_killed_ends_before_another_one_starts(vm: Vm) -> None:
    vm.start_and_wait().kill()
    (first,) = docker.running(vm.docker).values()
    os.kill(first, 0)  # It outlives its client.
    vm.start_and_wait()
    (second,) = docker.running(vm.docker).values()
    assert second != first
    assert docker.most_at_once(vm.docker, NAME) == 1, "two containers ran at the same time"
    assert vm.signals() == "SIGTERM\n", "the first one could not save"


@pytest.mark.slow
def test_a_container_that_outlives_docker_stays_alone(vm: Vm) -> None:
    client = vm.start_and_wait()
    (vm.docker / "down").touch()
    assert client.wait(timeout=SURE_SECONDS) == 125
    assert vm.start().wait(timeout=SURE_SECONDS) == 125, "it starts without docker"
    assert len(docker.running(vm.docker)) == 1
    (vm.docker / "down").unlink()
    vm.start_and_wait()
    assert docker.most_at_once(vm.docker, NAME) == 1
    assert vm.signals() == "SIGTERM\n"


@pytest.mark.slow
def test_a_sigterm_for_the_client_reaches_the_agent_in_the_container(vm: Vm) -> None:
    client = vm.start_and_wait()
    client.terminate()
    assert client.wait(timeout=SURE_SECONDS) == 0
    assert vm.signals() == "SIGTERM\n"
    assert docker.running(vm.docker) == {}


@pytest.mark.slow
def test_a_save_in_a_container_may_take_as_long_as_the_config_lets_it(vm: Vm) -> None:
    vm.start_and_wait()
    (start,) = docker.started(vm.docker, NAME)
    assert start["stop_timeout"] == instance_spec.stop_seconds(config())


@pytest.mark.slow
def test_the_check_of_the_python_leaves_a_running_container_alone(vm: Vm) -> None:
    client = vm.start_and_wait()
    done = subprocess.run([vm.agent, "check"], env=vm.env, timeout=SURE_SECONDS)
    assert done.returncode == 0
    assert len(docker.started(vm.docker, NAME)) == 1
    assert client.poll() is None


@pytest.mark.slow
def test_a_stopped_unit_leaves_no_container(vm: Vm) -> None:
    """`stopped` is what systemd runs after the client has ended in whatever way."""
    vm.start_and_wait().kill()
    _, begin, rest = rendered({"kind": "container", "image": "i"}).partition(
        'cat > "$base/stopped"'
    )
    text = begin + rest.partition('chmod +x "$base/stopped"\n')[0]
    env = {**vm.env, "base": str(vm.agent.parent), "name": "jx-0000"}
    subprocess.run(["bash", "-c", text], check=True, timeout=SURE_SECONDS, env=env)
    for _ in range(2):  # systemd takes the stop for a failure unless it exits with 0.
        stopped = ["bash", str(vm.agent.parent / "stopped")]
        subprocess.run(stopped, check=True, timeout=SURE_SECONDS, env=vm.env)
        assert docker.running(vm.docker) == {}, "it trains on without its unit"
    assert vm.signals() == "SIGTERM\n"


@pytest.mark.slow
def test_values_of_the_environment_are_on_no_command_line(vm: Vm) -> None:
    vm.start_and_wait()
    (pid,) = docker.running(vm.docker).values()
    assert f"WANDB_API_KEY={SECRET}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    assert not [entry for entry in docker.log(vm.docker) if SECRET in str(entry)]


@pytest.mark.slow
def test_the_stand_in_refuses_what_docker_does_not_know(vm: Vm) -> None:
    for words in (["run", "--nome=x", "i"], ["start", "x"], ["stop", "absent"], ["rm", "absent"]):
        done = subprocess.run(
            ["docker", *words], env=vm.env, timeout=SURE_SECONDS, capture_output=True
        )
        assert done.returncode != 0, words
    vm.start_and_wait()
    again = ["run", "--rm", f"--name={NAME}", "--entrypoint=true", "-w/", "i"]
    done = subprocess.run(["docker", *again], env=vm.env, timeout=SURE_SECONDS, capture_output=True)
    assert (done.returncode, b"already in use" in done.stderr) == (125, True), done.stderr
