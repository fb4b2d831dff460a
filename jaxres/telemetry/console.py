"""Console output: live progress on a terminal, otherwise a plain line at a fixed interval.

Observers of events and completed steps; training never depends on them. `ConsoleLog` appends the
plain lines to RUN_DIR/console.log, with the time before each.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from jaxres.clock import Clock
from jaxres.config.schema.data import HELDOUT
from jaxres.runlog import events, skip_causes
from jaxres.runlog.events import Event
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.skip_causes import SkipCause
from jaxres.secret_values import redact_text
from jaxres.storage.line_writer import LineWriter, open_line_writer
from jaxres.storage.threads import make_thread
from jaxres.telemetry import throughput
from jaxres.telemetry.stdio import escaped, format_bytes

WINDOW_STEPS = 50
WIDE_COLUMNS = 140
REFRESHES_PER_SECOND = 4
"""Refresh rate of the live progress; a refresh takes about 0.5 ms, which slows steps on CPU."""
QUICK_PHASES = ("train", "save", "evaluate", "hook")
SaveEvent = (
    events.SaveWaited
    | events.SaveSkipped
    | events.SaveIntervalChosen
    | events.SaveFailed
    | events.SaveCommitted
)
MAX_WAITING = 1000
"""Lines that wait in memory while storage refuses them; older ones are dropped."""


class Console:
    """Prints a run's progress; a context manager."""

    def __init__(
        self, *, attempt: int, log_every_seconds: float, clock: Clock, terminal: Terminal
    ) -> None:
        self._terminal = terminal
        self._clock = clock
        self._attempt = attempt
        self._log_every_seconds = log_every_seconds
        self._live: Progress | None = None
        self._bar: Any = None
        self._phase = ("start", clock.monotonic())
        self._printed_at = clock.monotonic()
        self._completed_at = clock.monotonic()
        self._recent: deque[MetricsLine] = deque(maxlen=WINDOW_STEPS)
        self._built: events.RunBuilt | None = None
        self._committed = 0
        self._failed_saves = 0
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._ticker = make_thread("console", self._tick, daemon=True)

    def __enter__(self) -> Console:
        if self._terminal.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24 if self._is_wide() else 8),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
            )
            self._live = Progress(
                *columns,
                console=self._terminal,
                transient=True,
                refresh_per_second=REFRESHES_PER_SECOND,
            )
            self._live.start()
            self._bar = self._live.add_task("start", total=None, numbers="")
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._ticker.join()
        if self._live is not None:
            self._live.stop()

    def print(self, text: str) -> None:
        """Prints a line above the live progress, without secrets."""
        with self._lock:
            self._terminal.print(Text(escaped(redact_text(text))))

    def on_event(self, event: Event) -> None:
        """Prints the events that matter to an operator."""
        with self._lock:
            match event:
                case events.PhaseChanged(phase, detail):
                    self._enter(phase, detail)
                case events.RunOpened(run_dir, attempt, threads):
                    self.print(f"run {run_dir} · attempt {attempt} · {threads} CPU threads")
                case events.RunBuilt():
                    self._built = event
                    self.print(_parts(event))
                case events.TrainingStarted(step, _, guarantee, committed):
                    self._committed = step if committed is None else committed
                    self.print(f"{_begin(event)} · guarantee: {guarantee}")
                case _ if isinstance(event, events.MemoryEvent):
                    self.print(_memory_tier(event))
                case events.Evaluated():
                    self.print(_evaluated(event))
                case events.GuardWarned(_, reason):
                    self.print(f"WARNING: {reason}")
                case events.CorruptionDetected(reason=reason):
                    self.print(f"ALARM: {reason}")
                case _ if isinstance(event, events.PerformanceEvent):
                    self.print(_speed(event))
                case events.RolledBack():
                    self.print(_rolled_back(event))
                case events.BadRecordsSkipped():
                    self.print(_left_out(event))
                case events.UpdateSkipped():
                    self.print(_skipped(event))
                case _ if isinstance(event, SaveEvent):
                    self._on_save(event)
                case events.StepQuarantined(step, path, evidence):
                    self.print(
                        f"ALARM: step {step} is damaged and is excluded ({path}): {evidence}. "
                        "Its files are kept for inspection; an older valid step is restored."
                    )
                case events.SampleWritten(text=text):
                    self.print(f"the model writes:\n{text}\n")
                case events.Noted() | events.HardwareTested():
                    self.print(_noted(event))
                case _:
                    pass

    def _on_save(self, event: SaveEvent) -> None:
        """Prints the events of saves that matter to an operator."""
        match event:
            case events.SaveWaited(step, seconds):
                self.print(f"step {step}: waited {seconds:.1f} s for the previous save")
            case events.SaveSkipped(step):
                self.print(f"step {step}: not saved, the previous save is still being written")
            case events.SaveIntervalChosen():
                self.print(_interval(event))
            case events.SaveFailed(step, reason, failures):
                self._failed_saves = failures
                self.print(
                    f"ALARM: step {step} could not be saved ({failures} in a row). Training "
                    f"continues and the next save tries again; the newest committed step is "
                    f"{self._committed}. Reason: {reason}"
                )
            case events.SaveCommitted(step=step):
                self._committed = step
                if self._failed_saves:
                    self.print(f"step {step} is committed, after {self._failed_saves} failed")
                self._failed_saves = 0

    def on_step(self, line: MetricsLine) -> None:
        """Shows a completed step."""
        with self._lock:
            self._recent.append(line)
            self._completed_at = self._clock.monotonic()
            if self._live is not None:
                total = self._built.steps if self._built else None
                self._live.update(
                    self._bar,
                    description="train",
                    completed=line.step,
                    total=total,
                    numbers=self._numbers() if self._is_wide() else self._few_numbers(),
                )
            elif len(self._recent) == 1:
                self._print_progress()

    def _enter(self, phase: str, detail: str) -> None:
        self._phase = (phase, self._clock.monotonic())
        if self._live is not None:
            self._live.update(self._bar, description=redact_text(f"{phase} {detail}".strip()))
        elif phase not in QUICK_PHASES:
            self.print(f"{phase}: {detail}" if detail else phase)
            self._printed_at = self._clock.monotonic()
        if phase == "settle" and self._recent:
            self.print(self._numbers())

    def _tick(self) -> None:
        """Prints the progress of a long phase every `log_every_seconds`."""
        while not self._stop.wait(min(1.0, self._log_every_seconds)):
            with self._lock:
                if self._live is None and self._due():
                    self._print_progress()

    def _print_progress(self) -> None:
        """Prints the newest step, or the phase and how long it has lasted."""
        now = self._clock.monotonic()
        phase, since = self._phase
        if phase == "train" and self._recent and now - self._completed_at < self._log_every_seconds:
            self.print(self._numbers())
        else:
            waited = now - max(since, self._completed_at)
            if waited < 1:
                return
            self.print(f"{phase}: {waited:.0f} s so far")
        self._printed_at = now

    def _due(self) -> bool:
        return self._clock.monotonic() - self._printed_at >= self._log_every_seconds

    def _numbers(self) -> str:
        assert self._built is not None
        newest = self._recent[-1]
        seconds = _mean([line.step_seconds for line in self._recent])
        left = seconds * (self._built.steps - newest.step)
        parts = [
            f"step {newest.step}/{self._built.steps}",
            f"loss {_number(newest.loss)}",
            f"grad {_number(newest.grad_norm)}",
            f"{throughput.tokens_per_second(self._built, seconds):,.0f} tok/s",
            throughput.utilization_text(self._built, seconds),
            f"left {_clock_face(left)}",
            f"committed {self._committed}",
            f"attempt {self._attempt}",
        ]
        return " · ".join(parts)

    def _is_wide(self) -> bool:
        return self._terminal.width >= WIDE_COLUMNS

    def _few_numbers(self) -> str:
        assert self._built is not None
        newest = self._recent[-1]
        left = _mean([m.step_seconds for m in self._recent]) * (self._built.steps - newest.step)
        return (
            f"{newest.step}/{self._built.steps} loss {_number(newest.loss)} left "
            f"{_clock_face(left)} committed {self._committed}"
        )


