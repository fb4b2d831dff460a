"""The vocabulary of the promise tests: real training processes, started, watched and killed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxres.cli import checkpoints as checkpoints_cli
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_events, read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Line, Stop
from jaxres.storage import files
from jaxres.storage import path as places
from jaxres.storage.path import BucketPath

POLL_SECONDS = 0.001
ROOT = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny.yaml")
FAULTY = Path(__file__).with_name("faulty.yaml")
PACED = {"PACE": "0.001"}
"""Environment of a FAULTY run of some 20 steps a second, to be met in the middle."""
STEPS = 200
MLP = (
    "model.kind=mlp",
    "optimizer.schedule.kind=constant",
    "evaluation.every_steps=0",
    f"train.steps={STEPS}",
    "checkpoint.save_every_steps=20",
)
"""Overrides for where only storage, processes or words are tested: compiles in a third of the time,
and the compiled step does not depend on the number of steps."""


@dataclass
class Trainer:
    """One training process on a run directory, and what it has left there."""

    run_dir: RunDir
    process: subprocess.Popen[bytes]
    output: Path
    attempt: int
    """The attempt that this process will claim."""

    def wait(self, condition: Callable[[], bool], *, what: str, seconds: float = 120) -> None:
        """Waits for a condition; fails if the process ends first."""
        deadline = time.monotonic() + seconds
        while True:
            code = self.process.poll()
            if condition():
                return
            assert code is None, f"ended with {code} before {what}:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, (
                f"no {what} in {seconds} s\n{self.output.read_text()}"
            )
            time.sleep(POLL_SECONDS)

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
        """Says whether this attempt has entered a phase."""
        return any(event.get("phase") == phase for event in self.events())

    def events(self, host: int = 0) -> list[dict[str, Any]]:
        """Returns what one host of this attempt has told so far."""
        return read_events(self.run_dir.events(self.attempt, host))

    def worker(self) -> int | None:
        """Returns the pid of the worker behind the door, or None if there is none."""
        return next(iter(self.workers().values()), None)

    def workers(self) -> dict[int, int]:
        """Returns host -> pid of the workers behind the door that are running."""
        door, found = self.process.pid, {}
        with contextlib.suppress(FileNotFoundError):
            for child in Path(f"/proc/{door}/task/{door}/children").read_text().split():
                words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                if "jaxres.train.worker" in words:
                    host = words[words.index("--host") + 1] if "--host" in words else "0"
                    found[int(host)] = int(child)
        return found

    def kill(self, sig: signal.Signals = signal.SIGKILL, *, who: str = "all") -> None:
        """Sends a real signal to the `door`, to the `worker`, or to `all`: first the worker."""
        worker = self.worker()
        if who != "door" and worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, sig)
        if who != "worker":
            self.process.send_signal(sig)

    def ended(self, seconds: float = 180) -> int:
        """Waits for the end and returns the exit code; negative: the signal."""
        return self.process.wait(timeout=seconds)

    def said(self) -> str:
        """Returns what it has printed."""
        return self.output.read_text()

    def wait_commit(self, step: int) -> None:
        """Waits until a step at or after `step` is committed."""
        self.wait(lambda: line(self.run_dir).step >= step, what=f"commit of step {step}")

    def wait_kept(self) -> None:
        """Waits until compiled steps are kept for the attempts that follow."""
        kept = self.run_dir.compiled
        self.wait(lambda: any(kept.glob("*.compiled")), what="compiled steps")

    def told(self, kind: str, host: int = 0) -> list[dict[str, Any]]:
        """Returns the events of a kind that one host of this attempt has told."""
        return [event for event in self.events(host) if event["event"] == kind]

    def steps(self) -> list[int]:
        """Returns the steps that this attempt has finished."""
        return [row["step"] for row in read_json_lines(self.run_dir.metrics(self.attempt))]

    def last_words(self) -> Stop | None:
        """Returns the stop record of this attempt, if it has left one."""
        record = line(self.run_dir).last_stop
        if record is None or record.attempt != self.attempt:
            return None
        assert isinstance(record.body, Stop), record
        return record.body

    def wait_word(self, word: str) -> None:
        """Waits until it has said something."""
        self.wait(lambda: word in self.said(), what=f"word {word!r}")

    def refused(self, exit: int, *words: str) -> str:
        """Waits for a typed end: that code, one message with these words, and no traceback."""
        code, said = self.ended(), self.said()
        assert code == exit, f"exit {code}, expected {exit}\n{said}"
        assert "Traceback" not in said, said
        assert said.count(f"(exit {int(exit)}") == 1, said
        for word in words:
            assert word in said, f"no {word!r} in:\n{said}"
        return said

    def refused_after_restarts(self, exit: int) -> str:
        """Waits for a typed end of a supervisor, and returns what it has said."""
        code, said = self.ended(), self.said()
        assert code == exit, f"exit {code}, expected {exit}\n{said}"
        assert said.count(f"(exit {int(exit)}") == 1, said
        return said


@dataclass
class Place:
    """Where runs live, with the caches that all of them share."""

    root: Path
    caches: Path
    through: tuple[str, ...] = ()
    """Words before the command: how a process gets into a namespace or becomes another user."""
    trainers: list[Trainer] = field(default_factory=list)
    bucket: BucketPath | None = None
    """Where the run directories are, if not below `root`."""

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
    ) -> Trainer:
        """Starts training in run directory `name`; `cores` is the affinity it is given."""
        words = self._words(name, *overrides, config=config)
        return self.command(self.run_dir(name), words, cores=cores, env=env)

    def _words(self, name: str, *overrides: str, config: Path | None) -> list[str]:
        return [
            str(config or TINY),
            f"run.dir={self.run_dir(name).root}",
            f"data.cache_dir={self.caches}",
            f"compilation.cache_dir={self.caches / 'xla'}",
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
    ) -> Trainer:
        """Starts training with several workers behind one door, or behind a supervisor."""
        words = [*self._words(name, *overrides, config=config), "--hosts", str(hosts)]
        words += [] if restart else ["--no-restart"]
        return self.command(self.run_dir(name), words, verb=("jaxres.launch", "local"), env=env)

    def launched(self, name: str, *overrides: str, **kwargs: Any) -> Trainer:
        """Trains with several workers to the end, which must be a good one."""
        trainer = self.launch(name, *overrides, **kwargs)
        assert trainer.ended() == 0, trainer.said()
        return trainer

    def command(
        self,
        run_dir: RunDir,
        words: list[str],
        *,
        verb: tuple[str, ...] = ("jaxres.train",),
        through: tuple[str, ...] = (),
        cores: set[int] | None = None,
        env: dict[str, str] | None = None,
    ) -> Trainer:
        """Starts `python -m jaxres.train`, or another verb, with these words."""
        attempt = line(run_dir).attempt + 1
        output = self.root / f"{run_dir.root.name}-{attempt}-{len(self.trainers)}.txt"
        # Not by a function between fork and exec: jax forbids forks once it has a backend.
        pinned = ("taskset", "--cpu-list", ",".join(map(str, sorted(cores)))) if cores else ()
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*self.through, *through, *pinned, sys.executable, "-m", *verb, *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}),
            )
        trainer = Trainer(run_dir, process, output, attempt)
        self.trainers.append(trainer)
        return trainer

    def door(
        self,
        name: str,
        *overrides: str,
        host: int,
        hosts: int,
        at: str,
        config: Path | None = None,
        env: dict[str, str] | None = None,
        through: tuple[str, ...] = (),
    ) -> Trainer:
        """Starts one host's own door, which meets the others at an address."""
        words = self._words(name, *overrides, config=config)
        words += ["--coordinator", at, f"--num-hosts={hosts}", "--host-id", str(host)]
        return self.command(self.run_dir(name), words, env=env, through=through)

    def doors(self, name: str, *overrides: str, hosts: int, **kwargs: Any) -> list[Trainer]:
        """Starts a door for every host."""
        at, attempt = free_address(), line(self.run_dir(name)).attempt + 1
        found = [
            self.door(name, *overrides, host=host, hosts=hosts, at=at, **kwargs)
            for host in range(hosts)
        ]
        for trainer in found:
            trainer.attempt = attempt
        return found

    def finish(self, name: str, *overrides: str, **kwargs: Any) -> Trainer:
        """Trains to the end, which must be a good one."""
        trainer = self.start(name, *overrides, **kwargs)
        assert trainer.ended() == 0, trainer.said()
        return trainer

    def copy(self, run_dir: RunDir, name: str) -> RunDir:
        """Copies a run directory of a disk to here, as anyone may."""
        copied = self.run_dir(name)
        put(run_dir.root, copied.root)
        if self.bucket is not None:
            shutil.copytree(run_dir.compiled, copied.compiled)
        return copied

    def end_all(self) -> None:
        """Ends every process that was started here."""
        for trainer in self.trainers:
            if trainer.process.poll() is None:
                trainer.process.kill()
                trainer.process.wait()


