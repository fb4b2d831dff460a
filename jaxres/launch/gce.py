"""`launch gce`: a job on GPU VMs of Google Compute Engine, led from wherever this runs."""

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
from jaxres.faults import ConfigError, Exit, Fenced, Preempted, Stopped, UsageError, message
from jaxres.launch import bucket_setup, controller, gce_status, instance_spec, preflight
from jaxres.launch.controller import Leader
from jaxres.launch.desired_state import Intent, Record
from jaxres.launch.gce_api import Compute
from jaxres.launch.lease import Lease
from jaxres.launch.paths import Places
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from jaxres.storage.path import BucketPath, Place, place
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.run_config import resolve, target_of

if TYPE_CHECKING:
    from jaxres.config.schema_gce import GceSection

USAGE = """\
usage: python -m jaxres.launch gce up CONFIG.yaml|gs://RUN [section.field=value ...]
                                      [--dry-run] [--standby]
       python -m jaxres.launch gce status gs://RUN [--json]
       python -m jaxres.launch gce logs gs://RUN [--vm NAME] [--attempt N]
       python -m jaxres.launch gce stop gs://RUN       save, then end; no VM is left
       python -m jaxres.launch gce down gs://RUN       end now; no VM is left
       python -m jaxres.launch gce init CONFIG.yaml [--yes]

up: gets VMs by launch.gce.ladder, trains on them, replaces what is lost, and ends when the run
    does; no VM is left then. It may be killed: the training goes on, and another `up` of the same
    run, anywhere, leads on. Exit codes as for `launch local`; 83: another launcher leads.
--dry-run: prints what would be created, and its price; creates nothing.
--standby: waits while another launcher leads, and leads on when it is gone.
init: shows what it would make of the run's bucket or change about it; does it with --yes.
"""
VERBS = ("up", "status", "logs", "stop", "down", "init")
ENDPOINT = "JAXRES_GCE_ENDPOINT"
WATCH_SECONDS = 1.0


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs a verb of `launch gce` and returns its exit code."""
    verb, *words = arguments or ("",)
    if verb not in VERBS:
        raise UsageError(f"expected one of {', '.join(VERBS)} (got {verb or 'nothing'})\n{USAGE}")
    flags = [word for word in words if word.startswith("--")]
    if verb == "up":
        _refuse_unknown(flags, ("--dry-run", "--standby"))
        target, overrides = target_of([w for w in words if w not in flags], usage=USAGE)
        if "--dry-run" in flags:
            return preflight.show(*_named(target, overrides))
        return _up(target, overrides, env=env, waits="--standby" in flags)
    if verb == "init":
        _refuse_unknown(flags, ("--yes",))
        target, overrides = target_of([w for w in words if w not in flags], usage=USAGE)
        return bucket_setup.prepare(*_named(target, overrides), does="--yes" in flags)
    if verb == "status":
        _refuse_unknown(flags, ("--json",))
        return gce_status.show(
            _run_of(words, flags), as_json="--json" in flags, clock=SystemClock()
        )
    if verb == "logs":
        return _logs(words, env=env)
    _refuse_unknown(flags, ())
    return _ask(verb, _run_of(words, flags), env=env)


def _refuse_unknown(flags: Sequence[str], known: Sequence[str]) -> None:
    for flag in flags:
        if flag not in known:
            raise UsageError(f"{flag}: unknown flag\n{USAGE}")


def _run_of(words: Sequence[str], flags: Sequence[str]) -> BucketPath:
    """Returns the run directory that the words name."""
    others = [word for word in words if word not in flags]
    if len(others) != 1:
        raise UsageError(
            f"expected one run directory, got {' '.join(others) or 'nothing'}\n{USAGE}"
        )
    try:
        run = place(others[0])
    except ValueError as error:
        raise UsageError(f"{others[0]}: {error}") from error
    if not isinstance(run, BucketPath):
        raise UsageError(f"{run}: runs of `launch gce` are in buckets; give gs://BUCKET/FOLDER")
    return run


def _config(target: Place, overrides: Sequence[str]) -> tuple[RunConfig, BucketPath]:
    """Returns the config of a job and its run directory.

    Raises:
      ConfigError: the config says nothing of VMs, or the run would not outlive them.
    """
    if isinstance(target, BucketPath):
        intent = Record(Places(target).intent).read()
        if intent is None:
            raise UsageError(
                f"{target}: no launcher has been here. Give the config file the first time."
            )
        return _recorded(Places(target), intent, overrides), target
    loaded, run_dir = resolve(target, overrides)
    return _on_vms(target, loaded.config, run_dir.root)


def _named(target: Place, overrides: Sequence[str]) -> tuple[RunConfig, BucketPath]:
    """Returns the config of a job and its run directory, whose bucket may not be there yet."""
    if isinstance(target, BucketPath):
        return _config(target, overrides)
    config = configs.load(target, overrides).config
    return _on_vms(target, config, config.run.dir)


def _on_vms(target: Place, config: RunConfig, root: Place | None) -> tuple[RunConfig, BucketPath]:
    """Holds that a config is of a job on VMs whose run outlives them."""
    if config.launch.gce is None:
        raise ConfigError(
            f"{target}: launch.gce is missing: which VMs? docs/gce.md has an example to begin with."
        )
    if not isinstance(root, BucketPath):
        raise ConfigError(
            f"{target}: run.dir is missing, and VMs come and go: give a bucket, "
            "run.dir=gs://BUCKET/FOLDER"
        )
    return config, root


def compute_of(config: RunConfig, env: Mapping[str, str]) -> Compute:
    """Returns the Compute API of a config's project."""
    gce = _gce(config)
    return Compute(gce, endpoint=gce.endpoint or env.get(ENDPOINT) or None)


