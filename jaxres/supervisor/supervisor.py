"""Supervises one attempt: spawns workers, handles signals, enforces deadlines, returns a result.

One thread waits in one `select`: signals come through a wake-up pipe, status messages through each
worker's pipe, a worker's exit through its pidfd, and changes of the run directory from the
`RunDirWatcher`. Each worker has its own process group and dies with this process. With several
workers, the first exit ends the attempt for all (`root_cause`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import select
import signal
from collections.abc import Iterable, Sequence

from jaxres.clock import Awake, Clock
from jaxres.cluster.messages import JobResult
from jaxres.cluster.peer_connections import PeerLinks
from jaxres.exit_codes import ExitCode, exit_row
from jaxres.host import processes, signals
from jaxres.host.processes import oom_kill_count
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.event_log import AsyncEventLog
from jaxres.supervisor import hardware_faults, root_cause, signal_dispatch
from jaxres.supervisor.attempt import AttemptSpec, RunningAttempt, Services, print_message
from jaxres.supervisor.process.watchdog import (
    LEAVE_SECONDS,
    ProgressTracker,
    limit_seconds,
    overdue_seconds,
)
from jaxres.supervisor.process.worker_process import (
    Worker,
    kill_process_groups,
    spawn_worker,
    wait_for,
)
from jaxres.supervisor.remote_hosts import LEADER, FollowerLinks, LeaderLink, RemoteHost
from jaxres.supervisor.root_cause import HostStatus, WorkerExit
from jaxres.supervisor.run_dir_watcher import RunDirWatcher
from jaxres.supervisor.run_lock import RunLock

TICK_SECONDS = 0.25
SILENT_SECONDS = 10.0
"""A message is printed once storage has not answered the run directory watcher for this long."""
STACKS_GRACE_SECONDS = 0.7
ABORT_GRACE_SECONDS = 0.7


def supervise(spec: AttemptSpec, services: Services) -> AttemptResult:
    """Runs the workers of an attempt until they have all exited; returns its result."""
    run_dir, clock, metrics = spec.run_dir, services.clock, services.run_metrics
    with contextlib.ExitStack() as stack:
        path = run_dir.host_supervisor_events(spec.number, min(spec.commands))
        event_log = stack.enter_context(AsyncEventLog(path, clock=clock))
        wakeup = services.wakeup
        wakeup = stack.enter_context(signals.wakeup_fd()) if wakeup is None else wakeup
        links = None if services.peers is None else _connect_links(services.peers, spec, clock)
        running = RunningAttempt(spec, services, links, event_log)
        try:
            watch = None  # Before the workers: the lock's heartbeat must not wait for imports.
            if services.run_lock is not None:
                watch = stack.enter_context(_run_dir_watcher(running, services.run_lock))
            _spawn_workers(running, wakeup=wakeup)
            if metrics is not None:
                running.workers[0].on_message = metrics.on_status
                metrics.on_attempt_started(spec.number, num_hosts=spec.num_hosts)
            ended = _with_stop_request(running, _wait(running, wakeup, watch))
            _send_exit(running, ended)
            return ended
        finally:
            kill_process_groups(running.workers, clock=clock)
            for worker in running.workers:
                worker.close()


def _spawn_workers(running: RunningAttempt, *, wakeup: int) -> None:
    """Spawns the workers, the lowest host first; a signal ends the wait for a fork server."""

    def may_wait() -> bool:
        _send_heartbeat(running, running.spec.commands)
        return not select.select([wakeup], [], [], 0)[0]

    kills_before = oom_kill_count()
    server = running.services.fork_server
    fork = running.services.fork if server is None else server.fork
    for host, command in sorted(running.spec.commands.items()):
        worker = spawn_worker(
            command,
            host=host,
            is_alone=running.spec.num_hosts == 1,
            env=running.spec.env,
            kills_before=kills_before,
            clock=running.services.clock,
            fork=fork,
            may_wait=may_wait,
        )
        running.workers.append(worker)


def _send_heartbeat(running: RunningAttempt, hosts: Iterable[int]) -> None:
    """Sends the other supervisors the progress of the workers here, of which some may not run yet.

    Args:
      hosts: the hosts of this supervisor.
    """
    progress = dict.fromkeys(
        hosts, ProgressTracker(last_progress=running.services.clock.monotonic())
    )
    progress |= {worker.host: worker.progress for worker in running.workers}
    if isinstance(running.links, LeaderLink):
        (own,) = progress.values()
        running.links.send_heartbeat(own)
    elif running.links is not None:
        running.links.send_heartbeat([(host, each.step) for host, each in progress.items()])


def _run_dir_watcher(running: RunningAttempt, owner: RunLock) -> RunDirWatcher:
    return RunDirWatcher(
        running.spec.run_dir,
        attempt=running.spec.number,
        last_seq=running.spec.last_seq,
        run_lock=owner,
        clock=running.services.clock,
        step=lambda: running.step,
        progress=running.training_progress,
    )


def _with_stop_request(running: RunningAttempt, ended: AttemptResult) -> AttemptResult:
    """Adds the requested exit code and the reason, which the workers do not know."""
    if ended.requested is None:
        ended = dataclasses.replace(ended, requested=running.stop_requested)
    if running.stop_reason and ended.announced and exit_row(ended.code).stop_signals:
        ended = dataclasses.replace(ended, reason=f"{running.stop_reason}: {ended.reason}")
    return ended


def _connect_links(peers: PeerLinks, spec: AttemptSpec, clock: Clock) -> FollowerLinks | LeaderLink:
    if LEADER in spec.commands:
        return FollowerLinks(peers, now=clock.monotonic())
    return LeaderLink(peers)


def _send_exit(running: RunningAttempt, ended: AttemptResult) -> None:
    """Sends this supervisor's result to the others, so that none of them waits for it."""
    if running.services.run_metrics is not None:
        running.services.run_metrics.on_attempt_ended(announced=ended.announced)
    if running.links is not None:
        running.links.send_exit(ended, step=running.step)


