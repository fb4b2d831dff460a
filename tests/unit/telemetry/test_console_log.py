"""RUN_DIR/console.log has the lines of the console in all attempts, with times, and no more."""

from __future__ import annotations

import io
import resource

from rich.console import Console as Terminal

from jaxres.clock import SystemClock
from jaxres.runlog.event_log import EventLog
from jaxres.runlog.events import Noted, PhaseChanged, RunEnded, RunOpened
from jaxres.telemetry.console import Console, ConsoleLog


def test_lines_of_all_attempts_are_appended_with_times_and_how_each_ended(tmp_path):
    path = tmp_path / "console.log"
    for attempt in (1, 2):
        log = ConsoleLog(path, attempt=attempt, log_every_seconds=9, clock=SystemClock())
        with log:
            log.on_event(RunOpened("run", attempt, 2, False))
            log.on_event(Noted("first\nsecond \x1b[31m [bold]"))
            log.on_event(RunEnded(75, "PREEMPTED", 7, True, "SIGTERM"))
    lines = path.read_text().splitlines()
    texts = [line[21:] for line in lines]
    assert texts[:4] == [
        "run run · attempt 1 · 2 CPU threads",
        "first",
        "second \\x1b[31m [bold]",
        "exit 75 PREEMPTED: SIGTERM",
    ]
    assert texts[4] == "run run · attempt 2 · 2 CPU threads"
    assert all(line[:4].isdigit() and line[19:21] == "  " for line in lines), lines


def test_no_secret_is_in_the_console_or_its_file(tmp_path):
    secret, path = "https:/me:hunter2@host/cache", tmp_path / "console.log"
    clock, shown = SystemClock(), io.StringIO()
    terminal = Terminal(file=shown, force_terminal=True, width=300)
    log = ConsoleLog(path, attempt=1, log_every_seconds=9, clock=clock)
    console = Console(attempt=1, log_every_seconds=9, clock=clock, terminal=terminal)
    events = EventLog(tmp_path / "e", clock=clock, listeners=[log.on_event, console.on_event])
    with log, console, events:
        events.emit(PhaseChanged("open data", secret))
        events.emit(RunOpened(secret, 1, 2, False))
    texts = (path.read_text(), shown.getvalue(), (tmp_path / "e").read_text())
    assert all("https:/me:<secret>@host/cache" in text for text in texts), texts
    assert all("hunter2" not in text for text in texts), texts


def test_a_full_disk_ends_nothing(tmp_path):
    path = tmp_path / "console.log"
    log = ConsoleLog(path, attempt=1, log_every_seconds=9, clock=SystemClock())
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))  # As a full disk: no byte is written.
    try:
        with log:
            log.on_event(Noted("a line"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert path.read_bytes() == b""
