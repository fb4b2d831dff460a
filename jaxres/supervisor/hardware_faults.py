"""Acts on faults of the hardware that the health guard finds while an attempt runs.

A fault ends the attempt with UNHEALTHY, so that this host is replaced or repaired. `save` asks the
workers to save as a preemption notice does; their exit is then recorded as UNHEALTHY. `leave` kills
the workers, so that no state is saved that the fault may have changed. In both cases the other
hosts learn the cause from this host's exit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket

from jaxres.cluster.host_identity import HostIdentity, identify
from jaxres.cluster.messages import JobResult
from jaxres.exit_codes import ExitCode, exit_row
from jaxres.faults import RunError
from jaxres.runlog import run_log
from jaxres.runlog.attempt_result import AttemptResult, fault_record
from jaxres.runlog.run_log import RunLog
from jaxres.runlog.supervisor_events import HardwareFaultFound, HealthWatchStarted
from jaxres.storage.threads import spawn_thread
from jaxres.supervisor import signal_dispatch
from jaxres.supervisor.attempt import RunningAttempt, print_message
from jaxres.supervisor.health.gpu_health import Finding
from jaxres.supervisor.process.worker_process import Worker, kill_process_groups
from jaxres.supervisor.remote_hosts import LEADER
from jaxres.supervisor.root_cause import WorkerExit

WHAT_FOLLOWS = {
    "warn": "training continues",
    "save": f"saving, then exit {ExitCode.UNHEALTHY.value}: this host must be repaired or replaced",
    "leave": f"exit {ExitCode.UNHEALTHY.value} without a save: this host must be repaired or "
    "replaced",
}


def on_health(running: RunningAttempt) -> None:
    """Handles the findings of the health guard since the last call."""
    if running.services.health_watcher is None:
        return
    for found in running.services.health_watcher.poll():
        if isinstance(found, HealthWatchStarted):
            running.event_log.emit(found)
            _print_watch(found)
        else:
            _on_finding(running, found)


def _print_watch(started: HealthWatchStarted) -> None:
    if started.reason:
        print_message(f"the health of GPUs is not watched: {started.reason}")
    elif started.unreadable:
        why = ", ".join(f"{name} ({error})" for name, error in sorted(started.unreadable.items()))
        print_message(f"the health of {len(started.gpus)} GPUs is watched, except for: {why}")


def _on_finding(running: RunningAttempt, finding: Finding) -> None:
    is_first = not running.hardware_fault
    action = finding.action
    if action == "save" and running.step == 0 and not running.spec.is_program:
        action = "leave"  # Nothing new to save.
    _announce(running, dataclasses.replace(finding, action=action))
    reason = f"{socket.gethostname()}: {finding}"
    if action != "warn" and is_first:
        _record(running, reason)
    if action == "leave":
        _leave(running, reason)
    elif action == "save" and is_first and running.stop_requested is None:
        running.hardware_fault = reason
        signal_dispatch.request_stop(running, ExitCode.UNHEALTHY, reason)


def _record(running: RunningAttempt, reason: str) -> None:
    """Records the fault in a thread: a save may take long, and may be killed with its supervisor.

    Host 0 alone writes the run log: it records the fault of another host with the attempt's end.
    """
    identity = identify(running.spec.env, hostname=socket.gethostname())
    result = AttemptResult(ExitCode.UNHEALTHY, reason, is_machine_fault=True, faulty_host=identity)
    fault, folder = fault_record(result, None), running.spec.run_dir.log
    attempt = running.spec.number
    if fault is None or LEADER not in {worker.host for worker in running.workers}:
        return

    def write() -> None:
        with contextlib.suppress(RunError, OSError):  # The record of the end is the second try.
            records = run_log.read_records(folder)
            run_log.claim_of(records, attempt=attempt, folder=folder)
            log = RunLog.of_attempt(folder, records, attempt=attempt, clock=running.services.clock)
            log.append(fault)

    spawn_thread("host-fault", write, daemon=True)


def _announce(running: RunningAttempt, finding: Finding) -> None:
    running.num_hardware_faults += 1
    event = HardwareFaultFound(
        attempt=running.spec.number,
        step=max((worker.save_times.committed_step for worker in running.workers), default=0),
        kind=finding.kind,
        device=finding.device,
        reason=finding.text,
        action=finding.action,
        host=running.workers[0].host,
        number=running.num_hardware_faults,
    )
    running.event_log.emit(event)
    if running.services.run_metrics is not None:
        running.services.run_metrics.on_fault(event)
    print_message(f"hardware: {finding}; {WHAT_FOLLOWS[finding.action]}")
    watcher = running.services.health_watcher
    if finding.action == "warn" and watcher is not None and watcher.on_fault is not None:
        watcher.on_fault(event)


def _leave(running: RunningAttempt, reason: str) -> None:
    """Kills the workers; their exits, not announced, end the attempt on all hosts at once."""
    running.stop_requested = ExitCode.UNHEALTHY
    kill_process_groups(running.workers, clock=running.services.clock)
    now = running.services.clock.monotonic()
    for worker in running.workers:
        code = None if worker.end is None else worker.end.result.code
        is_decided = code is not None and exit_row(code).is_graceful
        if not is_decided and code != ExitCode.UNHEALTHY:
            result = AttemptResult(ExitCode.UNHEALTHY, reason, is_machine_fault=True)
            worker.end = WorkerExit(result, now)


def as_unhealthy(running: RunningAttempt, result: AttemptResult) -> AttemptResult:
    """Returns the result of a worker here as UNHEALTHY if a fault of the hardware explains it."""
    row = exit_row(result.code)
    is_explained = row.code == ExitCode.PREEMPTED or row.blames_host
    if not running.hardware_fault or not is_explained or row.code == ExitCode.PEER_LOST:
        return result
    reason = f"{running.hardware_fault}; {result.reason}"
    return dataclasses.replace(
        result, code=ExitCode.UNHEALTHY, reason=reason, is_machine_fault=True
    )


def own_fault(running: RunningAttempt, worker: Worker, verdict: JobResult) -> HostIdentity | None:
    """Returns the identity of this machine if its own hardware has certainly ended its worker.

    The host reports such a fault itself: the leader may be killed before it has recorded it.
    Before the first step a worker knows its own hardware only. The leader, if it is not lost, knows
    more, as after a wrong sum over all hosts. Later a difference may come from another host.
    """
    result = None if worker.end is None else worker.end.result
    if result is None or result.code != ExitCode.UNHEALTHY:
        return None
    is_leader_lost = (verdict.code, verdict.culprit) == (ExitCode.PEER_LOST, LEADER)
    is_in_start = worker.progress.step == 0 and is_leader_lost
    if result.is_machine_fault or result.culprit == worker.host or is_in_start:
        return identify(running.spec.env, hostname=socket.gethostname())
    return None


def faulty_host(running: RunningAttempt, result: AttemptResult) -> HostIdentity | None:
    """Returns the host whose hardware has ended the attempt; None: none, or unknown which."""
    if result.code != ExitCode.UNHEALTHY:
        return None
    remote = {} if running.links is None else {host.host: host for host in running.links.hosts}
    if result.culprit in remote:
        return remote[result.culprit].identity
    if result.culprit is None and not result.is_machine_fault:
        return None
    return identify(running.spec.env, hostname=socket.gethostname())
