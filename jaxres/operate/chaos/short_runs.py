"""Short runs of a config: real processes of `launch local`, broken by real signals.

`jaxres resume-check` and `jaxres chaos run` use them. The hook of `train/chaos_hooks/break_hook.py`
holds the worker after a planned step, so that the break is there on any machine, however fast its
steps are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxres import config as configs
from jaxres.checkpoint.read import manifest as manifests
from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode, Severity, exit_name, exit_row
from jaxres.faults import ConfigError, UsageError
from jaxres.host import proc_stat
from jaxres.host.processes import start_command
from jaxres.operate.resume_verdict import AttemptFacts, Break, RunFacts
from jaxres.runlog import attempt_history, metrics, run_log
from jaxres.runlog.event_log import read_events
from jaxres.runlog.guarantee import PROGRAM
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Start
from jaxres.storage import memory_folder
from jaxres.storage.path import GcsPath, RunPath
from jaxres.train.chaos_hooks import break_hook

POLL_SECONDS = 0.02
LIMIT_SECONDS = 6 * 3600.0
"""Longest wait for a run or a step. The run's own deadlines end a hung one much earlier."""
HANG_SECONDS = 5.0
"""deadlines.hook_seconds of a run that is broken by a hang: the supervisor finds it after these."""
FOLLOWER_POLLS = 6000
"""Most looks at the other supervisors of a job, once host 0's has ended: two minutes of them, and
longer on a slow machine."""
SHOWN_ROWS = 8
MESSAGE_LINES = 12
"""Most lines of a failed run's output that are shown."""


@dataclass(frozen=True)
class Topology:
    """Workers of a run on this machine, and virtual CPU devices of each; None: as JAX decides."""

    hosts: int = 1
    devices_per_host: int | None = None

    def __str__(self) -> str:
        """Returns it as the command line has it."""
        per_host = "" if self.devices_per_host is None else f"x{self.devices_per_host}"
        return f"{self.hosts}{per_host}"

    def arguments(self) -> list[str]:
        """Returns the flags of `launch local`."""
        flags = ["--hosts", str(self.hosts)]
        if self.devices_per_host is not None:
            flags += ["--devices-per-host", str(self.devices_per_host)]
        return flags


HERE = Topology()


def shortened(config: RunConfig, *, steps: int, save_every: int, breaks: int) -> list[str]:
    """Returns the overrides of a check: free keys only, so that the trajectory is the config's.

    What the run would send elsewhere is off: alerts, trackers, the replica, hooks of the user.
    """
    horizon = configs.horizon_steps(config)
    schedule = [] if horizon is None else [f"optimizer.schedule.horizon_steps={horizon}"]
    evaluation = []
    if config.evaluation.every_steps:
        evaluation = [f"evaluation.every_steps={save_every}", "evaluation.batches=1"]
    hook = f"{{target: '{break_hook.TARGET}', every_steps: 1, timeout_seconds: 86400}}"
    return [
        f"train.steps={steps}",
        *schedule,
        *evaluation,
        f"checkpoint.when={{kind: steps, every_steps: {save_every}}}",
        "checkpoint.busy=wait",
        f"checkpoint.keep.last={2 + steps}",
        "checkpoint.replica=null",
        "checkpoint.scrub=null",
        f"hooks=[{hook}]",
        "alerts.targets=[]",
        "telemetry.trackers=[]",
        "telemetry.tensorboard=false",
        "telemetry.sample_tokens=0",
        "run.must_exist=false",
        "run.guarantee=any",
        "preemption.sigterm_seconds=null",
        f"restart.max_attempts_without_commit={5 + breaks}",
        "restart.backoff_seconds=0",
        "restart.jitter=0",
        "restart.max_storage_attempts=3",  # What fails without a fault is to end soon.
        "restart.storage_backoff_seconds=1",
        "launch.max_hours=null",
        "launch.max_restarts_per_1000_steps=null",
    ]


@contextlib.contextmanager
def run_folder(to: str | None, *, keep: bool, prefix: str) -> Iterator[Path]:
    """Yields an empty folder for the runs.

    Args:
      to: --to; None: a temporary folder, which is deleted at the end.
      keep: whether a temporary folder stays.
      prefix: of the temporary folder's name.

    Raises:
      UsageError, ConfigError: `to` can't be used.
    """
    if to is not None:
        if "://" in to:
            raise UsageError(f"--to {to}: give a folder of a disk")
        folder = Path(to).expanduser().absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigError(f"--to {folder}: it is not empty. Give a new folder.")
        except OSError as error:
            raise ConfigError(f"--to {folder}: {error.strerror}. Give another folder.") from error
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def report_failed(reference: RunFacts, *, command: str, run: str, otherwise: int) -> int:
    """Prints why the run with which all are compared has failed; returns the command's exit code.

    Args:
      command: the command of jaxres.
      run: what the run is called.
      otherwise: the exit code, unless the input is wrong.
    """
    text = f"the {run} ended with {exit_name(reference.exit)}, see above"
    sys.stderr.write(f"{reference.message}\njaxres {command}: {text}\n")
    is_input = exit_row(reference.exit).severity is Severity.CONFIG
    return ExitCode.CONFIG if is_input else otherwise


