"""Contents of a run's report, from its records, events and metrics; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from jaxres.exit_codes import ExitCode, exit_row
from jaxres.goodput import run_timeline
from jaxres.goodput.attempt_timeline import NOT_LOST
from jaxres.goodput.run_timeline import RunTimeline
from jaxres.goodput.summary import ROLLED_BACK, Summary
from jaxres.runlog import attempt_history, metrics_columns, run_log, skip_causes
from jaxres.runlog.attempt_history import KILLED, RUNNING, AttemptSummary
from jaxres.runlog.attempt_result import PLANNED_CAUSES
from jaxres.runlog.event_log import LONGEST_SECONDS
from jaxres.runlog.events import EVENTS, RunBuilt, SaveCommitted, SaveFailed, SaveStarted
from jaxres.runlog.guarantee import guarantee_level
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.metrics_columns import MetricsColumns
from jaxres.runlog.records import Claim, Commit, Record, Start
from jaxres.runlog.skip_causes import SkipCause
from jaxres.telemetry.throughput import peak_flops

RUN_BUILT, SAVE_STARTED, SAVE_COMMITTED, SAVE_FAILED = map(
    EVENTS.tag, (RunBuilt, SaveStarted, SaveCommitted, SaveFailed)
)
NUM_ATTEMPTS = 100
"""Newest attempts that the table of attempts has."""
Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The data read of a run."""

    root: str
    """The run directory, as given."""
    name: str | None
    """`run.name` of its config."""
    records: Sequence[Record]
    """The run log, without late records."""
    events: Mapping[int, Events]
    """Events of host 0's worker, by attempt."""
    lines: Mapping[int, MetricsColumns]
    """Metrics by attempt."""
    launch_events: Sequence[LaunchEvent]
    is_alive: bool


@dataclass(frozen=True)
class InterruptionMark:
    """Where an attempt ended or went back, on the axis of steps."""

    attempt: int
    cause: str
    step: int
    """The last step that was trained before."""
    resumed: int | None
    """The step at which training went on; None: it has not."""

    @property
    def is_rollback(self) -> bool:
        """Whether the attempt went on itself."""
        return self.cause == ROLLED_BACK

    @property
    def steps_text(self) -> str:
        """Where it was, for people."""
        then = "not resumed" if self.resumed is None else f"resumed at step {self.resumed:,}"
        return f"after step {self.step:,}, {then}"


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint that was committed."""

    step: int
    attempt: int
    status: str
    """committed, quarantined, or deleted."""
    size_bytes: int
    stall_seconds: float | None
    """Time for which training waited for the snapshot; None: not recorded."""
    write_seconds: float | None
    """Until it was committed; None: not recorded."""
    written_bytes: int
    """Without files that it shares with earlier steps."""

    @property
    def rate(self) -> float | None:
        """Bytes written per second."""
        return self.written_bytes / self.write_seconds if self.write_seconds else None


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast an attempt has trained, by the median of its step times."""

    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    """Share of the devices' peak; None: the peak is unknown."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """All that a page has."""

    sources: Sources
    timeline: RunTimeline
    summary: Summary
    kept: MetricsColumns
    """Steps that the run still has, ascending."""
    lost: MetricsColumns
    """Steps that it has lost, in the order of their segments."""
    interruptions: tuple[InterruptionMark, ...]
    """One for each incident of the summary."""
    saves: tuple[Save, ...]
    num_failed_saves: int
    attempts: tuple[AttemptSummary, ...]
    """The newest ones."""
    speeds: Mapping[int, Speed]
    """By attempt, without attempts whose speed is unknown."""
    guarantee: str | None
    """Level of the newest start; None: there was none."""

    def skip_causes(self) -> dict[int, SkipCause | None]:
        """Returns step -> cause of its skipped update, of the newest attempt that recorded one."""
        own = (skip_causes.of_events(events) for _, events in sorted(self.sources.events.items()))
        return {step: cause for causes in own for step, cause in causes.items()}


def collect(sources: Sources, timeline: RunTimeline, summary: Summary) -> Contents:
    """Returns the contents of the report's page."""
    history = run_log.fold(sources.records)
    lines = metrics_columns.concatenate(list(sources.lines.values()))
    next_start = None if sources.is_alive else history.step
    is_lost = run_timeline.lost_steps(sources.records, lines, next_start) != NOT_LOST
    return Contents(
        sources=sources,
        timeline=timeline,
        summary=summary,
        kept=metrics_columns.surviving(history, lines.take(~is_lost)),
        lost=lines.take(is_lost),
        interruptions=tuple(_interruptions(sources, timeline, lines)),
        saves=tuple(_saves(sources)),
        num_failed_saves=sum(_has_tag(sources.events, SAVE_FAILED)),
        attempts=tuple(_attempts(sources)),
        speeds=dict(_speeds(sources)),
        guarantee=guarantee_level(history.starts) if history.starts else None,
    )


def first_difference(a: MetricsColumns, b: MetricsColumns) -> int | None:
    """Returns the first step that both runs have with different losses; None: there is none."""
    common, in_a, in_b = np.intersect1d(a.step, b.step, return_indices=True)
    one, other = a.loss[in_a], b.loss[in_b]
    differs = (one != other) & ~(np.isnan(one) & np.isnan(other))
    return int(common[np.argmax(differs)]) if differs.any() else None


