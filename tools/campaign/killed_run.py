"""One run of the campaign: real processes, killed as planned, and what was seen of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxres.chaos import leftovers, short_runs
from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint import verify
from jaxres.clock import SystemClock
from jaxres.exit_codes import SIGNAL_BASE, ExitCode
from jaxres.faults import RunError
from jaxres.runlog import attempt_history, run_log, step_dirs
from jaxres.runlog.event_log import read_events, read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import AttemptEnded
from jaxres.runlog.resume_verdict import AttemptFacts, RunFacts
from jaxres.runlog.run_log import RunHistory
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from jaxres.supervisor import proc_stat
from jaxres.train.forkserver import PROCESS_NAME
from tests.promises.trainer import TrainingProcess, Workspace, run_history
from tools.campaign.bucket import KillingServer, Order
from tools.campaign.plan import PLACES, STEPS, Kill, RunPlan
from tools.campaign.rows import ORDERS
from tools.campaign.verdict import KilledFacts

CONFIG = Path(__file__).with_name("kills.yaml")
PACE_SECONDS = "0.001"
LIMIT_SECONDS = 600.0
"""Longest wait for a place, an end or a start: what takes longer is a broken promise."""
POLL_SECONDS = 0.01
POLL_SHARE = 0.05
"""Most of a core that a wait may use: it reads logs, which takes long on a busy machine."""
PRINTED_STEP = re.compile(rf"step (\d+)/{STEPS}")
STARTING = threading.Lock()
"""The tests' fork server serves one thread at a time."""


@dataclass(frozen=True)
class Timing:
    """How long an attempt takes that no other kills, in seconds."""

    startup: float
    """Until its first step, without a compilation."""
    step: float
    """A step, with its share of saves and evaluations."""

    def expected(self, committed: int) -> float:
        """Returns the time that an attempt from a step is expected to take."""
        return self.startup + self.step * (STEPS - committed)


RUNNING = ("train", "wait for data", "evaluate", "save", "settle")
"""Phases after the start-up."""


def measured(run_dir: RunDir, attempt: AttemptFacts) -> Timing | None:
    """Returns the times of an attempt; None: it has finished no step, or has no events."""
    phases = attempt_history.phase_seconds(read_events(run_dir.events(attempt.attempt, 0)))
    running = sum(phases.get(name, 0.0) for name in RUNNING)
    steps = (attempt.finished_step or 0) - (attempt.start_step or 0)
    if not running or steps <= 0:
        return None
    startup = sum(phases.values()) - running - phases.get("compile", 0.0)
    return Timing(startup, running / steps)


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


class GivenUp(Exception):
    """The run does not go on as it must."""


