"""`launch sky`: prints the task of a run on SkyPilot; and the process of its nodes.

SkyPilot replaces nodes; the process of a node restarts the training on it (task.py). All nodes
decide alike, from the run log, with the budgets of `launch local`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jaxres import config as configs
from jaxres import faults
from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig
from jaxres.config.argparser import Parser
from jaxres.exit_codes import SIGNAL_BASE, ExitCode, exit_name
from jaxres.faults import ConfigError, StorageUnavailable, UsageError
from jaxres.host import signals
from jaxres.host.processes import kill_me_with_parent
from jaxres.launch import argument_checks
from jaxres.launch.k8s import manifest as k8s_manifest
from jaxres.launch.sky import task as sky_task
from jaxres.launch.sky.task import TaskOptions
from jaxres.launch.storage_retry import with_retries
from jaxres.runlog import run_log
from jaxres.runlog.attempt_result import AttemptOutcome, AttemptResult, leave_record
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, Record, RunLog, SupervisorEnded
from jaxres.storage.path import RunPath, is_remote
from jaxres.storage.timeouts import write_with_timeout
from jaxres.supervisor import restart_policy
from jaxres.supervisor.attempt import print_message
from jaxres.supervisor.attempt_runner import RECORD_SECONDS, RESTART_VARIABLE
from jaxres.supervisor.restart_policy import GiveUp, Restart
from jaxres.supervisor.run_config import find_run_dir, parse_target
from jaxres.telemetry import stdio

COMMAND = "python -m jaxres.launch sky"
USAGE = """\
usage: python -m jaxres.launch sky CONFIG.yaml [section.field=value ...] run.dir=gs://BUCKET/RUN
           --print --image IMAGE|--setup LINE [--setup LINE ...] [--nodes N] [--gpus NAME:COUNT]
           [--spot] [--disk-gb G] [--infra CLOUD/REGION/ZONE] [--workdir FOLDER] [--python PATH]
           [--name NAME]

Prints the task of a job that trains with one process a node (sky jobs launch task.yaml). SkyPilot
creates other nodes after a preemption (75) and for a node that has failed (82); jaxres restarts the
training on them by itself. The job ends when the last step is committed (0), or an attempt ends
with what can't be retried (76, 78, 81, 83, 85), or a budget of restarts without a new commit is
used up (84).
--image: image with jaxres, whose user is root (docs/schedulers.md). --setup: line of the shell that
    installs jaxres on a new node; may be repeated. --workdir: folder that is copied to the nodes.
--gpus: GPUs of each node, as sky names them, such as H100:8. --spot: preemptible nodes.
--disk-gb: size of the disk of each node (as sky decides).
--infra: where (the cheapest place that sky finds).
--python: Python that has jaxres, on the nodes (/usr/local/bin/python with --image, else python).
"""
POLL_SECONDS = 0.5
END_SECONDS = 120.0
"""Longest wait for the end of an attempt on the other hosts: when one node has exited with another
code than 0, SkyPilot kills the processes of all others, a host that still saves among them."""
MAX_DISK_GB = 65536


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs `launch sky`; returns the exit code."""
    if arguments[:1] == ["node"]:
        return _node(arguments[1:], env=env, clock=SystemClock())
    target, overrides, given = _parse(arguments)
    loaded = configs.load(target, overrides)
    root = find_run_dir(loaded).root
    if not is_remote(root):
        raise ConfigError(
            f"run.dir={loaded.config.run.dir}: it would be lost with its nodes. Give a bucket: "
            "run.dir=gs://BUCKET/run"
        )
    options = _options(given, root)
    gpus = options.accelerators[1] if options.accelerators else 0
    argument_checks.require_feasible(loaded.config, nodes=options.nodes, gpus_per_node=gpus)
    stdio.write_result(sky_task.to_yaml(sky_task.task(loaded.config, root, options)))
    return ExitCode.DONE


