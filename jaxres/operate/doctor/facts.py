"""Facts of a job and of this machine for the checklist of `jaxres doctor`; read once.

Everything that may be missing is None where it is: a fact is never a guess.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from jaxres.config import RunConfig
from jaxres.config.gce_machine_types import num_gpus
from jaxres.estimate import job_estimate, storage_rate
from jaxres.estimate.job_estimate import JobEstimate
from jaxres.estimate.storage_rate import existing
from jaxres.exit_codes import exit_row
from jaxres.faults import ConfigError, RunError
from jaxres.host.processes import kill_session
from jaxres.launch.gce.checks import bucket_setup
from jaxres.launch.gce.checks.bucket_setup import Location
from jaxres.operate.chaos import results as chaos_results
from jaxres.operate.chaos.results import ChaosFound
from jaxres.operate.doctor.check import Check
from jaxres.runlog import metrics, run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, Claim
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote
from jaxres.supervisor.companions.prometheus_exporter import PACKAGE as EXPORTER
from jaxres.supervisor.health import health_process
from jaxres.supervisor.health.health_messages import MESSAGES, WatchStarted, WatchUnavailable
from jaxres.telemetry import alert_sender
from jaxres.train import kept_results

MOUNTS = Path("/proc/self/mounts")
RECENT_STEPS = 50
"""Steps of the newest attempt whose median is the duration of a step."""
HEALTH_SECONDS = 30.0
"""Longest wait for NVIDIA's library."""
ASK_SECONDS = 5.0
"""Longest wait for timedatectl."""
STA_UNSYNC, TIME_ERROR = 0x40, 5
"""Bit of the status, and return value, of adjtimex(2): the clock is not synchronised."""
STATUS_BYTE, TIMEX_BYTES = 40, 256
"""Where the status is in struct timex on 64-bit Linux, and more than its size."""
NCCL = re.compile(r"(nvidia-nccl-cu\d+)\s*>=\s*([\d.]+)")


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """NVIDIA's driver and its library on this machine."""

    error: str | None
    """Why the GPUs can't be read; None: they can."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Reading -> why it is missing."""


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """The installed NCCL and the oldest one that JAX's plugin accepts."""

    name: str
    version: str | None
    """None: the package is not installed."""
    least: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts; the checks before the checklist are there by their names."""

    is_here: bool = True
    """Whether the job trains on this machine."""
    starts_here: bool = True
    """Whether it is started here, as one on VMs is too."""
    platform: str = "cpu"
    """Of the devices of the job."""
    num_devices: int = 1
    num_hosts: int = 1
    estimate: JobEstimate
    num_params: int | None = None
    checks: Mapping[str, Check] = field(default_factory=dict)
    run_root: RunPath = Path("run")
    file_system: str | None = None
    """Type of the file system of a local run directory."""
    shares_disk: bool = False
    """Whether a local replica is on the file system of the run directory."""
    bucket_places: Mapping[str, Location | None] = field(default_factory=dict)
    """Bucket of the run or of its replica -> where it is; None: this account may not read it."""
    restarted_by: str = ""
    """What the run log has of an attempt that was started again; empty: nothing."""
    alert_error: str | None = None
    """Why the targets of the alerts can't be used; None: they can."""
    test_alerts: Sequence[tuple[str, bool, str]] | None = None
    """Target, whether it has accepted the test message, and its answer; None: not asked for."""
    chaos: ChaosFound | None = None
    has_exporter: bool = True
    is_clock_synchronised: bool | None = None
    open_files: int | None = None
    """Limit of this process."""
    gpus: Gpus | None = None
    driver: str | None = None
    cuda: int | None = None
    """Major version of the CUDA libraries of JAX's plugin."""
    nccl: Nccl | None = None


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that a run is checked for."""

    is_here: bool
    """Whether they are the devices of this machine."""
    platform: str
    number: int
    num_hosts: int


def gather(
    config: RunConfig,
    run_dir: RunDir,
    *,
    env: Mapping[str, str],
    checks: Mapping[str, Check],
    devices: Devices,
    estimate: JobEstimate,
    num_params: int | None,
    test_alerts: Sequence[tuple[str, bool, str]] | None = None,
) -> Facts:
    """Reads the facts.

    Args:
      checks: the checks before, by name; of several the worst.
      devices: the devices of the run.
      estimate: the estimate of the job, see `estimate_of`.
      num_params: number of parameters; None: unknown.
      test_alerts: results of `--send-test-alert`; None: it was not given.
    """
    starts_here, devices = devices.is_here, _devices_of_run(config, devices)
    is_here, has_gpus = devices.is_here, devices.is_here and devices.platform == "gpu"
    cuda, nccl = _cuda_plugin() if has_gpus else (None, None)
    return Facts(
        is_here=is_here,
        starts_here=starts_here,
        platform=devices.platform,
        num_devices=devices.number,
        num_hosts=devices.num_hosts,
        estimate=estimate,
        num_params=num_params,
        checks=checks,
        run_root=run_dir.root,
        file_system=_file_system(run_dir) if is_here else None,
        shares_disk=is_here and _shares_disk(config, run_dir),
        bucket_places=_bucket_places(config, run_dir) if starts_here else {},
        restarted_by=_restarted_by(run_dir) if starts_here else "",
        alert_error=_alert_error(config, env),
        test_alerts=test_alerts,
        chaos=chaos_results.read(config),
        has_exporter=importlib.util.find_spec(EXPORTER) is not None,
        is_clock_synchronised=_is_clock_synchronised() if is_here else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0] if is_here else None,
        gpus=_read_gpus(env) if has_gpus else None,
        driver=kept_results.versions_here().get(kept_results.DRIVER) if has_gpus else None,
        cuda=cuda,
        nccl=nccl,
    )


def estimate_of(
    config: RunConfig, run_dir: RunDir, *, devices: Devices, state_bytes: int | None
) -> JobEstimate:
    """Returns the estimate of a job, with what was measured for its machines.

    That of VMs was measured by `launch gce check`; of other machines than this one there is none.
    """
    vms, own = job_estimate.vms_of(config), devices.is_here
    machine = socket.gethostname() if own else None
    if vms is not None:
        machine = config.launch.gce and config.launch.gce.capacity_options[0].machine_type
    return job_estimate.estimate(
        config,
        vms or job_estimate.fleet(devices.number, devices.num_hosts),
        state_bytes=state_bytes,
        rate=storage_rate.read(config, run_dir.root, machine=machine) if machine else None,
        step_seconds=step_seconds(run_dir) if own else None,
    )


def _devices_of_run(config: RunConfig, here: Devices) -> Devices:
    """Returns the devices of the VMs that `launch gce` creates, or else those of this machine."""
    gce, vms = config.launch.gce, job_estimate.vms_of(config)
    if gce is None or vms is None:
        return here
    platform = "gpu" if num_gpus(gce.capacity_options[0].machine_type) else "cpu"
    return Devices(is_here=False, platform=platform, number=vms.num_gpus, num_hosts=vms.num_hosts)


def _bucket_places(config: RunConfig, run_dir: RunDir) -> dict[str, Location | None]:
    """Returns where the buckets of the run and of its replica are, if both are in one."""
    replica = config.checkpoint.replica
    if replica is None or not is_remote(replica.path) or not is_remote(run_dir.root):
        return {}
    found: dict[str, Location | None] = {}
    for path in (run_dir.root, replica.path):
        found[path.bucket] = None
        with contextlib.suppress(RunError):  # What is not known is said to be so.
            found[path.bucket] = bucket_setup.location(path)
    return found


def _restarted_by(run_dir: RunDir) -> str:
    """Returns the evidence of the run log that an attempt was started again; empty: none."""
    with contextlib.suppress(RunError, OSError):
        records = run_log.read_records(run_dir.log) if files.exists(run_dir.log) else []
        claims = [r.body for r in records if isinstance(r.body, Claim)]
        own = [claim.attempt for claim in claims if claim.slots is not None]
        if own:
            return f"attempt {own[-1]} has a launcher that restarts it"
        ends = ((r.attempt, r.body) for r in records if isinstance(r.body, AttemptEnded))
        failed = {attempt for attempt, end in ends if exit_row(end.exit).is_failure}
        again = [claim.attempt for claim in claims if claim.attempt - 1 in failed]
        if again:
            return f"attempt {again[-1]} followed one that had failed"
    return ""


def file_system_of(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Returns the type of the file system that a path is or would be on, such as nfs4."""
    try:
        rows = [row.split() for row in mounts.read_text().splitlines()]
        folder = os.path.realpath(existing(path))
    except OSError:
        return None
    found, length = None, -1
    for _, mount, kind, *_ in (row for row in rows if len(row) >= 4):
        is_inside = folder == mount or folder.startswith(f"{mount.rstrip('/')}/")
        if is_inside and len(mount) >= length:  # Of two mounts on one folder the later counts.
            found, length = kind, len(mount)
    return found