def _wait(running: RunningAttempt, wakeup: int, watch: RunDirWatcher | None) -> AttemptResult:
    """Handles signals, messages and deadlines until the attempt has a result."""
    links, awake = running.links, Awake(running.services.clock)
    while True:
        sources: list[int] = [fd for worker in running.workers for fd in worker.sources()]
        sources += [] if watch is None else [watch.wakeup]
        sources += [] if links is None else [links.fileno()]
        sources += (
            []
            if running.services.preemption_watcher is None
            else [running.services.preemption_watcher.wakeup]
        )
        sources += (
            []
            if running.services.health_watcher is None
            else [running.services.health_watcher.wakeup]
        )
        select.select([wakeup, *sources], [], [], TICK_SECONDS)
        _extend_deadlines(running, awake)
        hardware_faults.on_health(running)  # Before an exit that it explains.
        now = running.services.clock.monotonic()
        for worker in running.workers:
            _read_status(running, worker, now=now)
            while worker.news:
                news = worker.news.pop(0)
                if worker.host == LEADER:
                    running.services.on_news(news)
        if links is not None and (ended := _exchange(running, links, now=now)) is not None:
            return ended
        if (ended := _result_after_exit(running)) is not None:
            return ended
        # Notices before signals: an early notice sends a SIGTERM too.
        if (ended := signal_dispatch.on_notices(running)) is not None:
            return ended
        for number in signals.drain(wakeup):
            if (ended := signal_dispatch.on_signal(running, number)) is not None:
                return ended
        for report in watch.reports() if watch else ():
            if (ended := signal_dispatch.on_watcher_event(running, report)) is not None:
                return ended
        _extend_deadlines(running, awake)  # A handler may have suspended this process.
        if (ended := _tick(running, watch)) is not None:
            return ended


def _read_status(running: RunningAttempt, worker: Worker, *, now: float) -> None:
    """Reads a worker's messages and its exit."""
    had_ended = worker.end is not None
    worker.read_status(now=now)
    if worker.end is not None and not had_ended:
        result = hardware_faults.as_unhealthy(running, worker.end.result)
        worker.end = dataclasses.replace(worker.end, result=result)


def _extend_deadlines(running: RunningAttempt, awake: Awake) -> None:
    """Extends all deadlines by the time this process was suspended."""
    if slept := awake.slept():
        for host in running.hosts:
            host.extend_deadlines(slept)