def _has_tag(events: Mapping[int, Events], tag: str) -> Iterator[bool]:
    return (event.get("event") == tag for own in events.values() for event in own)


def _interruptions(
    sources: Sources, timeline: RunTimeline, lines: MetricsColumns
) -> Iterator[InterruptionMark]:
    """Yields the ends and rollbacks of attempts, one for each incident of the summary."""
    steps = {r.seq: r.body.step for r in sources.records if isinstance(r.body, Start)}
    last = {seq: int(lines.step[own].max()) for seq, own in lines.by_segment().items()}
    reached = steps | last
    step = 0
    for index, attempt in enumerate(timeline.attempts):
        segments = [seq for seq, _ in attempt.starts]
        for before, seq in pairwise(segments):
            yield InterruptionMark(attempt.attempt, ROLLED_BACK, reached[before], steps[seq])
        step = reached[segments[-1]] if segments else step
        if attempt.cause in (RUNNING, exit_row(ExitCode.DONE).name):
            continue
        following = (a.starts[0][0] for a in timeline.attempts[index + 1 :] if a.starts)
        seq = next(following, None)
        yield InterruptionMark(attempt.attempt, attempt.cause, step, steps.get(seq or 0))


def _number(
    event: Mapping[str, Any], name: str, *, most: float = LONGEST_SECONDS
) -> int | float | None:
    """Returns a number of an event; None: it has none, or one that is damaged."""
    value = event.get(name)
    return value if isinstance(value, int | float) and -most < value < most else None


def _saves(sources: Sources) -> Iterator[Save]:
    """Yields the commits in the order of the log."""
    history = run_log.fold(sources.records)
    kept = {record.seq for record in history.commits}
    damaged = {record.seq for record, _ in history.quarantined}
    stalls: dict[tuple[int, int], float] = {}
    written: dict[tuple[int, int], Mapping[str, Any]] = {}
    for attempt, events in sources.events.items():
        for event in events:
            key = attempt, int(_number(event, "step") or 0)
            if event.get("event") == SAVE_STARTED:
                stalls[key] = _number(event, "blocked_seconds") or 0.0
            elif event.get("event") == SAVE_COMMITTED:
                written[key] = event
    for record in sources.records:
        if not isinstance(record.body, Commit):
            continue
        key = record.attempt, record.body.step
        event = written.get(key, {})
        status = "committed" if record.seq in kept else "deleted"
        yield Save(
            step=record.body.step,
            attempt=record.attempt,
            status="quarantined" if record.seq in damaged else status,
            size_bytes=record.body.bytes,
            stall_seconds=stalls.get(key),
            write_seconds=_number(event, "seconds"),
            written_bytes=record.body.bytes - int(_number(event, "linked_bytes", most=1e30) or 0),
        )


def _attempts(sources: Sources) -> list[AttemptSummary]:
    numbers = [r.attempt for r in sources.records if isinstance(r.body, Claim)][-NUM_ATTEMPTS:]
    shown = set(numbers)  # Besides these, a guarantee needs the starts before them.
    own = [r for r in sources.records if r.attempt in shown or isinstance(r.body, Start)]
    finished = {n: int(sources.lines[n].step.max()) for n in numbers if len(sources.lines[n])}
    events = {n: sources.events[n] for n in numbers}
    return attempt_history.fold(
        own,
        events=events,
        finished=finished,
        is_alive=sources.is_alive,
        launch_events=sources.launch_events,
    )


def _speeds(sources: Sources) -> Iterator[tuple[int, Speed]]:
    """Yields attempts with their speed, if they have trained and recorded their model."""
    for attempt, events in sources.events.items():
        built = next((e for e in reversed(events) if e.get("event") == RUN_BUILT), None)
        lines = sources.lines.get(attempt)
        if built is None or lines is None or not len(lines):
            continue
        seconds = float(np.median(lines.step_seconds))
        tokens = _number(built, "tokens_per_step", most=1e30)
        flops = _number(built, "flops_per_token", most=1e30)
        if seconds <= 0 or not tokens or flops is None:
            continue
        num_devices, _, kind = str(built.get("devices", "")).partition(" x ")
        peak = peak_flops(kind)
        mfu = None
        if peak is not None and num_devices.isdecimal():
            mfu = flops * tokens / seconds / (peak * int(num_devices))
        yield attempt, Speed(step_seconds=seconds, tokens_per_second=tokens / seconds, mfu=mfu)


def cause_text(cause: str, culprit: int | None) -> str:
    """Returns the cause of an end, with the host if one is.

    >>> cause_text("PEER_LOST", 2)
    'PEER_LOST, host 2'
    """
    return cause if culprit is None else f"{cause}, host {culprit}"


def is_planned(cause: str) -> bool:
    """Returns whether an end is no failure: asked for, or announced."""
    names = (exit_row(ExitCode.STOPPED).name, exit_row(ExitCode.PREEMPTED).name)
    return cause in names or cause in PLANNED_CAUSES


def is_failure(cause: str) -> bool:
    """Returns whether an end is a failure."""
    good = (RUNNING, exit_row(ExitCode.DONE).name)
    return cause == KILLED or (cause not in good and not is_planned(cause))
