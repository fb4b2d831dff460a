"""Spawns a job's workers, answers signals and requests at once, holds deadlines, reports the end.

One thread, one `select`: signals come through a wake-up pipe, progress through each worker's beat,
its end through a pidfd, news of the run directory from the lookout. A worker sits in a process
group of its own and dies with this process. One worker is the case of one; of several the first end
decides for all (`blame`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import select
import signal
from collections.abc import Callable, Mapping, Sequence

from jaxres.clock import Awake, Clock
from jaxres.cluster.messages import Verdict
from jaxres.cluster.peer_connections import Peers
from jaxres.config.schema import DeadlinesSection
from jaxres.faults import Exit
from jaxres.runlog.event_log import Diary
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import processes, root_cause, signal_dispatch, signals
from jaxres.supervisor.attempt import Attempt, Ended, say, to_nobody
from jaxres.supervisor.forkserver_client import Zygote
from jaxres.supervisor.preemption_watcher import Watchman
from jaxres.supervisor.processes import out_of_memory_kills
from jaxres.supervisor.remote_hosts import LEAD, Following, Led, Remote
from jaxres.supervisor.root_cause import End, Known
from jaxres.supervisor.run_dir_watcher import Lookout
from jaxres.supervisor.run_lock import Owner
from jaxres.supervisor.watchdog import LEAVE_SECONDS, limit_seconds, overdue_seconds
from jaxres.supervisor.worker_process import Worker, kill_groups, start, wait_for
from jaxres.telemetry.heartbeat import SaveNews

TICK_SECONDS = 0.25
SILENT_SECONDS = 10.0
"""Storage that has not answered the lookout for so long is spoken of."""
STACKS_GRACE_SECONDS = 0.7
ABORT_GRACE_SECONDS = 0.7


def supervise(
    commands: Mapping[int, Sequence[str]],
    *,
    run_dir: RunDir,
    attempt: int,
    last_seq: int,
    limits: DeadlinesSection,
    owner: Owner | None,
    clock: Clock,
    env: Mapping[str, str],
    num_hosts: int,
    peers: Peers | None = None,
    wakeup: int | None = None,
    until: float = math.inf,
    heard: Callable[[SaveNews], None] = to_nobody,
    zygote: Zygote | None = None,
    watchman: Watchman | None = None,
) -> Ended:
    """Runs the workers to their end.

    Args:
      commands: argv by host of the workers here; `--beat-fd N` is appended. The lead starts first.
      run_dir: whose requests are honoured.
      attempt: the attempt that the workers belong to.
      last_seq: number of the attempt's claim in the log.
      limits: the deadlines by phase.
      owner: beats every second while the workers run; None: the lead's door does, on another host.
      clock: the watcher's.
      env: the workers' environment.
      num_hosts: of the whole job.
      peers: the doors of the other hosts, if they have any.
      wakeup: where signals come as bytes; None: they are taken for as long as the workers run.
      until: when the workers are asked to save and stop, on the clock.
      heard: is told whether storage takes the lead's saves.
      zygote: forks the workers if it can, and is told when training runs; None: there is none.
      watchman: watches for notices of this machine, if anybody does.
    """
    with contextlib.ExitStack() as stack:
        path = run_dir.door_events(attempt, min(commands))
        diary = stack.enter_context(Diary(path, clock=clock))
        wakeup = stack.enter_context(signals.as_bytes()) if wakeup is None else wakeup
        others = None if peers is None else _others(peers, commands, clock=clock)
        running = Attempt(
            *(run_dir, attempt, limits, clock, [], others, until),
            *(num_hosts, watchman, diary, zygote, env, heard),
        )
        try:
            _start(running, commands, is_alone=num_hosts == 1)
            watch = None
            if owner is not None:
                watch = stack.enter_context(_lookout(running, owner, last_seq=last_seq))
            ended = _with_what_was_asked(running, _wait(running, wakeup, watch))
            _tell_others(running, ended)
            return ended
        finally:
            kill_groups(running.workers, clock=clock)
            for worker in running.workers:
                worker.close()


def _start(running: Attempt, commands: Mapping[int, Sequence[str]], *, is_alone: bool) -> None:
    """Starts the workers, the lead first."""
    kills_before = out_of_memory_kills()
    for host, command in sorted(commands.items()):
        worker = start(
            command,
            host=host,
            is_alone=is_alone,
            env=running.env,
            kills_before=kills_before,
            clock=running.clock,
            fork=None if running.zygote is None else running.zygote.fork,
        )
        running.workers.append(worker)


def _lookout(running: Attempt, owner: Owner, *, last_seq: int) -> Lookout:
    return Lookout(
        running.run_dir,
        attempt=running.number,
        last_seq=last_seq,
        owner=owner,
        clock=running.clock,
        step=lambda: running.step,
    )


def _with_what_was_asked(running: Attempt, ended: Ended) -> Ended:
    """Adds what only the door knows: what it was asked for, and by whom."""
    if ended.asked is None:
        ended = dataclasses.replace(ended, asked=running.asked)
    if running.why and ended.own_word and ended.code in (Exit.PREEMPTED, Exit.STOPPED):
        ended = dataclasses.replace(ended, reason=f"{running.why}: {ended.reason}")
    return ended


def _others(peers: Peers, commands: Mapping[int, object], *, clock: Clock) -> Led | Following:
    return Led(peers, now=clock.monotonic()) if LEAD in commands else Following(peers)


def _tell_others(running: Attempt, ended: Ended) -> None:
    """Sees to it that no other door waits for what this one knows."""
    if isinstance(running.others, Led):
        running.others.leave(ended.code, ended.reason, step=running.step, committed=ended.committed)
    elif running.others is not None:
        end = End(ended.code, ended.reason, running.clock.monotonic(), ended.own_word)
        running.others.ended(end, step=running.step)


def _wait(running: Attempt, wakeup: int, watch: Lookout | None) -> Ended:
    """Answers whatever comes until the attempt has ended."""
    others, awake = running.others, Awake(running.clock)
    while True:
        sources: list[int] = [fd for worker in running.workers for fd in worker.sources()]
        sources += [] if watch is None else [watch.wakeup]
        sources += [] if others is None else [others.fileno()]
        sources += [] if running.watchman is None else [running.watchman.wakeup]
        select.select([wakeup, *sources], [], [], TICK_SECONDS)
        _stretch(running, awake)
        now = running.clock.monotonic()
        for worker in running.workers:
            worker.take(now=now)
            while worker.news:
                news = worker.news.pop(0)
                if worker.host == LEAD:
                    running.heard(news)
        if others is not None and (ended := _hear(running, others, now=now)) is not None:
            return ended
        if (ended := _first_end(running)) is not None:
            return ended
        # Before signals: an early notice has come as a SIGTERM too.
        if (ended := signal_dispatch.heed_notices(running)) is not None:
            return ended
        for number in signals.taken(wakeup):
            if (ended := signal_dispatch.answer(running, number)) is not None:
                return ended
        for report in watch.reports() if watch else ():
            if (ended := signal_dispatch.heed(running, report)) is not None:
                return ended
        _stretch(running, awake)  # An answer may have been a sleep.
        if (ended := _tick(running, watch)) is not None:
            return ended


def _stretch(running: Attempt, awake: Awake) -> None:
    """Lets no limit run while this process was asleep."""
    if slept := awake.slept():
        for host in running.hosts:
            host.paused(slept)


def _hear(running: Attempt, others: Led | Following, *, now: float) -> Ended | None:
    """Takes what the other doors say, and tells them how far the workers here are."""
    if isinstance(others, Following):
        (worker,) = running.workers
        others.beat(step=worker.watch.step, phase=worker.watch.phase)
        if worker.end is not None:
            others.ended(worker.end, step=worker.watch.step)
        verdict = others.take()
        return None if verdict is None else _as_told(running, worker, verdict)
    asked = others.take(now=now)
    others.beat([(worker.host, worker.watch.step) for worker in running.workers])
    for stop in asked:
        running.why = running.why or stop.reason
        if stop.step == running.step == 0 and running.asked is None:
            return signal_dispatch.ask_to_stop(running, Exit(stop.code), stop.reason)
    return None


def _as_told(running: Attempt, worker: Worker, verdict: Verdict) -> Ended:
    """Ends as the lead's door says, or as this worker has ended if the lead is gone."""
    if verdict.is_hang:
        _dump_stacks(running)
    kill_groups(running.workers, clock=running.clock)
    end = worker.end
    if end is not None and end.own_word and end.code in root_cause.AGREED:
        verdict = dataclasses.replace(verdict, code=end.code, reason=end.reason)
    return Ended(
        verdict.code,
        verdict.reason,
        verdict.committed,
        on_record=False,
        to_be_said=verdict.code != Exit.DONE,
        culprit=verdict.culprit,
        own_word=end is not None and end.own_word,
    )


