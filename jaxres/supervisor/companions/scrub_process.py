"""Starts a process for each committed step that is to be verified again, and reports damage.

The process is `jaxres.cli.scrub`; it verifies one step. A thread looks which step is due, waits for
the process, and emits an event for damage that the run's events do not have yet. Nothing here stops
or delays training, and no step is quarantined.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.exit_codes import SIGNAL_BASE, ExitCode, exit_name
from jaxres.faults import RunError, command_line
from jaxres.host.side_process import SideProcess
from jaxres.runlog import run_log, scrub_progress
from jaxres.runlog.event_log import read_events
from jaxres.runlog.events import EVENTS, Event
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Commit
from jaxres.runlog.run_log import RunHistory
from jaxres.runlog.scrub_progress import RETRY_SECONDS, StepCheck
from jaxres.runlog.supervisor_events import CheckpointDamageFound
from jaxres.storage.threads import make_thread
from jaxres.supervisor.process import worker_group
from jaxres.telemetry import stdio

MODULE = "jaxres.cli.scrub"
WATCH_SECONDS = 60.0
"""Longest time between two looks at which step is due."""
POLL_SECONDS = 0.1
KILL_SECONDS = 1.0
"""Longest wait for a killed process; one that hangs in storage is left behind."""


class ScrubProcess:
    """The background verification of a run with `checkpoint.scrub`; a context manager."""

    def __init__(
        self, config: RunConfig, run_dir: RunDir, *, env: Mapping[str, str], clock: Clock
    ) -> None:
        """Starts nothing."""
        self._section, self._replica = config.checkpoint.scrub, config.checkpoint.replica
        self._run_dir, self._clock = run_dir, clock
        self._process = SideProcess(env)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._reported: set[tuple[str, float]] | None = None
        """Path and time of the damage in the run's events; None: they are not read yet."""

    def __enter__(self) -> ScrubProcess:
        return self

    def ensure_started(self, emit: Callable[[Event], None]) -> None:
        """Starts the thread unless it runs; `emit` is called in it. Called after the claim."""
        if self._section is not None and self._thread is None:
            self._thread = make_thread("scrub-watch", lambda: self._watch(emit), daemon=True)
            self._thread.start()

    @property
    def pids(self) -> set[int]:
        """Pid of the process, if it runs."""
        return self._process.pids

    def __exit__(self, *_: object) -> None:
        """Kills the process: the next start verifies the step again."""
        self._closed.set()
        self._process.kill(seconds=KILL_SECONDS)
        if self._thread is not None:
            self._thread.join(KILL_SECONDS)  # It may wait for storage.

    def _watch(self, emit: Callable[[Event], None]) -> None:
        assert self._section is not None
        every = 3600 * self._section.every_hours
        pause = min(WATCH_SECONDS, every / 4)
        wait, log, shown = pause, run_log.reader_of(self._run_dir.log), ""
        while not self._closed.wait(wait):
            wait = pause
            try:
                history = run_log.fold(log.read())
                newest = history.claims[-1] if history.claims else None
                if newest is not None and not worker_group.is_claim_of(newest, pid=os.getpid()):
                    return  # Another supervisor owns the run now.
                checks = self._report(history, emit)
            except RunError:  # Unreadable storage: the next look is later.
                continue
            now = self._clock.wall()
            due = scrub_progress.due_steps(history.commits, checks, now=now, every_seconds=every)
            code = self._verify(due[0]) if due else ExitCode.DONE
            if code == ExitCode.FENCED:
                return
            if code != ExitCode.DONE:
                wait = max(pause, min(every, RETRY_SECONDS))
                text = f"checkpoint.scrub: its process has exited with {exit_name(code)}"
                if text != shown and not self._closed.is_set():
                    stdio.eprint(f"{text}; it is tried again, and training continues\n")
                    shown = text

    def _verify(self, commit: Commit) -> int:
        """Runs the process for one step; returns its exit code."""
        assert self._section is not None
        command = [sys.executable, "-m", MODULE, str(self._run_dir.root), f"--path={commit.path}"]
        command += ["--parent", str(os.getpid())]
        command += [f"--max-mb-per-second={self._section.max_mb_per_second}"]
        if self._replica is not None:
            command += [f"--replica={self._replica.place}"]
        try:
            self._process.start(command)
        except OSError:
            return ExitCode.STORAGE
        while self._process.pids and not self._closed.wait(POLL_SECONDS):
            pass
        self._process.kill(seconds=KILL_SECONDS)
        code = self._process.exit_code
        if code is None:
            return ExitCode.STORAGE
        return code if code >= 0 else SIGNAL_BASE - code

    def _report(
        self, history: RunHistory, emit: Callable[[Event], None]
    ) -> Mapping[str, StepCheck]:
        """Emits an event for each damage that has none; returns the checks."""
        checks = scrub_progress.read(self._run_dir)
        events = damage_events(history, checks, run_dir=self._run_dir)
        if not events:
            return checks
        if self._reported is None:
            name = EVENTS.tag(CheckpointDamageFound)
            rows = [r for r in read_events(self._run_dir.supervisor_events) if r["event"] == name]
            self._reported = {(row["path"], row["found"]) for row in rows}
        for event in events:
            if (key := (event.path, event.found)) not in self._reported:
                self._reported.add(key)
                emit(dataclasses.replace(event, number=len(self._reported)))
        return checks


def damage_events(
    history: RunHistory, checks: Mapping[str, StepCheck], *, run_dir: RunDir
) -> list[CheckpointDamageFound]:
    """Returns an event for each committed step with known damage. Pure."""
    intact = scrub_progress.intact_steps(history.committed, checks)
    events: list[CheckpointDamageFound] = []
    for check in scrub_progress.damaged_steps(history.committed, checks):
        damage = check.damage
        assert damage is not None, check
        state = "is damaged on storage" if damage.kind == "damaged" else "can't be read"
        events.append(
            CheckpointDamageFound(
                attempt=history.attempt,
                step=history.step,
                kind=damage.kind,
                damaged_step=check.step,
                path=check.path,
                found=damage.found,
                files=damage.files,
                arrays=damage.arrays,
                intact_steps=intact,
                copy=damage.copy,
                reason=f"step {check.step} ({check.path}) {state}: {damage.evidence}",
                next=_remedy(check, intact, damage.copy, run_dir=run_dir),
                number=0,
            )
        )
    return events


def _remedy(check: StepCheck, intact: Sequence[int], copy: str | None, *, run_dir: RunDir) -> str:
    root = run_dir.root.absolute()
    command = command_line("jaxres checkpoints verify", root, "--step", check.step)
    if copy is not None:
        return (
            f"training continues; an intact copy is in the replica: copy the files of {copy} over "
            f"those in {root / check.path}, then {command}"
        )
    if intact:
        return (
            f"training continues; a restore skips this step and takes step {max(intact)}, which "
            f"has no known damage. To look again: {command}"
        )
    return (
        "training continues, and no other committed step is known to be intact: request a save "
        f"({root}/save) and do not stop the run before it is committed"
    )