def _file_system(run_dir: RunDir) -> str | None:
    return None if is_remote(run_dir.root) else file_system_of(run_dir.root)


def _shares_disk(config: RunConfig, run_dir: RunDir) -> bool:
    replica = config.checkpoint.replica
    if replica is None or is_remote(place := replica.place) or is_remote(run_dir.root):
        return False
    try:
        devices = [existing(path).stat().st_dev for path in (place, run_dir.root)]
    except OSError:
        return False
    return devices[0] == devices[1]


def step_seconds(run_dir: RunDir) -> float | None:
    """Returns the duration of a step of the newest attempt, if there is one with steps."""
    with contextlib.suppress(RunError, OSError):
        if not files.exists(run_dir.log):
            return None
        for attempt in sorted({r.attempt for r in run_log.read_records(run_dir.log)})[::-1][:3]:
            lines = metrics.read_newest(run_dir, attempt, num=RECENT_STEPS)
            if len(lines) > 2:  # The first steps compile.
                return median(line.step_seconds for line in lines)
    return None


def _alert_error(config: RunConfig, env: Mapping[str, str]) -> str | None:
    try:
        alert_sender.resolve(config.alerts, env=env)
    except ConfigError as error:
        *lines, _ = str(error).splitlines()  # The last one is the remedy.
        return "; ".join(lines)
    return None


