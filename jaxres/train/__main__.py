"""The door: `python -m jaxres.train CONFIG.yaml|RUN_DIR [section.field=value ...]`; no jax.

Runs one worker behind a supervisor that answers signals at once and turns the worker's end into the
exit code. `--inline` runs the worker in this process: same codes, no deadlines.
"""

from __future__ import annotations

from jaxres.supervisor import signals

if __name__ == "__main__":
    signals.hold()  # First of all: a signal during the other imports waits for `main`.

import functools
import os
import sys
from collections.abc import Sequence

from jaxres import config as configs
from jaxres.cluster.detect import membership, take_flags
from jaxres.cluster.host_group import ALONE
from jaxres.faults import Exit, UsageError
from jaxres.storage import gcs_client
from jaxres.storage.path import Place
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.attempt import Ended
from jaxres.supervisor.attempt_runner import Opened, leave
from jaxres.supervisor.follower import follow
from jaxres.supervisor.run_config import target_of
from jaxres.supervisor.worker_group import leading
from jaxres.telemetry import stdio
from jaxres.telemetry.heartbeat import Leaving
from jaxres.train import oom_advice

USAGE = """\
usage: python -m jaxres.train CONFIG.yaml [section.field=value ...]   start a run, or go on with it
       python -m jaxres.train RUN_DIR [section.field=value ...]       go on with a recorded run

The same command starts a run and resumes it, also after kill -9, from the newest committed step.
Ctrl-C or `touch RUN_DIR/stop`: save and stop (76); SIGTERM: save and stop (75); a second one ends
at once. `touch RUN_DIR/save`: one extra checkpoint. `kill -USR1`: stacks of all threads.
--inline: train in this very process, for debuggers and notebooks; no deadlines.

On many hosts start the same command on each, with a run directory that all of them share:
--coordinator HOST:PORT   where host 0 listens for the others (JAXRES_COORDINATOR)
--num-hosts N             how many they are (JAXRES_NUM_HOSTS)
--host-id I               which of them this is, from 0 (JAXRES_HOST_ID)
Slurm's and indexed Jobs' own variables do as well. Workers on this machine only:
`python -m jaxres.launch local`.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if any(word in ("-h", "--help") for word in arguments):
        sys.stdout.write(USAGE + "\n" + configs.describe() + "\n")
        return Exit.DONE
    os.environ.update(gcs_client.environment(os.environ))
    return attempt_runner.answered(lambda: _train(arguments))


def _parse(arguments: Sequence[str]) -> tuple[Place, list[str], bool]:
    inline = "--inline" in arguments
    words = [word for word in arguments if word != "--inline"]
    return *target_of(words, usage=USAGE), inline


def _train(arguments: Sequence[str]) -> int:
    env, advise = os.environ, oom_advice.host_advice
    flags, words = take_flags(arguments)
    target, overrides, inline = _parse(words)
    member, address = membership(flags, env)
    if inline:
        if not member.is_alone:
            raise UsageError("--inline: a process without a door is alone; leave out either.")
        threads = len(os.sched_getaffinity(0))
        return attempt_runner.attempt(target, overrides, run=_inline, env=env, threads=threads)
    run = functools.partial(attempt_runner.behind_a_door, env=env, advise=advise)
    if address is None:
        return attempt_runner.attempt(target, overrides, run=run, env=env)
    if member.leads:
        meet = functools.partial(leading, member=member, address=address)
        return attempt_runner.attempt(target, overrides, run=run, env=env, meet=meet)
    return follow(target, overrides, member=member, address=address, env=env, advise=advise)


def _inline(opened: Opened) -> Ended:
    """Trains in this process, for debuggers and notebooks."""
    run_dir, log, claim = opened.run_dir, opened.log, opened.claim
    os.environ["NPROC"] = str(claim.threads)
    from jaxres.train import worker
    from jaxres.train.stop_requests import Requests

    with Requests(alone=True) as requests:
        worker.catch_bugs(
            run_dir,
            claim.attempt,
            ALONE,
            tell=lambda leaving: attempt_runner.put_down(log, leaving),
            say=stdio.tell,
        )
        early = "before the first finished step"
        requests.before_early_end(
            lambda exit: attempt_runner.put_down(log, Leaving(exit, early, committed=False))
        )
        leaving = worker.work(opened.config, run_dir, log, claim, requests=requests)
    on_record = leaving.exit != Exit.FENCED
    said = leaving.exit != Exit.DONE
    return Ended(leaving.exit, leaving.reason, leaving.committed, on_record, to_be_said=said)


if __name__ == "__main__":
    stdio.never_fail()
    leave(main(sys.argv[1:]))
