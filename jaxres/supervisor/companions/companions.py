"""The companions of a supervisor, which run from before its first attempt to its exit.

They are this machine's watchers (preemption, health), the exporter of metrics and, on the host that
owns the run, the processes that copy metrics to trackers, copy steps to a replica and verify steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.events import Event
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Claim, Record
from jaxres.runlog.supervisor_events import HardwareFaultFound
from jaxres.supervisor.attempt import Services
from jaxres.supervisor.companions import replica_process, tracker_processes
from jaxres.supervisor.companions.prometheus_exporter import PrometheusExporter
from jaxres.supervisor.companions.replica_process import ReplicaProcess
from jaxres.supervisor.companions.scrub_process import ScrubProcess
from jaxres.supervisor.companions.tracker_processes import TrackerProcesses
from jaxres.supervisor.health.health_watcher import HealthWatcher
from jaxres.supervisor.preemption.watcher import PreemptionWatcher


def ignore_event(event: Event) -> None:
    """No-op: a host that does not own the run has no events of replica or verification."""


class Companions:
    """A context manager, to be entered before the run lock: it ends once the run is free."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        *,
        env: Mapping[str, str],
        clock: Clock,
        is_inline: bool = False,
        owns_run: bool = True,
    ) -> None:
        """Starts nothing.

        Args:
          is_inline: whether the supervisor itself trains: it watches nothing and serves no metrics.
          owns_run: whether this is the supervisor of host 0.

        Raises:
          ConfigError: a package that the config needs is not installed.
        """
        self.preemption_watcher: PreemptionWatcher | None = None
        """The source of this machine's preemption notices; None: there is none."""
        self.health_watcher: HealthWatcher | None = None
        """The watcher of this machine's GPUs; None: there is none."""
        if not is_inline:
            self.preemption_watcher = PreemptionWatcher(config.preemption, env=env, clock=clock)
            section = config.hardware.health
            self.health_watcher = HealthWatcher(section, run_dir.local, env=env, clock=clock)
        self._exporter = PrometheusExporter(config, run_dir, clock=clock)
        self._is_inline, self._clock = is_inline, clock
        self._trackers: TrackerProcesses | None = None
        self._replica: ReplicaProcess | None = None
        self._scrub: ScrubProcess | None = None
        if owns_run:
            self._trackers = TrackerProcesses(config, run_dir, env=env, clock=clock)
            self._replica = ReplicaProcess(config, run_dir, env=env, clock=clock)
            self._scrub = ScrubProcess(config, run_dir, env=env, clock=clock)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Companions:
        """Starts the watchers."""
        with contextlib.ExitStack() as stack:
            for each in (
                self.preemption_watcher,
                self.health_watcher,
                self._trackers,
                self._replica,
                self._scrub,
                self._exporter,
            ):
                if each is not None:
                    stack.enter_context(each)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all of them, each within its own time limit."""
        self._stack.close()

    @property
    def services(self) -> Services:
        """What an attempt uses of the companions, without the services of its supervisor."""
        return Services(
            clock=self._clock,
            preemption_watcher=self.preemption_watcher,
            health_watcher=self.health_watcher,
            run_metrics=self._exporter.metrics,
        )

    @property
    def pids(self) -> set[int]:
        """Pids of the processes that run: they are no leftovers of an attempt."""
        running = (self._trackers, self._replica, self._scrub, self.health_watcher)
        return {pid for each in running if each is not None for pid in each.pids}

    def send_faults(self, send: Callable[[HardwareFaultFound], None]) -> None:
        """Calls `send` with each fault of this machine after which training continues."""
        if self.health_watcher is not None:
            self.health_watcher.on_fault = send

    def on_history(self, records: Sequence[Record]) -> None:
        """Gives the exporter the run log before the next attempt."""
        self._exporter.on_history(records)

    def on_claim(
        self, claim: Claim, *, host: int, emit: Callable[[Event], None] = ignore_event
    ) -> None:
        """Starts the companions that do not run yet, for a claimed attempt.

        Args:
          host: the job's first host on this machine.
          emit: called with the events of the replica and of the verification, in their threads.
        """
        if not self._is_inline:
            self._exporter.ensure_started(host=host, health=self.health_watcher)
        if self._trackers is not None:
            self._trackers.ensure_started(claim.attempt)
        for each in (self._replica, self._scrub):
            if each is not None:
                each.ensure_started(emit)

    def on_run_ended(self, code: int) -> None:
        """Gives trackers and replica more time if the run is complete."""
        for each in (self._trackers, self._replica):
            if each is not None:
                each.on_run_ended(code)


def send_rest(config: RunConfig, run_dir: RunDir, *, env: Mapping[str, str]) -> None:
    """Sends data that the trackers and the replica of a complete run have not received."""
    records, clock = run_log.read_records(run_dir.log), SystemClock()
    history = run_log.fold(records)
    with contextlib.ExitStack() as stack:
        if tracker_processes.lack_steps(config, run_dir, history):
            trackers = stack.enter_context(TrackerProcesses(config, run_dir, env=env, clock=clock))
            trackers.ensure_started(history.attempt)
            trackers.on_run_ended(ExitCode.DONE)
        if replica_process.lacks_records(config, run_dir, records):
            replica = stack.enter_context(ReplicaProcess(config, run_dir, env=env, clock=clock))
            replica.ensure_started(ignore_event)
            replica.on_run_ended(ExitCode.DONE)
