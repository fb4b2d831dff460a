"""Turns what a run has recorded into the input of `simulated_attempts`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from jaxres.config.schema import RunConfig
from jaxres.exit_codes import ExitCode, exit_row
from jaxres.goodput.intervals import Activity, Interval
from jaxres.goodput.run_timeline import AttemptTime, RunTimeline
from jaxres.plan.simulated_attempts import Failure, JobSettings, Times
from jaxres.runlog import run_log
from jaxres.runlog.events import EVENTS, SaveCommitted, SaveStarted
from jaxres.runlog.records import AttemptEnded, Record, Start
from jaxres.runlog.supervisor_events import AttemptRestarted
from jaxres.supervisor.restart_policy import KILLED

STEPS = (Activity.PRODUCTIVE, Activity.REPLAYED, Activity.SKIPPED)
PAUSES = (Activity.DATA_WAIT, Activity.EVALUATION, Activity.HOOK, Activity.UNKNOWN)
DONE = exit_row(ExitCode.DONE).name


@dataclass(frozen=True)
class ObservedAttempts:
    """The input of the simulation of a run that has ended."""

    times: Times
    failures: tuple[Failure, ...]
    settings: JobSettings


def of_run(
    timeline: RunTimeline,
    records: Sequence[Record],
    *,
    events: Iterable[Mapping[str, Any]],
    supervisor_events: Iterable[Mapping[str, Any]],
    config: RunConfig,
) -> ObservedAttempts | None:
    """Returns the times and failures of a run; None: it is not of the kind that is simulated.

    The run is complete, began at step 0, has gone back only between attempts, and a restart loop
    (`launch local`) has started all attempts but the first.

    Args:
      timeline: the run's timeline.
      records: its log, without late records.
      events: those of host 0's workers, of all attempts.
      supervisor_events: those of the restart loop.
      config: the newest config.
    """
    attempts = timeline.attempts
    restarted = EVENTS.tag(AttemptRestarted)
    waits = {e["attempt"]: e["after_seconds"] for e in supervisor_events if e["event"] == restarted}
    if not attempts or attempts[-1].cause != DONE or any(len(a.starts) > 1 for a in attempts):
        return None
    starts = [r.body for r in records if isinstance(r.body, Start)]
    if starts[0].step or any(one.attempt not in waits for one in attempts[:-1]):
        return None
    last_step = run_log.fold(records).step
    num_steps = last_step + sum(timeline.lost_steps.values())
    times = _times(timeline, list(events), waits, num_steps=num_steps)
    if times is None:
        return None
    ends = {r.attempt: r.body for r in records if isinstance(r.body, AttemptEnded)}
    num_steps_of = _steps_of_attempts(timeline, records, last_step=last_step)
    failures = [
        _failure(
            one,
            ends.get(one.attempt),
            _own(timeline, one),
            num_steps=num_steps_of.get(one.attempt, 0),
            step_seconds=times.step_seconds,
        )
        for one in attempts[:-1]
    ]
    settings = JobSettings(
        last_step=config.train.steps,
        when=config.checkpoint.when,
        restart=config.restart,
        launch=config.launch,
    )
    last = attempts[-1]  # The attempt without a failure.
    own_seconds = _step_seconds(
        _own(timeline, last), num_steps_of.get(last.attempt, 0), default=times.step_seconds
    )
    return ObservedAttempts(replace(times, step_seconds=own_seconds), tuple(failures), settings)


def _own(timeline: RunTimeline, attempt: AttemptTime) -> list[Interval]:
    return [i for i in timeline.intervals if i.attempt == attempt.attempt]


def _steps_of_attempts(
    timeline: RunTimeline, records: Sequence[Record], *, last_step: int
) -> dict[int, int]:
    """Returns how many steps each attempt has made, those that were lost included."""
    began = {r.seq: r.body.step for r in records if isinstance(r.body, Start)}
    trained = [(one.attempt, one.starts[0][0]) for one in timeline.attempts if one.starts]
    ends = [began[seq] + timeline.lost_steps.get(seq, 0) for _, seq in trained[1:]]
    return {
        attempt: end - began[seq]
        for (attempt, seq), end in zip(trained, [*ends, last_step], strict=True)
    }


def _step_seconds(own: Sequence[Interval], num_steps: int, *, default: float) -> float:
    """Returns the mean duration of an attempt's steps; `default` if it has none."""
    return sum(i.seconds for i in own if i.activity in STEPS) / num_steps if num_steps else default


