"""`launch local`: all workers of a job on this machine, under one supervisor that restarts them."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxres import faults
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.engine import mesh_plan
from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError
from jaxres.host import processes
from jaxres.storage import cpu_cores
from jaxres.storage.path import RunPath
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.attempt import print_message
from jaxres.supervisor.companions import companions
from jaxres.supervisor.process.worker_group import local_hosts
from jaxres.supervisor.restart_loop import run_restart_loop
from jaxres.supervisor.restart_policy import RestartPolicy
from jaxres.supervisor.run_config import parse_target, resolve_run
from jaxres.telemetry import alert_sender
from jaxres.telemetry.stdio import format_bytes
from jaxres.train import completion
from jaxres.train.checks import oom_advice, start_checks

COMMAND = "python -m jaxres.launch local"
USAGE = """\
usage: python -m jaxres.launch local CONFIG.yaml|RUN_DIR [section.field=value ...]
           --hosts N|A..B [--devices-per-host K] [--no-restart] [--oversubscribe]

Trains with N workers on this machine, each in the role of one host, under one supervisor. It starts
the run or resumes it. The loss of a worker ends the attempt; the next attempt resumes from the
newest committed step. It gives up (84) after restart.max_attempts_without_commit failures without a
new committed step, and never retries errors that another attempt can't fix (76, 78, 81, 85).
Signals and request files as for `python -m jaxres.train`, for all workers together.
--hosts N|A..B: number of workers; A..B: the largest feasible number, and fewer, down to A, if a
    worker has to be excluded (82, or two consecutive failures that name it).
--devices-per-host K: virtual CPU devices of each worker (JAX_NUM_CPU_DEVICES).
--no-restart: one attempt only.
--oversubscribe: allow more workers, or more virtual devices, than this machine has room for by
    its cores and its memory.
