"""A stand-in for SkyPilot: a check of tasks, and the controller of a managed job.

    check(task)                              # refuses what SkyPilot's schema does not have
    after_exits(task, [81, 137])             # what follows the exits of the nodes
    job = ManagedJob(folder, env); job.launch(text); job.wait(...)       # runs it as processes

Fields and rules are written after SkyPilot 0.14: sky/utils/schemas.py,
sky/jobs/recovery_strategy.py (should_restart_on_failure), sky/backends/task_codegen.py
(get_or_fail): the first node that exits with another code than 0 ends the others, whose code is
then 137.

A node is a process of this machine. What it does not have: clouds, images, setup, capacity.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.emulators import polling

ROOT = Path(__file__).parents[2]
KILL_SECONDS = 30.0
"""From SIGTERM to SIGKILL of the other nodes (sky/skylet/subprocess_daemon.py)."""
FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "num_nodes": int,
    "resources": dict,
    "workdir": str,
    "secrets": dict,
    "setup": str,
    "run": str,
}
RESOURCES: Mapping[str, type | tuple[type, ...]] = {
    "infra": str,
    "accelerators": dict,
    "use_spot": bool,
    "disk_size": int,
    "image_id": str,
    "job_recovery": dict,
}
RECOVERY: Mapping[str, type | tuple[type, ...]] = {
    "strategy": str,
    "max_restarts_on_errors": int,
    "recover_on_exit_codes": list,
}
NAME = re.compile("[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")
DONE, AGAIN, FAILED = "SUCCEEDED", "RECOVERING", "FAILED"


class Refused(Exception):
    """A task that SkyPilot would refuse."""


def check(task: Mapping[str, Any]) -> None:
    """Refuses a task with fields, types or values that SkyPilot does not accept."""
    _check_types(task, FIELDS)
    _check_types(task["resources"], RESOURCES)
    recovery = task["resources"]["job_recovery"]
    _check_types(recovery, RECOVERY)
    codes = recovery["recover_on_exit_codes"]
    if len(set(codes)) < len(codes) or not all(0 <= code <= 255 for code in codes):
        raise Refused(f"recover_on_exit_codes {codes}")
    if recovery["strategy"] not in ("EAGER_NEXT_REGION", "FAILOVER"):
        raise Refused(f"strategy {recovery['strategy']}")
    if NAME.fullmatch(task["name"]) is None:
        raise Refused(f"name {task['name']}")


def _check_types(found: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if name not in types or type(value) is not types[name]:
            raise Refused(f"{name}: {value!r}")


def after_exits(task: Mapping[str, Any], codes: Sequence[int], *, failed_before: int = 0) -> str:
    """Returns the reaction of SkyPilot to the exits of all nodes, none of which is lost.

    Args:
      task: its rules.
      codes: exit code of each node.
      failed_before: failures that have used up restarts before.
    """
    if not any(codes):
        return DONE
    recovery = task["resources"]["job_recovery"]
    if set(codes) & set(recovery["recover_on_exit_codes"]):
        return AGAIN
    return AGAIN if failed_before < recovery["max_restarts_on_errors"] else FAILED


@dataclass
class ManagedJob:
    """Runs the script of a task on each node, until the job ends."""

    folder: Path
    env: Mapping[str, str]
    task: dict[str, Any] = field(default_factory=dict)
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    """What followed each end of the nodes; `lost` if one was lost."""
    codes: list[list[int]] = field(default_factory=list)
    """Exit codes of the nodes at each end."""
    ended: dict[int, int] = field(default_factory=dict)
    state: str = "RUNNING"

    def launch(self, text: str) -> None:
        """Checks the task, and starts its nodes."""
        self.task = yaml.safe_load(text)
        check(self.task)
        self._start()

    def wait(self, condition: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Runs the controller until a condition holds."""
        polling.wait(condition, self._reconcile, seconds=seconds, what=what, printed=self.printed)

    def lose(self, rank: int) -> None:
        """Takes a node away, without notice, and creates others."""
        os.killpg(self.nodes[rank].pid, signal.SIGKILL)
        self.nodes[rank].wait()
        self.actions.append("lost")
        self.end()
        self._start()

    def printed(self) -> str:
        """Returns the output of all nodes."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("node-*.txt")))

    def end(self) -> None:
        """Kills what still runs."""
        for node in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        script = self.task["run"].replace(":8470", f":{port}")
        number = self.task["num_nodes"]
        self.nodes = [self._start_node(script, rank, number) for rank in range(number)]
        self.ended = {}

    def _start_node(self, script: str, rank: int, number: int) -> subprocess.Popen[bytes]:
        env = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": str(number)}
        env["SKYPILOT_NODE_IPS"] = "127.0.0.1\n" * number
        home = self.folder / f"home-{rank}"
        home.mkdir(exist_ok=True)
        output = self.folder / f"node-{len(self.actions):03d}-{rank}.txt"
        with output.open("ab") as file:
            return subprocess.Popen(
                ["bash", "-c", script],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **self.env, **env, "HOME": str(home)},
                process_group=0,
            )

    def _reconcile(self) -> None:
        if self.state != "RUNNING":
            return
        for rank, node in enumerate(self.nodes):
            if rank not in self.ended and (code := node.poll()) is not None:
                self.ended[rank] = 128 - code if code < 0 else code
        if any(self.ended.values()):
            self._end_others()
        if len(self.ended) < len(self.nodes):
            return
        codes = [self.ended[rank] for rank in range(len(self.nodes))]
        self.codes.append(codes)
        self.actions.append(after_exits(self.task, codes))
        if self.actions[-1] == AGAIN:
            self.end()
            self._start()
        else:
            self.state = self.actions[-1]

    def _end_others(self) -> None:
        others = [rank for rank in range(len(self.nodes)) if rank not in self.ended]
        for rank in others:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.nodes[rank].pid, signal.SIGTERM)
        for rank in others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.nodes[rank].wait(KILL_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.nodes[rank].pid, signal.SIGKILL)
            self.nodes[rank].wait()
            self.ended[rank] = 137