def _times(
    timeline: RunTimeline,
    events: Sequence[Mapping[str, Any]],
    waits: Mapping[int, float],
    *,
    num_steps: int,
) -> Times | None:
    """Returns the mean times of a run; None: it has no step."""
    seconds = dict.fromkeys(Activity, 0.0)
    for interval in timeline.intervals:
        seconds[interval.activity] += interval.seconds
    first, *later = timeline.attempts
    trains = [(one, at) for one in timeline.attempts if (at := _training(one)) is not None]
    step_seconds = sum(seconds[one] for one in STEPS) / num_steps if num_steps else 0.0
    if not trains or not step_seconds:
        return None
    gaps = [sum(i.seconds for i in _own(timeline, a) if i.in_gap) for a in timeline.attempts[:-1]]
    starts = [at - one.claimed for one, at in trains if one in later]
    blocked = _values(events, EVENTS.tag(SaveStarted), "blocked_seconds")
    written = _values(events, EVENTS.tag(SaveCommitted), "seconds")
    commit = max(0.0, _mean(written) - _mean(blocked))
    detections = [_detection(_own(timeline, a)) for a in timeline.attempts[:-1]]
    last = timeline.attempts[-1]
    ends = [
        i.seconds
        for i in _own(timeline, last)
        if i.activity == Activity.START_UP and i.start > (_training(last) or 0.0)
    ]
    return Times(
        step_seconds=step_seconds,
        pause_seconds=sum(seconds[one] for one in PAUSES) / num_steps,
        stall_seconds=_stall(seconds, blocked, commit),
        commit_seconds=commit,
        first_start_seconds=(_training(first) or first.claimed) - first.claimed,
        start_seconds=_mean(starts),
        # On average an attempt is killed in the middle of a step.
        detect_seconds=max(0.0, _mean(detections) - step_seconds / 2),
        launch_seconds=max(0.0, _mean(gaps) - _mean(list(waits.values()))),
        end_seconds=sum(ends),
    )


def _stall(
    seconds: Mapping[Activity, float],
    blocked: Sequence[float],
    commit: float,
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
    return max(_mean(blocked), (seconds[Activity.SAVE_STALL] - commit) / len(blocked))


def _failure(
    attempt: AttemptTime,
    end: AttemptEnded | None,
    own: Sequence[Interval],
    *,
    num_steps: int,
    step_seconds: float,
) -> Failure:
    """Returns what ended an attempt, and when; `step_seconds`: those of an attempt without one."""
    begin = _training(attempt)
    until = attempt.ended - _detection(own)
    step_seconds = _step_seconds(own, num_steps, default=step_seconds)
    return Failure(
        seconds=until - (attempt.claimed if begin is None else begin - step_seconds / 2),
        code=KILLED if end is None else end.exit,
        in_setup=begin is None,
        is_saved=end is not None and end.committed,
        step_seconds=step_seconds,
    )


def _training(attempt: AttemptTime) -> float | None:
    """Returns when the training of an attempt began; None: it did not."""
    return attempt.starts[0][1] if attempt.starts else None


def _detection(own: Sequence[Interval]) -> float:
    return sum(i.seconds for i in own if i.activity == Activity.DETECTION and not i.in_gap)


def _values(events: Sequence[Mapping[str, Any]], kind: str, name: str) -> list[float]:
    return [event[name] for event in events if event.get("event") == kind and name in event]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
