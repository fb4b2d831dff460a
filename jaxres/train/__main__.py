"""The command `python -m jaxres.train CONFIG.yaml|RUN_DIR [section.field=value ...]`; no jax.

Runs one worker under a supervisor, which handles signals at once and derives the exit code from the
worker's exit. `--inline` runs the worker in this process: same exit codes, no deadlines.
"""

from __future__ import annotations

from jaxres.host import signals

if __name__ == "__main__":
    signals.block()  # Before all other imports: a signal during them waits for `main`.

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxres import config as configs
from jaxres.cluster import authentication
from jaxres.cluster.detect import detect_cluster, split_flags
from jaxres.cluster.host_group import ALONE
from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.run_log import RunLog
from jaxres.storage import cpu_cores, gcs_client, home
from jaxres.storage.path import RunPath
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.attempt_runner import (
    RESTART_VARIABLE,
    ClaimedAttempt,
    Inline,
    hard_exit,
)
from jaxres.supervisor.companions import attempt_alerts
from jaxres.supervisor.follower import follow
from jaxres.supervisor.process import worker_env
from jaxres.supervisor.process.worker_group import Membership, as_leader
from jaxres.supervisor.run_config import parse_target
from jaxres.supervisor.run_dir_watcher import RunDirWatcher
from jaxres.supervisor.run_lock import RunLock
from jaxres.telemetry import stdio
from jaxres.train.checks import oom_advice, start_checks
from jaxres.train.completion import is_complete

if TYPE_CHECKING:
    from jaxres.supervisor.process.worker_process import Fork
    from jaxres.train.stop_requests import InlineSignals

COMMAND = "python -m jaxres.train"
USAGE = """\
usage: python -m jaxres.train CONFIG.yaml [section.field=value ...]   start a run, or resume it
       python -m jaxres.train RUN_DIR [section.field=value ...]       resume a recorded run

CONFIG.yaml is a file, or the name of a built-in config such as quickstart (docs/configuration.md).
The same command starts a run and resumes it, also after kill -9, from the newest committed step.
Ctrl-C or `touch RUN_DIR/stop`: save and stop (76); SIGTERM: save and stop (75); a second one exits
at once. `touch RUN_DIR/save`: one extra checkpoint. `kill -USR1`: stacks of all threads.
--inline: train in this process, for debuggers; no deadlines. In a notebook call jaxres.train(...),
docs/getting-started.md: an interrupt saves and raises KeyboardInterrupt.

On several hosts start the same command on each, with a run directory that all of them share:
--coordinator HOST:PORT   address on which host 0 listens for the others (JAXRES_COORDINATOR)
--num-hosts N             number of hosts (JAXRES_NUM_HOSTS)
--host-id I               number of this host, from 0 (JAXRES_HOST_ID)
The variables of Slurm, MPI, torchrun and Kubernetes indexed Jobs are detected, and the time limit
of a job (docs/many-hosts.md). The hosts authenticate each other by the secret in RUN_DIR/secret, or
by JAXRES_SECRET, which must be equal on all of them (docs/security.md). Workers on this machine
only: `python -m jaxres.launch local`.
"""


def main(arguments: Sequence[str], *, is_command: bool = False, fork: Fork | None = None) -> int:
    """Runs the command and returns its exit code.

    In the process of another program, such as a notebook's kernel, nothing exits it, and signal
    handlers, signal mask and exception hook are as before when this returns.

    Args:
      arguments: those of the command line.
      is_command: whether this is the command's own process.
      fork: forks the worker (`jaxres.launch.gce.vm.standby`); None: it is a fresh process.

    Raises:
      KeyboardInterrupt: a second Ctrl-C with --inline, unless `is_command`.
    """
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(USAGE + "\n" + configs.describe() + "\n")
        return ExitCode.DONE
    os.environ.update(gcs_client.library_environment(os.environ))
    is_restart = os.environ.get(RESTART_VARIABLE) == "1"
    command = functools.partial(_train, arguments, is_command=is_command, fork=fork)
    with contextlib.nullcontext() if is_command else signals.restored():
        return attempt_runner.run_with_exit_code(command, at_start=not is_restart)


