"""One short run with faults, held after a step by the hook `train/chaos_hooks/break_hook.py`.

What the scenarios share: they look at the run, wait, start it and stop it by this class. Holds are
numbered as the planned faults are.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxres.exit_codes import ExitCode, exit_name
from jaxres.operate.chaos import leftovers
from jaxres.operate.chaos.emulated_vms import EmulatedVms
from jaxres.operate.chaos.job_network import ProxiedNetwork
from jaxres.operate.chaos.scenarios import BY_NAME
from jaxres.operate.chaos.schedule import PlannedRun
from jaxres.operate.chaos.short_runs import POLL_SECONDS, Runner, Topology
from jaxres.runlog import faulty_hosts, metrics, run_log
from jaxres.runlog.event_log import read_events
from jaxres.runlog.history import RunHistory
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import RunPath
from jaxres.train.chaos_hooks import break_hook, fault_request

if TYPE_CHECKING:
    from jaxres_emulators.gcs import GcsServer
    from jaxres_emulators.nvml import FakeNvml

END_POLLS = 100_000
"""Most looks at a process that is to end: half an hour of them, and longer on a slow machine."""
AGAIN = 1000
"""Number of the second hold of the first fault; a run has fewer faults."""


@dataclass
class HeldRun:
    """A run, its directory, and the faults' effects on it so far."""

    runner: Runner
    planned: PlannedRun
    topology: Topology
    name: str
    """Name of the run directory; another one after the loss of a region."""
    server: GcsServer | None = None
    """The emulated Cloud Storage, if the run is in a bucket."""
    network: ProxiedNetwork | None = None
    """The connections of the supervisors, if each host has its own."""
    vms: EmulatedVms | None = None
    """The emulated Compute Engine, if the run is on VMs."""
    gpus: FakeNvml | None = None
    """The GPU that the health guard reads, if its library is a fake."""
    torn: list[tuple[Path, int]] = field(default_factory=list)
    """Files with a torn line, and where it ends."""
    uncommitted: set[int] = field(default_factory=set)
    """Steps whose save was made to fail."""
    set_aside: set[int] = field(default_factory=set)
    """Attempts that a fault explains, besides the one that it ends: they have not trained."""
    altered: list[tuple[int, int]] = field(default_factory=list)
    """Number of a start record, and the step after which a fault has changed the state."""
    other_samples: dict[int, str] = field(default_factory=dict)
    """Step -> samples that it must have, since a fault has made the run leave rows out."""
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Commands of this run besides the runner's, which a fault has left."""
    ports: dict[int, str] = field(default_factory=dict)
    """Inode -> text of each port on which its processes have listened."""
    fault_at: float | None = None
    """When the newest fault happened, on the clock of `now`."""

    @property
    def run_dir(self) -> RunDir:
        """The run directory."""
        return self.runner.run_dir(self.name)

    @property
    def root(self) -> RunPath:
        """Path of the run directory."""
        return self.run_dir.root

    @property
    def disk(self) -> Path:
        """Path of the run directory, which is on a disk."""
        root = self.root
        assert isinstance(root, Path), root
        return root

    def history(self) -> RunHistory:
        """Reads the run log."""
        return run_log.fold(run_log.read_records(self.run_dir.log))

    def mark_altered(self, step: int) -> None:
        """Notes that a fault changes the state after a step of the segment that is trained now."""
        self.altered.append((self.history().starts[-1].seq, step))

    def mark_fault(self) -> None:
        """Notes that a fault happens now: the recovery is timed from here."""
        self.fault_at = self.now()

    def now(self) -> float:
        """Seconds of the clock of all waits."""
        return self.runner.clock.monotonic()

    def folder(self, what: str) -> Path:
        """Returns a folder of this run beside the run directories, such as its replica."""
        return self.runner.folder / f"{self.planned.name}-{what}"

    def start(self, more: Sequence[str] = (), *, env: Mapping[str, str] | None = None) -> None:
        """Starts the command, or starts it again, with the settings that the scenarios need.

        Args:
          more: overrides of this start alone.
          env: variables of this start alone.
        """
        names = {fault.scenario for fault in self.planned.faults}
        extra = [f"{key}={self.folder(what)}" for name, key, what in OWN_FOLDERS if name in names]
        extra += [setting for name in sorted(names) for setting in BY_NAME[name].settings]
        extra += more
        if self.network is not None:
            self.runner.start_hosts(self.name, self.network.open(), extra=extra)
            return
        if self.vms is not None:
            self.runner.start_verb(self.name, self.vms.up)
            return
        self.runner.start(self.name, self.topology, hang="hang" in names, extra=extra, env=env)

    def resume(self, number: int) -> None:
        """Starts the command again after a fault, with the hold for the next one planned."""
        self.plan(number + 1)
        self.start()

    def plan(self, number: int) -> None:
        """Plans the hold for a fault, if there is one; a region that is lost has no other hold."""
        if number < len(self.planned.faults):
            self.plan_hold(number, step=self.planned.faults[number].step)

    def plan_hold(self, number: int, *, step: int) -> None:
        """Plans a hold after a step."""
        break_hook.plan_next(self.root, number=number, step=step)

    def request(
        self,
        number: int,
        *,
        step: int,
        kind: fault_request.Kind,
        host: int | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Asks the hooks of the run for a fault after a step; see `fault_request.py`."""
        asked = fault_request.FaultRequest(
            number=number, step=step, kind=kind, host=host, seconds=seconds
        )
        fault_request.write(self.root, asked)

    def done(self, number: int, *, host: int = 0) -> str:
        """Returns the answer of a host's hooks to a request; empty: no answer."""
        return fault_request.done(self.root, number=number, host=host)

    def release(self, number: int, *, root: RunPath | None = None) -> None:
        """Ends a hold, of the run directory or of the one that a region has lost."""
        break_hook.release(self.root if root is None else root, number=number)

    def end_others(self) -> None:
        """Kills the commands that a fault has left."""
        for process in self.others:
            if process.poll() is None:
                process.kill()
                process.wait()

    @contextlib.contextmanager
    def held_again(self, number: int, *, step: int) -> Iterator[None]:
        """Ends a hold, and holds the workers after another step as long as the block lasts.

        A save that began at the first hold is written meanwhile; no other one begins.
        """
        again = AGAIN + number
        self.plan_hold(again, step=step)
        self.release(number)
        self.wait_held(again)
        yield
        self.plan(number + 1)  # Before a worker trains on.
        self.release(again)

    def held(self, number: int, host: int) -> Path:
        """Returns the file that exists once a worker holds."""
        return break_hook.reached(self.root, number=number, host=host)

    def wait_held(self, number: int) -> bool:
        """Waits until every worker holds; returns False if the command has ended."""
        files = [self.held(number, host) for host in range(self.topology.hosts)]
        is_held = self.runner.wait(lambda: all(file.exists() for file in files))
        self.ports |= leftovers.ports_of(leftovers.processes(self.root))
        return is_held

    def pid(self, number: int, host: int) -> int:
        """Returns the pid of a worker that holds."""
        return int(self.held(number, host).read_text())

    def wait_limited(
        self, condition: Callable[[], bool], *, instead: Callable[[], bool] = lambda: False
    ) -> bool:
        """Waits for a condition until the command ends; returns whether it holds.

        No clock ends the wait. Workers that hold count their looks for the release: without one
        they train on after an hour of them, so the command ends.

        Args:
          condition: what is waited for.
          instead: after what it can't come any more.
        """
        self.runner.wait(lambda: condition() or instead())
        return condition()

    def wait_commit(self, step: int) -> str:
        """Waits for the commit of the newest step saved before one; returns why there is none."""
        wanted = (step - 1) // self.runner.save_every * self.runner.save_every
        if self.wait_saved(wanted):
            return ""
        return f"step {wanted} was not committed: its save failed, or the command ended"

    def wait_saved(self, step: int) -> bool:
        """Waits until the save of a step is over; returns whether the step is committed."""
        return self.wait_limited(
            lambda: self.history().step >= step, instead=lambda: self.has_failed(step)
        )

    def has_failed(self, step: int) -> bool:
        """Returns whether the newest attempt has reported that the save of a step failed."""
        found = read_events(self.run_dir.events(self.history().attempt, 0))
        return any((e["event"], e.get("step")) == ("save_failed", step) for e in found)

    def wait_end(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the end of a process, even after the command has ended; returns if it ended."""
        for _ in range(END_POLLS):
            if process.poll() is not None:
                return True
            self.runner.clock.sleep(POLL_SECONDS)
        return False

    def wait_trained(self, attempt: int, number: int) -> float | None:
        """Waits for the first step that a later attempt finishes; returns the seconds since the
        fault. None: there is no such step.
        """
        held = self.held(number + 1, 0)  # Reached before the step's line is written.

        def has_trained() -> bool:
            later = range(attempt + 1, attempt + 4)
            return held.exists() or any(metrics.read_attempt(self.run_dir, n) for n in later)

        return self.seconds() if self.runner.wait(has_trained) else None

    def seconds(self) -> float:
        """Returns the seconds since the fault, as they are reported."""
        assert self.fault_at is not None
        return round(self.now() - self.fault_at, 1)

    def forget_faulty_hosts(self) -> str:
        """Uses the left-out hosts of the run again, as after a repair; returns the error."""
        for host in faulty_hosts.read(self.run_dir):
            self.runner.start_verb(self.name, ["hosts", str(self.root), "--forget", host.name])
            if (code := self.runner.wait_exit()) != ExitCode.DONE:
                return f"hosts --forget exited with {exit_name(code)}"
        return ""

    def stop(self, number: int) -> str:
        """Stops the run by a notice; returns why it has not stopped by it."""
        self.runner.send_notice(self.name, self.root, number)
        code = self.runner.wait_exit()
        return "" if code == ExitCode.PREEMPTED else f"the command exited with {exit_name(code)}"


OWN_FOLDERS: Sequence[tuple[str, str, str]] = (
    ("region-loss", "checkpoint.replica.path", "replica"),
    ("damaged-cache", "compilation.cache_dir", "compiled"),
    ("damaged-data", "data.cache_dir", "data"),
    ("bad-record", "data.cache_dir", "data"),
)
"""Scenario, and the setting that gives its run a folder of its own, which is damaged or used."""
