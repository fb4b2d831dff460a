"""Simulates the attempts of one job, second by second, under given failures. Pure.

Deciders of a run that it calls:

- `supervisor.restart_policy.decide`: whether another attempt follows, and after which wait;
- `launch.reconcile.decide`: the same of a job on VMs, and which VMs are replaced (`simulated_vms`);
- `checkpoint.save_interval.choose`: the interval with `checkpoint.when.kind=auto`.

It does not call

- `train.save_scheduler`: it reads a run log, events and a clock. Its rule is repeated here in a few
  lines, without the bound on small changes of the interval, and without late saves that are left
  out (ADR 21);
- `checkpoint.retention`: the newest commit is always kept, so no policy changes what is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxres.checkpoint.retention import save_interval
from jaxres.checkpoint.retention.save_interval import HOUR_SECONDS, Costs
from jaxres.config.schema.checkpoint import (
    AutoWhen,
    ContinuousWhen,
    EpochsWhen,
    SecondsWhen,
    StepsWhen,
    When,
)
from jaxres.config.schema.supervision import LaunchSection, RestartSection
from jaxres.operate.plan.simulated_vms import Gap, SimulatedLauncher, Vms
from jaxres.runlog.attempt_result import AttemptOutcome
from jaxres.supervisor import restart_policy
from jaxres.supervisor.restart_policy import GiveUp, Restart, RestartPolicy

NO_GAP = Gap()
RECENT = 1000
"""Newest attempts of which the restart policy is told: its time grows with their number."""


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """How long each part of a job takes, in seconds."""

    step_seconds: float
    """Of the step itself."""
    pause_seconds: float = 0.0
    """Of waits for data, evaluations and hooks, on average after each step."""
    stall_seconds: float = 0.0
    """Training waits for a snapshot."""
    commit_seconds: float = 0.0
    """From the end of the stall until the step can be restored."""
    first_start_seconds: float = 0.0
    """From the claim of the first attempt to the begin of its training."""
    start_seconds: float = 0.0
    """The same of all later attempts."""
    detect_seconds: float = 0.0
    """From a failure until the attempt is recorded as ended."""
    launch_seconds: float = 0.0
    """From then, after the wait of the restart policy, until the next attempt is claimed.

    Of a job on VMs: from the launcher's decision to start it."""
    end_seconds: float = 0.0
    """From the last commit of an attempt that ends by itself until it is recorded as ended."""


@dataclass(frozen=True, kw_only=True)
class SimulatedFailure:
    """The end of an attempt before the last step."""

    seconds: float
    """Since the begin of training, or of the attempt if it is `in_setup`."""
    code: int = restart_policy.KILLED
    """Exit code of the attempt."""
    in_setup: bool = False
    """Whether it happens before training begins."""
    is_saved: bool = False
    """Whether the attempt commits its last step before it ends, as after a notice."""
    step_seconds: float | None = None
    """Of the steps of this attempt; None: those of the job."""
    pause_seconds: float | None = None
    """The same of its pauses."""
    commit_seconds: float | None = None
    """The same of its commits."""
    detect_seconds: float | None = None
    """From this failure until its attempt is recorded as ended; None: the mean of the job."""
    gap: Gap = NO_GAP
    """Events of service and VMs after the attempt, of a job on VMs."""


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings of a job from its config."""

    last_step: int
    when: When
    restart: RestartSection
    launch: LaunchSection
    vms: Vms | None = None
    """VMs of `launch gce`; None: a restart loop on one machine starts the attempts."""


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """Result of the simulation of a job."""

    seconds: float
    goodput: float
    """Share of the time in steps that the job still has."""
    step: int
    """Newest committed step at the end."""
    num_attempts: int
    num_saves: int
    steps_lost: int
    wait_seconds: float
    """Of the restart policy, or from the end of an attempt that a launcher sees until it starts the
    next one; in sum."""
    gave_up: str
    """Reason of the restart policy or of the launcher; "": the job was not given up."""
    times: PartTimes
    """The times of the simulation."""


def simulate_attempts(
    times: PartTimes, failures: Sequence[SimulatedFailure], settings: JobSettings
) -> SimulatedJob:
    """Simulates a job: one attempt for each failure, then one to the last step."""
    decide = _decider(settings)
    history: list[AttemptOutcome[int]] = []
    seconds = useful = wait_seconds = trained_seconds = 0.0
    committed = num_attempts = num_saves = steps_lost = num_lossy = 0
    gave_up = ""
    for failure in [*failures, None]:
        setup = times.start_seconds if history else times.first_start_seconds
        if failure is not None and failure.in_setup:
            seconds += failure.seconds
            reached = _Reached(committed, committed, 0.0, 0)
        else:
            costs = Costs(failures=num_lossy, trained_hours=trained_seconds / HOUR_SECONDS)
            own = times if failure is None else _own_times(times, failure)
            reached = _train(own, settings, committed, costs, failure)
            seconds += setup + reached.seconds
            useful += (reached.committed - committed) * own.step_seconds
        trained_seconds += reached.seconds
        num_attempts += 1
        num_saves += reached.num_saves
        steps_lost += reached.step - reached.committed
        before, committed = committed, reached.committed
        if failure is None or committed == settings.last_step:
            seconds += times.end_seconds
            break
        seconds += _end_seconds(times, failure)
        num_lossy += not failure.is_saved and not failure.in_setup
        history.append(AttemptOutcome(failure.code, "", before, committed))
        decision = decide(history, failure, seconds)
        if isinstance(decision, GiveUp):
            gave_up = decision.reason
            break
        seconds += decision.after_seconds + times.launch_seconds
        wait_seconds += decision.after_seconds
    return SimulatedJob(
        seconds=seconds,
        goodput=useful / seconds if seconds else 0.0,
        step=committed,
        num_attempts=num_attempts,
        num_saves=num_saves,
        steps_lost=steps_lost,
        wait_seconds=wait_seconds,
        gave_up=gave_up,
        times=times,
    )


def _decider(
    settings: JobSettings,
) -> Callable[[Sequence[AttemptOutcome[int]], SimulatedFailure, float], Restart | GiveUp]:
    """Returns the decision after a failure: that of the restart policy, or of the launcher."""
    policy = RestartPolicy(settings.restart, settings.launch, num_hosts=(1,), began=0.0, seed=0)
    launcher = None if settings.vms is None else SimulatedLauncher(settings.vms)

    def decide(
        history: Sequence[AttemptOutcome[int]], failure: SimulatedFailure, now: float
    ) -> Restart | GiveUp:
        if launcher is None:
            return restart_policy.decide(history[-RECENT:], now, policy)
        step = history[-1].step_after
        return launcher.end_attempt(failure.code, failure.gap, step=step, now=now)

    return decide


def _end_seconds(times: PartTimes, failure: SimulatedFailure) -> float:
    """Returns the time from a failure to the end of its attempt."""
    found = failure.detect_seconds
    detection = times.detect_seconds if found is None else found
    return detection + (times.end_seconds if failure.is_saved else 0.0)


def _own_times(times: PartTimes, failure: SimulatedFailure) -> PartTimes:
    """Returns the times of the attempt that a failure ends."""
    names = ("step_seconds", "pause_seconds", "commit_seconds")
    own = {name: getattr(failure, name) for name in names}
    return replace(times, **{name: value for name, value in own.items() if value is not None})


@dataclass(frozen=True)
class _Reached:
    """The end of one attempt's training."""

    step: int
    committed: int
    seconds: float
    num_saves: int


