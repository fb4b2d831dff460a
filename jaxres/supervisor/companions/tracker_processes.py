"""Starts and ends the processes that copy a run's metrics to experiment trackers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from jaxres.clock import Clock
from jaxres.config import RunConfig, load_recorded
from jaxres.exit_codes import ExitCode
from jaxres.host.side_process import SideProcess, end_all
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunHistory
from jaxres.supervisor.companions.tracker_copy import has_everything
from jaxres.telemetry import stdio, trackers

MODULE = "jaxres.supervisor.companions.tracker_copy"
CLOSE_SECONDS = 10.0
"""Longest delay of the exit for metrics that were not sent yet; the next start sends the rest."""
FINISH_SECONDS = 60.0
"""The same for a run that has reached its last step: most likely there is no next start."""


class TrackerProcesses:
    """One process for each tracker of the config; a context manager, which ends them.

    Their failures are printed by themselves, and stop nothing. It is to be entered before the run
    lock: it ends when the run is free, and when a second Ctrl-C ends the supervisor at once.
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
        self._run_dir, self._clock = run_dir, clock
        own = {**trackers.ENVIRONMENT, **env}
        self._processes = [SideProcess(own) for _ in self._sections]
        self._close_seconds = CLOSE_SECONDS

    def __enter__(self) -> TrackerProcesses:
        return self

    def ensure_started(self, attempt: int) -> None:
        """Starts the trackers that do not run, with the recorded config of an attempt."""
        for number, process in enumerate(self._processes):
            if process.pids:
                continue
            command = [sys.executable, "-m", MODULE, str(self._run_dir.root.absolute())]
            command += ["--attempt", str(attempt), "--number", str(number)]
            try:
                process.start(command, stdin=subprocess.PIPE)
            except OSError as error:
                stdio.eprint(f"telemetry.trackers[{number}]: did not start: {error}\n")

    @property
    def pids(self) -> set[int]:
        """Pids of the running trackers, which are no leftovers of an attempt."""
        return {pid for process in self._processes for pid in process.pids}

    def on_run_ended(self, code: int) -> None:
        """Lets them take FINISH_SECONDS if the run is complete."""
        if code == ExitCode.DONE:
            self._close_seconds = FINISH_SECONDS

    def __exit__(self, *_: object) -> None:
        """Lets the trackers send their rest for a limited time, and kills them."""
        end_all(self._processes, seconds=self._close_seconds, clock=self._clock)
        for section, process in zip(self._sections, self._processes, strict=True):
            if process.exit_code:
                stdio.eprint(
                    f"tracker {section.kind}: has not received the last steps; the same command "
                    "sends them, also when the run is complete\n"
                )


def lack_steps(config: RunConfig, run_dir: RunDir, history: RunHistory) -> bool:
    """Returns whether trackers lack steps of a complete run; prints if they are other trackers."""
    sections = config.telemetry.trackers
    if all(
        has_everything(run_dir, section, number, step=history.step)
        for number, section in enumerate(sections)
    ):
        return False
    recorded = load_recorded(run_dir.attempt(history.attempt) / "config.yaml").config
    if recorded.telemetry.trackers != sections:
        stdio.eprint("telemetry.trackers: changed since the run is complete; nothing is sent\n")
        return False
    return True