def _first_end(running: Attempt) -> Ended | None:
    """Ends all once the first end, and what the others did then, allow to say why."""
    if isinstance(running.others, Following):
        return None  # The lead's door decides.
    ends = [host.end for host in running.hosts]
    settle_seconds = running.limits.save_seconds + LEAVE_SECONDS
    if running.clock.monotonic() < root_cause.due(ends, settle_seconds=settle_seconds):
        return None
    return _conclude(running)


def _conclude(running: Attempt) -> Ended:
    known = [host.known() for host in running.hosts]
    kill_groups(running.workers, clock=running.clock)
    found = root_cause.decide(known)
    code, reason = found.code, found.reason
    if isinstance(running.others, Led):
        running.others.conclude(found)
        code, reason = found.told[LEAD]
    return Ended(
        code,
        reason,
        found.committed,
        on_record=found.code != Exit.FENCED,
        to_be_said=code != Exit.DONE,
        culprit=found.culprit,
        own_word=found.own_word,
    )


def _tick(running: Attempt, watch: Lookout | None) -> Ended | None:
    """Holds the deadlines, and says so when storage no longer answers."""
    now = running.clock.monotonic()
    if now - running.ticked_at < TICK_SECONDS:
        return None  # A finished step has woken us.
    running.ticked_at = now
    awaited = {worker.process.pid for worker in running.workers}
    if running.zygote is not None:
        awaited |= running.zygote.pids
        if running.step:  # Not earlier: the two would import at the same time.
            running.zygote.see_to_it(running.env)
    processes.bury(awaited)
    is_silent = watch is not None and watch.silent_seconds(now=now) > SILENT_SECONDS
    if is_silent != running.silence_told:
        running.silence_told = is_silent
        state = "does not answer; deadlines and signals go on" if is_silent else "answers again"
        say(f"{running.run_dir.root}: storage {state} ({running.where()})")
    if now >= running.until and running.asked is None:
        return signal_dispatch.ask_to_stop(running, Exit.STOPPED, "launch.max_hours are over")
    late = [host for host in running.hosts if host.end is None and _is_overdue(running, host, now)]
    for worker in running.running:
        if worker in late and worker.word is not None:
            worker.signal_group(signal.SIGKILL)
            worker.end = worker.end_by_word(now)
    if isinstance(running.others, Following):
        return None  # The lead's door knows what all hosts wait for.
    overdue = {host.host for host in late if host.end is None}
    known = [host.known() for host in running.hosts if host.end is None] if overdue else []
    hung = root_cause.hung(known, overdue)
    return _end_hung(running, hung) if hung else None