def _is_clock_synchronised() -> bool | None:
    """Returns whether the clock is synchronised, by the kernel or systemd; None: unknown."""
    timex = ctypes.create_string_buffer(TIMEX_BYTES)  # modes is 0: reads only.
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(timex)
        if state != -1:
            status = ctypes.c_int.from_buffer(timex, STATUS_BYTE).value
            return state != TIME_ERROR and not status & STA_UNSYNC
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(
            ["timedatectl", "show", "--property=NTPSynchronized", "--value"],
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=False,
        )
        return {"yes": True, "no": False}.get(asked.stdout.strip())
    return None


def _read_gpus(env: Mapping[str, str]) -> Gpus:
    """Reads the GPUs once, in a process of its own: a call of the driver may hang."""
    command = [sys.executable, "-m", health_process.__name__, "--poll-seconds", "3600"]
    try:
        process = subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=dict(env),
        )
    except OSError as error:
        return Gpus(error=str(error))
    assert process.stdout is not None
    try:
        if not select.select([process.stdout], [], [], HEALTH_SECONDS)[0]:
            return Gpus(error=f"NVIDIA's library has not answered for {HEALTH_SECONDS:.0f} s")
        return gpus_of(process.stdout.readline())
    finally:
        kill_session(process, seconds=1.0)
        process.stdout.close()


def gpus_of(line: bytes) -> Gpus:
    """Returns the health process's view of the GPUs, from its first message."""
    try:
        match MESSAGES.decode(json.loads(line)):
            case WatchStarted(unreadable=unreadable):
                return Gpus(error=None, unreadable=unreadable)
            case WatchUnavailable(reason=reason):
                return Gpus(error=reason)
            case other:
                return Gpus(error=f"unexpected answer {other}")
    except (ValueError, KeyError, TypeError) as error:
        return Gpus(error=f"the health process gave no answer ({error})")


def _cuda_plugin() -> tuple[int | None, Nccl | None]:
    """Returns the CUDA version of JAX's plugin, and the NCCL that it asks for."""
    for major in (13, 12):
        try:
            needs = importlib.metadata.requires(f"jax-cuda{major}-plugin") or []
        except importlib.metadata.PackageNotFoundError:
            continue
        asked = next((match for need in needs if (match := NCCL.match(need))), None)
        if asked is None:
            return major, None
        version = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(asked[1])
        return major, Nccl(name=asked[1], version=version, least=asked[2])
    return None, None