@dataclass
class Execution:
    """A run while it is executed."""

    workspace: Workspace
    plan: RunPlan
    timing: Timing
    server: KillingServer | None = None
    landed: list[Landed] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    """Places of planned kills that did not happen: the run had ended before."""
    seen_digests: dict[int, str] = field(default_factory=dict)
    problem: str = ""
    _trainer: TrainingProcess | None = None
    _since: float = 0.0
    _attempt: int = 0
    """The newest attempt that was killed."""
    _printed: int = 0
    """Length of the command's output at the last kill."""

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return f"run-{self.plan.number:04d}"

    @property
    def _command(self) -> TrainingProcess:
        assert self._trainer is not None
        return self._trainer

    def execute(self) -> tuple[KilledFacts, tuple[Landed, ...]]:
        """Runs, kills and restarts until the run is complete; returns what was seen."""
        self._start()
        try:
            for kill in self.plan.kills:
                if not self._kill(kill):
                    self.missed.append(kill.place)
            code = self._wait_end()
        except (GivenUp, RunError, AssertionError) as error:
            self.problem = f"{type(error).__name__}: {error}"
            code = self._command.process.poll()
        if self._command.process.poll() is None:
            self._command.kill()
            self._command.wait_exit()
        return self._observe(SIGNAL_BASE if code is None else code), tuple(self.landed)

    def _start(self) -> None:
        self._trainer = start(self.workspace, self.plan, self.name)
        self._since, self._printed = time.monotonic(), 0

    def _history(self) -> RunHistory:
        return run_history(self._command.run_dir)

    def _ended(self) -> bool:
        """Returns whether the run is complete."""
        code = self._command.process.poll()
        if code not in (None, 0):
            raise GivenUp(f"the command ended with {code}:\n{self._command.printed()[-2000:]}")
        return code == 0

    def _wait(self, condition: Callable[[], Any], *, what: str) -> bool:
        """Waits for a condition; returns False if the run is complete first."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            ended, began = self._ended(), time.monotonic()
            if condition():
                return True
            if ended:
                return False
            if time.monotonic() > deadline:
                raise GivenUp(f"no {what} in {LIMIT_SECONDS:g} s")
            time.sleep(max(POLL_SECONDS, (time.monotonic() - began) / POLL_SHARE))

    def _wait_end(self) -> int:
        self._wait(lambda: False, what="end of the run")
        return 0

    def _sleep_until(self, at: float) -> bool:
        """Sleeps; returns False if the run is complete first."""
        while (left := at - time.monotonic()) > 0:
            if self._ended():
                return False
            time.sleep(min(left, 0.05))
        return not self._ended()

    def _kill(self, kill: Kill) -> bool:
        """Carries out a planned kill, and starts the command again if it needs that."""
        if PLACES[kill.place].point:
            return self._kill_at_operation(kill)
        if kill.place == "write request":
            return self._kill_at_request(kill)
        if kill.place in ("any time", "start-up", "between attempts"):
            if not self._wait_fraction(kill):
                return False
        elif not self._wait_place(kill):
            return False
        if kill.place == "between attempts":
            return self._kill_between(kill)
        return self._strike(kill, kill.target)

    def _wait_fraction(self, kill: Kill) -> bool:
        """Waits for a part of the attempt's expected time; False: the run is complete first.

        After the start-up the time is that of finished steps, so that a machine whose speed changes
        does not miss the kill.
        """
        timing, committed = self.timing, self._history().step
        if kill.place == "start-up":
            return self._sleep_until(self._since + kill.fraction * timing.startup)
        seconds = kill.fraction * timing.expected(committed)
        if not self._sleep_until(self._since + min(seconds, timing.startup)):
            return False
        step, part = divmod(max(0.0, seconds - timing.startup) / timing.step, 1.0)
        wanted = committed + int(step)
        if step and not self._wait(lambda: self._progress() >= wanted, what=f"step {wanted}"):
            return False
        return self._sleep_until(time.monotonic() + part * timing.step)

    def _progress(self) -> int:
        """Returns the newest finished step since the last kill; in a bucket, what was printed."""
        if isinstance(self._command.run_dir.root, GcsPath):
            found = PRINTED_STEP.findall(self._command.printed()[self._printed :])
            return int(found[-1]) if found else 0
        attempt = self._history().attempt
        steps = self._steps(attempt) if attempt > self._attempt else []
        return steps[-1] if steps else 0

    def _wait_place(self, kill: Kill) -> bool:
        """Waits for a new attempt and the place in it; False: the run is complete first."""
        if not self._wait(lambda: self._history().attempt > self._attempt, what="attempt"):
            return False
        attempt = self._command.attempt = self._history().attempt
        before = {one.name for one in step_dirs.listed(self._command.run_dir.checkpoints)}
        conditions: Mapping[str, Callable[[], Any]] = {
            "compile": lambda: self._phase(attempt) in ("compile", "train"),
            "restore": lambda: self._phase(attempt) in ("restore", "init", "train"),
            "first step": lambda: self._steps(attempt),
            "evaluation": lambda: self._phase(attempt) == "evaluate",
            "save": lambda: self._open_saves() - before,
            "end of run": lambda: (self._steps(attempt) or [0])[-1] >= STEPS,
        }
        if not self._wait(conditions[kill.place], what=kill.place):
            return False
        time.sleep(kill.fraction * PLACES[kill.place].delay_seconds)
        return not self._ended()

    def _kill_between(self, kill: Kill) -> bool:
        """Kills the worker, and the supervisor while it restarts it."""
        workers = self._workers()
        for pid in workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(kill.fraction * self.timing.startup)
        return self._strike(kill, "supervisor" if not workers else "both")

    def _workers(self) -> dict[int, int]:
        """Returns host -> pid of the workers that run."""
        return {
            host: pid for host, pid in self._command.workers().items() if _state(pid) not in "ZX"
        }

    def _strike(self, kill: Kill, target: str, *, after: Callable[[], object] = int) -> bool:
        """Sends SIGKILL to what there is of a target; returns whether it has hit.

        Args:
          kill: the planned kill.
          target: the process.
          after: called when the processes are killed, before the command is started again.
        """
        landed, supervisor = self._look(kill, target), self._command.process
        workers = self._workers()
        worker = workers.get(kill.host, next(iter(workers.values()), None))
        fork_server = self._fork_server() if target == "fork server" else None
        if worker is None and target in ("worker", "fork server"):
            landed = replace(landed, target="supervisor")
        elif target == "fork server" and fork_server is None:
            landed = replace(landed, target="worker")
        for pid in (fork_server, None if landed.target == "supervisor" else worker):
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if landed.target not in ("supervisor", "both"):
            self._note(landed)
            return True
        supervisor.send_signal(signal.SIGKILL)
        if supervisor.wait(LIMIT_SECONDS) != -signal.SIGKILL:
            return False
        after()
        self._note(landed)
        self._start()
        return True

    def _note(self, landed: Landed) -> None:
        self.landed.append(landed)
        self._since = time.monotonic()
        self._attempt = max(self._attempt, landed.attempt)
        self._printed = len(self._command.printed())

    def _fork_server(self) -> int | None:
        supervisor = self._command.process.pid
        with contextlib.suppress(OSError):
            found = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
            for pid in map(int, found):
                if Path(f"/proc/{pid}/comm").read_text().strip() == PROCESS_NAME:
                    return pid
        return None

    def _look(self, kill: Kill, target: str) -> Landed:
        """Returns the state of the run right before a kill; notes the digests of its steps."""
        history = self._history()
        self._note_digests(history)
        steps = self._steps(history.attempt)
        return Landed(
            place=kill.place,
            target=target,
            attempt=history.attempt,
            phase=self._phase(history.attempt),
            in_save=bool(self._open_saves(history)),
            step=steps[-1] if steps else None,
            committed=history.step,
            seconds=round(time.monotonic() - self._since, 3),
        )

    def _note_digests(self, history: RunHistory) -> None:
        root = self._command.run_dir.root
        for commit in history.committed:
            if commit.step not in self.seen_digests:
                with contextlib.suppress(RunError):  # It is being pruned.
                    found = manifests.read(root / commit.path, commit)
                    self.seen_digests[commit.step] = found.digest

    def _open_saves(self, history: RunHistory | None = None) -> set[str]:
        """Returns the step directories without a commit record."""
        names = {one.name for one in step_dirs.listed(self._command.run_dir.checkpoints)}
        known = {p.rpartition("/")[2] for p in (history or self._history()).paths}
        return {name for name in names if name.partition(".")[0] not in known}

    def _phase(self, attempt: int) -> str:
        """Returns the newest phase of host 0's worker; in a bucket its events arrive late."""
        if isinstance(self._command.run_dir.root, GcsPath):
            return "unknown"
        events = read_json_lines(self._command.run_dir.events(attempt, 0))
        return next((e["phase"] for e in reversed(events) if "phase" in e), "start")

    def _steps(self, attempt: int) -> list[int]:
        return [row["step"] for row in read_json_lines(self._command.run_dir.metrics(attempt))]

    def _kill_at_operation(self, kill: Kill) -> bool:
        """Lets the next attempt's worker be killed right before a file operation."""
        orders = self.workspace.root / f"{self.name}-orders"
        taken = orders / "taken"
        taken.unlink(missing_ok=True)
        text = f"{PLACES[kill.place].point}:{kill.count}:{signal.SIGKILL.value}"
        (orders / "new").write_text(text)
        (orders / "new").rename(orders / "order")
        if not self._wait(taken.exists, what="worker that takes the order"):
            (orders / "order").unlink(missing_ok=True)
            return False
        attempt = self._history().attempt
        before = self._look(kill, "worker")

        def end() -> AttemptEnded | None:
            records = run_log.read_records(self._command.run_dir.log)
            return next(
                (
                    r.body
                    for r in records
                    if r.attempt == attempt and isinstance(r.body, AttemptEnded)
                ),
                None,
            )

        self._wait(end, what="end of the attempt")
        found = end()
        if found is None or found.exit != SIGNAL_BASE + signal.SIGKILL:
            return False
        steps = self._steps(attempt)
        self._note(
            replace(
                before,
                attempt=attempt,
                phase=self._phase(attempt),
                in_save=kill.place.startswith("save"),
                step=steps[-1] if steps else None,
                seconds=round(time.monotonic() - self._since, 3),
            )
        )
        return True

    def _kill_at_request(self, kill: Kill) -> bool:
        """Lets the bucket kill at a write request; it holds the request meanwhile."""
        assert self.server is not None
        hit, done = threading.Event(), threading.Event()

        def strike() -> None:
            hit.set()
            done.wait(LIMIT_SECONDS)

        self.server.orders[self.name] = Order(self.name, kill.count, kill.is_after, strike)
        try:
            if not self._wait(hit.is_set, what="write request"):
                return False
            return self._strike(kill, kill.target, after=done.set)
        finally:
            self.server.orders.pop(self.name, None)
            done.set()

    def _observe(self, code: int) -> KilledFacts:
        run_dir = self._command.run_dir
        code = SIGNAL_BASE - code if code < 0 else code
        run = short_runs.observe(
            run_dir, name=self.name, exit=code, message=self._command.printed()[-2000:]
        )
        history = self._history()
        damaged = [
            f"step {commit.step}: {problem}"
            for commit in history.committed
            for problem in verify.verify_step(run_dir.root / commit.path, commit).problems
        ]
        return KilledFacts(
            run=run,
            records=run_log.read_records(run_dir.log),
            seen_digests=self.seen_digests,
            damaged=tuple(damaged),
            left=leftovers.find(run_dir, SystemClock()),
            problem=self.problem,
        )