def free_address() -> str:
    """Returns an address of this machine where nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


NOT_IN_A_BUCKET = ("compiled", "tensorboard", "exports", "owner.json", "owner.lock")


def put(folder: places.Place, to: places.Place) -> None:
    """Copies a folder of a disk; in a bucket a file of lines is a folder of segments."""
    assert isinstance(folder, Path)
    if isinstance(to, Path):
        shutil.copytree(folder, to)
        return
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    paths = [path for path in paths if path.parts[0] not in NOT_IN_A_BUCKET]

    def one(path: Path) -> None:
        there = to / path.as_posix()
        is_lines = path.suffix == ".jsonl"
        files.replace(there / "00000001" if is_lines else there, (folder / path).read_bytes())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, paths))


def snapshot(folder: places.Place) -> dict[str, bytes]:
    """Returns relative path -> bytes of everything below a folder; a disk's folders are there too.

    Left out: temporaries, which any claim sweeps, and the owner's beat.
    """
    if isinstance(folder, BucketPath):
        names = sorted(set(files.sizes(folder)) - {"owner.json"})
        found = files.read_all([folder / name for name in names])
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"folder"
        for path in sorted(folder.rglob("*"))
        if path.name not in ("owner.json", "owner.lock")
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def line(run_dir: RunDir) -> Line:
    """Returns what the run's log says."""
    return run_log.fold(run_log.read_records(run_dir.log))