class ConsoleLog:
    """A console of plain lines in a file; a context manager.

    Storage that fails or hangs ends nothing: its lines are dropped.
    """

    def __init__(self, path: Path, *, attempt: int, log_every_seconds: float, clock: Clock) -> None:
        """Opens the file.

        Raises:
          RunError: it can't be opened.
        """
        self._lines = open_line_writer(path, max_waiting=MAX_WAITING, on_overflow="drop oldest")
        file = cast(IO[str], _TimedLines(self._lines, clock))
        self._console = Console(
            attempt=attempt,
            log_every_seconds=log_every_seconds,
            clock=clock,
            terminal=Terminal(
                file=file, highlight=False, soft_wrap=True, force_terminal=False, color_system=None
            ),
        )

    def __enter__(self) -> ConsoleLog:
        self._console.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._console.__exit__()
        self._lines.close()

    def on_event(self, event: Event) -> None:
        """Writes the console's output, and the end of the attempt."""
        self._console.on_event(event)
        if isinstance(event, events.RunEnded):
            what = event.message or f"step {event.step}"
            self._console.print(f"exit {event.exit} {event.name}: {what}")

    def on_step(self, line: MetricsLine) -> None:
        """Writes the progress from time to time."""
        self._console.on_step(line)


class _TimedLines:
    """A text stream for rich, which writes whole lines."""

    encoding = "utf-8"

    def __init__(self, lines: LineWriter, clock: Clock) -> None:
        self._lines, self._clock, self._rest = lines, clock, ""

    def write(self, text: str) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        at = datetime.fromtimestamp(self._clock.wall()).isoformat(sep=" ", timespec="seconds")
        for line in whole:
            self._lines.append(f"{at}  {line}".rstrip().encode())
        return len(text)

    def flush(self) -> None:
        """No-op: whole lines are written at once."""

    def isatty(self) -> bool:
        return False


