"""What a door knows of the attempt that it watches, and how an attempt ends."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.config.schema import DeadlinesSection
from jaxres.faults import Exit
from jaxres.runlog.event_log import Diary
from jaxres.runlog.paths import RunDir
from jaxres.supervisor.forkserver_client import Zygote
from jaxres.supervisor.preemption import Measured
from jaxres.supervisor.preemption_watcher import Watchman
from jaxres.supervisor.remote_hosts import Following, Led, Remote
from jaxres.supervisor.worker_process import Worker
from jaxres.telemetry import stdio
from jaxres.telemetry.heartbeat import SaveNews


@dataclass(frozen=True)
class Ended:
    """How the attempt ended, for the process's exit code and the stop record."""

    code: int
    reason: str
    committed: bool
    on_record: bool = True
    """False: fenced; this attempt may write nothing more."""
    to_be_said: bool = False
    """Whether nobody has told the person yet."""
    culprit: int | None = None
    """The host that is the cause, where one is."""
    own_word: bool = False
    """Whether its worker itself has said why."""
    asked: int | None = None
    """The code that the door was asked to end with, if it was."""


def to_nobody(news: SaveNews) -> None:
    """Has nobody to tell of saves: the console does."""


@dataclass
class Attempt:
    """What the supervisor knows of the running workers; owned by `supervise`."""

    run_dir: RunDir
    number: int
    limits: DeadlinesSection
    clock: Clock
    workers: list[Worker]
    others: Led | Following | None
    """The hosts behind other doors, if there are any."""
    until: float
    """When the workers are asked to save and stop; inf: never."""
    num_hosts: int
    """Of the whole job."""
    watchman: Watchman | None
    """Who watches for notices of this machine; None: nobody."""
    diary: Diary
    zygote: Zygote | None
    """What forks workers, if the attempt has one."""
    env: Mapping[str, str]
    """The workers'."""
    heard: Callable[[SaveNews], None] = to_nobody
    """Is told whether storage takes the lead's saves."""
    asked: Exit | None = None
    why: str = ""
    """Why it was asked for, where the worker can't know."""
    answered: tuple[object, ...] = ()
    """The notice and the decision about it that were told last."""
    hurried: bool = False
    """Whether one of AT_ONCE has come."""
    ticked_at: float = float("-inf")
    silence_told: bool = False

    @property
    def hosts(self) -> list[Worker | Remote]:
        """All hosts that this door decides about."""
        return [*self.workers, *(self.others.hosts if self.others else ())]

    @property
    def running(self) -> list[Worker]:
        """The workers here that have not ended."""
        return [worker for worker in self.workers if worker.end is None]

    @property
    def step(self) -> int:
        """The newest step that any host has finished."""
        return max((host.watch.step for host in self.hosts), default=0)

    def measured(self) -> Measured:
        """Returns what is known of how long it takes to leave."""
        steps = [statistics.median(w.watch.durations) for w in self.workers if w.watch.durations]
        writes = [w.writing.longest for w in self.workers if w.writing.longest is not None]
        begun = [w.writing.since for w in self.workers if w.writing.since is not None]
        return Measured(
            step_seconds=max(steps, default=0.0),
            num_hosts=self.num_hosts,
            write_seconds=max(writes, default=None),
            writing_seconds=self.clock.monotonic() - min(begun) if begun else None,
        )

    def where(self) -> str:
        """Returns how far the attempt has come, for a message."""
        if len(self.hosts) == 1:
            return self.workers[0].where()
        return f"{len(self.hosts)} hosts, step {self.step} of this attempt"

    def stacks(self) -> str:
        """Returns where stacks are dumped to, for a message."""
        first, last = (self.run_dir.stacks(self.number, self.workers[n].host) for n in (0, -1))
        return f"{first}" if first == last else f"{first} to {last.name}"


def say(text: str) -> None:
    """Answers the person at the terminal, at once."""
    stdio.tell(f"jaxres: {text}\n")
