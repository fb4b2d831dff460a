"""Turns the records of a run into the input of `simulated_attempts`. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from jaxres.config.schema.checkpoint import EpochsWhen
from jaxres.config.schema.run_config import RunConfig
from jaxres.exit_codes import ExitCode, exit_row
from jaxres.goodput.intervals import Activity, ActivityInterval
from jaxres.goodput.run_timeline import AttemptTime, RunTimeline
from jaxres.operate.plan import observed_vms
from jaxres.operate.plan.observed_vms import ObservedGap, ObservedVms
from jaxres.operate.plan.simulated_attempts import JobSettings, PartTimes, SimulatedFailure
from jaxres.operate.plan.simulated_vms import Vms
from jaxres.runlog import run_log
from jaxres.runlog.events import (
    EVENTS,
    PhaseChanged,
    RunEnded,
    SaveCommitted,
    SaveStarted,
    TrainingStarted,
)
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.records import AttemptEnded, Claim, Commit, Record, Start, by_attempt
from jaxres.runlog.supervisor_events import AttemptRestarted
from jaxres.supervisor.restart_policy import KILLED

STEPS = (Activity.PRODUCTIVE, Activity.REPLAYED, Activity.SKIPPED)
PAUSES = (Activity.DATA_WAIT, Activity.EVALUATION, Activity.HOOK, Activity.UNKNOWN)
DONE = exit_row(ExitCode.DONE).name


@dataclass(frozen=True)
class ObservedAttempts:
    """The input of the simulation of a run that has ended."""

    times: PartTimes
    failures: tuple[SimulatedFailure, ...]
    settings: JobSettings


def of_run(
    timeline: RunTimeline,
    records: Sequence[Record],
    *,
    events: Iterable[Mapping[str, Any]],
    supervisor_events: Iterable[Mapping[str, Any]],
    config: RunConfig,
    launch_events: Sequence[LaunchEvent] = (),
) -> ObservedAttempts | None:
    """Returns the times and failures of a run; None: it is not of the kind that is simulated.

    The run is complete, began at step 0, has gone back only between attempts, and a restart loop
    (`launch local`) or the launcher of `launch gce` has started all attempts but the first. Its
    saves do not go by epochs.

    Args:
      records: its log, without late records.
      events: those of host 0's workers, of all attempts.
      supervisor_events: those of the restart loop.
    """
    attempts = timeline.attempts
    by_epochs = isinstance(config.checkpoint.when, EpochsWhen)
    if by_epochs or not _goes_straight_on(attempts, records):
        return None
    vms, waits = _vms(config, launch_events, num_attempts=len(attempts)), None
    if vms is None and (waits := _waits(supervisor_events, attempts)) is None:
        return None
    last_step, events = run_log.fold(records).step, list(events)
    times = _times(timeline, events, num_steps=last_step + sum(timeline.lost_steps.values()))
    if times is None:
        return None
    num_steps_of = _steps_of_attempts(timeline, records, last_step=last_step)
    claims = _claim_times(records, {one.attempt for one in attempts})
    failures = _failures(timeline, records, claims, events, num_steps_of, times)
    settings = _settings(config)
    if vms is None:
        gaps = [sum(i.seconds for i in _own(timeline, a) if i.in_gap) for a in attempts[:-1]]
        launches = [gap - wait for gap, wait in zip(gaps, waits or (), strict=True)]
    else:
        found = zip(failures, vms.gaps, attempts, strict=False)
        failures = [_before_gap(failure, gap, one) for failure, gap, one in found]
        launches = [at - gap.started for at, gap in zip(claims[1:], vms.gaps, strict=True)]
        settings = replace(settings, vms=_vms_of_job(vms, config, claimed=claims[0]))
    times = replace(
        _times_of_last(timeline, times, num_steps_of),
        detect_seconds=_mean([failure.detect_seconds or 0.0 for failure in failures]),
        launch_seconds=max(0.0, _mean(launches)),
    )
    return ObservedAttempts(times, tuple(failures), settings)


def _goes_straight_on(attempts: Sequence[AttemptTime], records: Sequence[Record]) -> bool:
    """Returns whether a run is complete, began at step 0 and went back only between attempts."""
    if not attempts or attempts[-1].cause != DONE or any(len(a.starts) > 1 for a in attempts):
        return False
    return next(record.body for record in records if isinstance(record.body, Start)).step == 0


def _claim_times(records: Sequence[Record], attempts: Collection[int]) -> list[float]:
    return [r.time for r in records if isinstance(r.body, Claim) and r.attempt in attempts]


def _times_of_last(
    timeline: RunTimeline, times: PartTimes, num_steps_of: Mapping[int, int]
) -> PartTimes:
    """Returns the times with those of the attempt without a failure, which is the last one."""
    last = timeline.attempts[-1]
    own, num_steps = _own(timeline, last), num_steps_of.get(last.attempt, 0)
    return replace(
        times,
        step_seconds=_step_seconds(own, num_steps, default=times.step_seconds),
        pause_seconds=_pause_seconds(own, num_steps, default=times.pause_seconds),
    )


def _settings(config: RunConfig) -> JobSettings:
    return JobSettings(
        last_step=config.train.steps,
        when=config.checkpoint.when,
        restart=config.restart,
        launch=config.launch,
    )


def _before_gap(
    failure: SimulatedFailure, observed: ObservedGap, attempt: AttemptTime
) -> SimulatedFailure:
    """Returns a failure with the code and time that the launcher saw, and the gap after it."""
    late = observed.ended - attempt.time
    detection = (failure.detect_seconds or 0.0) + late
    return replace(failure, code=observed.code, gap=observed.gap, detect_seconds=detection)


def _vms_of_job(vms: ObservedVms, config: RunConfig, *, claimed: float) -> Vms:
    """Returns the VMs of a job; `claimed`: the first claim, in seconds since the epoch."""
    return Vms(
        config=config,
        first=vms.first,
        before_seconds=claimed - vms.began,
        usual=vms.usual,
        label=vms.label,
    )


def _waits(
    events: Iterable[Mapping[str, Any]], attempts: Sequence[AttemptTime]
) -> list[float] | None:
    """Returns the restart loop's wait after each attempt; None: not all were started by one."""
    restarted = EVENTS.tag(AttemptRestarted)
    waits = {e["attempt"]: e["after_seconds"] for e in events if e["event"] == restarted}
    numbers = [one.attempt for one in attempts[:-1]]
    return [waits[n] for n in numbers] if waits.keys() >= set(numbers) else None