def _gce(config: RunConfig) -> GceSection:
    assert config.launch.gce is not None, config
    return config.launch.gce


def say(words: str) -> None:
    """Tells a person, with the time."""
    moment = datetime.fromtimestamp(SystemClock().wall()).strftime("%H:%M:%S")
    sys.stdout.write(f"{moment} {words}\n")
    sys.stdout.flush()


def _up(target: Place, overrides: Sequence[str], *, env: Mapping[str, str], waits: bool) -> int:
    config, run = _config(target, overrides)
    compute, places, clock = compute_of(config, env), Places(run), SystemClock()
    compute.told_by(say)
    lease = Lease(places.lease, holder=_holder(), seconds=_gce(config).lease_seconds)
    record = Record(places.intent)
    intent = record.read()
    if intent is None or intent.phase == "ended":  # Else it is too late for questions.
        if attempt_runner.is_done(RunDir(run), config):
            return Exit.DONE
        for words in preflight.check(_gce(config), compute, run):
            say(words)
        instance_spec.pack(_gce(config).package)  # Refused now rather than under the lease.
    _acquire(lease, run, clock, waits=waits)
    with _released_on_error(lease):
        intent = record.read()
        if intent is None or intent.phase == "ended":
            intent = _ship(config, places, intent, clock)
            say(f"{run}: {_gce(config).num_hosts} VMs are wanted")
        else:
            config = _adopted(config, intent, places)
            say(f"{run}: going on with what is there ({intent.phase}, attempt {intent.attempt})")
        record.write(intent, epoch=lease.epoch)
    return _lead(Leader(places, config, compute, lease, record, clock, say))


@contextlib.contextmanager
def _released_on_error(lease: Lease) -> Iterator[None]:
    """Leaves the lead to others at once where this launcher fails."""
    try:
        yield
    except BaseException:
        lease.release()
        raise


def _lead(led: Leader) -> int:
    """Leads a job to its end, or until a person has this launcher leave it."""
    run = led.places.run
    try:
        with _released_on_error(led.lease):
            end = led.lead()
    except (Stopped, Preempted) as left:
        say(
            "this launcher leaves; the VMs and the training go on and cost money. "
            f"`python -m jaxres.launch gce up {run}` leads on, `... stop {run}` ends them"
        )
        return 128 + signal.SIGINT if isinstance(left, Stopped) else left.exit
    sys.stdout.write(message(end.exit, f"{run}: {end.reason}; no VM is left"))
    return end.exit


