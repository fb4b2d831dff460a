"""State of the attempt that a supervisor runs at the moment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxres.clock import Clock
from jaxres.cluster.peer_connections import PeerLinks
from jaxres.config.schema.supervision import DeadlinesSection
from jaxres.exit_codes import ExitCode, RestartRule, exit_row
from jaxres.runlog.event_log import AsyncEventLog
from jaxres.runlog.paths import RunDir
from jaxres.supervisor.health.health_watcher import HealthWatcher
from jaxres.supervisor.preemption.notices import SaveTimings
from jaxres.supervisor.preemption.watcher import PreemptionWatcher
from jaxres.supervisor.process.forkserver_client import ForkServer
from jaxres.supervisor.process.worker_process import Fork, Worker
from jaxres.supervisor.remote_hosts import FollowerLinks, LeaderLink, RemoteHost
from jaxres.supervisor.run_lock import RunLock, TrainingProgress
from jaxres.supervisor.run_metrics import RunMetrics
from jaxres.telemetry import stdio
from jaxres.telemetry.heartbeat import News


def ignore_news(news: News) -> None:
    """No-op: the worker's console reports failing saves itself."""


@dataclass(frozen=True)
class AttemptSpec:
    """The attempt that a supervisor runs; it does not change while the attempt runs."""

    run_dir: RunDir
    """The run directory, whose request files are handled."""
    number: int
    """Number of the attempt."""
    last_seq: int
    """Sequence number of the claim in the run log."""
    commands: Mapping[int, Sequence[str]]
    """Argv of each host's worker here, to which `--status-fd N` is appended."""
    env: Mapping[str, str]
    """Environment of the workers."""
    num_hosts: int
    """Number of hosts of the whole job."""
    limits: DeadlinesSection
    """The deadlines by phase."""
    is_program: bool = False
    """Whether the workers run a program (`program`), which does not say what it could save."""
    deadline: float = math.inf
    """When the workers are asked to save and stop, on the clock; inf: never."""


@dataclass(frozen=True)
class Services:
    """Objects that a supervisor uses while it runs an attempt; each outlives the attempt."""

    clock: Clock
    run_lock: RunLock | None = None
    """Its heartbeat is written meanwhile; None: the supervisor of host 0 holds the lock."""
    peers: PeerLinks | None = None
    """Connections to the supervisors of the other hosts; None: there are none."""
    wakeup: int | None = None
    """Read end of `signals.wakeup_fd`; None: one is opened while the workers run."""
    on_news: Callable[[News], None] = ignore_news
    """Called with host 0's news for the alerts: failing saves, a slow host."""
    fork_server: ForkServer | None = None
    """Forks the workers, and is started once training runs; None: see `fork`."""
    fork: Fork | None = None
    """Forks the workers of this attempt; None: they are fresh processes."""
    preemption_watcher: PreemptionWatcher | None = None
    """Source of this machine's preemption notices; None: there is none."""
    health_watcher: HealthWatcher | None = None
    """Watcher of this machine's GPUs; None: there is none."""
    run_metrics: RunMetrics | None = None
    """Receives the metrics to export; None: none are exported."""


@dataclass
class RunningAttempt:
    """State of a running attempt and its workers; mutated by `supervise` only."""

    spec: AttemptSpec
    services: Services
    links: FollowerLinks | LeaderLink | None
    """Connections to the supervisors of other hosts; None: all hosts run under this one."""
    event_log: AsyncEventLog
    workers: list[Worker] = field(default_factory=list[Worker])
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
            num_hosts=self.spec.num_hosts,
            write_seconds=max(writes, default=None),
            writing_seconds=self.services.clock.monotonic() - min(begun) if begun else None,
        )

    def training_progress(self) -> TrainingProgress | None:
        """Returns the newest step of the first worker here; None: it has finished none."""
        worker = next(iter(self.workers), None)
        if worker is None or worker.newest_step is None:
            return None
        step, rate = worker.newest_step, worker.tokens_per_second
        return TrainingProgress(self.spec.number, step.step, step.loss, rate)

    def progress_text(self) -> str:
        """Returns the attempt's progress, for a message."""
        if len(self.hosts) == 1:
            return self.workers[0].progress_text()
        return f"{len(self.hosts)} hosts, step {self.step} of this attempt"

    def stacks_text(self) -> str:
        """Returns the files that stacks are dumped to, for a message."""
        first, last = (
            self.spec.run_dir.stacks(self.spec.number, self.workers[n].host) for n in (0, -1)
        )
        return f"{first}" if first == last else f"{first} to {last.name}"


def print_message(text: str) -> None:
    """Prints a line of the supervisor to stderr, unbuffered."""
    stdio.eprint(f"jaxres: {text}\n")