def _parse(arguments: Sequence[str]) -> tuple[Path, list[str], argparse.Namespace]:
    parser = Parser(prog=COMMAND, usage=USAGE, add_help=False)
    for flag in ("--image", "--gpus", "--infra", "--workdir", "--python", "--name"):
        parser.add_argument(flag, default="")
    parser.add_argument("--setup", action="append", default=[])
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--disk-gb", type=int)
    parser.add_argument("--spot", action="store_true")
    parser.add_argument("--print", action="store_true")
    given, others = parser.parse_known_args(list(arguments))
    target, overrides = parse_target(others, command=COMMAND)
    if not given.print:
        raise UsageError(f"give --print (usage: `{COMMAND} --help`)")
    if not (given.image or given.setup):
        raise UsageError(
            "--image, --setup: how do the nodes get jaxres? Give an image that has it, or the "
            f"lines that install it (usage: `{COMMAND} --help`)"
        )
    return argument_checks.config_file(target), overrides, given


def _options(given: argparse.Namespace, root: RunPath) -> TaskOptions:
    """Returns the options of the task; raises UsageError for options that SkyPilot would refuse."""
    if given.image:
        argument_checks.image(given.image)
    argument_checks.number("--nodes", given.nodes, 1, argument_checks.MAX_NODES)
    if given.disk_gb is not None:
        argument_checks.number("--disk-gb", given.disk_gb, 1, MAX_DISK_GB)
    if given.infra:
        place = "CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE, such as gcp/us-central1"
        argument_checks.text("--infra", given.infra, r"[\w.*-]+(/[\w.:@*-]+){0,8}", place)
    python = given.python or ("/usr/local/bin/python" if given.image else "python")
    texts = [("--python", python), ("--workdir", given.workdir)]
    for flag, text in [*texts, *(("--setup", line) for line in given.setup)]:
        if not text.isprintable():
            raise UsageError(f"{flag} {text[:60]!r}: expected one line without control characters")
    name = argument_checks.job_name(given.name or k8s_manifest.object_name(root))
    if "---" in name:
        raise UsageError(f"--name {name!r}: sky takes at most two hyphens in a row")
    return TaskOptions(
        name=name,
        nodes=given.nodes,
        accelerators=_accelerators(given.gpus) if given.gpus else None,
        use_spot=given.spot,
        disk_gb=given.disk_gb,
        infra=given.infra,
        image=given.image,
        workdir=given.workdir,
        setup=tuple(given.setup),
        python=python,
    )


def _accelerators(text: str) -> tuple[str, int]:
    name, _, count = text.partition(":")
    expected = "GPUs and how many a node has, such as H100:8"
    argument_checks.text("--gpus", text, r"[A-Za-z][\w.-]{0,60}:[0-9]{1,9}", expected)
    most = argument_checks.MAX_GPUS
    if not 1 <= int(count) <= most:
        raise UsageError(f"--gpus {text!r}: expected from 1 to {most} GPUs a node")
    return name, int(count)


# The process of a node.


def _node(arguments: Sequence[str], *, env: Mapping[str, str], clock: Clock) -> int:
    """Trains on this node, attempt after attempt, until the job ends or needs other nodes."""
    target, overrides = parse_target(arguments, command=f"{COMMAND} node")
    loaded = configs.load(argument_checks.config_file(target), overrides)
    run_dir = find_run_dir(loaded)
    with signals.wakeup_fd() as wakeup:
        node = SkyNode(
            loaded.config,
            run_dir,
            clock=clock,
            wait=partial(signals.wait_for_stop, wakeup),
            train=partial(_train, arguments, env, wakeup),
            is_first=env.get("JAXRES_HOST_ID", "0") == "0",
        )
        return node.run()


