"""Seconds of each class of time while a run trains, from the messages to a supervisor.

`run_timeline` reads the records afterwards, and knows which steps the run has lost. Here a step
counts as replayed when it is trained again. Each second has one class, and gets no other later, so
that the sums only grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxres.goodput.intervals import ACTIVITIES, TRAIN, Activity


@dataclass
class LiveTimeline:
    """The time of one host since its supervisor began; times are monotonic, in seconds."""

    since: float
    """Begin of the interval that has not ended yet."""
    activity: Activity | None = Activity.DOWN
    """Its class; None: training, whose class the next finished step decides."""
    reached: int = 0
    """Highest step that was ever finished: training it again is a replay."""
    trained: float = 0.0
    """Seconds of training before `since` that no finished step has decided about."""
    totals: dict[Activity, float] = field(default_factory=lambda: dict.fromkeys(Activity, 0.0))
    """Seconds of each class up to `since`."""

    def on_attempt_started(self, *, now: float) -> None:
        """Processes of an attempt start."""
        self._end_interval(now)
        self.activity = Activity.START_UP

    def on_phase(self, phase: str, *, now: float) -> None:
        """The worker has entered a phase."""
        self._end_interval(now)
        self.activity = None if phase == TRAIN else ACTIVITIES.get(phase, Activity.UNKNOWN)

    def on_step(self, step: int, *, skipped: bool, now: float) -> None:
        """The worker has finished a step, which decides about the training before it."""
        if self.activity is None:
            self._end_interval(now)
        activity = Activity.SKIPPED if skipped else Activity.PRODUCTIVE
        if step <= self.reached:
            activity = Activity.REPLAYED
        self.reached = max(self.reached, step)
        self._decide(activity)

    def on_exit_announced(self, *, now: float) -> None:
        """The worker has reported its end."""
        self._end_interval(now)
        self._decide(Activity.UNKNOWN)
        self.activity = Activity.START_UP

    def on_attempt_ended(self, *, announced: bool, now: float) -> None:
        """The workers are gone; without a reported end, training since the last step was lost."""
        self._end_interval(now)
        self._decide(Activity.UNKNOWN if announced else Activity.DETECTION)
        self.activity = Activity.DOWN

    def seconds(self, *, now: float) -> Mapping[Activity, float]:
        """Returns the seconds of each class; training that is not decided yet is in none."""
        found = dict(self.totals)
        if self.activity is not None:
            found[self.activity] += max(0.0, now - self.since)
        return found

    def _end_interval(self, now: float) -> None:
        seconds = max(0.0, now - self.since)
        if self.activity is None:
            self.trained += seconds
        else:
            self.totals[self.activity] += seconds
        self.since = max(now, self.since)

    def _decide(self, activity: Activity) -> None:
        self.totals[activity] += self.trained
        self.trained = 0.0
