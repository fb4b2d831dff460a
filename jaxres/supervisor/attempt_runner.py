"""The way into an attempt and out of it, shared by all commands that train; no jax.

Reads the config, owns the run directory, takes the run over by a claim, fixes what decides bits
(NPROC), lets the attempt run, and puts its end down: in the log, on the screen, as the exit code.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from jaxres.clock import Clock, SystemClock
from jaxres.cluster.host_group import ALONE, Member
from jaxres.cluster.peer_connections import Peers
from jaxres.config import RunConfig
from jaxres.faults import ConfigError, Exit, TypedEnd
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, Line, RunLog, Stop
from jaxres.storage import files
from jaxres.storage.path import Place
from jaxres.storage.timeouts import within
from jaxres.supervisor import processes, signals
from jaxres.supervisor.attempt import Ended, to_nobody
from jaxres.supervisor.failure_report import bring
from jaxres.supervisor.forkserver_client import Zygote
from jaxres.supervisor.preemption_watcher import Watchman
from jaxres.supervisor.run_config import resolve
from jaxres.supervisor.run_lock import Owner
from jaxres.supervisor.supervisor import supervise
from jaxres.supervisor.worker_group import Job, Meet, alone, boot_id, versions
from jaxres.telemetry import stdio
from jaxres.telemetry.heartbeat import Leaving, SaveNews

RECORD_SECONDS = 10.0
"""Longest wait, at the end, for storage to take the last record or to give a traceback."""


@dataclass(frozen=True)
class Opened:
    """An attempt that has been claimed, and may train."""

    config: RunConfig
    run_dir: RunDir
    log: RunLog
    claim: Claim
    owner: Owner
    clock: Clock
    last_seq: int
    """Number of the claim's record."""
    hosts: tuple[int, ...]
    """Whose workers run behind this door."""
    peers: Peers | None
    """The doors of the other hosts, if they have any."""
    watchman: Watchman | None = None
    """Watches for notices of this machine."""


def answered(act: Callable[[], int]) -> int:
    """Acts, and turns whatever comes, signals included, into an exit code and one message."""
    sys.excepthook = _leave_as_bug
    try:
        signals.raise_stops()
        return act()
    except TypedEnd as end:
        stdio.flush()
        stdio.tell(faults.message(end.exit, str(end)))
        return end.exit


def leave(code: int) -> NoReturn:
    """Ends the process for sure: after a failed save Orbax's threads would hold it for minutes."""
    stdio.flush()
    os._exit(code)