def _holder() -> str:
    return f"{socket.gethostname()} (pid {os.getpid()})"


def _acquire(lease: Lease, run: BucketPath, clock: Clock, *, waits: bool) -> None:
    """Takes the lead, as soon as whoever has it gives no sign of life.

    Raises:
      Fenced: another launcher does, and leads.
    """
    first = None
    while not lease.acquire():
        other = lease.other()
        if other is None:
            continue
        if first is None:
            first = lease.seen
            say(f"{other.holder} leads this run, or did; looking whether it still does")
        elif lease.seen != first and not waits:
            raise Fenced(
                f"{run}: {other.holder} leads this run. Leave it to that launcher, end it there "
                "(the training goes on), or wait for its end with --standby."
            )
        clock.sleep(WATCH_SECONDS)


def _ship(config: RunConfig, places: Places, before: Intent | None, clock: Clock) -> Intent:
    """Puts code and config where the VMs find them, and returns the intent of a new job."""
    code = instance_spec.ship(instance_spec.pack(_gce(config).package), places.codes, ".tar.gz")
    text = configs.dump_yaml(config).encode()
    digest = instance_spec.ship(text, places.configs, ".yaml")
    return controller.fresh(places.label, code, digest, now=clock.wall(), after=before)


def _recorded(places: Places, intent: Intent, overrides: Sequence[str]) -> RunConfig:
    """Returns the config that was put into the bucket at the first `up`."""
    path = places.config(intent.config)
    if gcs_objects.read(path) is None:
        raise ConfigError(f"{path} is gone; bring it back from a copy, or give the config file.")
    return configs.load_recorded(path, overrides).config


def _adopted(config: RunConfig, intent: Intent, places: Places) -> RunConfig:
    """Returns the config that a job goes by that is on already."""
    recorded = _recorded(places, intent, ())
    if configs.dump_yaml(recorded) != configs.dump_yaml(config):
        say("the job is on with the config of its first `up`; changes hold after `launch gce stop`")
    return recorded


def _ask(verb: str, run: BucketPath, *, env: Mapping[str, str]) -> int:
    """Has a job end: asks whoever leads it, or leads it to its end."""
    places, clock = Places(run), SystemClock()
    record = Record(places.intent)
    intent = record.read()
    if intent is None:
        raise UsageError(f"{run}: no launcher has been here; there is nothing to end")
    if intent.phase == "ended":
        sys.stdout.write(f"{run}: has ended; no VM is left\n")
        return Exit.DONE
    config = _recorded(places, intent, ())
    lease = Lease(places.lease, holder=_holder(), seconds=_gce(config).lease_seconds)
    gcs_objects.write(places.stop if verb == "stop" else places.down, b"", over=None)
    say(f"{run}: asked to end; waiting until no VM is left")
    while (intent := record.read()) is not None and intent.phase != "ended":
        if not lease.acquire():
            clock.sleep(WATCH_SECONDS)
        elif (intent := record.read()) is not None and intent.phase != "ended":
            with _released_on_error(lease):
                compute = compute_of(config, env)
                compute.told_by(say)
                say("no launcher leads the run, so this one does, to its end")
                record.write(intent, epoch=lease.epoch)
            code = _lead(Leader(places, config, compute, lease, record, clock, say))
            return Exit.DONE if code == Exit.STOPPED else code
    lease.release()
    sys.stdout.write(f"{run}: has ended; no VM is left\n")
    return Exit.DONE


def _logs(words: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Shows what a VM's part in an attempt has printed last."""
    parser = Parser(prog="python -m jaxres.launch gce logs", usage=USAGE)
    parser.add_argument("run")
    parser.add_argument("--vm")
    parser.add_argument("--attempt", type=int)
    options = parser.parse_args(list(words))
    run = _run_of([options.run], ())
    intent = Record(Places(run).intent).read()
    if intent is None:
        raise UsageError(f"{run}: no launcher has been here")
    compute = compute_of(_recorded(Places(run), intent, ()), env)
    return gce_status.logs(run, intent, compute, vm=options.vm, attempt=options.attempt)