@dataclass
class Runner:
    """Starts runs in a folder, each with a run directory of its own."""

    config: Path
    overrides: Sequence[str]
    """Overrides by the user and by the check."""
    folder: Path
    save_every: int
    """Steps between two saves."""
    env: Mapping[str, str]
    clock: Clock
    bucket: GcsPath | None = None
    """Where the run directories are; None: in the folder."""
    process: subprocess.Popen[bytes] | None = None
    """The command that runs now; of a job with several supervisors, host 0's."""
    followers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """The other supervisors of such a job, in order of hosts."""

    @property
    def supervisors(self) -> list[subprocess.Popen[bytes]]:
        """The supervisors of the job that runs now, in order of hosts."""
        return [*([] if self.process is None else [self.process]), *self.followers]

    def run_dir(self, name: str) -> RunDir:
        """Returns the run directory of a run."""
        return RunDir(self.folder / name if self.bucket is None else self.bucket / name)

    def unbroken(self, name: str, on: Topology = HERE, *, extra: Sequence[str] = ()) -> RunFacts:
        """Runs without a break; `extra` are overrides of this run alone."""
        self.start(name, on, hang=False, extra=extra)
        return self.observe(name, self.wait_exit())

    def broken(self, name: str, breaks: Sequence[Break], *, then: Topology = HERE) -> RunFacts:
        """Runs, breaks the run at each step and resumes it, on another topology if one is given."""
        root = self.run_dir(name).root
        assert isinstance(root, Path)
        self._plan(root, breaks, 0)
        code = self._run_broken(name, root, breaks, then)
        return self.observe(name, code, breaks=breaks, topology="" if then == HERE else str(then))

    def _run_broken(self, name: str, root: Path, breaks: Sequence[Break], then: Topology) -> int:
        kinds = [planned.kind for planned in breaks]
        self.start(name, HERE, hang=_has_hang(kinds))
        for number, planned in enumerate(breaks):
            held = break_hook.reached(root, number=number)
            if not self.wait(held.exists):
                break  # It has ended by itself.
            if number == 0 and planned.step > self.save_every:  # Hooks precede a step's save.
                self._wait_commit(name)
            if planned.kind == "notice":
                self.send_notice(name, root, number)
                code = self.wait_exit()
                if code != ExitCode.PREEMPTED:
                    return code
                self._plan(root, breaks, number + 1)
                self.start(name, then, hang=_has_hang(kinds[number + 1 :]))
                continue
            self._plan(root, breaks, number + 1)  # Before the worker is resumed.
            stop = signal.SIGKILL if planned.kind == "kill" else signal.SIGSTOP
            self.signal_worker(int(held.read_text()), stop)
            break_hook.release(root, number=number)  # Other hosts hold too.
        return self.wait_exit()

    def signal_worker(self, pid: int, sent: signal.Signals) -> bool:
        """Signals a worker, unless it has ended: another process may have its pid by now.

        Returns:
          Whether the signal was sent. The run log says how the attempt ended.
        """
        assert self.process is not None
        with contextlib.suppress(OSError):
            parents = {supervisor.pid for supervisor in self.supervisors}
            if proc_stat.read_proc_stat(pid).parent in parents:
                os.kill(pid, sent)
                return True
        return False

    def _plan(self, root: Path, breaks: Sequence[Break], number: int) -> None:
        if number < len(breaks):
            break_hook.plan_next(root, number=number, step=breaks[number].step)

    def _wait_commit(self, name: str) -> None:
        """Waits until the first save is over: a resume at step 0 would prove little."""
        run_dir = self.run_dir(name)

        def is_over() -> bool:
            history = run_log.fold(run_log.read_records(run_dir.log))
            events = read_events(run_dir.events(history.attempt, 0))
            return history.step > 0 or any(e["event"] == "save_failed" for e in events)

        self.wait(is_over)

    def send_notice(self, name: str, root: RunPath, number: int) -> None:
        """Sends SIGTERM to the supervisor, and ends the hold when it has passed it on."""
        assert self.process is not None
        output = self.output(name)
        before = output.stat().st_size
        self.process.send_signal(signal.SIGTERM)

        def is_passed_on() -> bool:
            return b"SIGTERM" in output.read_bytes()[before:]

        self.wait(is_passed_on)
        self.clock.sleep(10 * POLL_SECONDS)  # The worker's thread takes the signal at once.
        break_hook.release(root, number=number)

    def output(self, name: str) -> Path:
        """Returns the file with the output of a run's commands."""
        return self.folder / f"{name}.txt"

    def start(
        self,
        name: str,
        topology: Topology,
        *,
        hang: bool,
        extra: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the command of a run, or starts it again.

        Args:
          topology: workers, and devices of each.
          hang: whether the supervisor will meet a hang, which it is to find soon.
          extra: overrides of this run alone.
          env: variables of this start alone.
        """
        command = [sys.executable, "-m", "jaxres.launch", "local", str(self.config)]
        command += [*self.overrides, *extra, f"run.dir={self.run_dir(name).root}"]
        command += topology.arguments()
        if hang:
            command.append(f"deadlines.hook_seconds={HANG_SECONDS:g}")
        self.followers = []
        env = {**self.env, **(env or {})}
        self.process = start_command(command, output=self.output(name), env=env)

    def start_hosts(self, name: str, addresses: Sequence[str], *, extra: Sequence[str]) -> None:
        """Starts a supervisor for each host, as a scheduler does, without restarts.

        Args:
          addresses: of the rendezvous, for each host.
          extra: overrides of this run alone.
        """
        command = [sys.executable, "-m", "jaxres.train", str(self.config), *self.overrides, *extra]
        command += [f"run.dir={self.run_dir(name).root}", f"--num-hosts={len(addresses)}"]
        self.process, *self.followers = (
            start_command(
                [*command, f"--coordinator={address}", f"--host-id={host}"],
                output=self.output(name),
                env=self.env,
            )
            for host, address in enumerate(addresses)
        )

    def start_verb(self, name: str, words: Sequence[str]) -> None:
        """Starts another command of jaxres, whose output is appended to a run's."""
        command = [sys.executable, "-m", "jaxres", *words]
        self.process = start_command(command, output=self.output(name), env=self.env)

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Waits for a condition; returns whether it holds. False: the command has ended."""
        assert self.process is not None
        deadline = self.clock.monotonic() + LIMIT_SECONDS
        while self.clock.monotonic() < deadline:
            has_ended = self.process.poll() is not None
            if condition():
                return True
            if has_ended:
                return False
            self.clock.sleep(POLL_SECONDS)
        self.stop()
        return False

    def is_running(self) -> bool:
        """Returns whether the command has not ended."""
        assert self.process is not None
        return self.process.poll() is None

    def wait_exit(self) -> int:
        """Waits until the command ends; returns its exit code, or 128 + the signal's number.

        Of several supervisors it is the first code that is not 0.
        """
        self.wait(lambda: False)
        looks = 0
        while any(one.poll() is None for one in self.followers):
            looks += 1
            if looks > FOLLOWER_POLLS:
                self.stop()
            self.clock.sleep(POLL_SECONDS)
        codes = [one.wait() for one in self.supervisors]
        code = next((code for code in codes if code), 0)
        return code if code >= 0 else 128 - code

    def rows_differ(self) -> bool:
        """Returns whether two processes read other rows at the first positions of the data set."""
        command = [sys.executable, "-m", "jaxres", "data", "show", str(self.config)]
        command += [*self.overrides, "--rows", str(SHOWN_ROWS)]
        shown = [
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=self.env)
            for _ in range(2)
        ]
        return [s.returncode for s in shown] == [0, 0] and shown[0].stdout != shown[1].stdout

    def stop(self) -> None:
        """Kills the command that runs, if one does; its workers end with it."""
        for process in self.supervisors:
            if process.poll() is None:
                process.kill()
                process.wait()

    def observe(self, name: str, code: int, **planned: Any) -> RunFacts:
        """Reads the facts about a run, and deletes its leftovers in shared memory."""
        run_dir = self.run_dir(name)
        memory_folder.delete(run_dir.root)
        printed = self.output(name).read_text(errors="replace").strip().splitlines()
        message = "" if code == ExitCode.DONE else "\n".join(printed[-MESSAGE_LINES:])
        return observe(run_dir, name=name, exit=code, message=message, **planned)


def _has_hang(kinds: Sequence[str]) -> bool:
    """Returns whether the next command meets a hang; a notice ends the command."""
    until = kinds.index("notice") if "notice" in kinds else len(kinds)
    return "hang" in kinds[:until]


def observe(
    run_dir: RunDir,
    *,
    name: str,
    exit: int,
    message: str = "",
    breaks: Sequence[Break] = (),
    topology: str = "",
) -> RunFacts:
    """Reads the facts about a run: all steps of all attempts, digests, and ends."""
    records = run_log.read_records(run_dir.log)
    history = run_log.fold(records)
    programs = {
        r.attempt: r.body.computation.get(PROGRAM, "") for r in records if isinstance(r.body, Start)
    }
    rows = [
        row
        for attempt in range(1, history.attempt + 1)
        for row in metrics.read_attempt(run_dir, attempt)
    ]
    return RunFacts(
        name=name,
        exit=exit,
        rows=tuple(rows),
        digests={
            commit.step: manifests.read(run_dir.root / commit.path, commit).digest
            for commit in history.committed
        },
        attempts=tuple(
            AttemptFacts(
                found.attempt,
                found.exit,
                found.start_step,
                found.finished_step,
                programs.get(found.attempt, ""),
            )
            for found in attempt_history.read(run_dir, is_alive=False)
        ),
        breaks=tuple(breaks),
        message=message,
        topology=topology,
    )