def _parse(arguments: Sequence[str]) -> tuple[RunPath, list[str], bool]:
    inline = "--inline" in arguments
    others = [argument for argument in arguments if argument != "--inline"]
    return *parse_target(others, command=COMMAND), inline


def training_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without variables for the command alone: secret, restart flag."""
    own = (authentication.VARIABLE, RESTART_VARIABLE)
    return {name: value for name, value in env.items() if name not in own}


def refuse_unknown(env: Mapping[str, str]) -> None:
    """Raises UsageError if a variable has a value that would be taken for none."""
    known = {RESTART_VARIABLE: ("0", "1"), attempt_alerts.VARIABLE: (attempt_alerts.RECORDED,)}
    for name, values in known.items():
        if (value := env.get(name, "")) not in ("", *values):
            raise UsageError(f"{name}={value}: must be {' or '.join(values)}, or not be set")


def _train(arguments: Sequence[str], *, is_command: bool, fork: Fork | None) -> int:
    home.ensure(os.environ)
    refuse_unknown(os.environ)
    env, advise = training_variables(os.environ), oom_advice.host_advice
    secret = os.environ.get(authentication.VARIABLE, "")
    flags, others = split_flags(arguments)
    target, overrides, inline = _parse(others)
    member, address = detect_cluster(flags, env)
    if inline:
        if not member.is_alone:
            raise UsageError(
                "--inline has no supervisor, so it runs on one host only: omit one of the two."
            )
        from jaxres.train.stop_requests import InlineSignals

        with contextlib.ExitStack() as stack:
            received = InlineSignals(is_command=is_command)
            return attempt_runner.run_attempt(
                target,
                overrides,
                run=Inline(
                    functools.partial(_inline, received=received),
                    threads=cpu_cores.usable(),
                    hold_signals=lambda: stack.enter_context(received),
                ),
                is_complete=functools.partial(start_checks.is_complete, env=env),
                env=env,
            )
    run = functools.partial(attempt_runner.run_local_workers, env=env, advise=advise)
    run_attempt = functools.partial(
        attempt_runner.run_attempt, target, overrides, run=run, env=env, fork=fork
    )
    if address is None:
        return run_attempt(is_complete=functools.partial(start_checks.is_complete, env=env))
    if member.leads:
        rendezvous = functools.partial(as_leader, member=member, address=address, secret=secret)
        return run_attempt(rendezvous=rendezvous, is_complete=is_complete)
    return follow(
        target,
        overrides,
        membership=Membership(member, address, secret),
        env=env,
        advise=advise,
        is_complete=is_complete,
        fork=fork,
    )


def _inline(
    opened: ClaimedAttempt, log: RunLog, run_lock: RunLock, *, received: InlineSignals
) -> AttemptResult:
    """Trains in this process, for debuggers and notebooks."""
    run_dir, claim = opened.run_dir, opened.claim
    os.environ.update(worker_env.thread_variables(claim))
    from jaxres.train import worker

    def record(exit: ExitCode, reason: str) -> None:
        attempt_runner.record_stop(log, AttemptResult(exit, reason))

    watch = RunDirWatcher(
        run_dir,
        attempt=claim.attempt,
        last_seq=opened.last_seq,
        run_lock=run_lock,
        clock=run_lock.clock,
        step=lambda: received.requests.step,
        report=received.on_watcher_event,
    )
    with worker.inline_stacks(run_dir, claim.attempt) as stacks, watch:
        received.on_attempt(stacks, lambda exit: record(exit, "before the first finished step"))
        try:
            worker.import_all()
            received.allow_interrupts()
            result = worker.run_worker(
                opened.config, run_dir, log, claim, requests=received.requests
            )
        except KeyboardInterrupt:
            record(ExitCode.STOPPED, "interrupted a second time")
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - recorded, as a worker does.
            result, text = worker.describe_crash(error, run_dir, claim.attempt, ALONE)
            stdio.flush()
            stdio.eprint(text)
            return result
    return dataclasses.replace(
        result,
        is_recorded=result.code != ExitCode.FENCED,
        is_printed=result.code != ExitCode.DONE,
    )


if __name__ == "__main__":
    stdio.install_safe_stdio(escapes="--inline" not in sys.argv)
    hard_exit(main(sys.argv[1:], is_command=True))
