"""A process that copies a run's metrics to one experiment tracker; the supervisor starts it.

It follows the files of the run directory, so training never waits for the service, and a dead
service stops nothing. Each step is sent once, over all attempts: `trackers/NAME.json` has the
newest step that was sent, and the service is asked too. After a rollback the steps that were
trained again replace the earlier ones: a new run of the tracker gets the whole surviving history,
and the former one is marked. It ends when its standard input does.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxres.config import RunConfig, load_recorded
from jaxres.config.schema.telemetry import TrackerSection
from jaxres.runlog import evaluations, metrics, run_log
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunHistory
from jaxres.secret_values import redact, redact_text
from jaxres.storage import files
from jaxres.storage.path import RunPath, parse_path
from jaxres.telemetry import stdio, trackers
from jaxres.telemetry.trackers import Identity, Row, Tracker

FOLDER = "trackers"
LONGEST_RETRY_SECONDS = 60.0
LEAST_SECONDS_IN_BUCKET = 60.0
"""Least time between two looks at a bucket, where each reads the attempt's metrics as a whole."""
LAST_SECONDS = 90
"""Time to send the rest after the run's end, if no supervisor ends the process earlier."""


def main(arguments: Sequence[str]) -> int:
    """Follows a run until standard input ends."""
    parser = argparse.ArgumentParser("jaxres.supervisor.companions.tracker_copy")
    parser.add_argument("run_dir")
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    options = parser.parse_args(arguments)
    run_dir = RunDir(parse_path(options.run_dir))
    config = load_recorded(run_dir.attempt(options.attempt) / "config.yaml").config
    section = config.telemetry.trackers[options.number]
    name, folder = _name(section, options.number), run_dir.local / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    copy = Copy(run_dir, config, trackers.make(section, folder), name=name)
    with open(folder / f"{name}.lock", "wb", opener=files.only_files) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # A killed supervisor's may still be sending.
        least = LEAST_SECONDS_IN_BUCKET if run_dir.is_remote else 0.0
        return _follow(copy, section, every_seconds=max(section.every_seconds, least))


def has_everything(run_dir: RunDir, section: TrackerSection, number: int, *, step: int) -> bool:
    """Returns whether a tracker was closed after it had received every step up to this one."""
    saved = _read_state(_state_path(run_dir, _name(section, number)))
    return saved.get("complete") is True and int(saved.get("step", 0)) >= step


def _name(section: TrackerSection, number: int) -> str:
    return f"{section.kind}-{number}"


def _state_path(run_dir: RunDir, name: str) -> RunPath:
    return run_dir.root / FOLDER / f"{name}.json"


def _read_state(path: RunPath) -> Mapping[str, Any]:
    try:
        saved = json.loads(files.read(path) or b"{}")
    except ValueError:
        return {}
    return saved if isinstance(saved, dict) else {}


def _follow(copy: Copy, section: TrackerSection, *, every_seconds: float) -> int:
    wait, failed = 1.0, False
    while True:
        ended = bool(select.select([sys.stdin], [], [], wait)[0])
        if ended:
            signal.alarm(LAST_SECONDS)
        try:
            copy.update()
            if ended:
                copy.close()
                return 0
            wait, failed = every_seconds, False
        except Exception as error:  # noqa: BLE001 - a service or its client failed in any way.
            then = (
                "the rest is sent at the next start" if ended else "training goes on, this retries"
            )
            if not failed:
                text = redact_text(f"{type(error).__name__}: {error}".splitlines()[0])
                stdio.eprint(f"tracker {section.kind}: {text}; {then}\n")
            if ended:
                return 1
            copy.reset()
            wait, failed = min(2 * max(wait, 1.0), LONGEST_RETRY_SECONDS), True


