"""State of the attempt that a supervisor runs at the moment."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.config.schema import DeadlinesSection
from jaxres.exit_codes import ExitCode, RestartRule, exit_row
from jaxres.runlog.event_log import AsyncEventLog
from jaxres.runlog.paths import RunDir
from jaxres.supervisor.health.health_watcher import HealthWatcher
from jaxres.supervisor.preemption.notices import SaveTimings
from jaxres.supervisor.preemption.watcher import PreemptionWatcher
from jaxres.supervisor.process.forkserver_client import ForkServer
from jaxres.supervisor.process.worker_process import Worker
from jaxres.supervisor.remote_hosts import FollowerLinks, LeaderLink, RemoteHost
from jaxres.supervisor.run_metrics import RunMetrics
from jaxres.telemetry import stdio
from jaxres.telemetry.heartbeat import News


def ignore_news(news: News) -> None:
    """No-op: the worker's console reports failing saves itself."""


@dataclass
class RunningAttempt:
    """State of a running attempt and its workers; mutated by `supervise` only."""

    run_dir: RunDir
    number: int
    limits: DeadlinesSection
    clock: Clock
    workers: list[Worker]
    links: FollowerLinks | LeaderLink | None
    """Connections to the supervisors of other hosts; None: all hosts run under this one."""
    deadline: float
    """When the workers are asked to save and stop, on the clock; inf: never."""
    num_hosts: int
    """Number of hosts of the whole job."""
    preemption_watcher: PreemptionWatcher | None
    """Source of this machine's preemption notices; None: there is no watcher."""
    event_log: AsyncEventLog
    fork_server: ForkServer | None
    """Forks the workers; None: all are fresh processes."""
    env: Mapping[str, str]
    """Environment of the workers."""
    health_watcher: HealthWatcher | None
    """Watches the GPUs of this host; None: nothing does."""
    on_news: Callable[[News], None] = ignore_news
    """Called when the saves of host 0 begin to fail, and when they recover."""
    run_metrics: RunMetrics | None = None
    """Receives what is exported for monitoring; None: nothing is."""
    stop_requested: ExitCode | None = None
    """Exit code of the stop that was requested; None: no stop was requested."""
    stop_reason: str = ""
    """Why the stop was requested, where the workers do not know the reason."""
    hardware_fault: str = ""
    """The fault of the hardware for which the stop was requested; empty: it was not."""
    num_hardware_faults: int = 0
    """Number of faults of the hardware that were found in this attempt."""
    last_decision: tuple[object, ...] = ()
    """The notice and the action that were logged last."""
    second_signal_armed: bool = False
    """Whether one of TWICE_KILLS was received, so that a second one kills."""
    ticked_at: float = float("-inf")
    """When the deadlines were checked last, on the clock."""
    is_silence_reported: bool = False
    """Whether the message that storage does not answer is in force."""

    @property
    def hosts(self) -> list[Worker | RemoteHost]:
        """All hosts whose workers this supervisor decides about."""
        return [*self.workers, *(self.links.hosts if self.links else ())]

    @property
    def running_workers(self) -> list[Worker]:
        """Workers of this supervisor that have not exited."""
        return [worker for worker in self.workers if worker.end is None]

    @property
    def step(self) -> int:
        """Newest step that any host has finished."""
        return max((host.progress.step for host in self.hosts), default=0)

    @property
    def is_restarted_after_stop(self) -> bool:
        """Whether a stop was requested after which the run is started again (75, 82)."""
        stop = self.stop_requested
        return stop is not None and exit_row(stop).restart is not RestartRule.NEVER

    def save_timings(self) -> SaveTimings:
        """Returns the measured times that a stop depends on."""
        steps = [
            statistics.median(w.progress.durations) for w in self.workers if w.progress.durations
        ]
        writes = [w.save_times.longest for w in self.workers if w.save_times.longest is not None]
        begun = [w.save_times.since for w in self.workers if w.save_times.since is not None]
        return SaveTimings(
            step_seconds=max(steps, default=0.0),
            num_hosts=self.num_hosts,
            write_seconds=max(writes, default=None),
            writing_seconds=self.clock.monotonic() - min(begun) if begun else None,
        )

    def progress_text(self) -> str:
        """Returns the attempt's progress, for a message."""
        if len(self.hosts) == 1:
            return self.workers[0].progress_text()
        return f"{len(self.hosts)} hosts, step {self.step} of this attempt"

    def stacks_text(self) -> str:
        """Returns the files that stacks are dumped to, for a message."""
        first, last = (self.run_dir.stacks(self.number, self.workers[n].host) for n in (0, -1))
        return f"{first}" if first == last else f"{first} to {last.name}"


def print_message(text: str) -> None:
    """Prints a line of the supervisor to stderr, unbuffered."""
    stdio.eprint(f"jaxres: {text}\n")
