"""Observer that appends the console's lines to RUN_DIR/console.log, with the time before each."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from rich.console import Console as Terminal

from jaxres.clock import Clock
from jaxres.runlog import events
from jaxres.runlog.events import Event
from jaxres.runlog.metrics import MetricsLine
from jaxres.storage.line_writer import LineWriter, open_line_writer
from jaxres.telemetry.console import Console

MAX_WAITING = 1000
"""Lines that wait in memory while storage refuses them; older ones are dropped."""


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._console.__exit__(kind, error, trace)
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