def _vms(
    config: RunConfig, events: Sequence[LaunchEvent], *, num_attempts: int
) -> ObservedVms | None:
    """Returns the gaps of a job on VMs; None: it is none, or it can't be simulated.

    That of a job with spares can't: they are requested while it trains.
    """
    gce = config.launch.gce
    if gce is None or gce.spares or not events:
        return None
    return observed_vms.of_events(events, num_attempts=num_attempts)


def _own(timeline: RunTimeline, attempt: AttemptTime) -> list[ActivityInterval]:
    return [i for i in timeline.intervals if i.attempt == attempt.attempt]


def _steps_of_attempts(
    timeline: RunTimeline, records: Sequence[Record], *, last_step: int
) -> dict[int, int]:
    """Returns the number of steps that each attempt has made, lost ones included."""
    began = {r.seq: r.body.step for r in records if isinstance(r.body, Start)}
    trained = [(one.attempt, one.starts[0][0]) for one in timeline.attempts if one.starts]
    ends = [began[seq] + timeline.lost_steps.get(seq, 0) for _, seq in trained[1:]]
    return {
        attempt: end - began[seq]
        for (attempt, seq), end in zip(trained, [*ends, last_step], strict=True)
    }


def _step_seconds(own: Sequence[ActivityInterval], num_steps: int, *, default: float) -> float:
    """Returns the mean duration of an attempt's steps; `default` if it has none."""
    return sum(i.seconds for i in own if i.activity in STEPS) / num_steps if num_steps else default


def _pause_seconds(
    own: Sequence[ActivityInterval], num_steps: int, *, default: float, until: float = math.inf
) -> float:
    """Returns the mean pause after a step of an attempt, of pauses that begin before a time."""
    pauses = (i.seconds for i in own if i.activity in PAUSES and i.start < until)
    return sum(pauses) / num_steps if num_steps else default


def _times(
    timeline: RunTimeline,
    events: Sequence[Mapping[str, Any]],
    *,
    num_steps: int,
) -> PartTimes | None:
    """Returns the mean times of a run; None: it has no step."""
    seconds = dict.fromkeys(Activity, 0.0)
    for interval in timeline.intervals:
        seconds[interval.activity] += interval.seconds
    first, *later = timeline.attempts
    trains = [(one, at) for one in timeline.attempts if (at := _training(one)) is not None]
    step_seconds = sum(seconds[one] for one in STEPS) / num_steps if num_steps else 0.0
    if not trains or not step_seconds:
        return None
    starts = [at - one.claimed for one, at in trains if one in later]
    blocked = _values(events, EVENTS.tag(SaveStarted), "blocked_seconds")
    commit = _commit_seconds(events) or 0.0
    settle = _settle_seconds(events)
    settle = commit if settle is None else settle
    last = timeline.attempts[-1]
    ends = [
        i.seconds
        for i in _own(timeline, last)
        if i.activity == Activity.START_UP and i.start > (_training(last) or 0.0)
    ]
    return PartTimes(
        step_seconds=step_seconds,
        pause_seconds=sum(seconds[one] for one in PAUSES) / num_steps,
        stall_seconds=_stall(seconds, blocked, commit, settle),
        commit_seconds=commit,
        first_start_seconds=(_training(first) or first.claimed) - first.claimed,
        start_seconds=_mean(starts),
        end_seconds=sum(ends) + max(0.0, settle - commit),
    )


