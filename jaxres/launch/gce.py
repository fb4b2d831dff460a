"""`launch gce`: creates, supervises and ends a job on GPU VMs of Google Compute Engine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from jaxres import config as configs
from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig
from jaxres.config.argparser import Parser
from jaxres.exit_codes import ExitCode
from jaxres.faults import (
    ConfigError,
    Fenced,
    PreemptedError,
    StoppedError,
    UsageError,
    format_exit_message,
)
from jaxres.launch import bucket_setup, controller, gce_status, instance_spec, preflight
from jaxres.launch.controller import Controller
from jaxres.launch.desired_state import DesiredState, StateObject
from jaxres.launch.gce_api import Compute
from jaxres.launch.lease import Lease
from jaxres.launch.paths import LaunchPaths
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath, RunPath, is_remote, parse_path
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.run_config import parse_target, resolve_run

if TYPE_CHECKING:
    from jaxres.config.schema_gce import GceSection

COMMAND = "python -m jaxres.launch gce"
USAGE = """\
usage: python -m jaxres.launch gce up CONFIG.yaml|gs://RUN [section.field=value ...]
                                      [--dry-run] [--standby]
       python -m jaxres.launch gce status gs://RUN [--json]
       python -m jaxres.launch gce logs gs://RUN [--vm NAME] [--attempt N]
       python -m jaxres.launch gce stop gs://RUN       save, then end; no VM is left
       python -m jaxres.launch gce down gs://RUN       end now; no VM is left
       python -m jaxres.launch gce init CONFIG.yaml [--yes]

up: creates VMs by launch.gce.capacity_options, trains on them, replaces lost ones, and ends when
    the run does; no VM is left then. It may be killed: training continues, and another `up` of the
    same run, on any machine, takes over. Exit codes as for `launch local`; 83: another launcher
    holds the lease.
--dry-run: prints what would be created, and its price; creates nothing.
--standby: waits while another launcher holds the lease, and takes over when that one is lost.
init: shows how it would create or change the run's bucket; does so with --yes.
"""
VERBS = ("up", "status", "logs", "stop", "down", "init")
ENDPOINT = "JAXRES_GCE_ENDPOINT"
WATCH_SECONDS = 1.0


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs a verb of `launch gce` and returns its exit code."""
    verb, *rest = arguments or ("",)
    if verb not in VERBS:
        raise UsageError(
            f"launch gce {verb}: expected one of {', '.join(VERBS)} (usage: `{COMMAND} --help`)"
        )
    flags = [argument for argument in rest if argument.startswith("--")]
    if verb == "up":
        _refuse_unknown(flags, ("--dry-run", "--standby"))
        target, overrides = parse_target(
            [a for a in rest if a not in flags], command=f"{COMMAND} up"
        )
        if "--dry-run" in flags:
            return preflight.show(*_config_without_bucket(target, overrides))
        return _up(target, overrides, env=env, waits="--standby" in flags)
    if verb == "init":
        _refuse_unknown(flags, ("--yes",))
        target, overrides = parse_target(
            [a for a in rest if a not in flags], command=f"{COMMAND} init"
        )
        return bucket_setup.init_bucket(
            *_config_without_bucket(target, overrides), does="--yes" in flags
        )
    if verb == "status":
        _refuse_unknown(flags, ("--json",))
        return gce_status.show_status(
            _run_of(rest, flags), as_json="--json" in flags, clock=SystemClock()
        )
    if verb == "logs":
        return _logs(rest, env=env)
    _refuse_unknown(flags, ())
    return _request_end(verb, _run_of(rest, flags), env=env)


def _refuse_unknown(flags: Sequence[str], known: Sequence[str]) -> None:
    for flag in flags:
        if flag not in known:
            raise UsageError(f"{flag}: unknown flag (usage: `{COMMAND} --help`)")


def _run_of(arguments: Sequence[str], flags: Sequence[str]) -> GcsPath:
    """Returns the run directory that the arguments name."""
    others = [argument for argument in arguments if argument not in flags]
    if len(others) != 1:
        raise UsageError(
            f"expected one run directory, got {' '.join(others) or 'nothing'} "
            f"(usage: `{COMMAND} --help`)"
        )
    try:
        run = parse_path(others[0])
    except ValueError as error:
        raise UsageError(f"{others[0]}: {error}") from error
    if not is_remote(run):
        raise UsageError(f"{run}: runs of `launch gce` are in buckets; give gs://BUCKET/FOLDER")
    return run


