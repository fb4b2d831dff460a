"""Helpers of the promise tests: real training processes, started, observed and killed."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.faults import RunError
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_events, read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, RunHistory
from jaxres.runlog.step_dirs import LOG_COPY
from jaxres.storage import files, memory_folder
from jaxres.storage import path as paths
from jaxres.storage.path import GcsPath
from jaxres.supervisor.process.forkserver_client import WORKER
from jaxres.train.chaos_hooks import break_hook
from jaxres.train.worker import NAME_PREFIX
from tests.promises import forks, mounts
from tests.promises.fork_server import may_fork
from tests.waiting import SURE_SECONDS, wait_until

ENDLESS = "train.steps=1000000"
"""Trains on for longer than any test waits."""
ROOT = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny.yaml")
FAULTY = Path(__file__).with_name("faulty.yaml")
LOOP, NNX = (Path(__file__).with_name(f"{name}.yaml") for name in ("loop", "nnx"))
"""Loops of the user's own in place of the trainer."""
PACED = {"PACE": "0.001", "HELD": "40"}
"""Environment of a FAULTY run with about 20 steps per second, which tests interrupt. However slow a
test is, the run has not ended then: in its 40th step it is held until the test waits for its end.
"""
BUCKET_PACE = 0.01
"""Least PACE of a run in a bucket, which commits a few times slower than one on a disk: else a slow
machine's run has ended before the test sees its commits."""
DENIED = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
"""Command prefix that drops root's right to use what it has no permission for; others need none."""
STEPS = 200
MLP = (
    "model.kind=mlp",
    "optimizer.schedule.kind=constant",
    "evaluation.every_steps=0",
    f"train.steps={STEPS}",
    "checkpoint.save_every_steps=20",
)
"""Overrides for tests of storage, processes or messages: compiles in a third of the time, and the
compiled step does not depend on the number of steps."""