def _commit_seconds(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the mean time from the end of a stall to its commit; None: there is no commit."""
    blocked = _values(events, EVENTS.tag(SaveStarted), "blocked_seconds")
    written = _values(events, EVENTS.tag(SaveCommitted), "seconds")
    return max(0.0, _mean(written) - _mean(blocked)) if written else None


def _cycle_seconds(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the mean time from step to step until the newest save of an attempt; None: unknown.

    It decides which saves are committed before the attempt ends. `events`: those of the attempt.
    """
    begun = [e for e in events if e.get("event") == EVENTS.tag(TrainingStarted)]
    saves = [e for e in events if e.get("event") == EVENTS.tag(SaveStarted)]
    num_steps = saves[-1]["step"] - begun[0]["step"] if begun and saves else 0
    if num_steps <= 0:
        return None
    blocked = sum(_values(saves, EVENTS.tag(SaveStarted), "blocked_seconds"))
    return (saves[-1]["monotonic"] - begun[0]["monotonic"] - blocked) / num_steps


def _settle_seconds(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns for how long the newest attempt that ended by itself waited for its last save."""
    kinds = (EVENTS.tag(PhaseChanged), EVENTS.tag(RunEnded))
    phases = [e for e in events if e.get("event") in kinds and "monotonic" in e]
    if len(phases) < 2 or phases[-1]["event"] != kinds[1] or phases[-2].get("phase") != "settle":
        return None
    return phases[-1]["monotonic"] - phases[-2]["monotonic"]


def _stall(
    seconds: Mapping[Activity, float],
    blocked: Sequence[float],
    commit: float,
    settle: float,
) -> float:
    """Returns the mean time that training waits for a save, some also for a slow one before it.

    Where commits are usually longer than the interval, the simulation has these waits.
    """
    if not blocked:
        return 0.0
    trained = sum(seconds[one] for one in STEPS)
    if commit > trained / len(blocked):
        return _mean(blocked)
    # The end waits for the commit of the last step.
    return max(_mean(blocked), (seconds[Activity.SAVE_STALL] - settle) / len(blocked))


def _failures(
    timeline: RunTimeline,
    records: Sequence[Record],
    claims: Sequence[float],
    events: Sequence[Mapping[str, Any]],
    num_steps_of: Mapping[int, int],
    times: PartTimes,
) -> list[SimulatedFailure]:
    """Returns the failure that ended each attempt but the last.

    `claims`: when each attempt was claimed. `num_steps_of`: its steps, by attempt.
    """
    own_records = by_attempt(records)
    found: list[SimulatedFailure] = []
    for one, (begin, end) in zip(timeline.attempts, itertools.pairwise(claims), strict=False):
        failure = _failure(
            one,
            own_records[one.attempt],
            _own(timeline, one),
            num_steps=num_steps_of.get(one.attempt, 0),
            times=times,
        )
        own = [event for event in events if begin <= event.get("time", -math.inf) < end]
        failure = replace(failure, commit_seconds=_commit_seconds(own))
        cycle = _cycle_seconds(own)
        if cycle is not None and failure.step_seconds is not None:
            failure = replace(failure, pause_seconds=max(0.0, cycle - failure.step_seconds))
        found.append(failure)
    return found


def _failure(
    attempt: AttemptTime,
    records: Sequence[Record],
    own: Sequence[ActivityInterval],
    *,
    num_steps: int,
    times: PartTimes,
) -> SimulatedFailure:
    """Returns the failure that ended an attempt, its time and detection time included.

    `times`: the mean times of the job.
    """
    begin = _training(attempt)
    end = next((r.body for r in records if isinstance(r.body, AttemptEnded)), None)
    is_saved = end is not None and end.committed
    last_step = max((i.end for i in own if i.activity in STEPS), default=attempt.claimed)
    step_seconds = _step_seconds(own, num_steps, default=times.step_seconds)
    half = step_seconds / 2  # On average an attempt is killed in the middle of a step.
    until, saving = last_step, 0.0
    if begin is None:
        begin, half, until = attempt.claimed, 0.0, attempt.ended - _detection(own)
    elif is_saved:
        saving = times.stall_seconds + times.commit_seconds + times.end_seconds
    else:  # A VM takes its newest events with it, but no record.
        latest = math.inf if end is None else attempt.ended
        claim, *others = records
        commits = [r.time - claim.time for r in others if isinstance(r.body, Commit)]
        until = max([until, *(min(latest, attempt.claimed + one) for one in commits)])
    return SimulatedFailure(
        seconds=until + half - begin,
        code=KILLED if end is None else end.exit,
        in_setup=_training(attempt) is None,
        is_saved=is_saved,
        step_seconds=step_seconds,
        pause_seconds=_pause_seconds(own, num_steps, default=times.pause_seconds, until=last_step),
        detect_seconds=attempt.ended - until - half - saving,
    )


def _training(attempt: AttemptTime) -> float | None:
    """Returns when the training of an attempt began; None: it did not."""
    return attempt.starts[0][1] if attempt.starts else None


def _detection(own: Sequence[ActivityInterval]) -> float:
    return sum(i.seconds for i in own if i.activity == Activity.DETECTION and not i.in_gap)


def _values(events: Sequence[Mapping[str, Any]], kind: str, name: str) -> list[float]:
    return [event[name] for event in events if event.get("event") == kind and name in event]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