def _config(target: RunPath, overrides: Sequence[str]) -> tuple[RunConfig, GcsPath]:
    """Returns the config of a job and its run directory.

    Raises:
      ConfigError: the config has no section on VMs, or the run directory is not in a bucket.
    """
    if is_remote(target):
        desired = StateObject(LaunchPaths(target).desired_state).read()
        if desired is None:
            raise UsageError(
                f"{target}: no job of `launch gce` was started here. Give the config file first."
            )
        return _recorded_config(LaunchPaths(target), desired, overrides), target
    loaded, run_dir = resolve_run(target, overrides)
    return _require_gce(target, loaded.config, run_dir.root)


def _config_without_bucket(target: RunPath, overrides: Sequence[str]) -> tuple[RunConfig, GcsPath]:
    """Returns the config of a job and its run directory, whose bucket need not exist."""
    if is_remote(target):
        return _config(target, overrides)
    config = configs.load(target, overrides).config
    return _require_gce(target, config, config.run.dir)


def _require_gce(
    target: RunPath, config: RunConfig, root: RunPath | None
) -> tuple[RunConfig, GcsPath]:
    """Checks that a config describes a job on VMs with a run directory in a bucket."""
    if config.launch.gce is None:
        raise ConfigError(
            f"{target}: launch.gce is missing, which describes the VMs; docs/gce.md has an example."
        )
    if root is None or not is_remote(root):
        raise ConfigError(
            f"{target}: run.dir must be in a bucket, because VMs are lost with their disks: give "
            "run.dir=gs://BUCKET/FOLDER"
        )
    return config, root


def compute_for(config: RunConfig, env: Mapping[str, str]) -> Compute:
    """Returns the Compute API of a config's project."""
    gce = _gce(config)
    return Compute(gce, endpoint=gce.endpoint or env.get(ENDPOINT) or None)


def _gce(config: RunConfig) -> GceSection:
    assert config.launch.gce is not None, config
    return config.launch.gce


def print_line(message: str) -> None:
    """Prints a message with the time."""
    moment = datetime.fromtimestamp(SystemClock().wall()).strftime("%H:%M:%S")
    sys.stdout.write(f"{moment} {message}\n")
    sys.stdout.flush()


def _up(target: RunPath, overrides: Sequence[str], *, env: Mapping[str, str], waits: bool) -> int:
    config, run = _config(target, overrides)
    compute, paths, clock = compute_for(config, env), LaunchPaths(run), SystemClock()
    compute.set_console(print_line)
    lease = Lease(paths.lease, holder=_holder(), seconds=_gce(config).lease_seconds)
    record = StateObject(paths.desired_state)
    desired = record.read()
    if desired is None or desired.phase == "ended":  # Else VMs exist already.
        if attempt_runner.is_complete(RunDir(run), config):
            return ExitCode.DONE
        for warning in preflight.check(_gce(config), compute, run):
            print_line(warning)
        instance_spec.pack(_gce(config).package)  # Errors appear here, before the lease is taken.
    _acquire(lease, run, clock, waits=waits)
    with _released_on_error(lease):
        desired = record.read()
        if desired is None or desired.phase == "ended":
            desired = _upload_job(config, paths, desired, clock)
            print_line(f"{run}: {_gce(config).num_hosts} VMs are requested")
        else:
            config = _adopt_config(config, desired, paths)
            print_line(f"{run}: resuming ({desired.phase}, attempt {desired.attempt})")
        record.write(desired, epoch=lease.epoch)
    return _run_controller(Controller(paths, config, compute, lease, record, clock, print_line))


@contextlib.contextmanager
def _released_on_error(lease: Lease) -> Iterator[None]:
    """Releases the lease if the block fails, so that another launcher can take it at once."""
    try:
        yield
    except BaseException:
        lease.release()
        raise


def _run_controller(running: Controller) -> int:
    """Controls a job to its end, or until a signal makes this launcher exit."""
    run = running.paths.run
    try:
        with _released_on_error(running.lease):
            end = running.run()
    except (StoppedError, PreemptedError) as left:
        print_line(
            "this launcher exits; the VMs and the training continue and cost money. "
            f"`python -m jaxres.launch gce up {run}` takes over, `... stop {run}` ends them"
        )
        return 128 + signal.SIGINT if isinstance(left, StoppedError) else left.exit_code
    sys.stdout.write(format_exit_message(end.exit, f"{run}: {end.reason}; no VM is left"))
    return end.exit