def _skipped(event: events.UpdateSkipped) -> str:
    """Returns the line for a step whose update was not applied."""
    rows = ", ".join(
        f"row {row} (sample {sample}, host {host})" for row, sample, host, _ in event.rows[:3]
    )
    more = f" and {event.num_rows - 3} more rows" if event.num_rows > 3 else ""
    why, scale = skip_causes.text(event.cause), event.overflowed_scale
    if event.cause is SkipCause.NORM_SPIKE:
        why = f"the gradient norm is {event.spike_score:.1f} deviations above the usual"
    elif event.cause is SkipCause.NONFINITE_LOSS and rows:
        why = f"loss of {rows}{more} not finite"
    elif event.cause is SkipCause.NONFINITE_GRADIENT and event.params:
        why = f"gradient of {', '.join(event.params[:3])} not finite"
    elif scale is not None:
        why = f"the gradient overflows under loss scale {scale:g}; it is {scale / 2:g} from now on"
    return (
        f"step {event.step}: loss {event.loss:.4g}, gradient norm {event.grad_norm:.4g}: its "
        f"update was skipped ({why})"
    )


def _rolled_back(event: events.RolledBack) -> str:
    """Returns the line for a rollback."""
    rate = ""
    if event.rate_factor < 1:
        rate = (
            f", with {event.rate_factor:g} times the learning rate in steps {event.onset} to "
            f"{event.onset + event.rate_steps - 1}"
        )
    return (
        f"ROLLBACK: {event.reason}. Resuming from step {event.target}, without the "
        f"{event.rows[1] - event.rows[0]} rows since step {event.onset}{rate}"
    )


def _left_out(event: events.BadRecordsSkipped) -> str:
    """Returns the line for rows that can't be used."""
    count = sum(stop - start for start, stop in event.rows)
    return (
        f"BAD RECORD: {event.reason}. Permanently excluded: {count} rows; resuming from step "
        f"{event.step}"
    )


def _noted(event: events.Noted | events.HardwareTested) -> str:
    if isinstance(event, events.Noted):
        return event.message
    passed = f"passed in {event.seconds:.1f} s: {'; '.join(event.results)}"
    return f"hardware.preflight={event.extent}: {passed}"


