"""Starts and ends the processes that copy a run's metrics to experiment trackers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping

from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig, load_recorded
from jaxres.exit_codes import ExitCode
from jaxres.host.processes import kill_session, start_session
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.supervisor.companions.tracker_process import has_everything
from jaxres.telemetry import stdio, trackers

MODULE = "jaxres.supervisor.companions.tracker_process"
CLOSE_SECONDS = 10.0
"""Longest delay of the exit for metrics that were not sent yet; the next start sends the rest."""
FINISH_SECONDS = 60.0
"""The same for a run that has reached its last step: most likely there is no next start."""
POLL_SECONDS = 0.02


class TrackerProcesses:
    """One process for each tracker of the config; a context manager, which ends them.

    They are in sessions of their own, so that a Ctrl-C reaches only the run. Their failures are
    printed by themselves, and stop nothing. It is to be entered before the run lock: it ends when
    the run is free, and when a second Ctrl-C ends the supervisor at once.
    """

    def __init__(
        self, config: RunConfig, run_dir: RunDir, *, env: Mapping[str, str], clock: Clock
    ) -> None:
        """Checks that the packages are installed; starts nothing.

        Raises:
          ConfigError: a package is not installed.
        """
        for section in config.telemetry.trackers:
            trackers.check(section)
        self._sections = config.telemetry.trackers
        self._run_dir, self._env, self._clock = run_dir, env, clock
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._close_seconds = CLOSE_SECONDS

    def __enter__(self) -> TrackerProcesses:
        return self

    def ensure_started(self, attempt: int) -> None:
        """Starts the trackers that do not run, with the recorded config of an attempt."""
        for number in range(len(self._sections)):
            process = self._processes.get(number)
            if process is not None and process.poll() is None:
                continue
            command = [sys.executable, "-m", MODULE, str(self._run_dir.root.absolute())]
            try:
                self._processes[number] = start_session(
                    [*command, "--attempt", str(attempt), "--number", str(number)],
                    stdin=subprocess.PIPE,
                    env={**trackers.ENVIRONMENT, **self._env},
                )
            except OSError as error:
                stdio.eprint(f"telemetry.trackers[{number}]: did not start: {error}\n")

    @property
    def pids(self) -> set[int]:
        """Pids of the running trackers, which are no leftovers of an attempt."""
        return {p.pid for p in self._processes.values() if p.poll() is None}

    def on_run_ended(self, code: int) -> None:
        """Lets them take FINISH_SECONDS if the run is complete."""
        if code == ExitCode.DONE:
            self._close_seconds = FINISH_SECONDS

    def __exit__(self, *_: object) -> None:
        """Lets the trackers send their rest for a limited time, and kills them."""
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        until = self._clock.monotonic() + self._close_seconds
        while self.pids and self._clock.monotonic() < until:
            self._clock.sleep(POLL_SECONDS)
        for number, process in self._processes.items():
            kill_session(process)
            if process.returncode:
                stdio.eprint(
                    f"tracker {self._sections[number].kind}: has not received the last steps; the "
                    "same command sends them, also when the run is complete\n"
                )
        self._processes = {}


def send_rest(config: RunConfig, run_dir: RunDir, *, env: Mapping[str, str]) -> None:
    """Sends data that the trackers of a complete run have not received."""
    history = run_log.fold(run_log.read_records(run_dir.log))
    sections = config.telemetry.trackers
    if not sections or all(
        has_everything(run_dir, section, number, step=history.step)
        for number, section in enumerate(sections)
    ):
        return
    attempt = history.attempt
    recorded = load_recorded(run_dir.attempt(attempt) / "config.yaml").config.telemetry.trackers
    if recorded != sections:
        stdio.eprint("telemetry.trackers: changed since the run is complete; nothing is sent\n")
        return
    with TrackerProcesses(config, run_dir, env=env, clock=SystemClock()) as processes:
        processes.ensure_started(attempt)
        processes.on_run_ended(ExitCode.DONE)