"""
FLAGS = ("--hosts", "--devices-per-host")
NO_RESTART = "--no-restart"
OVERSUBSCRIBE = "--oversubscribe"
WORKERS_PER_CORE, DEVICES_PER_CORE = 8, 64
"""Most workers and virtual devices of one core without --oversubscribe: enough for tests of large
jobs, few enough that the machine still answers."""
WORKER_BYTES = 256 * 2**20
"""Memory that a worker takes at least: the libraries alone."""


@dataclass(frozen=True)
class Options:
    """Parsed command line."""

    target: RunPath
    overrides: tuple[str, ...]
    min_hosts: int
    """Smallest number of hosts."""
    max_hosts: int
    """Largest number of hosts."""
    devices_per_host: int | None
    """Virtual CPU devices of each worker; None: as JAX decides."""
    restart: bool = True
    oversubscribe: bool = False
    """Whether there may be more workers than this machine has room for."""


def parse(arguments: Sequence[str]) -> Options:
    """Parses the arguments after `local`.

    Raises:
      UsageError: unknown flags, bad numbers, or not exactly one config file or run directory.
    """
    values: dict[str, str] = {}
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag in FLAGS:
            values[flag] = value if equals else next(rest, "")
        elif argument not in (NO_RESTART, OVERSUBSCRIBE):
            others.append(argument)
    target, overrides = parse_target(others, command=COMMAND)
    if "--hosts" not in values:
        raise UsageError(f"--hosts: how many workers? (usage: `{COMMAND} --help`)")
    least, most = parse_range("--hosts", values["--hosts"])
    devices = values.get("--devices-per-host")
    per_host = None if devices is None else _count("--devices-per-host", devices)
    restart, oversubscribe = NO_RESTART not in arguments, OVERSUBSCRIBE in arguments
    return Options(target, tuple(overrides), least, most, per_host, restart, oversubscribe)


def parse_range(flag: str, value: str) -> tuple[int, int]:
    """Parses N or A..B; returns the least and the largest number."""
    first, is_range, last = value.partition("..")
    least = _count(flag, first)
    most = _count(flag, last) if is_range else least
    if most < least:
        raise UsageError(f"{flag} {value}: expected the smaller number first")
    return least, most


def _count(flag: str, value: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < 1:
        given = value[:60] or "without a value"
        raise UsageError(f"{flag} {given}: expected a whole number, at least 1")
    return int(value)


def refuse_too_many(options: Options, *, cores: int, memory_bytes: int) -> None:
    """Refuses more workers or virtual devices than a machine has room for; pure.

    Raises:
      UsageError: there are too many, and --oversubscribe is not given.
    """
    if options.oversubscribe:
        return
    room = max(1, min(WORKERS_PER_CORE * cores, memory_bytes // WORKER_BYTES))
    machine = f"this machine ({cores} cores, {format_bytes(memory_bytes)} of memory)"
    if options.max_hosts > room:
        raise UsageError(
            f"--hosts {options.max_hosts}: {machine} has room for {room} workers. Give at most "
            f"{room}, or {OVERSUBSCRIBE} to start more"
        )
    devices = options.max_hosts * (options.devices_per_host or 1)
    if devices > DEVICES_PER_CORE * cores:
        raise UsageError(
            f"--devices-per-host {options.devices_per_host}: {devices} virtual devices in all; "
            f"{machine} has room for {DEVICES_PER_CORE * cores}. Give fewer, or {OVERSUBSCRIBE}"
        )


def launch(options: Options, *, env: Mapping[str, str]) -> int:
    """Trains and returns the exit code of the whole job."""
    cores = cpu_cores.usable()
    refuse_too_many(options, cores=cores, memory_bytes=processes.memory_bytes())
    if options.devices_per_host is not None:
        env = {**env, "JAX_NUM_CPU_DEVICES": str(options.devices_per_host)}
    train = functools.partial(attempt_runner.run_local_workers, advise=oom_advice.host_advice)
    if not options.restart:
        return attempt_runner.run_attempt(
            options.target,
            options.overrides,
            run=functools.partial(train, env=env),
            is_complete=functools.partial(start_checks.is_complete, env=env),
            env=env,
            rendezvous=functools.partial(local_hosts, num_hosts=options.max_hosts),
        )
    loaded, run_dir = resolve_run(options.target, options.overrides)
    config, clock = loaded.config, SystemClock()
    found = completion.check(run_dir, config)
    if found.is_complete:
        companions.send_rest(config, run_dir, env=env)
        return ExitCode.DONE
    start_checks.require_inputs(run_dir, config, env=env)
    per_host = devices_per_host(env, "JAX_NUM_CPU_DEVICES")
    policy = RestartPolicy(
        config.restart,
        config.launch,
        num_hosts=feasible_hosts(options.min_hosts, options.max_hosts, config, per_host=per_host),
        began=clock.monotonic(),
        seed=secrets.randbits(32),
    )
    targets = alert_sender.resolve(config.alerts, env=env)
    alerts = alert_sender.Alerts(
        targets, run_dir, section=config.alerts, clock=clock, report=print_message
    )
    env = alert_sender.scrub_secrets(config.alerts, env)
    with faults.refusals(at_start=not attempt_runner.follows_an_attempt(run_dir)):
        code = run_restart_loop(
            config,
            run_dir,
            policy=policy,
            run_attempt=train,
            unconfirmed=found.unconfirmed,
            env=env,
            clock=clock,
            alerts=alerts,
        )
        # The last worker may have been killed after the last commit.
        if code == ExitCode.DONE and config.program is None:
            completion.delete_leftovers(run_dir)
        return code


def devices_per_host(env: Mapping[str, str], *names: str) -> int:
    """Returns the number in the first of these variables that is set; 1 if it is no such number."""
    given = next((env[name] for name in names if env.get(name)), "")
    return int(given) if given.isdigit() and int(given) > 0 else 1


def feasible_hosts(least: int, most: int, config: RunConfig, *, per_host: int) -> tuple[int, ...]:
    """Returns the feasible numbers of hosts; a single requested number is not checked.

    Args:
      least, most: smallest and largest number of hosts.
      config: its mesh, batch and model decide.
      per_host: number of devices of a host.

    Raises:
      ConfigError: no number of the range is feasible.
    """
    if least == most:
        return (most,)
    if config.program is not None:
        return tuple(range(least, most + 1))
    parts = (config.mesh, config.train, config.model)
    devices = mesh_plan.feasible(*parts, limit=most * per_host, multiple_of=per_host)
    fitting = tuple(n // per_host for n in devices if n // per_host >= least)
    if not fitting:
        mesh_plan.plan(*parts, num_devices=most * per_host, num_hosts=most)
    return fitting