def is_suspended(pid: int) -> bool:
    """Returns whether all threads of a process are suspended by a signal, or have ended."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if stat.read_text().rpartition(")")[2].split()[0] not in "TZX":
                return False
    return True


@dataclass(frozen=True)
class Hold:
    """A hold of a run that needs no FAULTY config, by a hook."""

    place: Path
    """Names the folder by which the hook is told when to hold, beside it."""
    number: int

    def planned(self, *, after: int) -> str:
        """Plans it after a step; returns the override for it."""
        break_hook.plan_next(self.place, number=self.number, step=after)
        facts = f"every_steps: {after}, timeout_seconds: 86400"
        folder = json.dumps(str(break_hook.folder_of(self.place)))
        return f"hooks=[{{target: '{break_hook.TARGET}', {facts}, args: {{folder: {folder}}}}}]"


@dataclass
class TrainingProcess:
    """One training process and its run directory."""

    run_dir: RunDir
    process: forks.Process
    output: Path
    attempt: int
    """The attempt that this process will claim."""
    gate: Path | None = None
    """What a run with HELD waits for."""
    hold: Hold | None = None
    """The hold of a run that was started with `held_after`."""

    def go_on(self) -> None:
        """Ends the hold of a held run, now or when it comes to it."""
        if self.gate is not None:
            self.gate.touch()
        if self.hold is not None:
            break_hook.release(self.hold.place, number=self.hold.number)

    def go_on_until(self, step: int) -> None:
        """Ends the hold of a run that was started with `held_after`; plans one after a later step.

        The step is a multiple of `held_after`.
        """
        assert self.hold is not None
        following = Hold(self.hold.place, self.hold.number + 1)
        break_hook.plan_next(following.place, number=following.number, step=step)
        self.go_on()
        self.hold = following

    def wait(
        self, condition: Callable[[], bool], *, what: str, seconds: float = SURE_SECONDS
    ) -> None:
        """Waits for a condition; fails if the process ends first."""

        def is_met() -> bool:
            code = self.process.poll()
            met = condition()
            assert met or code is None, f"ended with {code} before {what}:\n{self.printed()}"
            return met

        wait_until(is_met, lambda: f"{what}\n{self.printed()}\n", seconds=seconds)

    def wait_step(self, step: int) -> None:
        """Waits until this attempt has finished a step at or after `step`."""
        path = self.run_dir.metrics(self.attempt)

        def reached() -> bool:
            lines = read_json_lines(path)
            return bool(lines) and lines[-1]["step"] >= step

        self.wait(reached, what=f"step {step}")

    def wait_phase(self, phase: str) -> None:
        """Waits until this attempt has entered a phase at least once."""
        self.wait(lambda: self.entered(phase), what=f"phase {phase}")

    def entered(self, phase: str) -> bool:
        """Returns whether this attempt has entered a phase."""
        return any(event.get("phase") == phase for event in self.events())

    def events(self, host: int = 0) -> list[dict[str, Any]]:
        """Returns the events of one host of this attempt so far."""
        return read_events(self.run_dir.events(self.attempt, host))

    def worker(self) -> int | None:
        """Returns the pid of the supervisor's worker, or None if there is none."""
        return next(iter(self.workers().values()), None)

    def workers(self) -> dict[int, int]:
        """Returns host -> pid of the supervisor's running workers."""
        supervisor, found = self.process.pid, {}
        with contextlib.suppress(FileNotFoundError):
            for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
                arguments = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                name = Path(f"/proc/{child}/comm").read_text().strip()
                if arguments != [""] and name.startswith(NAME_PREFIX):  # Includes forked workers.
                    found[int(name.removeprefix(NAME_PREFIX))] = int(child)
                elif WORKER in arguments:  # It is still importing.
                    host = (
                        arguments[arguments.index("--host") + 1] if "--host" in arguments else "0"
                    )
                    found[int(host)] = int(child)
        return found

    def programs(self) -> dict[int, int]:
        """Returns host -> pid of the running programs, which the workers have started."""
        found = {}
        for host, worker in self.workers().items():
            children = Path(f"/proc/{worker}/task/{worker}/children")
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in children.read_text().split():
                    found[host] = int(child)
        return found

    def kill(self, sig: signal.Signals = signal.SIGKILL, *, target: str = "all") -> None:
        """Sends a real signal to the `supervisor`, the `worker`, or `all`: the worker first.

        After SIGSTOP they are suspended; their threads may still write when the system call
        returns.
        """
        worker = self.worker()
        if target != "supervisor" and worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, sig)
                if sig == signal.SIGSTOP:
                    self.wait(lambda: is_suspended(worker), what="a suspended worker")
        if target != "worker":
            self.process.send_signal(sig)
            if sig == signal.SIGSTOP:
                pid = self.process.pid
                self.wait(lambda: is_suspended(pid), what="a suspended supervisor")

    def wait_exit(self, seconds: float = SURE_SECONDS) -> int:
        """Waits for the exit; returns the exit code, or the negative signal number.

        A run that is held goes on.
        """
        self.go_on()
        return self.process.wait(timeout=seconds)

    def wait_stopped(self) -> int:
        """Waits for the exit of a run on one host after a request to stop; it stays held.

        The request ends the wait for a row, so no step but the last finished one can be saved.
        """
        return self.process.wait(timeout=SURE_SECONDS)

    def printed(self) -> str:
        """Returns its output."""
        return self.output.read_text()

    def wait_commit(self, step: int) -> None:
        """Waits until a step at or after `step` is committed."""
        self.wait(lambda: run_history(self.run_dir).step >= step, what=f"commit of step {step}")

    def wait_compiled_steps_stored(self) -> None:
        """Waits until compiled steps are stored for later attempts."""
        kinds = ("steps_compiled", "compiled_steps_loaded")
        self.wait(lambda: any(map(self.events_of, kinds)), what="compiled steps")

    def events_of(self, kind: str, host: int = 0) -> list[dict[str, Any]]:
        """Returns the events of a kind of one host of this attempt."""
        return [event for event in self.events(host) if event["event"] == kind]

    def steps(self) -> list[int]:
        """Returns the steps that this attempt has finished."""
        return [row["step"] for row in read_json_lines(self.run_dir.metrics(self.attempt))]

    def end_record(self) -> AttemptEnded | None:
        """Returns the end record of this attempt, if there is one."""
        record = run_history(self.run_dir).last_stop
        if record is None or record.attempt != self.attempt:
            return None
        assert isinstance(record.body, AttemptEnded), record
        return record.body

    def wait_printed(self, text: str) -> None:
        """Waits until the output contains a text."""
        self.wait(lambda: text in self.printed(), what=f"text {text!r}")

    def assert_fails(self, exit: int, *texts: str) -> str:
        """Asserts that it exits with that code, one message with these texts, and no traceback."""
        code, printed = self.wait_exit(), self.printed()
        assert code == exit, f"exit {code}, expected {exit}\n{printed}"
        assert "Traceback" not in printed, printed
        assert printed.count(f"(exit {int(exit)}") == 1, printed
        for text in texts:
            assert text in printed, f"no {text!r} in:\n{printed}"
        return printed

    def assert_gave_up(self, exit: int) -> str:
        """Asserts that the supervisor exits with that code; returns its output."""
        code, printed = self.wait_exit(), self.printed()
        assert code == exit, f"exit {code}, expected {exit}\n{printed}"
        assert printed.count(f"(exit {int(exit)}") == 1, printed
        return printed