@dataclass(frozen=True)
class SkyNode:
    """The restarts of one node; the attempts themselves are `train`."""

    config: RunConfig
    run_dir: RunDir
    _: dataclasses.KW_ONLY
    clock: Clock
    wait: Callable[[float], bool]
    """Waits some seconds; returns True at once if this process is told to end."""
    train: Callable[[bool], tuple[int, bool]]
    """Runs an attempt, given whether it is a restart; returns its exit code, and whether this
    process was told to end."""
    is_first: bool
    """Whether this is the node of host 0, which writes the end of the job to the run log."""

    def run(self) -> int:
        """Returns the exit code of the node."""
        known, idle, code = None, 0, ExitCode.DONE
        while True:
            records = self._records(is_restart=known is not None)
            if records is None:
                return ExitCode.PREEMPTED
            newest = run_log.last_seq(records)
            has_new = known is not None and newest > known
            if has_new and isinstance(end := records[-1].body, SupervisorEnded):
                return end.exit  # Host 0 has decided.
            idle = idle + 1 if known == newest else 0
            decision = next_attempt(records, self.config, idle=idle, last=code)
            if isinstance(decision, GiveUp):
                self._record_end(decision, records)
                print_message(f"{decision.reason} ({exit_name(decision.exit)})")
                return decision.exit
            if decision is not None:
                print_message(f"next attempt: {decision.reason}")
                if self.wait(decision.after_seconds):
                    return ExitCode.PREEMPTED
            known = newest
            code, is_stopped = self.train(decision is not None)
            if code != ExitCode.DONE:
                self._wait_for_end()
            if is_stopped or sky_task.ends_node(code):
                return code

    def _records(self, *, is_restart: bool) -> list[Record] | None:
        """Reads the run log; None: this process was told to end.

        Raises:
          StorageUnavailable: storage has not answered `restart.max_storage_attempts` times.
        """

        def read() -> list[Record]:
            with faults.refusals(at_start=not is_restart):
                return run_log.read_records(self.run_dir.log)

        return with_retries(
            read, self.config.restart, wait=self.wait, what="the run log can't be read"
        )

    def _wait_for_end(self) -> None:
        """Waits until host 0 has written the end of the newest attempt, or END_SECONDS."""
        until = self.clock.monotonic() + END_SECONDS
        while self.clock.monotonic() < until:
            try:
                records = run_log.read_records(self.run_dir.log)
            except (StorageUnavailable, ConfigError):
                return
            newest = max((record.attempt for record in records), default=0)
            ends = (AttemptEnded, SupervisorEnded)
            own = [record for record in records if record.attempt == newest]
            if not newest or any(isinstance(record.body, ends) for record in own):
                return
            self.clock.sleep(2.0)

    def _record_end(self, decision: GiveUp, records: Sequence[Record]) -> None:
        """Writes that the job has ended: a job that an operator submits has the full budgets."""
        if not (self.is_first and records):
            return
        attempt = max(record.attempt for record in records)
        newest = run_log.last_seq(records)
        log = RunLog(self.run_dir.log, attempt=attempt, last_seq=newest, clock=self.clock)
        end = leave_record(AttemptResult(decision.exit, decision.reason))
        what = "the end of the job could not be recorded"
        write_with_timeout(
            lambda: log.append(end), seconds=RECORD_SECONDS, what=what, report=print_message
        )


def next_attempt(
    records: Sequence[Record], config: RunConfig, *, idle: int = 0, last: int = ExitCode.DONE
) -> Restart | GiveUp | None:
    """Decides the action of every node before it trains; None: it trains at once. Pure.

    Args:
      records: the run log; no attempt runs.
      idle: how many tries in a row have ended before they began an attempt, and so are not in the
        log: the hosts did not find each other.
      last: exit code of the last of them.
    """
    history = restart_policy.load_history(records, supervised_only=False).outcomes
    step = max((outcome.step_after for outcome in history), default=0)
    tries = idle * (AttemptOutcome(last, "no attempt has begun", step, step),)
    newest = max((record.attempt for record in records), default=0)
    outcomes = (*history, *tries)
    return restart_policy.decide_next(outcomes, config, seed=newest) if outcomes else None


def _train(
    arguments: Sequence[str], env: Mapping[str, str], wakeup: int, is_restart: bool
) -> tuple[int, bool]:
    """Runs one attempt on this host.

    SkyPilot signals all processes of a node, so no signal is passed on: a second one would end the
    training unsaved.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxres.train", *arguments],
        stdin=subprocess.DEVNULL,
        env={**env, RESTART_VARIABLE: "1" if is_restart else "0"},
        preexec_fn=partial(kill_me_with_parent, os.getpid()),
    )
    is_stopped = False
    while (code := process.poll()) is None:
        is_stopped |= signals.wait_for_stop(wakeup, POLL_SECONDS)
    return (SIGNAL_BASE - code if code < 0 else code), is_stopped | signals.wait_for_stop(
        wakeup, 0.0
    )