def _holder() -> str:
    return f"{socket.gethostname()} (pid {os.getpid()})"


def _acquire(lease: Lease, run: GcsPath, clock: Clock, *, waits: bool) -> None:
    """Takes the lease as soon as its holder no longer renews it.

    Raises:
      Fenced: another launcher holds and renews it.
    """
    first = None
    while not lease.acquire():
        other = lease.other_holder()
        if other is None:
            continue
        if first is None:
            first = lease.other_generation
            print_line(
                f"{other.holder} holds the launcher lease; checking whether it is still active"
            )
        elif lease.other_generation != first and not waits:
            raise Fenced(
                f"{run}: {other.holder} holds the lease of this run. Let that launcher continue, "
                "stop it (training continues), or wait for its end with --standby."
            )
        clock.sleep(WATCH_SECONDS)


def _upload_job(
    config: RunConfig, paths: LaunchPaths, before: DesiredState | None, clock: Clock
) -> DesiredState:
    """Uploads code and config for the VMs, and returns the desired state of a new job."""
    code = instance_spec.upload(instance_spec.pack(_gce(config).package), paths.codes, ".tar.gz")
    text = configs.dump_yaml(config).encode()
    digest = instance_spec.upload(text, paths.configs, ".yaml")
    return controller.new_state(paths.label, code, digest, now=clock.wall(), after=before)


def _recorded_config(
    paths: LaunchPaths, desired: DesiredState, overrides: Sequence[str]
) -> RunConfig:
    """Returns the config that the first `up` has uploaded."""
    path = paths.config(desired.config)
    if gcs_objects.read(path) is None:
        raise ConfigError(f"{path} is missing; restore it from a copy, or give the config file.")
    return configs.load_recorded(path, overrides).config


def _adopt_config(config: RunConfig, desired: DesiredState, paths: LaunchPaths) -> RunConfig:
    """Returns the config of the running job, which may differ from the given one."""
    recorded = _recorded_config(paths, desired, ())
    if configs.dump_yaml(recorded) != configs.dump_yaml(config):
        print_line(
            "the job runs with the config of its first `up`; changes apply after `launch gce stop`"
        )
    return recorded


def _request_end(verb: str, run: GcsPath, *, env: Mapping[str, str]) -> int:
    """Requests the end of a job and waits; takes the lease and ends it if no launcher holds it."""
    paths, clock = LaunchPaths(run), SystemClock()
    record = StateObject(paths.desired_state)
    desired = record.read()
    if desired is None:
        raise UsageError(f"{run}: no job of `launch gce` was started here; there is nothing to end")
    if desired.phase == "ended":
        sys.stdout.write(f"{run}: has ended; no VM is left\n")
        return ExitCode.DONE
    config = _recorded_config(paths, desired, ())
    lease = Lease(paths.lease, holder=_holder(), seconds=_gce(config).lease_seconds)
    gcs_objects.write(paths.stop if verb == "stop" else paths.down, b"", over=None)
    print_line(f"{run}: end requested; waiting until no VM is left")
    while (desired := record.read()) is not None and desired.phase != "ended":
        if not lease.acquire():
            clock.sleep(WATCH_SECONDS)
        elif (desired := record.read()) is not None and desired.phase != "ended":
            with _released_on_error(lease):
                compute = compute_for(config, env)
                compute.set_console(print_line)
                print_line(
                    "no launcher holds the lease of this run; this one takes it and ends the job"
                )
                record.write(desired, epoch=lease.epoch)
            code = _run_controller(
                Controller(paths, config, compute, lease, record, clock, print_line)
            )
            return ExitCode.DONE if code == ExitCode.STOPPED else code
    lease.release()
    sys.stdout.write(f"{run}: has ended; no VM is left\n")
    return ExitCode.DONE


def _logs(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Prints the end of an attempt's output on a VM."""
    parser = Parser(prog="python -m jaxres.launch gce logs", usage=USAGE)
    parser.add_argument("run")
    parser.add_argument("--vm")
    parser.add_argument("--attempt", type=int)
    options = parser.parse_args(list(arguments))
    run = _run_of([options.run], ())
    desired = StateObject(LaunchPaths(run).desired_state).read()
    if desired is None:
        raise UsageError(f"{run}: no job of `launch gce` was started here")
    compute = compute_for(_recorded_config(LaunchPaths(run), desired, ()), env)
    return gce_status.logs(run, desired, compute, vm=options.vm, attempt=options.attempt)
