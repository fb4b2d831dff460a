"""One run of the campaign: real processes, killed as planned and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxres.exit_codes import SIGNAL_BASE, ExitCode
from jaxres.faults import RunError
from jaxres.operate.chaos import short_runs
from jaxres.operate.resume_verdict import RunFacts
from jaxres.storage import files
from tests.promises.trainer import TrainingProcess, Workspace, run_history
from tools.campaign.bucket import KillingServer, Order
from tools.campaign.observed_run import Landed, ObservedRun
from tools.campaign.plan import PLACES, STEPS, Kill, RunPlan
from tools.campaign.rows import ORDERS
from tools.campaign.verdict import KilledFacts
from tools.campaign.waits import LIMIT_SECONDS, GivenUp, Timing, Waits, measured

CONFIG = Path(__file__).with_name("kills.yaml")
PACE_SECONDS = "0.001"
STARTING = threading.Lock()
"""The tests' fork server serves one thread at a time."""


@dataclass
class Execution:
    """A run while it is executed."""

    workspace: Workspace
    plan: RunPlan
    timing: Timing
    server: KillingServer | None = None
    missed: list[str] = field(default_factory=list)
    """Places of planned kills that did not happen: the run had ended before."""

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return f"run-{self.plan.number:04d}"

    def execute(self) -> tuple[KilledFacts, tuple[Landed, ...]]:
        """Runs, kills and restarts until the run is complete; returns the observed facts."""
        run = ObservedRun(start(self.workspace, self.plan, self.name), time.monotonic())
        waits, problem = Waits(run, self.timing), ""
        try:
            for kill in self.plan.kills:
                if not self._kill(run, waits, kill):
                    self.missed.append(kill.place)
            waits.until(lambda: False, what="end of the run")
            code: int | None = 0
        except (GivenUp, RunError, AssertionError) as error:
            problem = f"{type(error).__name__}: {error}"
            code = run.command.process.poll()
        if run.command.process.poll() is None:
            run.command.kill()
            run.command.wait_exit()
        code = SIGNAL_BASE if code is None else code
        return run.facts(code, name=self.name, problem=problem), tuple(run.landed)

    def _kill(self, run: ObservedRun, waits: Waits, kill: Kill) -> bool:
        """Carries out a planned kill, and starts the command again if it needs that."""
        if PLACES[kill.place].point:
            return self._kill_at_operation(run, waits, kill)
        if kill.place == "write request":
            return self._kill_at_request(run, waits, kill)
        if not waits.place_of(kill):
            return False
        if kill.place == "between attempts":
            return self._kill_between(run, kill)
        return self._strike(run, kill, kill.target)

    def _kill_between(self, run: ObservedRun, kill: Kill) -> bool:
        """Kills the worker, and the supervisor while it restarts it."""
        workers = run.workers()
        for pid in workers.values():
            _kill(pid)
        time.sleep(kill.fraction * self.timing.startup)
        return self._strike(run, kill, "supervisor" if not workers else "both")

    def _strike(
        self, run: ObservedRun, kill: Kill, target: str, *, after: Callable[[], object] = int
    ) -> bool:
        """Sends SIGKILL to the processes of a target; returns whether it has hit.

        Args:
          run: the run.
          kill: the planned kill.
          target: the process.
          after: called when the processes are killed, before the command is started again.
        """
        landed, supervisor = run.look(kill, target), run.command.process
        workers = run.workers()
        worker = workers.get(kill.host, next(iter(workers.values()), None))
        fork_server = run.fork_server() if target == "fork server" else None
        if worker is None and target in ("worker", "fork server"):
            landed = replace(landed, target="supervisor")
        elif target == "fork server" and fork_server is None:
            landed = replace(landed, target="worker")
        for pid in (fork_server, None if landed.target == "supervisor" else worker):
            if pid is not None:
                _kill(pid)
        if landed.target not in ("supervisor", "both"):
            run.on_kill(landed)
            return True
        supervisor.send_signal(signal.SIGKILL)
        if supervisor.wait(LIMIT_SECONDS) != -signal.SIGKILL:
            return False
        after()
        run.on_kill(landed)
        run.on_start(start(self.workspace, self.plan, self.name))
        return True

    def _kill_at_operation(self, run: ObservedRun, waits: Waits, kill: Kill) -> bool:
        """Lets the next attempt's worker be killed right before a file operation."""
        orders = self.workspace.root / f"{self.name}-orders"
        taken = orders / "taken"
        taken.unlink(missing_ok=True)
        text = f"{PLACES[kill.place].point}:{kill.count}:{signal.SIGKILL.value}"
        (orders / "new").write_text(text)
        (orders / "new").rename(orders / "order")
        if not waits.until(taken.exists, what="worker that takes the order"):
            (orders / "order").unlink(missing_ok=True)
            return False
        attempt = run.history().attempt
        before = run.look(kill, "worker")
        waits.until(lambda: run.end_of(attempt), what="end of the attempt")
        found = run.end_of(attempt)
        if found is None or found.exit != SIGNAL_BASE + signal.SIGKILL:
            return False
        steps = run.steps(attempt)
        run.on_kill(
            replace(
                before,
                attempt=attempt,
                phase=run.phase(attempt),
                in_save=kill.place.startswith("save"),
                step=steps[-1] if steps else None,
                seconds=run.seconds(),
            )
        )
        return True

    def _kill_at_request(self, run: ObservedRun, waits: Waits, kill: Kill) -> bool:
        """Lets the bucket kill at a write request; it holds the request meanwhile."""
        assert self.server is not None
        hit, done = threading.Event(), threading.Event()

        def strike() -> None:
            hit.set()
            done.wait(LIMIT_SECONDS)

        self.server.orders[self.name] = Order(self.name, kill.count, kill.is_after, strike)
        try:
            if not waits.until(hit.is_set, what="write request"):
                return False
            return self._strike(run, kill, kill.target, after=done.set)
        finally:
            self.server.orders.pop(self.name, None)
            done.set()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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
    """Runs a plan's config without a kill; returns its facts and times."""
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
