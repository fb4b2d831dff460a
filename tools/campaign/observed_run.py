"""A run of the campaign as it is seen from outside: its log, its processes, its saves."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read import verify
from jaxres.clock import SystemClock
from jaxres.exit_codes import SIGNAL_BASE
from jaxres.faults import RunError
from jaxres.host import proc_stat
from jaxres.operate.chaos import leftovers, short_runs
from jaxres.runlog import run_log, step_dirs
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import AttemptEnded
from jaxres.runlog.run_log import RunHistory
from jaxres.storage.path import GcsPath
from jaxres.train.prepared.forkserver import PROCESS_NAME
from tests.promises.trainer import TrainingProcess, run_history
from tools.campaign.plan import Kill
from tools.campaign.verdict import KilledFacts


@dataclass(frozen=True)
class Landed:
    """A kill that has happened."""

    place: str
    target: str
    """The process that was killed: `supervisor` too if there was no worker yet."""
    attempt: int
    phase: str
    """Phase of the worker, by its events; `start` if there are none, `unknown` in a bucket."""
    in_save: bool
    """Whether a save had a directory and no commit record."""
    step: int | None
    """Newest finished step of the attempt, by its metrics lines."""
    committed: int
    seconds: float
    """Since the last kill, or since the first start."""


@dataclass
class ObservedRun:
    """A run that is executed, and the facts observed so far."""

    command: TrainingProcess
    """Its newest command."""
    since: float
    """When that was started, or when a process was killed last."""
    landed: list[Landed] = field(default_factory=list)
    seen_digests: dict[int, str] = field(default_factory=dict)
    killed_attempt: int = 0
    """The newest attempt that was killed."""
    printed: int = 0
    """Length of the command's output at the last kill."""

    @property
    def run_dir(self) -> RunDir:
        """The run directory."""
        return self.command.run_dir

    @property
    def is_remote(self) -> bool:
        """Whether it is in a bucket: then events and metrics arrive late."""
        return isinstance(self.run_dir.root, GcsPath)

    def seconds(self) -> float:
        """Returns the seconds since the last kill or start."""
        return round(time.monotonic() - self.since, 3)

    def on_start(self, command: TrainingProcess) -> None:
        """Follows another command of the run."""
        self.command, self.since, self.printed = command, time.monotonic(), 0

    def on_kill(self, landed: Landed) -> None:
        """Notes a kill that has happened."""
        self.landed.append(landed)
        self.since = time.monotonic()
        self.killed_attempt = max(self.killed_attempt, landed.attempt)
        self.printed = len(self.command.printed())

    def history(self) -> RunHistory:
        """Reads the run log."""
        return run_history(self.run_dir)

    def phase(self, attempt: int) -> str:
        """Returns the newest phase of host 0's worker."""
        if self.is_remote:
            return "unknown"
        events = read_json_lines(self.run_dir.events(attempt, 0))
        return next((e["phase"] for e in reversed(events) if "phase" in e), "start")

    def steps(self, attempt: int) -> list[int]:
        """Returns the steps that an attempt has finished."""
        return [row["step"] for row in read_json_lines(self.run_dir.metrics(attempt))]

    def save_dirs(self) -> set[str]:
        """Returns the names of all step directories."""
        return {one.name for one in step_dirs.listed(self.run_dir.checkpoints)}

    def open_saves(self, history: RunHistory | None = None) -> set[str]:
        """Returns the step directories without a commit record."""
        names = self.save_dirs()
        known = {p.rpartition("/")[2] for p in (history or self.history()).paths}
        return {name for name in names if name.partition(".")[0] not in known}

    def end_of(self, attempt: int) -> AttemptEnded | None:
        """Returns the end record of an attempt, if there is one."""
        ends = (
            record.body
            for record in run_log.read_records(self.run_dir.log)
            if record.attempt == attempt and isinstance(record.body, AttemptEnded)
        )
        return next(ends, None)

    def workers(self) -> dict[int, int]:
        """Returns host -> pid of the workers that run."""
        return {
            host: pid for host, pid in self.command.workers().items() if _state(pid) not in "ZX"
        }

    def fork_server(self) -> int | None:
        """Returns the pid of the supervisor's fork server, if it has one."""
        supervisor = self.command.process.pid
        with contextlib.suppress(OSError):
            found = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
            for pid in map(int, found):
                if Path(f"/proc/{pid}/comm").read_text().strip() == PROCESS_NAME:
                    return pid
        return None

    def look(self, kill: Kill, target: str) -> Landed:
        """Returns the state right before a kill; notes the digests of the committed steps."""
        history = self.history()
        self._note_digests(history)
        steps = self.steps(history.attempt)
        return Landed(
            place=kill.place,
            target=target,
            attempt=history.attempt,
            phase=self.phase(history.attempt),
            in_save=bool(self.open_saves(history)),
            step=steps[-1] if steps else None,
            committed=history.step,
            seconds=self.seconds(),
        )

    def _note_digests(self, history: RunHistory) -> None:
        for commit in history.committed:
            if commit.step not in self.seen_digests:
                with contextlib.suppress(RunError):  # It is being pruned.
                    found = manifests.read(self.run_dir.root / commit.path, commit)
                    self.seen_digests[commit.step] = found.digest

    def facts(self, code: int, *, name: str, problem: str) -> KilledFacts:
        """Returns all that is known about the run once it has ended.

        Args:
          code: exit code of its newest command, or the negative number of a signal.
          name: of the run.
          problem: why it was given up, or nothing.
        """
        code = SIGNAL_BASE - code if code < 0 else code
        message = self.command.printed()[-2000:]
        run = short_runs.observe(self.run_dir, name=name, exit=code, message=message)
        damaged = [
            f"step {commit.step}: {found}"
            for commit in self.history().committed
            for found in verify.verify_step(self.run_dir.root / commit.path, commit).problems
        ]
        return KilledFacts(
            run=run,
            records=run_log.read_records(self.run_dir.log),
            seen_digests=self.seen_digests,
            damaged=tuple(damaged),
            left=leftovers.find(self.run_dir, SystemClock(), ports={}),
            problem=problem,
        )


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return proc_stat.read_proc_stat(pid).state
    return "X"