def _exchange(
    running: RunningAttempt, links: FollowerLinks | LeaderLink, *, now: float
) -> AttemptResult | None:
    """Receives messages of the other supervisors; sends them the progress of the workers here."""
    if isinstance(links, LeaderLink):
        (worker,) = running.workers
        _send_heartbeat(running, ())
        if worker.end is not None:
            links.send_exit(worker.end.result, step=worker.progress.step)
        verdict, stop = links.receive(), links.stop
        if verdict is None and stop is not None and running.stop_requested is None:
            return signal_dispatch.request_stop(running, ExitCode(stop.code), stop.reason)
        return None if verdict is None else _follow_leader(running, worker, verdict)
    requests = links.receive(now=now)
    _send_heartbeat(running, ())
    for stop in requests:
        running.stop_reason = running.stop_reason or stop.reason
        acts = running.spec.is_program or stop.step == running.step == 0
        if acts and running.stop_requested is None:
            return signal_dispatch.request_stop(running, ExitCode(stop.code), stop.reason)
    return None


def _follow_leader(running: RunningAttempt, worker: Worker, verdict: JobResult) -> AttemptResult:
    """Kills the worker; returns the leader's result, or the worker's own if that is agreed."""
    if verdict.is_hang:
        _dump_stacks(running)
    kill_process_groups(running.workers, clock=running.services.clock)
    own_result = None if worker.end is None else worker.end.result
    fault = hardware_faults.own_fault(running, worker, verdict)
    is_agreed = own_result is not None and exit_row(own_result.code).is_agreed
    if own_result is not None and is_agreed and (own_result.announced or fault is not None):
        verdict = dataclasses.replace(verdict, code=own_result.code, reason=own_result.reason)
    return AttemptResult(
        verdict.code,
        verdict.reason,
        committed=verdict.committed,
        is_recorded=False,
        is_printed=verdict.code != ExitCode.DONE,
        culprit=verdict.culprit,
        announced=own_result is not None and own_result.announced,
        is_machine_fault=fault is not None,
        faulty_host=fault,
    )


def _result_after_exit(running: RunningAttempt) -> AttemptResult | None:
    """Returns the result once a worker has exited and the others had time to exit too."""
    if isinstance(running.links, LeaderLink):
        return None  # The supervisor of host 0 decides.
    ends = [host.end for host in running.hosts]
    if running.services.clock.monotonic() < root_cause.decision_time(
        ends, settle_seconds=_settle_seconds(running)
    ):
        return None
    return _conclude(running)


def _settle_seconds(running: RunningAttempt) -> float:
    """Returns the longest time for the other hosts to exit after an exit that all agree on.

    A program that is done on one host has no limit on another one: the hosts do not agree.
    """
    limits = running.spec.limits
    if not running.spec.is_program:
        return limits.save_seconds + LEAVE_SECONDS
    codes = {host.end.result.code for host in running.hosts if host.end is not None}
    return math.inf if codes == {ExitCode.DONE} else limits.stop_seconds + LEAVE_SECONDS


def _conclude(running: RunningAttempt) -> AttemptResult:
    """Kills all workers; returns the result with its root cause, and sends it to all hosts."""
    statuses = [host.status() for host in running.hosts]
    kill_process_groups(running.workers, clock=running.services.clock)
    cause = root_cause.find_root_cause(statuses, is_program=running.spec.is_program)
    code, reason = cause.result.code, cause.result.reason
    if isinstance(running.links, FollowerLinks):
        running.links.send_results(cause)
        code, reason = cause.per_host[LEADER]
    return dataclasses.replace(
        cause.result,
        code=code,
        reason=reason,
        is_recorded=cause.result.code != ExitCode.FENCED,
        is_printed=code != ExitCode.DONE,
        faulty_host=hardware_faults.faulty_host(running, cause.result),
    )


