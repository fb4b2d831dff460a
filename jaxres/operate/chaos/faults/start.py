"""Scenarios in which the command is started so that it can't train, or dies again and again.

Each function is called while every worker holds after the planned step, and returns what it did.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import xxhash

from jaxres import config as configs
from jaxres.exit_codes import ExitCode, exit_name
from jaxres.operate.chaos import job_devices
from jaxres.operate.chaos.held_run import AGAIN, HeldRun
from jaxres.operate.chaos.scenarios import LOOP_ATTEMPTS, WORKER_SETTING
from jaxres.operate.chaos.schedule import ScheduledFault
from jaxres.operate.chaos.verdict import Injection
from jaxres.runlog import attempt_history
from jaxres.runlog.attempt_history import AttemptSummary
from jaxres.supervisor.attempt_runner import MIN_DEVICES
from jaxres.train.chaos_hooks.fault_request import WRONG_PRODUCT

UNKNOWN_KEY = "train.no_such_key=1"
EXPECTED_KILLS = 1 + LOOP_ATTEMPTS
"""The first of the attempts has committed a step."""
MOST_KILLS = EXPECTED_KILLS + 2
"""Kills after which a supervisor that has not given up is left alone."""


def bad_config(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run, starts the command with two wrong configs, and then with the right one."""
    if problem := run.stop(number):
        return Injection(fault, problem=problem)
    run.mark_fault()
    config = configs.load(run.runner.config, run.runner.overrides).config
    before, unkept = _contents(run.disk), ""
    wrong = (UNKNOWN_KEY, f"run.seed={config.run.seed ^ 1}")
    for override in wrong:
        run.start([override])
        code = run.runner.wait_exit()
        if code != ExitCode.CONFIG:
            unkept = unkept or f"with {override} the command exited with {exit_name(code)}"
    after = _contents(run.disk)
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    if changed:
        unkept = unkept or f"a refused command has changed {changed[0]}"
    run.resume(number)
    return Injection(fault, f"the command was given {' and '.join(wrong)}", unkept=unkept)


def _contents(folder: Path) -> dict[str, str]:
    """Returns path -> digest of each file of a folder."""
    return {
        str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def missing_device(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run, starts the command with a device less, and then with all of them.

    The number that belongs to a host is given as the agent of a VM gives it.
    """
    count = min(job_devices.read(run.run_dir).per_host)
    env = {"JAX_NUM_CPU_DEVICES": str(count - 1), MIN_DEVICES: str(count)}
    did = f"{count - 1} of {count} devices of each worker"
    text = f"{count} devices expected, {count - 1} found"
    return _unhealthy_start(run, number, fault, did, env=env, text=text)


def failed_preflight(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run, starts the command where a product is wrong, and then where none is."""
    did = f"the first device of host {fault.host} computes wrong products"
    env = {WRONG_PRODUCT: str(fault.host)}
    text = "(hardware.preflight). The hardware is faulty"
    return _unhealthy_start(run, number, fault, did, WORKER_SETTING, env=env, text=text)


def _unhealthy_start(
    run: HeldRun,
    number: int,
    fault: ScheduledFault,
    did: str,
    *settings: str,
    env: Mapping[str, str],
    text: str,
) -> Injection:
    """Stops the run, starts the command on hardware with a fault, and then without it.

    Args:
      run: the run.
      did: what is wrong with the hardware.
      *settings: overrides of the start with the fault.
      text: what its message must say.
    """
    if problem := run.stop(number):
        return Injection(fault, problem=problem)
    before, output = run.history(), run.runner.output(run.name)
    printed = output.stat().st_size
    run.mark_fault()
    run.start(settings, env=env)
    code = run.runner.wait_exit()
    is_named = text.encode() in output.read_bytes()[printed:]
    unkept = "" if code == ExitCode.UNHEALTHY else f"the command exited with {exit_name(code)}"
    later = [one for one in _attempts(run) if one.attempt > before.attempt]
    if any(one.start_step is not None for one in later):
        unkept = unkept or "it has trained on this hardware"
    if run.history().committed != before.committed:
        unkept = unkept or "it has changed what is committed"
    if not is_named:
        unkept = unkept or f"no message says {text!r}"
    run.set_aside |= {one.attempt for one in later if one.exit == ExitCode.UNHEALTHY}
    refused = run.forget_faulty_hosts()
    unkept = unkept or refused
    run.resume(number)
    return Injection(fault, did, unkept=unkept)


def _attempts(run: HeldRun) -> list[AttemptSummary]:
    return attempt_history.read(run.run_dir, is_alive=False)


def crash_loop(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Kills a worker after the same step in each attempt; starts the command again at the end."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    run.mark_fault()
    held, kills = number, 0
    while True:
        again = AGAIN * (kills + 1) + number
        run.plan_hold(again, step=fault.step)  # Before another worker trains.
        kills += run.runner.signal_worker(run.pid(held, fault.host), signal.SIGKILL)
        run.release(held)
        held = again
        if not run.wait_held(held) or kills == MOST_KILLS:
            break
    run.plan(number + 1)
    run.release(held)  # It is still planned, also for the next start.
    if run.runner.is_running():
        unkept = f"the supervisor did not give up after {kills} ends without a new commit"
        return Injection(fault, f"SIGKILL {kills} times", ended_attempts=kills, unkept=unkept)
    code = run.runner.wait_exit()
    unkept = "" if code == ExitCode.NO_PROGRESS else f"the command exited with {exit_name(code)}"
    if kills != EXPECTED_KILLS:
        unkept = unkept or f"it gave up after {kills} attempts, not {EXPECTED_KILLS}"
    run.resume(number)
    text = f"SIGKILL after step {fault.step} in {kills} attempts"
    return Injection(fault, text, ended_attempts=kills, unkept=unkept)
