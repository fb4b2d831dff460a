"""Under a real systemd an agent comes back after every death, and a stop ends by a save."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxres import config as configs
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.state.desired_state import DesiredState, HostAddress, JobAttempt
from jaxres.launch.gce.state.observed_state import AgentReport
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.launch.gce.vm import code_package, instance_spec
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from tests.emulators import docker
from tests.promises import booted_systemd
from tests.promises.booted_systemd import Systemd
from tests.promises.cloud import SPOT
from tests.promises.trainer import FAULTY, ROOT, run_history
from tests.waiting import SURE_SECONDS

NAME, UNIT = "jx-run-0000", "jaxres-agent"
CONTAINER = f"jaxres-{NAME}"
HELD_STEP = 15
"""The training waits for a row of this step."""
CGROUP = f"/sys/fs/cgroup/system.slice/{UNIT}.service"
CURL = """#!/bin/bash
case "$*" in
*computeMetadata*token) echo '{"access_token": "t"}' ;;
*computeMetadata*instance/name) echo NAME ;;
*computeMetadata*) exit 22 ;;
*) exec /usr/bin/curl "$@" ;;
esac
"""
"""The metadata server; GCE_METADATA_HOST, by which an emulator is named, rules out systemd."""
RECORDER = """
echo $$ > "$1/cgroup.procs"
trap 'echo SIGTERM >> "$2"; exit' TERM
echo ready >> "$2"
while :; do sleep 0.1; done
"""
"""A process of the unit, as a user's code may start one: records each SIGTERM."""


@dataclass
class Vm:
    """A VM whose first process is a systemd."""

    root: Path
    run: GcsPath
    systemd: Systemd
    config: str
    """Digest of the config of its run."""
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def paths(self) -> LaunchPaths:
        return LaunchPaths(self.run)

    def report(self) -> AgentReport | None:
        found = gcs_objects.list_metadata(self.paths.reports).get(NAME)
        return None if found is None else AgentReport.of(found[1])

    def main_pid(self) -> int:
        """Returns the pid of the unit's main process in the namespace; 0: there is none."""
        return int(self.systemd.show(UNIT, "MainPID")["MainPID"])

    def describe(self) -> str:
        printed = [self.systemd.output, *self.root.rglob("output-*.txt")]
        state = self.systemd.run("systemctl", "status", "--no-pager", UNIT).stdout
        return "\n".join([*(f"{p.name}:\n{p.read_text()[-4000:]}" for p in printed), state])

    def wait(self, what: Callable[[], object], *, of: str) -> None:
        until = time.monotonic() + SURE_SECONDS
        while not what():
            assert time.monotonic() < until, f"no {of}\n{self.describe()}"
            time.sleep(0.05)

    def is_up(self) -> bool:
        state = self.systemd.show(UNIT, "ActiveState")["ActiveState"]
        assert state != "failed", f"systemd starts the agent no more\n{self.describe()}"
        return state == "active"

    def kill_main(self) -> None:
        """Kills the unit's main process, and waits until another one is there."""
        self.wait(self.main_pid, of="main process")
        killed = self.main_pid()
        assert self.systemd.run("kill", "-KILL", str(killed)).returncode == 0
        self.wait(
            lambda: self.main_pid() not in (0, killed) and self.is_up(), of="restart by systemd"
        )

    def train(self) -> None:
        """Lets the agent start the first attempt, as the controller does."""
        hosts = (HostAddress(NAME, "127.0.0.1"),)
        attempt = JobAttempt(number=1, hosts=hosts, port=8476)
        state = DesiredState("jx-run", "", self.config, phase="running", attempt=attempt)
        StateObject(self.paths.desired_state).write(state, epoch=1)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*self.systemd.through, *arguments], stdout=subprocess.PIPE)
        self.others.append(process)
        return process


def written_config(root: Path, run: GcsPath, caches: Path, **gce: Any) -> Path:
    package = root / "package"
    (package / "tests" / "promises").mkdir(parents=True)
    shutil.copy(ROOT / "tests/promises/faulty.py", package / "tests/promises")
    section = {
        "project": "p",
        "capacity_options": [SPOT],
        "image": "projects/p/global/images/i",
        "package": str(package),
        **gce,
    }
    path = root / "config.yaml"
    overrides = {
        "base": str(FAULTY),
        "run": {"dir": str(run)},
        "data": {"cache_dir": str(caches)},
        "compilation": {"cache_dir": str(caches / "xla")},
        "launch": {"gce": section},
    }
    path.write_text(json.dumps(overrides))
    return path


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


RUNTIMES: dict[str, dict[str, Any]] = {
    "python": {"kind": "python", "python": sys.executable},
    "container": {"kind": "container", "image": "gcr.io/p/i", "flags": []},
}


