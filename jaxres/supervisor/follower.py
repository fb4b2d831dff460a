"""Runs one host's worker of an attempt that the supervisor of host 0 has claimed."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence

from jaxres import faults
from jaxres.clock import Clock, SystemClock
from jaxres.cluster.host_identity import identify
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.host import signals
from jaxres.runlog import faulty_hosts, run_log
from jaxres.runlog.attempt_result import AttemptResult, fault_record
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Claim, Record
from jaxres.storage.path import RunPath
from jaxres.storage.timeouts import write_with_timeout
from jaxres.supervisor import host_exclusion, host_memory
from jaxres.supervisor.attempt import print_message
from jaxres.supervisor.attempt_runner import (
    RECORD_SECONDS,
    ClaimedAttempt,
    follows_an_attempt,
    print_result,
    run_local_workers,
)
from jaxres.supervisor.companions import attempt_alerts
from jaxres.supervisor.companions.companions import Companions
from jaxres.supervisor.process.worker_group import Membership, as_follower
from jaxres.supervisor.process.worker_process import Fork
from jaxres.supervisor.run_config import resolve_run


def follow(
    target: RunPath,
    overrides: Sequence[str],
    *,
    membership: Membership,
    env: Mapping[str, str],
    advise: Callable[[RunConfig, str], str],
    is_complete: Callable[[RunDir, RunConfig], bool],
    fork: Fork | None = None,
) -> int:
    """Connects to the supervisor of host 0 and runs this host's worker; returns the exit code."""
    loaded, run_dir = resolve_run(target, overrides)
    config, member = loaded.config, membership.member
    if is_complete(run_dir, config):
        return ExitCode.DONE
    host_exclusion.on_this_machine(run_dir, run_log.read_records(run_dir.log), env=env)
    identity, clock = identify(env, hostname=socket.gethostname()), SystemClock()
    with contextlib.ExitStack() as stack:
        stack.enter_context(faults.refusals(at_start=not follows_an_attempt(run_dir)))
        companions = Companions(config, run_dir, env=env, clock=clock, owns_run=False)
        stack.enter_context(companions)
        joined = as_follower(
            config,
            run_dir,
            member,
            membership.address,
            secret=membership.secret,
            identity=identity,
            clock=clock,
        )
        attempt_number, peers, shared = stack.enter_context(joined)
        recording = attempt_alerts.recording(config, run_dir, host=member.host, clock=clock)
        companions.send_faults(stack.enter_context(recording).on_fault)
        signals.block()
        records, claim = _read_claim(run_dir, attempt_number)
        host_memory.prepare(run_dir, config, run_log.fold(records).claims)
        companions.on_history([record for record in records if record.attempt < attempt_number])
        companions.on_claim(claim, host=member.host)
        opened = ClaimedAttempt(
            config, run_dir, claim, run_log.last_seq(records), (member.host,), shared
        )
        services = dataclasses.replace(companions.services, peers=peers, fork=fork)
        if config.program is not None:
            services = dataclasses.replace(services, fork=None)
        ended = run_local_workers(opened, services, env=env, advise=advise)
    report_fault(run_dir, claim, ended, host=member.host, clock=clock)
    host_memory.delete_at_end(run_dir, config, ended)
    if ended.is_printed:
        print_result(ended, run_dir, claim)
    return ended.code


def _read_claim(run_dir: RunDir, attempt: int) -> tuple[list[Record], Claim]:
    records = run_log.read_records(run_dir.log)
    return records, run_log.claim_of(records, attempt=attempt, folder=run_dir.log)


def report_fault(
    run_dir: RunDir, claim: Claim, ended: AttemptResult, *, host: int, clock: Clock
) -> None:
    """Stores the fault of this machine, if one has ended the attempt here; prints a failure."""
    if (fault := fault_record(ended, None)) is None:
        return

    def write() -> None:
        faulty_hosts.report(run_dir, fault, claim=claim, host=host, now=clock.wall())

    what = "the fault of this host could not be recorded"
    write_with_timeout(write, seconds=RECORD_SECONDS, what=what, report=print_message)