def _train(
    times: PartTimes,
    settings: JobSettings,
    step: int,
    costs: Costs,
    failure: SimulatedFailure | None,
) -> _Reached:
    """Trains from a committed step until a failure, or until the last step, which is saved."""
    until = math.inf if failure is None else failure.seconds
    cycle = times.step_seconds + times.pause_seconds
    now = began = 0.0
    committed, writing, ready = step, step, 0.0
    num_saves = 0
    while step < settings.last_step:
        interval = _interval(settings.when, times, costs, now=now, is_measured=num_saves > 0)
        wanted = _steps_to_save(settings.when, step, max(began + interval, ready) - now, cycle)
        wanted = min(wanted, settings.last_step - step)
        if now + wanted * cycle > until:
            step, now = step + math.floor(max(0.0, until - now) / cycle), until
            break
        step, now = step + wanted, now + wanted * cycle
        began = max(now, ready)  # A save waits for the one before it.
        if began + times.stall_seconds > until:
            now = until
            break
        committed, writing = writing, step
        now = began + times.stall_seconds
        ready, num_saves = now + times.commit_seconds, num_saves + 1
    if ready <= now:
        committed = writing
    if step == settings.last_step and writing == step:
        return _Reached(step, step, max(now, ready), num_saves)
    if failure is None or failure.is_saved:
        now = max(now, ready) + times.stall_seconds + times.commit_seconds
        return _Reached(step, step, now, num_saves + 1)
    return _Reached(step, committed, now, num_saves)


def _interval(
    when: When, times: PartTimes, costs: Costs, *, now: float, is_measured: bool
) -> float:
    """Returns the seconds between saves; 0 where saves go by steps."""
    match when:
        case SecondsWhen(every_seconds=seconds):
            return seconds
        case AutoWhen():
            hours = costs.trained_hours + now / HOUR_SECONDS
            found = Costs(failures=costs.failures, trained_hours=hours)
            if is_measured:
                found = Costs(
                    stall_seconds=times.stall_seconds,
                    write_seconds=times.commit_seconds,
                    failures=costs.failures,
                    trained_hours=hours,
                )
            return save_interval.choose(found, when).seconds
        case StepsWhen() | EpochsWhen() | ContinuousWhen():
            return 0.0


def _steps_to_save(when: When, step: int, seconds: float, cycle: float) -> int:
    """Returns the number of steps until the next save; `seconds`: until it is due by time."""
    if isinstance(when, StepsWhen):
        return when.every_steps - step % when.every_steps
    return max(1, math.ceil(seconds / cycle)) if cycle else 1