def _leave_as_bug(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Ends the door with its own code; the workers are gone by now."""
    stdio.tell("".join(traceback.format_exception(kind, error, trace)))
    stdio.tell(f"this is a bug in jaxres (exit {Exit.BUG.value} BUG)\n")
    leave(Exit.BUG)


def attempt(
    target: Place,
    overrides: Sequence[str],
    *,
    run: Callable[[Opened], Ended],
    env: Mapping[str, str],
    meet: Meet = alone,
    threads: int | None = None,
) -> int:
    """Opens an attempt, lets it run and puts its end down; returns the exit code.

    Args:
      target: a config file or a run directory.
      overrides: `section.field=value` words.
      run: runs the opened attempt to its end.
      env: the environment that the attempt is to have.
      meet: brings the job's hosts together, before anything is claimed.
      threads: CPU threads that can't be changed any more; None: the run's own are set.
    """
    loaded, run_dir = resolve(target, overrides)
    config = loaded.config
    if is_done(run_dir, config):
        return Exit.DONE
    clock = SystemClock()
    with contextlib.ExitStack() as stack:
        watchman = None
        if threads is None:  # Else there is no door that could heed it.
            watchman = stack.enter_context(Watchman(config.preemption, env=env, clock=clock))
        job = stack.enter_context(meet(config, run_dir))
        owner = stack.enter_context(Owner(run_dir, clock=clock))
        signals.hold()  # Until somebody can answer them: the attempt is to end on record.
        log, opened = claim_next(
            config, run_dir, job=job, owner=owner, clock=clock, env=env, threads=threads
        )
        opened = dataclasses.replace(opened, watchman=watchman)
        ended = stop_that_was_asked(run_dir, opened.claim)
        if ended is not None:
            job.dismiss(ended.code, ended.reason)
        else:
            ended = _announced(opened, job, run)
        put_down_in_time(log, ended, run_dir=run_dir, owner=owner)
    if ended.to_be_said:
        say_end(ended, run_dir, opened.claim)
    return ended.code


def claim_next(
    config: RunConfig,
    run_dir: RunDir,
    *,
    job: Job,
    owner: Owner,
    clock: Clock,
    env: Mapping[str, str],
    threads: int | None = None,
) -> tuple[RunLog, Opened]:
    """Claims the run's next attempt and records its config."""
    records = run_log.read_records(run_dir.log)
    claim = new_claim(config, run_log.fold(records), env=env, job=job)
    if threads is not None:
        _refuse_other_threads(claim, threads)
    log = RunLog.claim(run_dir.log, claim, after=records, clock=clock)
    _record_config(config, run_dir, claim, is_first=not run_log.fold(records).starts)
    last_seq = len(records) + 1
    return log, Opened(config, run_dir, log, claim, owner, clock, last_seq, job.hosts, None)


def _announced(opened: Opened, job: Job, run: Callable[[Opened], Ended]) -> Ended:
    """Runs the attempt once every host has seen the claim; an end before that is on record too."""
    try:
        signals.raise_stops()
        peers = job.announce(opened.claim)
    except TypedEnd as end:
        return Ended(end.exit, str(end), committed=False, to_be_said=True)
    finally:
        signals.hold()
    return run(dataclasses.replace(opened, peers=peers))


def behind_a_door(
    opened: Opened,
    *,
    env: Mapping[str, str],
    advise: Callable[[RunConfig, str], str],
    wakeup: int | None = None,
    until: float = math.inf,
    heard: Callable[[SaveNews], None] = to_nobody,
    zygote: Zygote | None = None,
) -> Ended:
    """Runs the attempt's workers of this door as processes of this machine, one a host.

    Args:
      opened: the attempt.
      env: the workers' environment but for what the attempt fixes.
      advise: makes the message after the kernel has killed a worker for want of memory.
      wakeup: where signals come as bytes, if the caller takes them.
      until: when the attempt is asked to save and stop, on its clock.
      heard: is told whether storage takes saves.
      zygote: what forks workers, if the caller has one.
    """
    claim = opened.claim
    hosts = [Member(host, claim.num_hosts) for host in opened.hosts]
    ended = supervise(
        {member.host: worker_command(opened.run_dir, claim, member) for member in hosts},
        run_dir=opened.run_dir,
        attempt=claim.attempt,
        last_seq=opened.last_seq,
        limits=opened.config.deadlines,
        owner=opened.owner,
        clock=opened.clock,
        env=processes.marked({**env, "NPROC": str(claim.threads)}, opened.run_dir, claim),
        num_hosts=claim.num_hosts,
        peers=opened.peers,
        wakeup=wakeup,
        until=until,
        heard=heard,
        zygote=zygote,
        watchman=opened.watchman,
    )
    bring(opened.run_dir, claim.attempt)
    return advised(ended, opened.config, advise)


def advised(ended: Ended, config: RunConfig, advise: Callable[[RunConfig, str], str]) -> Ended:
    """Adds what to change where the kernel has killed a worker for want of memory."""
    if ended.code == Exit.OUT_OF_MEMORY and not ended.own_word:
        return dataclasses.replace(ended, reason=advise(config, ended.reason))
    return ended


def worker_command(run_dir: RunDir, claim: Claim, member: Member) -> list[str]:
    """Returns the argv of one host's worker."""
    command = [sys.executable, "-m", "jaxres.train.worker", str(run_dir.root)]
    command += ["--attempt", str(claim.attempt), "--parent", str(os.getpid())]
    if member == ALONE:
        return command
    place = ["--host", str(member.host), "--num-hosts", str(member.num_hosts)]
    assert claim.coordinator is not None
    return [*command, *place, "--coordinator", claim.coordinator]


def put_down(log: RunLog, leaving: Leaving, *, culprit: int | None = None) -> None:
    """Records the end; where that can't be done, says so, and the end keeps its code."""
    code, reason, committed = leaving.exit, leaving.reason, leaving.committed
    try:
        log.append(Stop(exit=code, reason=reason, committed=committed, culprit=culprit))
    except (TypedEnd, OSError) as error:
        stdio.tell(f"jaxres: the end could not be recorded: {error}\n")


def put_down_in_time(log: RunLog, ended: Ended, *, run_dir: RunDir, owner: Owner) -> None:
    """Records the end, or gives up: an end is sure whatever storage does."""
    if not ended.on_record:
        return

    def record() -> bool:
        leaving = Leaving(ended.code, ended.reason, ended.committed)
        put_down(log, leaving, culprit=ended.culprit)
        return True

    if within(RECORD_SECONDS, record) is None:
        owner.leave_open()  # Closing would wait for the same storage.
        silence = f"{run_dir.root}: storage has not answered for {RECORD_SECONDS:.0f} s"
        stdio.tell(f"jaxres: the end could not be recorded: {silence}\n")


def say_end(ended: Ended, run_dir: RunDir, claim: Claim) -> None:
    """Tells the person how it ended, once for all hosts; a bug with its traceback."""
    text = faults.message(ended.code, ended.reason)
    if ended.code == Exit.BUG and ended.own_word and ended.culprit is not None:
        path = run_dir.traceback(claim.attempt, ended.culprit)
        trace = None
        with contextlib.suppress(TypedEnd, OSError):
            trace = within(RECORD_SECONDS, lambda: files.read(path))
        told = [] if trace is None else [trace.decode(errors="replace")]
        if claim.num_hosts > 1 or not told:
            told.append(f"{ended.reason}\n")
        bug = f"this is a bug, in jaxres or in custom code (exit {Exit.BUG.value} BUG)\n"
        text = "".join([*told, bug])
    stdio.flush()
    stdio.tell(text)


def is_done(run_dir: RunDir, config: RunConfig) -> bool:
    step = run_log.fold(run_log.read_records(run_dir.log)).step
    if step < config.train.steps:
        return False
    sys.stdout.write(
        f"{run_dir.root}: step {step} of {config.train.steps} is committed already; "
        "nothing to do. A new run: another run.seed, run.dir or config.\n"
    )
    return True


def _record_config(config: RunConfig, run_dir: RunDir, claim: Claim, *, is_first: bool) -> None:
    """Writes the resolved config; only the owner does, never who lost the race for the claim."""
    text = configs.dump_yaml(config).encode()
    if is_first:
        files.replace(run_dir.config, text)
    files.make_dir(run_dir.attempt(claim.attempt))
    files.replace(run_dir.attempt(claim.attempt) / "config.yaml", text)


def stop_that_was_asked(run_dir: RunDir, claim: Claim) -> Ended | None:
    """Honours a `stop` file that lies there already; it never bars the start after this one."""
    if not files.exists(run_dir.request("stop")):
        return None
    files.move(run_dir.request("stop"), run_dir.attempt(claim.attempt) / "stop")
    reason = f"{run_dir.request('stop')} was there at the start; the next start goes on"
    return Ended(Exit.STOPPED, reason, committed=False, to_be_said=True)


def _refuse_other_threads(claim: Claim, threads: int) -> None:
    if claim.threads != threads:
        raise ConfigError(
            f"--inline: this run computes with {claim.threads} CPU threads, this process would "
            f"with {threads}, which changes bits. Leave --inline out: the door sets the number."
        )


def new_claim(
    config: RunConfig,
    line: Line,
    *,
    env: Mapping[str, str],
    job: Job,
) -> Claim:
    """Returns the claim that opens the run's next attempt."""
    cores = len(os.sched_getaffinity(0))
    return Claim(
        attempt=line.attempt + 1,
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=boot_id(),
        nonce=secrets.token_hex(8),
        coordinator=job.coordinator,
        num_hosts=job.num_hosts,
        threads=line.claims[0].threads if line.claims else cores,
        versions=versions(),
        fingerprint={
            "cpu": _cpu_model(),
            "machine": platform.machine(),
            "xla_flags": env.get("XLA_FLAGS", ""),
        },
        trajectory=configs.digest(config),
        places=job.places,
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