def start(workspace: Workspace, plan: RunPlan, name: str, *extra: str) -> TrainingProcess:
    """Starts the command of a run, or starts it again, with more overrides."""
    orders = workspace.root / f"{name}-orders"
    orders.mkdir(exist_ok=True)
    overrides = [f"run.seed={plan.run_seed}", *extra]
    if plan.is_cold:
        overrides.append(f"compilation.cache_dir={workspace.root / f'{name}-xla'}")
    with STARTING:
        return workspace.launch(
            name,
            *overrides,
            hosts=plan.hosts,
            config=CONFIG,
            env={"PACE": PACE_SECONDS, ORDERS: str(orders)},
            restart=True,
        )


def unbroken(workspace: Workspace, plan: RunPlan, name: str) -> tuple[RunFacts, Timing]:
    """Runs a plan's config without a kill; returns what it has done, and its times."""
    run_dir = workspace.run_dir(name)
    if not files.exists(run_dir.log) or run_history(run_dir).step < STEPS:
        command = start(workspace, plan, name, "checkpoint.keep_last=100")
        if code := command.wait_exit(LIMIT_SECONDS):
            raise RuntimeError(f"the unbroken run ended with {code}:\n{command.printed()}")
    facts = short_runs.observe(run_dir, name=name, exit=ExitCode.DONE)
    timing = measured(run_dir, facts.attempts[-1])
    if timing is None or len(facts.attempts) > 1:
        raise RuntimeError(f"{run_dir.root}: it was broken: delete it")
    return facts, timing


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return proc_stat.read_proc_stat(pid).state
    return "X"