@dataclass
class Workspace:
    """Folder of runs, with the caches that all of them share."""

    root: Path
    caches: Path
    through: tuple[str, ...] = ()
    """Prefix of commands that enters a namespace or changes the user."""
    trainers: list[TrainingProcess] = field(default_factory=list)
    bucket: GcsPath | None = None
    """Parent of the run directories, if not `root`."""
    fresh: bool = False
    """Whether no process is forked by the fork server, for tests of process starts."""
    more_spares: int = 0
    """Forked processes that later attempts of a command may use, besides those of the first."""
    preload: str = ""
    """A library that every process loads which the fork server starts."""

    def run_dir(self, name: str) -> RunDir:
        """Returns a run directory of that name."""
        return RunDir((self.bucket or self.root) / name)

    def start(
        self,
        name: str,
        *overrides: str,
        config: Path | None = None,
        cores: set[int] | None = None,
        env: dict[str, str] | None = None,
        held_after: int | None = None,
    ) -> TrainingProcess:
        """Starts training in run directory `name`; `cores` is its CPU affinity.

        If it comes to the end of step `held_after`, it is held there until `go_on` or `wait_exit`.
        """
        arguments = self._arguments(name, *overrides, config=config)
        run_dir = self.run_dir(name)
        return self.command(run_dir, arguments, cores=cores, env=env, held_after=held_after)

    def _arguments(self, name: str, *overrides: str, config: Path | None) -> list[str]:
        caches = [
            f"data.cache_dir={self.caches}",
            f"compilation.cache_dir={self.caches / 'xla'}",
        ]
        return [
            str(config or TINY),
            f"run.dir={self.run_dir(name).root}",
            *([] if config in (LOOP, NNX) else caches),
            *overrides,
        ]

    def launch(
        self,
        name: str,
        *overrides: str,
        hosts: int | str,
        config: Path | None = None,
        env: dict[str, str] | None = None,
        restart: bool = False,
        held_after: int | None = None,
    ) -> TrainingProcess:
        """Starts training with several workers; `restart` enables restarts."""
        arguments = [*self._arguments(name, *overrides, config=config), "--hosts", str(hosts)]
        arguments += [] if restart else ["--no-restart"]
        verb, run_dir = ("jaxres.launch", "local"), self.run_dir(name)
        return self.command(run_dir, arguments, verb=verb, env=env, held_after=held_after)

    def launched(self, name: str, *overrides: str, **kwargs: Any) -> TrainingProcess:
        """Trains with several workers until exit code 0."""
        trainer = self.launch(name, *overrides, **kwargs)
        assert trainer.wait_exit() == 0, trainer.printed()
        return trainer

    def command(
        self,
        run_dir: RunDir,
        arguments: list[str],
        *,
        verb: tuple[str, ...] = ("jaxres.train",),
        through: tuple[str, ...] = (),
        cores: set[int] | None = None,
        env: dict[str, str] | None = None,
        held_after: int | None = None,
    ) -> TrainingProcess:
        """Starts `python -m jaxres.train`, or another module, with these arguments."""
        attempt, hold = 1, None
        with contextlib.suppress(RunError):  # A test may have damaged the log.
            attempt += run_history(run_dir).attempt
        output = self.root / f"{run_dir.root.name}-{attempt}-{len(self.trainers)}.txt"
        if held_after is not None:
            hold = Hold(output.with_suffix(".hold"), number=1)
            arguments = [*arguments, hold.planned(after=held_after)]
        # Not in a preexec function: jax forbids forks once it has a backend.
        pinned = ("taskset", "--cpu-list", ",".join(map(str, sorted(cores)))) if cores else ()
        command = [sys.executable, "-m", *verb, *arguments]
        prefix = [*self.through, *through, *pinned]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
        if self.bucket is not None and "PACE" in environment:
            environment["PACE"] = str(max(float(environment["PACE"]), BUCKET_PACE))
        gate = None
        if "HELD" in (env or {}):
            gate = output.with_suffix(".gate")
            if "--coordinator" in arguments:  # None of several hosts goes on alone.
                port = arguments[arguments.index("--coordinator") + 1].rpartition(":")[2]
                gate = self.root / f"{run_dir.root.name}-{port}.gate"
            environment["HELD"] += f":{gate}"
        with output.open("wb") as file:
            process = self._process(prefix, command, env=environment, output=file)
        trainer = TrainingProcess(run_dir, process, output, attempt, gate, hold)
        self.trainers.append(trainer)
        return trainer

    def _process(
        self, prefix: list[str], command: list[str], *, env: dict[str, str], output: IO[bytes]
    ) -> forks.Process:
        """Starts a command; forks it if only the start-up time differs."""
        mounts_of = mounts.entered(prefix)
        is_forked = (not prefix or mounts_of) and not self.fresh and forks.FRESH not in os.environ
        if is_forked and may_fork(env, (server := forks.server(self.preload)).base):
            return server.start(
                command,
                env=env,
                output=output,
                spares=_spares(command) + self.more_spares,
                mounts_of=mounts_of,
            )
        return subprocess.Popen(
            [*prefix, *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
        )

    def start_host(
        self,
        name: str,
        *overrides: str,
        host: int,
        hosts: int,
        at: str,
        config: Path | None = None,
        env: dict[str, str] | None = None,
        through: tuple[str, ...] = (),
    ) -> TrainingProcess:
        """Starts the supervisor of one host; the rendezvous is at an address."""
        arguments = self._arguments(name, *overrides, config=config)
        arguments += ["--coordinator", at, f"--num-hosts={hosts}", "--host-id", str(host)]
        return self.command(self.run_dir(name), arguments, env=env, through=through)

    def start_hosts(
        self, name: str, *overrides: str, hosts: int, **kwargs: Any
    ) -> list[TrainingProcess]:
        """Starts one supervisor per host."""
        at, attempt = free_address(), run_history(self.run_dir(name)).attempt + 1
        found = [
            self.start_host(name, *overrides, host=host, hosts=hosts, at=at, **kwargs)
            for host in range(hosts)
        ]
        for trainer in found:
            trainer.attempt = attempt
        return found

    def finish(self, name: str, *overrides: str, **kwargs: Any) -> TrainingProcess:
        """Trains until exit code 0."""
        trainer = self.start(name, *overrides, **kwargs)
        assert trainer.wait_exit() == 0, trainer.printed()
        return trainer

    def repaired(self, name: str, *, host: str | None = None) -> None:
        """Declares a faulty host as repaired; None: this machine."""
        run_dir = self.run_dir(name)
        arguments = ["hosts", str(run_dir.root), "--forget", host or socket.gethostname()]
        forgotten = self.command(run_dir, arguments, verb=("jaxres",))
        assert forgotten.wait_exit() == 0, forgotten.printed()

    def copy(self, run_dir: RunDir, name: str) -> RunDir:
        """Copies a run directory from a disk."""
        copied = self.run_dir(name)
        copy_tree(run_dir.root, copied.root)
        return copied

    def end_all(self) -> None:
        """Kills every process that was started here, and frees what they hold in memory."""
        for trainer in self.trainers:
            if trainer.process.poll() is None:
                trainer.process.kill()
                trainer.process.wait()
            memory_folder.delete(trainer.run_dir.root)


def _spares(command: list[str]) -> int:
    """Returns the maximum number of processes that a command starts for one attempt."""
    if "jaxres.launch" not in command:
        return 1
    hosts = int(command[command.index("--hosts") + 1].rpartition("..")[2])
    return hosts + ("--no-restart" not in command)


def free_address() -> str:
    """Returns a free loopback address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def event_files(run_dir: RunDir) -> Any:
    """Returns TensorBoard's view of the event files in a run directory."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(run_dir.tensorboard))
    found.Reload()
    return found


NOT_IN_A_BUCKET = ("compiled", "tensorboard", "exports", "owner.json", "owner.lock")


def copy_tree(folder: paths.RunPath, to: paths.RunPath) -> None:
    """Copies a folder from a disk; in a bucket, a file of lines becomes a folder of segments."""
    assert isinstance(folder, Path)
    if isinstance(to, Path):
        shutil.copytree(folder, to)
        return
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    paths = [path for path in paths if path.parts[0] not in NOT_IN_A_BUCKET]

    def one(path: Path) -> None:
        there = to / path.as_posix()
        is_lines = path.suffix == ".jsonl" and path.name != LOG_COPY
        files.replace(there / "00000001" if is_lines else there, (folder / path).read_bytes())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, paths))


