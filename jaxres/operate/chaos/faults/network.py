"""Scenarios of a job with a supervisor on each host: a cut or slow network, a lost host.

Each function is called while every worker holds after the planned step, and returns what it did.
"""

from __future__ import annotations

import subprocess

from jaxres.exit_codes import ExitCode, exit_name
from jaxres.operate.chaos.held_run import HeldRun
from jaxres.operate.chaos.job_network import ProxiedNetwork
from jaxres.operate.chaos.schedule import ScheduledFault
from jaxres.operate.chaos.verdict import Injection

LATE_SECONDS = 0.5
"""Delay of everything that the supervisors send: less than a heartbeat's interval."""
LATE_MESSAGES = 5
"""How many of these a slow network delays at least."""


def partition(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Cuts a host off, until every supervisor has ended; then starts the job again."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    cut = _network(run).of(fault.host)
    run.mark_fault()
    for proxy in cut:
        proxy.cut()
    run.runner.wait_exit()
    unkept = _not_peer_lost(run.runner.supervisors)
    lost = sum(proxy.lost_bytes for proxy in cut)
    run.resume(number)
    if not lost:
        return Injection(fault, problem="the supervisors had sent nothing since the cut")
    return Injection(fault, f"host {fault.host} was cut off: {lost} bytes lost", unkept=unkept)


def lose_host(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Kills a host's supervisor, with which its worker ends; then starts the job again."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    killed = run.runner.supervisors[fault.host]
    if killed.poll() is not None:
        return Injection(fault, problem=f"the supervisor of host {fault.host} had ended")
    run.mark_fault()
    killed.kill()
    run.runner.wait_exit()
    unkept = _not_peer_lost([one for one in run.runner.supervisors if one is not killed])
    run.resume(number)
    evidence = f"SIGKILL to the supervisor of host {fault.host} (pid {killed.pid})"
    return Injection(fault, evidence, unkept=unkept)


def slow_network(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Delays all that the supervisors send, until the next save is committed."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    proxies = _network(run).of(0)
    run.mark_fault()
    for proxy in proxies:
        proxy.delay(LATE_SECONDS)
    with run.held_again(number, step=fault.step + 1):
        run.wait_limited(lambda: sum(one.num_late for one in proxies) >= LATE_MESSAGES)
        is_saved = run.wait_saved(fault.step)
        for proxy in proxies:
            proxy.delay(0.0)
    late = sum(one.num_late for one in proxies)
    if late < LATE_MESSAGES:
        return Injection(fault, problem=f"{late} messages were late")
    unkept = "" if is_saved else f"step {fault.step} was not committed meanwhile"
    evidence = f"{late} messages took {LATE_SECONDS:g} s more"
    return Injection(fault, evidence, recovery_seconds=run.seconds(), unkept=unkept)


def _network(run: HeldRun) -> ProxiedNetwork:
    assert run.network is not None, "a scenario of several supervisors"
    return run.network


def _not_peer_lost(supervisors: list[subprocess.Popen[bytes]]) -> str:
    """Returns which of these have ended for another reason than a lost host; empty: none."""
    codes = [one.returncode for one in supervisors]
    if all(code == ExitCode.PEER_LOST for code in codes):
        return ""
    names = ", ".join(str(code) if code < 0 else exit_name(code) for code in codes)
    return f"the other supervisors exited with {names}, not with {exit_name(ExitCode.PEER_LOST)}"
