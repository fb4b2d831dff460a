"""Runs one attempt from config to exit code; shared by all commands that train. No jax.

Reads the config, locks the run directory, writes the attempt's claim to the run log, fixes the
number of CPU threads (NPROC, which changes results bit for bit), runs the workers, and records and
prints the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import platform
import secrets
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from jaxres import config as configs
from jaxres import faults
from jaxres.clock import SystemClock
from jaxres.cluster.authentication import Secret
from jaxres.cluster.host_group import ALONE, HostRank
from jaxres.cluster.host_identity import HOST_NAME, identify
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, RunError, UsageError
from jaxres.host import signals
from jaxres.host.limits import error_of_limit
from jaxres.host.proc_stat import read_proc_stat
from jaxres.runlog import replica_files, run_log, step_dirs
from jaxres.runlog.attempt_result import AttemptResult, fault_record, stop_record
from jaxres.runlog.events import Event
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import OWN_LOOP
from jaxres.runlog.run_log import Claim, Record, RunHistory, RunLog, last_seq
from jaxres.runlog.supervisor_events import CheckpointDamageFound, ReplicaBehind, ReplicaCaughtUp
from jaxres.storage import cpu_cores, files
from jaxres.storage.path import RunPath
from jaxres.storage.timeouts import call_with_timeout, write_with_timeout
from jaxres.supervisor import (
    host_exclusion,
    host_memory,
    restart_policy,
    run_config,
    run_dir_watcher,
    slow_hosts,
)
from jaxres.supervisor.attempt import AttemptSpec, Services, print_message
from jaxres.supervisor.companions import attempt_alerts, companions
from jaxres.supervisor.companions.attempt_alerts import AttemptAlerts
from jaxres.supervisor.companions.companions import Companions
from jaxres.supervisor.failure_report import upload_artifacts
from jaxres.supervisor.process.forkserver_client import WORKER
from jaxres.supervisor.process.worker_env import worker_env
from jaxres.supervisor.process.worker_group import (
    Rendezvous,
    WorkerGroup,
    boot_id,
    single_host,
    versions,
)
from jaxres.supervisor.process.worker_process import Fork
from jaxres.supervisor.run_config import resolve_run
from jaxres.supervisor.run_lock import RunLock
from jaxres.supervisor.supervisor import supervise
from jaxres.telemetry import alert_sender, stdio

PROGRAM_WORKER = "jaxres.program"
"""Module that runs a program on a host, in place of the trainer's WORKER."""
MIN_DEVICES = "JAXRES_MIN_DEVICES"
"""Environment variable with the number of devices that each host must have."""
PLATFORM = "JAXRES_PLATFORM"
"""Environment variable with the platform that they must have, as JAX names it: gpu."""
RECORD_SECONDS = 10.0
"""Longest wait, at the end, to write the last record or to read a traceback."""

RESTART_VARIABLE = "JAXRES_RESTART"
"""Set to 1 by programs that start a command again without an operator, such as the agent of a VM:
storage that refuses access before the run log can be read is then an outage."""


@dataclass(frozen=True)
class ClaimedAttempt:
    """An attempt whose claim is in the run log, ready to train on the hosts of this supervisor."""

    config: RunConfig
    run_dir: RunDir
    claim: Claim
    last_seq: int
    """Newest record that was read, the claim's own or a later one."""
    hosts: tuple[int, ...]
    """Hosts whose workers run under this supervisor."""
    secret: Secret | None = None
    """The secret of the run, which the other hosts have too; None: there are none."""


@dataclass(frozen=True)
class Inline:
    """Training in the process of the supervisor itself."""

    run: Callable[[ClaimedAttempt, RunLog, RunLock], AttemptResult]
    """Runs the claimed attempt to its end."""
    threads: int
    """Number of CPU threads of this process."""
    hold_signals: Callable[[], object]
    """Keeps the signals for `run` once the run is locked, so that the result is recorded."""


RunWorkers = Callable[[ClaimedAttempt, Services], AttemptResult]
"""Runs the workers of a claimed attempt to their end."""


