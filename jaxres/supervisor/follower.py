"""The part of a host whose attempt another host's door opens: it claims and decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from jaxres.clock import SystemClock
from jaxres.cluster.detect import Address
from jaxres.cluster.host_group import Member
from jaxres.config import RunConfig
from jaxres.faults import Exit
from jaxres.runlog import run_log
from jaxres.storage.path import Place
from jaxres.supervisor import signals
from jaxres.supervisor.attempt_runner import advised, is_done, say_end, worker_command
from jaxres.supervisor.failure_report import bring
from jaxres.supervisor.preemption_watcher import Watchman
from jaxres.supervisor.run_config import resolve
from jaxres.supervisor.supervisor import supervise
from jaxres.supervisor.worker_group import following


def follow(
    target: Place,
    overrides: Sequence[str],
    *,
    member: Member,
    address: Address,
    env: Mapping[str, str],
    advise: Callable[[RunConfig, str], str],
) -> int:
    """Runs one host's part of an attempt that another host's door opens; returns the exit code."""
    loaded, run_dir = resolve(target, overrides)
    config = loaded.config
    if is_done(run_dir, config):
        return Exit.DONE
    clock = SystemClock()
    with contextlib.ExitStack() as stack:
        watchman = stack.enter_context(Watchman(config.preemption, env=env, clock=clock))
        met = following(config, run_dir, member, address, clock=clock)
        attempt_number, peers = stack.enter_context(met)
        signals.hold()
        records = run_log.read_records(run_dir.log)
        claim = run_log.claim_of(records, attempt=attempt_number)
        command = worker_command(run_dir, claim, member)
        ended = supervise(
            {member.host: command},
            run_dir=run_dir,
            attempt=claim.attempt,
            last_seq=len(records),
            limits=config.deadlines,
            owner=None,
            clock=clock,
            env={**env, "NPROC": str(claim.threads)},
            num_hosts=member.num_hosts,
            peers=peers,
            watchman=watchman,
        )
    bring(run_dir, claim.attempt)
    ended = advised(ended, config, advise)
    if ended.to_be_said:
        say_end(ended, run_dir, claim)
    return ended.code
