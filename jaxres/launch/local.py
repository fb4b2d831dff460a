"""All workers of a job on this machine, behind one supervisor that brings them back."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.engine import mesh_plan
from jaxres.faults import Exit, UsageError
from jaxres.storage.path import Place
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.attempt import say
from jaxres.supervisor.restart_loop import keep_up
from jaxres.supervisor.restart_policy import Policy
from jaxres.supervisor.run_config import resolve, target_of
from jaxres.supervisor.worker_group import behind_one_door
from jaxres.telemetry import alert_sender
from jaxres.train import oom_advice

USAGE = """\
usage: python -m jaxres.launch local CONFIG.yaml|RUN_DIR [section.field=value ...]
           --hosts N|A..B [--devices-per-host K] [--no-restart]

Trains with N workers on this machine, each with the part of one host, behind one supervisor: it
starts the run or goes on with it. The first worker that is lost ends the attempt; the next one goes
on from the newest committed step. It gives up (84) after restart.max_attempts_without_commit
failures without a new one, and never tries again what another attempt can't mend (76, 78, 81, 85).
Signals and request files as for `python -m jaxres.train`, for all workers together.
--hosts N|A..B: number of workers; A..B: the largest number that will do, and fewer, down to A, if
    one has to be left out (82, or two faults in a row that name it).
--devices-per-host K: virtual CPU devices of each worker (JAX_NUM_CPU_DEVICES).
--no-restart: one attempt only.
"""
FLAGS = ("--hosts", "--devices-per-host")
NO_RESTART = "--no-restart"


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    target: Place
    overrides: tuple[str, ...]
    least: int
    """Hosts, at least."""
    most: int
    """Hosts, at most."""
    devices_per_host: int | None
    """None: as JAX has it."""
    restart: bool = True


def parse(arguments: Sequence[str]) -> Asked:
    """Reads the words after `local`.

    Raises:
      UsageError: unknown flags, bad numbers, or not exactly one config file or run directory.
    """
    values: dict[str, str] = {}
    words: list[str] = []
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            values[flag] = value if equals else next(rest, "")
        elif word != NO_RESTART:
            words.append(word)
    target, overrides = target_of(words, usage=USAGE)
    if "--hosts" not in values:
        raise UsageError(f"--hosts: how many workers?\n{USAGE}")
    least, most = _range(values["--hosts"])
    devices = values.get("--devices-per-host")
    per_host = None if devices is None else _count("--devices-per-host", devices)
    restart = NO_RESTART not in arguments
    return Asked(target, tuple(overrides), least, most, per_host, restart)


def _range(value: str) -> tuple[int, int]:
    first, is_range, last = value.partition("..")
    least = _count("--hosts", first)
    most = _count("--hosts", last) if is_range else least
    if most < least:
        raise UsageError(f"--hosts {value}: expected the smaller number first\n{USAGE}")
    return least, most


def _count(flag: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) >= 1):
        raise UsageError(f"{flag} {value}: expected a whole number, at least 1\n{USAGE}")
    return int(value)


def launch(asked: Asked, *, env: Mapping[str, str]) -> int:
    """Trains, and returns the exit code of the whole job."""
    if asked.devices_per_host is not None:
        env = {**env, "JAX_NUM_CPU_DEVICES": str(asked.devices_per_host)}
    train = functools.partial(attempt_runner.behind_a_door, advise=oom_advice.host_advice)
    if not asked.restart:
        meet = functools.partial(behind_one_door, num_hosts=asked.most)
        run = functools.partial(train, env=env)
        return attempt_runner.attempt(asked.target, asked.overrides, run=run, env=env, meet=meet)
    loaded, run_dir = resolve(asked.target, asked.overrides)
    config, clock = loaded.config, SystemClock()
    if attempt_runner.is_done(run_dir, config):
        return Exit.DONE
    policy = Policy(
        config.restart,
        config.launch,
        num_hosts=_fitting(asked, config, env),
        began=clock.monotonic(),
        seed=secrets.randbits(32),
    )
    targets = alert_sender.resolve(config.alerts, env=env)
    alerts = alert_sender.Alerts(targets, run_dir, section=config.alerts, clock=clock, say=say)
    env = alert_sender.without_secrets(config.alerts, env)
    return keep_up(config, run_dir, policy=policy, train=train, env=env, clock=clock, alerts=alerts)


def _fitting(asked: Asked, config: RunConfig, env: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the numbers of hosts that will do; one number that is asked for is not questioned.

    Raises:
      ConfigError: none of the range will do.
    """
    if asked.least == asked.most:
        return (asked.most,)
    given = env.get("JAX_NUM_CPU_DEVICES", "")
    per_host = int(given) if given.isdigit() and int(given) > 0 else 1
    parts = (config.mesh, config.train, config.model)
    devices = mesh_plan.feasible(*parts, limit=asked.most * per_host, multiple_of=per_host)
    fitting = tuple(n // per_host for n in devices if n // per_host >= asked.least)
    if not fitting:
        mesh_plan.plan(*parts, num_devices=asked.most * per_host, num_hosts=asked.most)
    return fitting