def _is_overdue(running: Attempt, host: Worker | Remote, now: float) -> bool:
    return overdue_seconds(host.watch, running.limits, now=now) > 0


def _end_hung(running: Attempt, hung: Sequence[Known]) -> Ended:
    """Asks for the stacks of all threads of all workers, aborts, kills; each step sure to end."""
    known, *others = hung
    host = next(host for host in running.hosts if host.host == known.host)
    limit = limit_seconds(host.watch, running.limits)
    reason = (
        f"no progress for {limit:.1f} s in phase '{known.phase}' after step {known.step} of this "
        f"attempt; {_alike(known, others)}{_standing(running)}stacks of all threads, where they "
        f"could be had: "
        f"{running.stacks()}. If that is no hang, raise the phase's limit (deadlines.*)."
    )
    end = End(Exit.HUNG, reason, running.clock.monotonic(), own_word=False)
    if isinstance(running.others, Led):  # Before ours end: theirs would be aborted for their loss.
        ended = [
            dataclasses.replace(each.known(), end=end) if each is host else each.known()
            for each in running.hosts
        ]
        running.others.conclude(root_cause.decide(ended))
    _dump_stacks(running)
    host.end = end
    return _conclude(running)


def _standing(running: Attempt) -> str:
    """Says how far every host is, where there are several."""
    known = [host.known() for host in running.hosts]
    return (
        f"{root_cause.standing(known, now=running.clock.monotonic())}; " if len(known) > 1 else ""
    )


def _alike(known: Known, others: Sequence[Known]) -> str:
    """Says which hosts look the same from here: where they wait for each other, any may be hung."""
    alike = [o.host for o in others if (o.phase, o.step) == (known.phase, known.step)]
    if not alike or known.is_stopped:
        return ""
    return f"host {', '.join(map(str, alike))} looks the same, the stacks tell them apart; "


def _dump_stacks(running: Attempt) -> None:
    """Asks the workers here for the stacks of all threads, then aborts them."""
    workers = running.running
    for number, grace in (
        (signal.SIGUSR1, STACKS_GRACE_SECONDS),
        (signal.SIGABRT, ABORT_GRACE_SECONDS),
    ):
        for each in workers:
            each.signal(number)
        wait_for(workers, seconds=grace, clock=running.clock)