class Copy:
    """The state of copying one run to one tracker."""

    def __init__(self, run_dir: RunDir, config: RunConfig, tracker: Tracker, *, name: str) -> None:
        self._run_dir, self._config, self._tracker = run_dir, config, tracker
        self._state = _state_path(run_dir, name)
        self._generation: int | None = None
        """Number of rollbacks that the open run of the tracker knows; None: none is open."""
        self._sent = self._evaluated = 0
        """Newest step whose metrics, and whose evaluation, were sent."""
        self._files = LinesSince()

    def update(self) -> None:
        """Sends new lines of the run directory."""
        history = run_log.fold(run_log.read_records(self._run_dir.log))
        if not history.starts:
            return
        if history.rollbacks and history.rollbacks[-1].seq > history.starts[-1].seq:
            return  # Until the run resumes, its metrics still have the undone steps.
        if self._generation != len(history.rollbacks):
            self._open(history)
        before = self._sent, self._evaluated
        rows = self._new_rows(history)
        if not rows:
            return
        self._save(*before, sending=max(step for step, _ in rows))
        self._tracker.log(rows)
        self._save(self._sent, self._evaluated, sending=0)

    def reset(self) -> None:
        """Forgets the connection; the next update opens it again."""
        self._generation = None

    def close(self) -> None:
        """Waits until the tracker has everything."""
        if self._generation is not None:
            self._tracker.close()
            self._save(self._sent, self._evaluated, sending=0, complete=True)

    def _open(self, history: RunHistory) -> None:
        generation = len(history.rollbacks)
        if self._generation is not None:
            self._tracker.close(is_replaced=True)
        saved = _read_state(self._state)
        if saved.get("generation") != generation:
            saved = {}
        self._generation = None
        # Whether rows that were being sent at a kill have arrived is not known: at most once.
        maybe = max(int(saved.get("step", 0)), int(saved.get("sending", 0)))
        identity = _identity(self._run_dir, self._config, history)
        self._sent = self._tracker.open(identity, sent_through=maybe)
        # Evaluations of a step are read before the next step's metrics are.
        known = int(saved.get("evaluated", 0)) if self._sent else 0
        self._evaluated = max(known, self._sent - 1)
        self._generation = generation
        self._files = LinesSince()

    def _new_rows(self, history: RunHistory) -> list[Row]:
        if self._files.is_new:
            lines = metrics.read_history(self._run_dir, history)
            found = evaluations.read(self._run_dir, {line.attempt for line in lines})
            surviving = {(line.attempt, line.step) for line in lines}
            measured = {step: means for (a, step), means in found.items() if (a, step) in surviving}
            self._files.begin(history.attempt)
        else:
            lines, measured = self._files.read(self._run_dir, history.attempt)
        rows: dict[int, dict[str, float]] = {}
        for line in lines:
            if line.step > self._sent:
                rows[line.step] = _values(line)
        self._sent = max([self._sent, *rows])
        for step, means in measured.items():
            if step > self._evaluated:
                rows.setdefault(step, {}).update(trackers.finite(evaluations.curves(means)))
        self._evaluated = max([self._evaluated, *measured])
        return sorted((step, values) for step, values in rows.items() if values)

    def _save(self, sent: int, evaluated: int, *, sending: int, complete: bool = False) -> None:
        files.make_dir(self._state.parent)
        fields = {"generation": self._generation, "step": sent, "evaluated": evaluated}
        fields |= {"sending": sending, "complete": complete}
        files.replace(self._state, json.dumps(fields).encode())


class LinesSince:
    """Reads the lines that were added to an attempt's files since the last time."""

    def __init__(self) -> None:
        self._attempt = 0
        self._lines = self._events = 0

    @property
    def is_new(self) -> bool:
        """Whether nothing was read yet."""
        return self._attempt == 0

    def begin(self, attempt: int) -> None:
        """Begins at the start of an attempt; steps that were read otherwise are known by number."""
        self._attempt, self._lines, self._events = attempt, 0, 0

    def read(
        self, run_dir: RunDir, attempt: int
    ) -> tuple[list[MetricsLine], dict[int, dict[str, Any]]]:
        """Returns the new lines, and step -> evaluation, up to this attempt."""
        lines: list[MetricsLine] = []
        measured: dict[int, dict[str, Any]] = {}
        for number in range(self._attempt, attempt + 1):
            if number != self._attempt:
                self.begin(number)
            new, self._lines = metrics.read_since(run_dir.metrics(number), self._lines)
            lines += new
            events, self._events = evaluations.read_since(run_dir.events(number, 0), self._events)
            measured |= events
        return lines, measured


def _values(line: MetricsLine) -> dict[str, float]:
    named = {
        "train/loss": line.loss,
        "train/grad_norm": line.grad_norm,
        "train/learning_rate": line.learning_rate,
        "train/loss_scale": line.loss_scale,
        "train/tokens": line.tokens,
        "train/step_seconds": line.step_seconds,
    }
    return trackers.finite(named | {f"train/{k}": v for k, v in line.model_metrics.items()})


def _identity(run_dir: RunDir, config: RunConfig, history: RunHistory) -> Identity:
    generation = len(history.rollbacks)
    base = hashlib.sha256(history.claims[0].nonce.encode()).hexdigest()[:12]
    name = config.run.name or run_dir.root.name
    later = f" (after rollback {generation})" if generation else ""
    return Identity(
        id=f"{base}-{generation}" if generation else base,
        name=f"{name}{later}",
        group=run_dir.root.name,
        tags=config.run.tags,
        config=redact(config.model_dump(mode="json")),
    )


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.exit(main(sys.argv[1:]))
