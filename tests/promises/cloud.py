"""A cloud on loopback: processes as VMs, a bucket, and launchers that may be killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxres.faults import RunError
from jaxres.launch.gce import command as gce
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.observed_state import AgentReport
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from jaxres_emulators.gcs import GcsServer
from tests.promises import forks
from tests.promises.trainer import FAULTY, ROOT, run_history
from tests.waiting import SURE_SECONDS, wait_until

OPTION = {"machine_type": "a2-highgpu-1g", "zones": ["us-central1-a"], "dollars_per_hour": 1.5}
SPOT = {"kind": "spot", **OPTION}
SOON_LOST = {"lost_seconds": 6.0, "confirm_lost_seconds": 12.0}


@dataclass
class Launcher:
    """A `launch gce` process and its output."""

    process: forks.Process
    output: Path

    @property
    def has_exited(self) -> bool:
        return self.process.poll() is not None

    def printed(self) -> str:
        return self.output.read_text()

    def wait_exit(self, seconds: float = SURE_SECONDS) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher still runs:\n{self.printed()}") from None

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(sig)


@dataclass
class Cloud:
    """The emulated cloud of a launcher, and its run."""

    gce: GceEmulator
    gcs: GcsServer
    run: GcsPath
    root: Path
    caches: Path
    env: dict[str, str]
    launchers: list[Launcher] = field(default_factory=list)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.run)

    @property
    def launch_paths(self) -> LaunchPaths:
        return LaunchPaths(self.run)

    def config(
        self,
        *,
        capacity_options: list[dict[str, Any]] | None = None,
        fork: bool = True,
        **gce: Any,
    ) -> Path:
        """Writes a config for the faulty model on VMs of this cloud.

        Without `fork`, VMs that run one attempt import nothing for a next one. With HELD in `env`
        the workers are held in that step of theirs until `go_on`. The agent of a busy machine is
        silent for seconds: a test in which one is lost sets a short `lost_seconds` (SOON_LOST).
        """
        if "HELD" in gce.get("env", {}):
            gce["env"] = {**gce["env"], "HELD": f"{gce['env']['HELD']}:{self._gate}"}
        package = self.root / "package"
        if not package.exists():
            (package / "tests" / "promises").mkdir(parents=True)
            shutil.copy(ROOT / "tests/promises/faulty.py", package / "tests/promises")
        section = {
            "project": self.gce.project,
            "num_hosts": 1,
            "capacity_options": capacity_options or [SPOT],
            "image": "projects/debian-cloud/global/images/family/debian-12",
            "runtime": {"kind": "python", "python": sys.executable},
            "package": str(package),
            "lease_seconds": 4.0,
            "lost_seconds": 60.0,
            "confirm_lost_seconds": 120.0,
            **gce,
        }
        overrides = {
            "base": str(FAULTY),
            "run": {"dir": str(self.run)},
            "data": {"cache_dir": str(self.caches)},
            "compilation": {"cache_dir": str(self.caches / "xla")},
            "restart": {"backoff_seconds": 0.1, "fork": fork},
            "launch": {"gce": section},
        }
        path = self.root / f"config-{len(list(self.root.glob('config-*')))}.yaml"
        path.write_text(json.dumps(overrides))
        return path

    @property
    def _gate(self) -> Path:
        return self.root / "held-gate"

    def go_on(self) -> None:
        """Ends the hold of workers with HELD, now or when they come to it."""
        self._gate.touch()

    def wait_printed_on_vms(self, text: str) -> None:
        """Waits until a supervisor or worker on a VM has printed a text."""
        self.wait(
            lambda: any(text in p.read_text() for p in self.gce.root.rglob("output-*.txt")), of=text
        )

    def launch(self, *arguments: str, verb: str = "up", **env: str) -> Launcher:
        """Starts `launch gce VERB` with these arguments."""
        return self.start([sys.executable, "-m", "jaxres.launch", "gce", verb, *arguments], **env)

    def start(self, command: list[str], **env: str) -> Launcher:
        """Starts a launcher."""
        output = self.root / f"launcher-{len(self.launchers)}.txt"
        env = {**os.environ, **self.env, "PYTHONUNBUFFERED": "1", **env}
        with output.open("wb") as file:
            process = forks.start(command, env=env, output=file)
        self.launchers.append(Launcher(process, output))
        return self.launchers[-1]

    def up(self, config: Path, *arguments: str) -> Launcher:
        return self.launch(str(config), *arguments)

    def run_here(self, verb: str, target: object = None) -> int:
        """Runs a verb of `launch gce` in this process, as a process of it imports for seconds."""
        return gce.main([verb, str(target or self.run)], env={**os.environ, **self.env})

    def desired_state(self) -> DesiredState | None:
        return StateObject(self.launch_paths.desired_state).read()

    def reports(self) -> dict[str, AgentReport | None]:
        listed = gcs_objects.list_metadata(self.launch_paths.reports)
        return {name: AgentReport.of(metadata) for name, (_, metadata) in listed.items()}

    def wait(self, what: Callable[[], object], *, of: str, seconds: float = SURE_SECONDS) -> None:
        """Waits for a condition; fails with the output of the launchers."""
        wait_until(what, lambda: f"{of}\n{self.describe()}\n", seconds=seconds)

    def wait_commit(self, step: int) -> None:
        self.wait(lambda: run_history(self.run_dir).step >= step, of=f"commit of step {step}")

    def member(self, host: int) -> str:
        """Returns the VM of a host of the current attempt."""
        desired = self.desired_state()
        assert desired is not None
        return desired.attempt.hosts[host].name

    def describe(self) -> str:
        """Returns all outputs and the desired state, for failure messages."""
        printed = "\n".join(f"launcher:\n{launcher.printed()}" for launcher in self.launchers)
        vms = "\n".join(f"{n} ({s}):\n{self.gce.output(n)}" for n, s in self.gce.vms().items())
        parts = sorted(self.gce.root.rglob("output-*.txt"))
        logs = "\n".join(f"{p.name}:\n{p.read_text()[-3000:]}" for p in parts)
        try:
            desired: object = self.desired_state()
        except RunError as error:
            desired = error
        return f"{printed}\n{vms}\n{logs}\n{json.dumps(repr(desired))}"

    def assert_nothing_is_left(self) -> None:
        """Asserts that no VM and no process of a VM exists."""
        assert self.gce.vms() == {}, self.describe()
        assert self.gce.pids() == [], self.describe()

    def end_all(self) -> None:
        for launcher in self.launchers:
            if launcher.process.poll() is None:
                launcher.process.kill()
                launcher.process.wait()