def run_with_exit_code(command: Callable[[], int], *, at_start: bool = True) -> int:
    """Runs a command; turns every error and signal into an exit code and one message.

    `at_start`: the phase of the command as long as it has not read the run log.
    """
    sys.excepthook = _exit_as_bug
    signals.forget_stops()
    try:
        signals.raise_on_stop()
        with faults.refusals(at_start=at_start), files.untyped_failures():
            return command()
    except Exception as error:
        end = signals.raised_stop() or error_of_limit(error) or error
        if not isinstance(end, RunError):
            raise
        stdio.flush()
        stdio.eprint(faults.format_exit_message(end.exit_code, str(end)))
        return end.exit_code


def hard_exit(code: int) -> NoReturn:
    """Exits at once: after a failed save, Orbax's threads would delay a normal exit for minutes."""
    stdio.flush()
    os._exit(code)


def _exit_as_bug(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Exits the supervisor with BUG; its workers are already killed."""
    stdio.eprint("".join(traceback.format_exception(kind, error, trace)))
    stdio.eprint(f"this is a bug in jaxres (exit {ExitCode.BUG.value} BUG)\n")
    hard_exit(ExitCode.BUG)


def _log_to_go_on_with(run_dir: RunDir, config: RunConfig) -> list[Record]:
    records = run_log.read_records(run_dir.log)
    if config.checkpoint.replica is not None:
        replica_files.refuse_older_run(run_dir, config.checkpoint.replica.place, records)
    return records


def run_attempt(
    target: RunPath,
    overrides: Sequence[str],
    *,
    run: RunWorkers | Inline,
    is_complete: Callable[[RunDir, RunConfig], bool],
    env: Mapping[str, str],
    rendezvous: Rendezvous = single_host,
    fork: Fork | None = None,
) -> int:
    """Claims an attempt, runs it and records its result; returns the exit code.

    Args:
      target, overrides: a config file or a run directory; `section.field=value` arguments.
      run: runs the claimed attempt to its end.
      is_complete: returns whether there is nothing left to train, and prints so.
      env, rendezvous: the attempt's environment; how its hosts connect before it is claimed.
      fork: forks the workers; None: they are fresh processes.
    """
    loaded, run_dir = resolve_run(target, overrides)
    config = loaded.config
    inline = run if isinstance(run, Inline) else None
    if inline is not None and config.program is not None:
        raise UsageError("--inline: a program (`program`) has a process of its own; omit --inline")
    if is_complete(run_dir, config):
        companions.send_rest(config, run_dir, env=env)
        return ExitCode.DONE
    targets = attempt_alerts.resolve(config, env, is_inline=inline is not None)
    env = alert_sender.scrub_secrets(config.alerts, env)
    records, clock = _log_to_go_on_with(run_dir, config), SystemClock()
    host_exclusion.on_this_machine(run_dir, records, env=env)
    with contextlib.ExitStack() as stack:
        stack.enter_context(faults.refusals(at_start=not follows_an_attempt(run_dir)))
        beside = Companions(config, run_dir, env=env, clock=clock, is_inline=inline is not None)
        stack.enter_context(beside)
        job = stack.enter_context(rendezvous(config, run_dir))
        run_lock = stack.enter_context(RunLock(run_dir, clock=clock))
        opening = attempt_alerts.open_alerts(targets, config, run_dir, job.num_hosts, clock)
        alerts = stack.enter_context(opening)
        signals.block() if inline is None else inline.hold_signals()
        known, threads = last_seq(records), None if inline is None else inline.threads
        opened, log = claim_attempt(
            config, run_lock, job=job, env=env, known=known, threads=threads
        )
        claim = opened.claim
        _start_beside(beside, alerts, records, claim, host=opened.hosts[0])
        services = dataclasses.replace(
            beside.services,
            run_lock=run_lock,
            on_news=functools.partial(alerts.on_news, claim.attempt),
            fork=None if config.program is not None else fork,
        )

        def train() -> AttemptResult:
            if isinstance(run, Inline):
                return run.run(opened, log, run_lock)
            return _announce_and_run(opened, services, job, run)

        ended = run_and_record(opened, log, run_lock, job=job, train=train)
        alerts.on_end(ended, claim)
        beside.on_run_ended(ended.code)
        host_memory.delete_at_end(run_dir, config, ended)
    if ended.is_printed:
        print_result(ended, run_dir, claim)
    return ended.code


def _start_beside(
    beside: Companions, alerts: AttemptAlerts, records: Sequence[Record], claim: Claim, *, host: int
) -> None:
    """Begins with what runs beside a claimed attempt; `records` are the run log before it."""
    alerts.on_claim(records, claim)
    beside.send_faults(alerts.on_fault)
    beside.on_history(records)
    beside.on_claim(claim, host=host, emit=functools.partial(_on_event, alerts))


def _on_event(alerts: AttemptAlerts, event: Event) -> None:
    """Sends alerts of damage, and of a replica that is behind or has caught up, and prints them."""
    alerts.on_event(event)
    if isinstance(event, ReplicaBehind):
        print_message(f"ALARM: {event.reason}; training continues")
    elif isinstance(event, ReplicaCaughtUp):
        print_message(f"{event.replica} has step {event.step}: it has caught up")
    elif isinstance(event, CheckpointDamageFound):
        print_message(f"ALARM: {event.reason}; {event.next}")


def claim_attempt(
    config: RunConfig,
    run_lock: RunLock,
    *,
    job: WorkerGroup,
    env: Mapping[str, str],
    known: int,
    threads: int | None = None,
    attempt: int | None = None,
) -> tuple[ClaimedAttempt, RunLog]:
    """Writes the claim of the run's next attempt to the run log, and records its config.

    Args:
      run_lock: the lock of the run directory, held; its clock has the time of the records.
      job: hosts of the attempt.
      known: number of records that this process has read before.
      threads: number of CPU threads of this process if it trains itself.
      attempt: number of the attempt, for a log that is being rebuilt; None: the next one of a log
        that accounts for the checkpoints.

    Raises:
      StorageUnavailable: there are fewer records, so that the run would start again at step 0.
      Unrestorable: the log does not account for the checkpoints; nothing was changed.
    """
    run_dir = run_lock.run_dir
    claim, log = claim_next(
        run_lock,
        lambda history: new_claim(config, history, env=env, job=job),
        known=known,
        threads=threads,
        attempt=attempt,
    )
    host_memory.prepare(run_dir, config, log.history().claims)
    # Late records of the attempt before may precede the claim.
    run_config.record(config, run_dir, claim.attempt, log.history().starts, print_message)
    return ClaimedAttempt(config, run_dir, claim, log.last_seq, job.hosts, job.secret), log


def claim_next(
    run_lock: RunLock,
    new: Callable[[RunHistory], Claim],
    *,
    known: int = 0,
    threads: int | None = None,
    attempt: int | None = None,
) -> tuple[Claim, RunLog]:
    """Writes the claim of the next attempt, which `new` returns; see `claim_attempt`."""
    run_dir = run_lock.run_dir
    records = run_log.read_records(run_dir.log, known=known)
    history = run_log.fold(records)
    if attempt is None:
        step_dirs.require_complete_log(run_dir, history)
        step_dirs.require_same_log(run_dir, history, records)
    claim = new(history)
    if attempt is not None:
        claim = dataclasses.replace(claim, attempt=attempt)
    if threads is not None:
        _refuse_other_threads(claim, threads)
    return claim, RunLog.claim(run_dir.log, claim, after=records, clock=run_lock.clock)


def run_and_record(
    opened: ClaimedAttempt,
    log: RunLog,
    run_lock: RunLock,
    *,
    job: WorkerGroup,
    train: Callable[[], AttemptResult],
) -> AttemptResult:
    """Trains a claimed attempt, unless a `stop` file has existed before; records the result."""
    ended = run_dir_watcher.stop_requested_before(opened.run_dir)
    if ended is None:
        ended = train()
    else:
        job.cancel(ended.code, ended.reason)
    if ended.is_recorded:
        _record_stop_with_timeout(opened, log, run_lock, ended)
    return ended


def _announce_and_run(
    opened: ClaimedAttempt, services: Services, job: WorkerGroup, run: RunWorkers
) -> AttemptResult:
    """Runs the attempt once every host has read the claim; an error before that is a result too."""
    try:
        signals.raise_on_stop()
        peers = job.announce(opened.claim)
    except RunError as end:
        return AttemptResult(end.exit_code, str(end), committed=False, is_printed=True)
    finally:
        signals.block()
    return run(opened, dataclasses.replace(services, peers=peers))


def run_local_workers(
    opened: ClaimedAttempt,
    services: Services,
    *,
    env: Mapping[str, str],
    advise: Callable[[RunConfig, str], str],
    deadline: float = math.inf,
) -> AttemptResult:
    """Runs the attempt's workers as processes of this machine, one per host of this supervisor.

    Args:
      services: what its supervisor uses.
      env: the workers' environment, to which the attempt's own variables are added.
      advise: returns the message for a worker that the kernel has killed because memory ran out.
      deadline: when the workers are asked to save and stop, on the supervisor's clock.
    """
    claim = opened.claim
    hosts = [HostRank(host, claim.num_hosts) for host in opened.hosts]
    is_program = opened.config.program is not None
    module = PROGRAM_WORKER if is_program else WORKER
    spec = AttemptSpec(
        run_dir=opened.run_dir,
        number=claim.attempt,
        last_seq=opened.last_seq,
        commands={
            h.host: worker_command(opened.run_dir, claim, h, env=env, module=module) for h in hosts
        },
        env=worker_env(env, opened.config, opened.run_dir, claim, secret=opened.secret),
        num_hosts=claim.num_hosts,
        limits=opened.config.deadlines,
        is_program=is_program,
        deadline=deadline,
    )
    ended = supervise(spec, services)
    _review_slow_hosts(opened, services, ended, env=env)
    upload_artifacts(opened.run_dir, claim.attempt)
    return add_memory_advice(ended, opened.config, advise)


def add_memory_advice(
    ended: AttemptResult, config: RunConfig, advise: Callable[[RunConfig, str], str]
) -> AttemptResult:
    """Adds advice to the reason if the kernel has killed a worker because memory ran out."""
    if ended.code == ExitCode.OUT_OF_MEMORY and not ended.announced:
        return dataclasses.replace(ended, reason=advise(config, ended.reason))
    return ended


def worker_command(
    run_dir: RunDir,
    claim: Claim,
    member: HostRank,
    *,
    env: Mapping[str, str] | None = None,
    module: str = WORKER,
) -> list[str]:
    """Returns the argv of one host's worker; `env` has which devices it must have."""
    command = [sys.executable, "-m", module, str(run_dir.root)]
    command += ["--attempt", str(claim.attempt), "--parent", str(os.getpid())]
    if (least := (env or {}).get(MIN_DEVICES, "")).isdecimal():
        command += ["--min-devices", least]
    if platform_name := (env or {}).get(PLATFORM, ""):
        command.append(f"--platform={platform_name}")
    if member == ALONE:
        return command
    rank = ["--host", str(member.host), "--num-hosts", str(member.num_hosts)]
    assert claim.coordinator is not None
    return [*command, *rank, "--coordinator", claim.coordinator]


def record_stop(log: RunLog, result: AttemptResult, *, slots: Sequence[int] | None = None) -> None:
    """Writes the result to the run log; if that fails, only prints the error.

    `slots`: the slot of each host if one supervisor runs them all.
    """
    try:
        if (fault := fault_record(result, slots)) is not None:
            log.append(fault)
        elif result.faulty_host is not None:
            print_message(f"the faulty host can't be remembered: set {HOST_NAME} to its name")
        log.append(stop_record(result))
    except (RunError, OSError) as error:
        stdio.eprint(f"jaxres: the result could not be recorded: {error}\n")


def _record_stop_with_timeout(
    opened: ClaimedAttempt, log: RunLog, run_lock: RunLock, ended: AttemptResult
) -> None:
    """Writes the result to the run log, or gives up after RECORD_SECONDS.

    A request to stop that it answers is moved afterwards: one that is lost can't be repeated.
    """

    def record() -> None:
        record_stop(log, ended, slots=opened.claim.slots)
        run_dir_watcher.end_stop_request(opened.run_dir, opened.claim.attempt, ended.code)

    what = f"the result could not be recorded: {opened.run_dir.root}"
    if not write_with_timeout(record, seconds=RECORD_SECONDS, what=what, report=print_message):
        run_lock.abandon()  # Closing it would wait for the same storage.


def _review_slow_hosts(
    opened: ClaimedAttempt, services: Services, ended: AttemptResult, *, env: Mapping[str, str]
) -> None:
    """Proposes to exclude a host that has held up the attempt, or excludes it."""
    section, claim = opened.config.guards.throughput, opened.claim
    if section is None or claim.num_hosts < 2 or services.run_lock is None:
        return
    if not ended.is_recorded or ended.code == ExitCode.DONE:
        return
    machines = dict.fromkeys(opened.hosts, identify(env, hostname=socket.gethostname()))
    if services.peers is not None:
        machines |= {host: link.identity for host, link in services.peers.links.items()}

    def review() -> None:
        now = services.clock.wall()
        found = slow_hosts.review(opened.run_dir, claim, section, machines=machines, now=now)
        if found is not None:
            print_message(found)

    what = f"slow hosts could not be reviewed: {opened.run_dir.root}"
    write_with_timeout(review, seconds=RECORD_SECONDS, what=what, report=print_message)


def print_result(ended: AttemptResult, run_dir: RunDir, claim: Claim) -> None:
    """Prints the result, once for all hosts; for a bug, with its traceback."""
    text = faults.format_exit_message(ended.code, ended.reason)
    if ended.code == ExitCode.BUG and ended.announced and ended.culprit is not None:
        path = run_dir.traceback(claim.attempt, ended.culprit)
        trace = None
        with contextlib.suppress(RunError, OSError):
            trace = call_with_timeout(lambda: files.read(path), seconds=RECORD_SECONDS)
        parts = [] if trace is None else [trace.decode(errors="replace")]
        if claim.num_hosts > 1 or not parts:
            parts.append(f"{ended.reason}\n")
        bug = f"this is a bug, in jaxres or in custom code (exit {ExitCode.BUG.value} BUG)\n"
        text = "".join([*parts, bug])
    stdio.flush()
    stdio.eprint(text)


def follows_an_attempt(run_dir: RunDir) -> bool:
    """Returns whether the next attempt follows one that ended without an operator's decision."""
    return restart_policy.is_restart(run_log.read_records(run_dir.log))


def _refuse_other_threads(claim: Claim, threads: int) -> None:
    if claim.threads not in (threads, len(os.sched_getaffinity(0))):  # Older runs: no quota.
        raise ConfigError(
            f"--inline: this run computes with {claim.threads} CPU threads, this process "
            f"would with {threads}: results would differ in their last bits. Omit --inline: the "
            "supervisor sets the number of threads."
        )


def new_claim(
    config: RunConfig | None,
    run_history: RunHistory,
    *,
    env: Mapping[str, str],
    job: WorkerGroup,
) -> Claim:
    """Returns the claim that opens the run's next attempt; without a config, of a user's loop."""
    cores = cpu_cores.usable()
    return Claim(
        attempt=run_history.attempt + 1,
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=boot_id(),
        nonce=secrets.token_hex(8),
        coordinator=job.coordinator,
        num_hosts=job.num_hosts,
        threads=run_history.claims[0].threads if run_history.claims else cores,
        versions=versions(),
        fingerprint={
            "cpu": _cpu_model(),
            "machine": platform.machine(),
            "xla_flags": env.get("XLA_FLAGS", ""),
        },
        trajectory=OWN_LOOP if config is None else configs.digest(config),
        started=read_proc_stat().start_ticks,
        slots=job.slots,
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