def _tick(running: RunningAttempt, watch: RunDirWatcher | None) -> AttemptResult | None:
    """Checks the deadlines and storage every TICK_SECONDS; returns the result of a hang."""
    now = running.services.clock.monotonic()
    if now - running.ticked_at < TICK_SECONDS:
        return None  # A status message has woken the loop earlier.
    running.ticked_at = now
    child_pids = {worker.process.pid for worker in running.workers}
    if running.services.fork_server is not None:
        child_pids |= running.services.fork_server.pids
        if running.step:  # Not earlier: both would import at the same time.
            running.services.fork_server.ensure_started(running.spec.env)
    processes.reap(child_pids)
    is_silent = watch is not None and watch.silent_seconds(now=now) > SILENT_SECONDS
    if is_silent != running.is_silence_reported:
        running.is_silence_reported = is_silent
        state = (
            "does not answer; deadlines and signals still work" if is_silent else "answers again"
        )
        print_message(f"{running.spec.run_dir.root}: storage {state} ({running.progress_text()})")
    if now >= running.spec.deadline and running.stop_requested is None:
        return signal_dispatch.request_stop(
            running, ExitCode.STOPPED, "launch.max_hours is reached"
        )
    late = [host for host in running.hosts if host.end is None and _is_overdue(running, host, now)]
    for worker in running.running_workers:
        if worker in late and worker.exit_message is not None:
            worker.signal_group(signal.SIGKILL)
            worker.end = worker.announced_exit(now)
    if isinstance(running.links, LeaderLink):
        return None  # The supervisor of host 0 knows what all hosts wait for.
    overdue = {host.host for host in late if host.end is None}
    statuses = [host.status() for host in running.hosts if host.end is None] if overdue else []
    hung = root_cause.hung_hosts(statuses, overdue)
    return _end_hung(running, hung) if hung else None


def _is_overdue(running: RunningAttempt, host: Worker | RemoteHost, now: float) -> bool:
    return overdue_seconds(host.progress, running.spec.limits, now=now) > 0


def _end_hung(running: RunningAttempt, hung: Sequence[HostStatus]) -> AttemptResult:
    """Dumps the stacks of all workers, aborts and kills them, each step with a time limit."""
    first, *others = hung
    host = next(host for host in running.hosts if host.host == first.host)
    limit = limit_seconds(host.progress, running.spec.limits)
    reason = (
        f"no progress for {limit:.1f} s in phase '{first.phase}' after step {first.step} of this "
        f"attempt; {_hosts_at_same_point(first, others)}{_progress_of_hosts(running)}stacks of all "
        f"threads, if they could be dumped: {running.stacks_text()}. If this "
        "is not a hang, raise the phase's limit (deadlines.*)."
    )
    result = AttemptResult(ExitCode.HUNG, reason)
    if isinstance(host, Worker):
        result = hardware_faults.as_unhealthy(running, result)
    end = WorkerExit(result, running.services.clock.monotonic())
    if isinstance(
        running.links, FollowerLinks
    ):  # Before these workers die: losing them aborts the workers of other hosts.
        statuses = [
            dataclasses.replace(each.status(), end=end) if each is host else each.status()
            for each in running.hosts
        ]
        cause = root_cause.find_root_cause(statuses, is_program=running.spec.is_program)
        running.links.send_results(cause)
    _dump_stacks(running)
    host.end = end
    return _conclude(running)


def _progress_of_hosts(running: RunningAttempt) -> str:
    """Returns the progress of every host, for a message; empty for a single host."""
    statuses = [host.status() for host in running.hosts]
    return (
        f"{root_cause.progress_summary(statuses, now=running.services.clock.monotonic())}; "
        if len(statuses) > 1
        else ""
    )


def _hosts_at_same_point(first: HostStatus, others: Sequence[HostStatus]) -> str:
    """Returns which hosts are at the same point, of which any may be the hung one."""
    alike = [o.host for o in others if (o.phase, o.step) == (first.phase, first.step)]
    if not alike or first.is_stopped:
        return ""
    return f"host {', '.join(map(str, alike))} is at the same point, compare the stacks; "


def _dump_stacks(running: RunningAttempt) -> None:
    """Makes the workers here dump the stacks of all threads, then aborts them."""
    workers = running.running_workers
    for number, grace in (
        (signal.SIGUSR1, STACKS_GRACE_SECONDS),
        (signal.SIGABRT, ABORT_GRACE_SECONDS),
    ):
        for each in workers:
            each.signal(number)
        wait_for(workers, seconds=grace, clock=running.services.clock)