def snapshot(folder: paths.RunPath) -> dict[str, bytes]:
    """Returns relative path -> bytes of everything below a folder; a disk's folders are there too.

    Omits temporaries, which any claim deletes, and the lock holder's heartbeat.
    """
    if isinstance(folder, GcsPath):
        names = sorted(set(files.sizes(folder)) - {"owner.json"})
        found = files.read_all([folder / name for name in names])
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"folder"
        for path in sorted(folder.rglob("*"))
        if path.name not in ("owner.json", "owner.lock")
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def run_history(run_dir: RunDir) -> RunHistory:
    """Returns the run history, folded from the run log."""
    return run_log.fold(run_log.read_records(run_dir.log))


def digest(run_dir: RunDir, step: int | None = None) -> str:
    """Returns the content digest of a committed step, default the newest."""
    arguments = ["checkpoints", "digest", str(run_dir.root)]
    return _verb(arguments + ([] if step is None else ["--step", str(step)])).strip()


def history(run_dir: RunDir) -> list[dict[str, Any]]:
    """Returns the metrics history over all attempts."""
    return [json.loads(row) for row in _verb(["history", str(run_dir.root), "--json"]).splitlines()]


MAY_DIFFER = (
    *("attempt", "step_seconds", "busy_seconds", "usual_step_seconds"),
    *("losses", "bits_per_byte", "epochs", "metrics", "skip_cause"),
)
"""Times, and what only the events have: those of a killed host's last seconds may be lost."""


def trajectory(run_dir: RunDir) -> list[dict[str, Any]]:
    """Returns the history without the fields in which an interrupted run may differ."""
    return [
        {name: value for name, value in row.items() if name not in MAY_DIFFER}
        for row in history(run_dir)
    ]


def starts(run_dir: RunDir) -> list[int]:
    """Returns the start step of each attempt that has started training."""
    return [run_log.start_of(record).step for record in run_history(run_dir).starts]


def _verb(arguments: list[str]) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = checkpoints_cli.main(arguments, usage="")
    assert code == 0, err.getvalue()
    return out.getvalue()


def assert_bit_exact(broken: RunDir, unbroken: RunDir) -> None:
    """Asserts that an interrupted run equals an uninterrupted one, except for times."""
    there, here = trajectory(unbroken), trajectory(broken)
    steps = list(range(1, len(there) + 1))
    assert [row["step"] for row in here] == steps, "steps are missing or doubled"
    samples = [row["samples"] for row in there]
    assert [row["samples"] for row in here] == samples, "other samples were trained on"
    assert here == there, "the losses are others"
    assert digest(broken) == digest(unbroken), "the final state is another"