def digest(run_dir: RunDir, step: int | None = None) -> str:
    """Returns the content digest of a committed step, default the newest."""
    words = ["checkpoints", "digest", str(run_dir.root)]
    return _verb(words + ([] if step is None else ["--step", str(step)])).strip()


def history(run_dir: RunDir) -> list[dict[str, Any]]:
    """Returns the one history over all attempts."""
    return [json.loads(row) for row in _verb(["history", str(run_dir.root), "--json"]).splitlines()]


WALL_CLOCK_FACTS = ("attempt", "step_seconds", "busy_seconds")


def trajectory(run_dir: RunDir) -> list[dict[str, Any]]:
    """Returns the history without the facts in which a broken run may differ from an unbroken."""
    return [
        {name: value for name, value in row.items() if name not in WALL_CLOCK_FACTS}
        for row in history(run_dir)
    ]


def starts(run_dir: RunDir) -> list[int]:
    """Returns the step from which each attempt that got so far has trained."""
    return [run_log.start_of(record).step for record in line(run_dir).starts]


def _verb(words: list[str]) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = checkpoints_cli.main(words, usage="")
    assert code == 0, err.getvalue()
    return out.getvalue()


def assert_bit_exact(broken: RunDir, unbroken: RunDir) -> None:
    """Holds a run that was broken against one that was not: nothing but times may differ."""
    there, here = trajectory(unbroken), trajectory(broken)
    steps = list(range(1, len(there) + 1))
    assert [row["step"] for row in here] == steps, "steps are missing or doubled"
    samples = [row["samples"] for row in there]
    assert [row["samples"] for row in here] == samples, "other samples were trained on"
    assert here == there, "the losses are others"
    assert digest(broken) == digest(unbroken), "the final state is another"