def _evaluated(event: events.Evaluated) -> str:
    """Returns the losses of all sets as text; the best loss is the first set's."""
    names = list(event.losses) or [HELDOUT]
    texts = []
    for name in names:
        what = "held-out" if name == HELDOUT else name
        loss = event.losses.get(name, event.loss)
        bits = event.bits_per_byte.get(name)
        more = [] if bits is None else [f"{bits:.3f} bits/byte"]
        more += [f"{key} {mean:.4f}" for key, mean in event.metrics.get(name, {}).items()]
        texts.append(", ".join([f"{what} loss {loss:.4f}", *more]))
    texts[0] += f" (best {event.best_loss:.4f} at step {event.best_step})"
    return f"step {event.step}: {'; '.join(texts)}"


def _begin(started: events.TrainingStarted) -> str:
    step, committed = started.step, started.committed_step
    if committed is not None:
        durable = f"step {committed}" if committed else "none"
        return f"resuming from step {step} (from host memory; newest committed step: {durable})"
    return f"resuming from step {step} ({started.path})" if started.path else "starting at step 0"


def _speed(event: events.PerformanceEvent) -> str:
    match event:
        case events.StragglerRecovered(step=step, host=host):
            return f"step {step}: host {host} is no longer slower than the others"
        case events.ThroughputRecovered(step=step, kind=kind):
            return f"step {step}: {kind.replace('_', ' ')} are as fast as usual again"
        case _:
            return f"WARNING: step {event.step}: {event.reason}"


def _memory_tier(event: events.MemoryEvent) -> str:
    match event:
        case events.MemoryTierOpened(folder, size, every, neighbor):
            copies = "" if neighbor is None else f"; host {neighbor} keeps copies"
            return (
                f"every {every} steps the state is kept in this host's memory too: "
                f"{format_bytes(size)} in {folder}{copies}"
            )
        case events.MemoryCopied(step, host, size):
            return f"step {step} is in the memory of host {host} too ({format_bytes(size)})"
        case events.MemoryCopyFailed(step, host, reason):
            return (
                f"WARNING: step {step} could not be copied to the memory of host {host}: {reason}. "
                "Training continues, and the next state is tried again"
            )
        case events.MemoryFetched(step, host):
            return f"step {step} of this host came from the memory of host {host}"
        case events.MemoryTierClosed(reason):
            return (
                f"WARNING: no state is kept in host memory any more: {reason}. Training continues, "
                "and no committed step is affected"
            )


def _parts(built: events.RunBuilt) -> str:
    padding = "" if built.padding is None else f", {built.padding:.1%} padding"
    return (
        f"{built.model}, {built.params / 1e6:.2f} M parameters, "
        f"{built.flops_per_token / 1e6:.1f} MFLOP a token, on {built.devices} · "
        f"{built.rows:,} rows, {built.tokens_per_epoch / 1e6:.1f} M tokens an epoch{padding} · "
        f"{built.steps:,} steps · state {format_bytes(built.state_bytes_per_device)} a device, "
        f"a save takes up to {format_bytes(built.save_bytes_per_host)} of a host's memory"
    )


def _interval(chosen: events.SaveIntervalChosen) -> str:
    steps = "" if chosen.steps is None else f" ({chosen.steps} steps)"
    why = {
        "failures": "loses least",
        "write": "as long as a commit takes",
        "overhead": "by checkpoint.when.max_overhead",
    }
    return (
        f"saving every {chosen.seconds:.3g} s{steps}, {why[chosen.bound]}: a save stalls "
        f"{chosen.stall_seconds:.3g} s and is committed after {chosen.write_seconds:.3g} s, a "
        f"restart takes {chosen.restart_seconds:.3g} s, {chosen.failures} failures in "
        f"{chosen.trained_hours:.3g} h, one in {chosen.mtbf_hours:.3g} h expected, "
        f"{chosen.useful_share:.1%} of the time useful"
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _clock_face(seconds: float) -> str:
    """Returns h:mm:ss or m:ss.

    >>> _clock_face(62), _clock_face(3723)
    ('1:02', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