@pytest.fixture
def vm(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    caches: Path,
    gcs_server: GcsServer,
    gcs_bucket: str,
) -> Iterator[Vm]:
    """A VM after its startup script; skips where no systemd can be booted."""
    if (obstacle := booted_systemd.obstacle()) is not None:
        pytest.skip(obstacle)
    folder, home, run = tmp_path / "bin", tmp_path / "home", GcsPath(gcs_bucket, "run")
    for each in (folder, home, caches):
        each.mkdir(exist_ok=True, parents=True)
    docker.install(folder, state=tmp_path / "docker")
    program(folder, "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program(folder, "curl", CURL.replace("NAME", NAME))
    env = {
        **gcs_server.env,
        "FAULT": f"row:{24 * HELD_STEP}:gate",
        "GATE": str(tmp_path / "gate"),
        "TMPDIR": str(home),
        "JAX_PLATFORMS": "cpu",
    }
    path = written_config(tmp_path, run, caches, env=env, runtime=RUNTIMES[request.param])
    loaded, paths = configs.load(path).config, LaunchPaths(run)
    assert loaded.launch.gce is not None
    code = instance_spec.upload(
        code_package.pack(loaded.launch.gce.package), paths.codes, ".tar.gz"
    )
    digest = instance_spec.upload(configs.dump_yaml(loaded).encode(), paths.configs, ".yaml")
    script = tmp_path / "startup.sh"
    script.write_text(instance_spec.startup_script(loaded, run, paths.code(code), code))
    path_variable = f"{folder}:/usr/bin:/bin"
    environment = {"PATH": path_variable, docker.CGROUP: "/sys/fs/cgroup/docker"}
    with booted_systemd.booted(tmp_path, writable=[caches], environment=environment) as systemd:
        vm = Vm(tmp_path, run, systemd, digest)
        own = {"HOME": str(home), "PATH": path_variable, **gcs_server.env}
        for _ in range(2):  # A VM may run it twice.
            done = systemd.run("bash", str(script), env=own, seconds=SURE_SECONDS)
            assert done.returncode == 0, done.stdout + vm.describe()
        assert f"the agent of {NAME} runs already" in done.stdout
        yield vm
    for process in vm.others:
        process.communicate(timeout=SURE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("vm", ["python"], indirect=True)
def test_an_agent_that_dies_ten_times_in_a_row_comes_back_each_time(vm: Vm) -> None:
    for _ in range(10):
        vm.kill_main()
    assert vm.systemd.show(UNIT, "NRestarts")["NRestarts"] == "10"
    vm.wait(lambda: (r := vm.report()) and r.state == "ready", of="report of the agent")


@pytest.mark.slow
@pytest.mark.parametrize("vm", ["container"], indirect=True)
def test_a_docker_client_that_dies_leaves_one_agent_on_its_vm(vm: Vm) -> None:
    state = vm.root / "docker"
    vm.wait(lambda: docker.started(state, CONTAINER), of="container")
    (first,) = docker.running(state).values()
    vm.kill_main()
    vm.wait(lambda: len(docker.started(state, CONTAINER)) == 2, of="another container")
    assert docker.most_at_once(state, CONTAINER) == 1, "two agents ran at the same time"
    assert [*docker.running(state)] == [CONTAINER]
    assert docker.running(state)[CONTAINER] != first


@pytest.mark.slow
@pytest.mark.parametrize("vm", ["container"], indirect=True)
def test_a_stop_of_the_unit_ends_the_training_by_a_save(vm: Vm) -> None:
    vm.train()
    run_dir, signals = RunDir(vm.run), vm.root / "signals"
    vm.wait(lambda: run_history(run_dir).step >= 10, of="commit")
    recorder = vm.start("bash", "-c", RECORDER, "recorder", CGROUP, str(signals))
    vm.wait(signals.exists, of="process of the unit")
    stopping = vm.start("systemctl", "stop", UNIT)
    vm.wait(
        lambda: any("SIGHUP" in p.read_text() for p in vm.root.rglob("output-*.txt")),
        of="request to save at the supervisor",
    )
    (vm.root / "gate").touch()
    assert stopping.wait(timeout=SURE_SECONDS) == 0, vm.describe()
    assert vm.systemd.show(UNIT, "ActiveState", "Result") == {
        "ActiveState": "inactive",
        "Result": "success",
    }, vm.describe()
    assert signals.read_text() == "ready\n", "not only the agent has got SIGTERM"
    assert recorder.wait(timeout=SURE_SECONDS) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    record = run_history(run_dir).last_stop
    assert record is not None, vm.describe()
    assert isinstance(record.body, AttemptEnded)
    assert (record.body.exit, record.body.committed) == (ExitCode.PREEMPTED, True)
    assert run_history(run_dir).step > 10, "the last steps are not saved"
    assert docker.running(vm.root / "docker") == {}
