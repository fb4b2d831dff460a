"""Injects the planned faults into a short run: real signals, real damage to real files.

The hook of `train/break_hook.py` holds the worker at the planned step, so that a fault is there on
any machine, however fast its steps are. The next hold is planned before a worker trains on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxres.chaos import damage, leftovers
from jaxres.chaos.schedule import Fault, PlannedRun
from jaxres.chaos.short_runs import Runner, Topology
from jaxres.chaos.time_account import TimeAccount
from jaxres.chaos.verdict import ChaosFacts, Injection
from jaxres.exit_codes import ExitCode, exit_name
from jaxres.goodput import read_timeline, summary
from jaxres.runlog import metrics, replica_files, run_log, step_dirs
from jaxres.runlog.history import RunHistory
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import AttemptEnded, Claim
from jaxres.supervisor import proc_stat
from jaxres.train import break_hook

LOOK_SECONDS = 0.001
"""Pause between two looks at the saves: a tiny one takes a few hundredths of a second."""
COMMIT_SECONDS = 300.0
"""Longest wait for a commit, or for a replica to have it."""


@dataclass
class FaultyRun:
    """One run with its faults."""

    runner: Runner
    planned: PlannedRun
    topology: Topology
    name: str = ""
    """Name of the run directory; another one after the loss of a region."""
    torn: list[tuple[Path, int]] = field(default_factory=list)
    """Files with a torn line, and where it ends."""

    def execute(self) -> ChaosFacts:
        """Runs, injects each fault, waits for each recovery; returns what was seen."""
        self.name = self.planned.name
        injections: list[Injection] = []
        clock_offset = self._clock_offset()
        self._plan(0)
        self._start()
        for number, fault in enumerate(self.planned.faults):
            if not self._wait_held(number):
                break  # It has ended by itself.
            attempt, root = self._history().attempt, self._root()
            done = INJECT[fault.scenario](self, number, fault)
            self._plan(number + 1)
            break_hook.release(root, number=number)
            if done.evidence and done.recovery_seconds is not None:
                seconds = self._recovery(attempt, number, since=done.recovery_seconds)
                done = dataclasses.replace(done, recovery_seconds=seconds)
            injections.append(done)
        code = self.runner.wait_exit()
        left = leftovers.find(self._run_dir, self.runner.clock)
        return ChaosFacts(
            planned=self.planned,
            run=self.runner.observe(self.name, code),
            injections=tuple(injections),
            quarantined=frozenset(body.step for _, body in self._history().quarantined),
            merged_lines=tuple(str(path) for path, end in self.torn if damage.is_merged(path, end)),
            left=left,
            account=self._account(abs(self._clock_offset() - clock_offset)),
        )

    def _clock_offset(self) -> float:
        return self.runner.clock.wall() - self.runner.clock.monotonic()

    def _account(self, clock_moved_seconds: float) -> TimeAccount | None:
        """Returns what `jaxres report` says of the run; None: no attempt has recorded its end."""
        records = run_log.in_force(run_log.read_records(self._run_dir.log))
        begins = [record.time for record in records if isinstance(record.body, Claim)]
        ends = [record.time for record in records if isinstance(record.body, AttemptEnded)]
        if not begins or not ends:
            return None
        found = summary.summarize(read_timeline.read(self._run_dir, is_alive=False))
        return TimeAccount(
            by_activity=found.by_activity,
            seconds=found.seconds,
            wall_seconds=ends[-1] - begins[0],
            clock_moved_seconds=clock_moved_seconds,
            incidents=found.incidents,
        )

    @property
    def _run_dir(self) -> RunDir:
        return self.runner.run_dir(self.name)

    def _root(self) -> Path:
        root = self._run_dir.root
        assert isinstance(root, Path), root
        return root

    def _history(self) -> RunHistory:
        return run_log.fold(run_log.read_records(self._run_dir.log))

    def _now(self) -> float:
        return self.runner.clock.monotonic()

    def _start(self) -> None:
        names = {fault.scenario for fault in self.planned.faults}
        extra = [f"checkpoint.replica.path={self._replica()}"] if "region-loss" in names else []
        self.runner.start(self.name, self.topology, hang="hang" in names, extra=extra)

    def _replica(self) -> Path:
        return self.runner.folder / f"{self.planned.name}-replica"

    def _plan(self, number: int) -> None:
        """Plans the hold for a fault, if there is one; a region that is lost has no other hold."""
        if number < len(self.planned.faults):
            step = self.planned.faults[number].step
            break_hook.plan_next(self._root(), number=number, step=step)

    def _held(self, number: int, host: int) -> Path:
        return break_hook.reached(self._root(), number=number, host=host)

    def _wait_held(self, number: int) -> bool:
        """Waits until every worker holds; returns False if the command has ended."""
        files = [self._held(number, host) for host in range(self.topology.hosts)]
        return self.runner.wait(lambda: all(file.exists() for file in files))

    def _pid(self, number: int, host: int) -> int:
        return int(self._held(number, host).read_text())

    def _wait_limited(self, condition: Callable[[], bool]) -> bool:
        """Waits for a condition, at most COMMIT_SECONDS; returns whether it holds."""
        deadline = self._now() + COMMIT_SECONDS
        self.runner.wait(lambda: condition() or self._now() > deadline)
        return condition()

    def _wait_commit(self, step: int) -> str:
        """Waits for the commit of the newest step saved before one; returns why there is none."""
        wanted = (step - 1) // self.runner.save_every * self.runner.save_every
        is_there = self._wait_limited(lambda: self._history().step >= wanted)
        return "" if is_there else f"step {wanted} was not committed in {COMMIT_SECONDS:g} s"

    def _recovery(self, attempt: int, number: int, *, since: float) -> float | None:
        """Waits for the first step that a later attempt finishes; returns the seconds until it."""
        held = self._held(number + 1, 0)  # Reached before the step's line is written.

        def has_trained() -> bool:
            later = range(attempt + 1, attempt + 3)
            return held.exists() or any(metrics.read_attempt(self._run_dir, n) for n in later)

        return round(self._now() - since, 1) if self.runner.wait(has_trained) else None

    # The scenarios. `recovery_seconds` is the time of the fault until the run has recovered.

    def kill_worker(self, number: int, fault: Fault) -> Injection:
        """Kills a worker when the newest save is committed."""
        if problem := self._wait_commit(fault.step):
            return Injection(fault, problem=problem)
        return self._signal(number, fault, signal.SIGKILL)

    def stop_worker(self, number: int, fault: Fault) -> Injection:
        """Suspends a worker at once: the deadline of hooks begins with the hold."""
        return self._signal(number, fault, signal.SIGSTOP)

    def _signal(self, number: int, fault: Fault, sent: signal.Signals) -> Injection:
        pid, now = self._pid(number, fault.host), self._now()
        self._plan(number + 1)  # Before another worker trains.
        if not self.runner.signal_worker(pid, sent):
            return Injection(fault, problem=f"the worker (pid {pid}) had ended")
        return Injection(fault, f"{sent.name} to pid {pid}", recovery_seconds=now)

    def kill_in_save(self, number: int, fault: Fault) -> Injection:
        """Kills host 0's worker as soon as a save has a directory and no commit record.

        The worker is suspended while that is looked at, so that the save can't end meanwhile. A
        save that has been too fast is left alone, and the next one is watched.
        """
        pid = self._pid(number, 0)
        before = {one.name for one in step_dirs.listed(self._run_dir.checkpoints)}
        if problem := self._wait_commit(fault.step):
            return Injection(fault, problem=problem)
        self._plan(number + 1)
        break_hook.release(self._root(), number=number)
        next_hold = self._held(number + 1, 0)
        while self.runner.is_running() and not next_hold.exists():
            new = {one.name for one in step_dirs.listed(self._run_dir.checkpoints)} - before
            if not new:
                self.runner.clock.sleep(LOOK_SECONDS)
                continue
            if not self._suspend(pid):
                break
            paths = {path.rpartition("/")[2] for path in self._history().paths}
            open_saves = [name for name in new if _final_name(name) not in paths]
            if open_saves:
                now = self._now()
                self.runner.signal_worker(pid, signal.SIGKILL)
                evidence = f"SIGKILL to pid {pid} while {open_saves[0]} was written"
                return Injection(fault, evidence, recovery_seconds=now)
            self.runner.signal_worker(pid, signal.SIGCONT)
            before |= new
        return Injection(fault, problem="each save was committed before it was seen")

    def _suspend(self, pid: int) -> bool:
        """Suspends a worker; returns whether it is, once all its threads are."""
        if not self.runner.signal_worker(pid, signal.SIGSTOP):
            return False

        def is_suspended() -> bool:
            with contextlib.suppress(OSError):
                return proc_stat.read_proc_stat(pid).state in "Tt"
            return False

        return self._wait_limited(is_suspended)

    def notice(self, number: int, fault: Fault) -> Injection:
        """Sends a notice, and starts the command again."""
        now = self._now()
        if problem := self._stop(number):
            return Injection(fault, problem=problem)
        self._plan(number + 1)
        self._start()
        return Injection(fault, "the command exited with PREEMPTED", recovery_seconds=now)

    def _stop(self, number: int) -> str:
        """Stops the run by a notice; returns why it has not stopped by it."""
        self.runner.send_notice(self.name, self._root(), number)
        code = self.runner.wait_exit()
        return "" if code == ExitCode.PREEMPTED else f"the command exited with {exit_name(code)}"

    def kill_supervisor(self, number: int, fault: Fault) -> Injection:
        """Kills the supervisor, and starts the command again."""
        if problem := self._wait_commit(fault.step):
            return Injection(fault, problem=problem)
        if not self.runner.is_running():
            return Injection(fault, problem="the supervisor had ended")
        pid, now = self._pid(number, fault.host), self._now()
        self.runner.stop()
        self._plan(number + 1)
        self._start()
        evidence = f"SIGKILL to the supervisor of pid {pid}"
        return Injection(fault, evidence, recovery_seconds=now)

    def damage(self, number: int, fault: Fault) -> Injection:
        """Stops the run, damages its newest checkpoint, and starts it again."""
        if problem := self._stop(number):
            return Injection(fault, problem=problem)
        newest = self._history().newest
        if newest is None:
            return Injection(fault, problem="no step was committed")
        chance = random.Random(f"{fault}")
        did, now = damage.DAMAGES[fault.scenario](self._root(), newest, chance), self._now()
        self._plan(number + 1)
        self._start()
        return Injection(fault, did, recovery_seconds=now, damaged_step=newest.step)

    def tear_lines(self, number: int, fault: Fault) -> Injection:
        """Stops the run, appends half a line to its logs, and starts it again."""
        if problem := self._stop(number):
            return Injection(fault, problem=problem)
        run_dir, attempt = self._run_dir, self._history().attempt
        logs = [run_dir.metrics(attempt), run_dir.events(attempt, 0), run_dir.supervisor_events]
        ends = {p: damage.tear_last_line(p) for p in logs if isinstance(p, Path)}
        torn = [(path, end) for path, end in ends.items() if end is not None]
        self.torn += torn
        now = self._now()
        self._plan(number + 1)
        self._start()
        names = ", ".join(path.name for path, _ in torn)
        if not names:
            return Injection(fault, problem="the run has no log with a line")
        return Injection(fault, f"half a line in {names}", recovery_seconds=now)

    def lose_region(self, number: int, fault: Fault) -> Injection:
        """Kills the run, deletes its directory, and resumes in the replica."""
        if problem := self._wait_commit(fault.step):
            return Injection(fault, problem=problem)
        newest, replica = self._history().step, RunDir(self._replica())

        def is_replicated() -> bool:
            marker = replica_files.read_marker(replica)
            return marker is not None and marker.step >= newest

        if not self._wait_limited(is_replicated):
            return Injection(fault, problem=f"the replica does not have step {newest}")
        root, now = self._root(), self._now()
        self.runner.stop()
        if left := leftovers.wait_gone(root, self.runner.clock):
            return Injection(fault, problem=f"processes outlive the supervisor: {left}")
        shutil.rmtree(root)
        self.name = replica.root.name
        self._start()
        return Injection(fault, f"{root.name} is deleted", recovery_seconds=now)


INJECT: Mapping[str, Callable[[FaultyRun, int, Fault], Injection]] = {
    "worker-kill": FaultyRun.kill_worker,
    "notice": FaultyRun.notice,
    "hang": FaultyRun.stop_worker,
    "supervisor-kill": FaultyRun.kill_supervisor,
    "kill-in-save": FaultyRun.kill_in_save,
    "bit-flip": FaultyRun.damage,
    "lost-file": FaultyRun.damage,
    "torn-line": FaultyRun.tear_lines,
    "region-loss": FaultyRun.lose_region,
}
"""Scenario -> what injects it."""


def _final_name(name: str) -> str:
    """Returns the name of a step directory when it is complete.

    >>> _final_name("00000008-0002.orbax-checkpoint-tmp")
    '00000008-0002'
    """
    return name.partition(".")[0]
