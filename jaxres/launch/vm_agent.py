"""The agent of a VM: does what the intent says of this host, and reports. No jax.

It decides nothing. It starts this host's door for the attempt that is on, ends it when that attempt
is over, and goes on with what it knows while the bucket is away: a launcher that is gone stops no
training.

Compiled steps by way of the bucket, so that a VM that is new loads what another has compiled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxres import config as configs
from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig
from jaxres.config.argparser import Parser
from jaxres.config.schema_operations import PreemptionSection
from jaxres.faults import Exit, StorageUnavailable, TypedEnd, UsageError
from jaxres.launch.desired_state import Intent, unpacked
from jaxres.launch.observed_state import Report, State
from jaxres.launch.paths import Places
from jaxres.runlog.events import Noted, NoticeSeen
from jaxres.runlog.paths import RunDir
from jaxres.storage import files, gcs_objects
from jaxres.storage.path import BucketPath, place
from jaxres.supervisor.preemption_watcher import Watchman
from jaxres.supervisor.processes import die_with

POLL_SECONDS = 1.0
BEAT_SECONDS = 2.0
LOG_SECONDS = 20.0
"""Between two uploads of what a part has printed."""
LOG_BYTES = 2**20
"""Of its end that are uploaded."""
END_GRACE_SECONDS = 6.0
"""Until a part that is to end at once is killed."""
STOPPED_BYTES = 64 * 2**10
"""Of a part's output in which its last words are looked for."""


@dataclass
class Part:
    """The door of one attempt on this host."""

    attempt: int
    process: subprocess.Popen[bytes]
    output: Path


class Beat:
    """Says again and again that this agent is there, from a thread of its own."""

    def __init__(self, path: BucketPath, *, clock: Clock) -> None:
        """Says nothing yet."""
        self._path, self._clock = path, clock
        self._report = Report("ready", secrets.token_hex(6))
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def report(self) -> Report:
        """What is said now."""
        return self._report

    def say(self, report: Report) -> None:
        """Says something new, as soon as the bucket takes it."""
        with self._changed:
            if report != self._report:
                self._report = report
                self._changed.notify()

    def run(self) -> None:
        """Beats until closed."""
        while True:
            said = self._report
            with contextlib.suppress(TypedEnd):  # The leader sees the silence.
                gcs_objects.write(self._path, b"", over=None, words=said.words())
            with self._changed:
                if self._report == said:
                    self._changed.wait(BEAT_SECONDS)
                if self._is_closed:
                    return
            self._clock.sleep(1.0)  # An object takes a write a second.

    def close(self) -> None:
        """Has it end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class Agent:
    """One VM's part in a job, until its process ends."""

    def __init__(
        self, places: Places, *, name: str, folder: Path, clock: Clock, notice_seconds: float = 0.0
    ) -> None:
        """Starts nothing yet.

        Args:
          places: of the run.
          name: the VM's.
          folder: where it leaves things on this machine.
          clock: its own.
          notice_seconds: for which the VM goes on once it is being preempted, as it was made.
        """
        self._places, self._name, self._folder, self._clock = places, name, folder, clock
        self._notice_seconds = notice_seconds
        self._beat = Beat(places.report(name), clock=clock)
        self._part: Part | None = None
        self._watchman: Watchman | None = None
        self._is_leaving = False
        self._uploaded_at = -LOG_SECONDS
        self._sharing = Sharing(places)

    def run(self, env: Mapping[str, str]) -> None:
        """Does what is meant to be, until SIGTERM has come and its part has ended."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_leaving", True))
        threading.Thread(target=self._beat.run, name="jaxres-agent-beat", daemon=True).start()
        with contextlib.ExitStack() as stack:
            while not (self._is_leaving and self._part is None):
                if (intent := self._read()) is not None:
                    if self._watchman is None and (config := self._config(intent)) is not None:
                        section = self._preemption(config)
                        watchman = Watchman(section, env=env, clock=self._clock)
                        self._watchman = stack.enter_context(watchman)
                    self._follow(intent, env)
                self._look()
                self._clock.sleep(POLL_SECONDS)
        self._beat.close()

    def _read(self) -> Intent | None:
        with contextlib.suppress(StorageUnavailable):
            data = gcs_objects.read(self._places.intent)
            return None if data is None else unpacked(data, self._places.intent)
        return None

    def _config(self, intent: Intent) -> RunConfig | None:
        """Returns the run's config, once it could be had."""
        path = self._folder / f"{intent.config}.yaml"
        with contextlib.suppress(StorageUnavailable):
            if not path.exists():
                if (data := gcs_objects.read(self._places.config(intent.config))) is None:
                    return None
                path.write_bytes(data)
            return configs.load(path).config
        return None

    def _preemption(self, config: RunConfig) -> PreemptionSection:
        """Returns the config's section, with the longer notice that this VM may have."""
        given = config.preemption
        longest = max(given.notice_seconds, self._notice_seconds)
        return given.model_copy(update={"notice_seconds": longest})

    def _follow(self, intent: Intent, env: Mapping[str, str]) -> None:
        """Starts or ends this host's part, as the intent says."""
        names = [member.name for member in intent.members]
        is_member = intent.phase == "running" and self._name in names
        part = self._part
        if part is not None and not (is_member and part.attempt == intent.attempt):
            self._end(part, f"attempt {part.attempt} is over")
        if not is_member or self._is_leaving or self._part is not None:
            return
        if self._had() < intent.attempt:
            self._start(intent, names.index(self._name), env)
        elif self._beat.report.attempt < intent.attempt:
            reason = "the agent was started anew, and its part has ended with the one before"
            self._say("ended", intent.attempt, exit=128 + signal.SIGKILL, reason=reason)

    def _start(self, intent: Intent, host: int, env: Mapping[str, str]) -> None:
        if (config := self._config(intent)) is None:
            return  # The bucket is away; the next look tries again.
        self._sharing.bring(self._places.run)
        words = [str(self._folder / f"{intent.config}.yaml"), f"run.dir={self._places.run}"]
        if (notice := self._preemption(config).notice_seconds) != config.preemption.notice_seconds:
            words += [f"preemption.notice_seconds={notice:g}"]
        if len(intent.members) > 1:
            coordinator = f"{intent.members[0].ip}:{intent.port}"
            words += ["--coordinator", coordinator]
            words += ["--num-hosts", str(len(intent.members)), "--host-id", str(host)]
        output = self._folder / f"output-{intent.attempt:04d}.txt"
        self._had_file.write_text(f"{intent.attempt}\n")
        with output.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxres.train", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**env},
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid()),
            )
        self._part = Part(intent.attempt, process, output)
        self._say("running", intent.attempt)

    @property
    def _had_file(self) -> Path:
        return self._folder / "attempt"

    def _had(self) -> int:
        """Returns the newest attempt that this VM has had a part in, over agents."""
        try:
            return int(self._had_file.read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _look(self) -> None:
        """Reports what has happened here: an end, a notice; and uploads what was printed."""
        if self._watchman is not None:
            for event in self._watchman.take():
                if isinstance(event, NoticeSeen | Noted):
                    sys.stdout.write(f"agent: {event}\n")
            if (notice := self._watchman.pressing()) is not None and notice.words:
                self._beat.say(replace(self._beat.report, notice=notice.words))
        part = self._part
        if part is None:
            return
        code = part.process.poll()
        now = self._clock.monotonic()
        if code is not None or now - self._uploaded_at >= LOG_SECONDS:
            self._uploaded_at = now
            self._upload(part)
            self._sharing.give(self._places.run)
        if code is not None:
            self._part = None
            exit = 128 - code if code < 0 else code
            self._say("ended", part.attempt, exit=exit, reason=last_words(part.output))

    def _end(self, part: Part, why: str) -> None:
        """Ends a part at once: what it has not committed is lost, and was given up."""
        for _ in range(2):  # The second SIGTERM means at once, and in order.
            with contextlib.suppress(ProcessLookupError):
                part.process.send_signal(signal.SIGTERM)
            self._clock.sleep(0.3)
        try:
            part.process.wait(END_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(part.process.pid, signal.SIGKILL)
            part.process.wait()
        self._upload(part)
        self._part = None
        self._say("ready", part.attempt, reason=why)

    def _say(
        self, state: State, attempt: int, *, exit: int | None = None, reason: str = ""
    ) -> None:
        now = self._beat.report
        self._beat.say(replace(now, state=state, attempt=attempt, exit=exit, reason=reason))

    def _upload(self, part: Part) -> None:
        with contextlib.suppress(TypedEnd, OSError):
            path = self._places.output(part.attempt, self._name)
            gcs_objects.write(path, _tail(part.output, LOG_BYTES), over=None)


def last_words(output: Path) -> str:
    """Returns the last line that a part has printed which says how it ended."""
    lines = _tail(output, STOPPED_BYTES).decode("utf-8", "replace").splitlines()
    told = [line.strip() for line in lines if line.strip()]
    typed = [line for line in told if "(exit " in line]
    return (typed or told or ["it has printed nothing"])[-1]


def _tail(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read()


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs the agent of this machine."""
    parser = Parser(prog="python -m jaxres.launch agent")
    parser.add_argument("--run", type=place, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--notice-seconds", type=float, default=0.0)
    options = parser.parse_args(arguments)
    if not isinstance(options.run, BucketPath):
        raise UsageError(f"--run {options.run}: expected gs://BUCKET/FOLDER")
    places = Places(options.run)
    agent = Agent(
        places,
        name=options.name,
        folder=options.folder,
        clock=SystemClock(),
        notice_seconds=options.notice_seconds,
    )
    agent.run(env)
    return Exit.DONE


MAX_BYTES = 2**30


class Sharing:
    """Brings and gives files whose names are digests of all that decides what is in them."""

    def __init__(self, places: Places) -> None:
        """Asks for nothing yet."""
        self._folder = places.compiled
        self._there: set[str] = set()

    def bring(self, run: BucketPath) -> None:
        """Fetches what is not here; without the bucket's answer steps are compiled anew."""
        local = RunDir(run).compiled
        with contextlib.suppress(TypedEnd, OSError):
            local.mkdir(parents=True, exist_ok=True)
            for name in gcs_objects.names(self._folder):
                self._there.add(name)
                if not (local / name).exists() and (data := gcs_objects.read(self._folder / name)):
                    files.replace(local / name, data)

    def give(self, run: BucketPath) -> None:
        """Puts there what is new here."""
        local = RunDir(run).compiled
        with contextlib.suppress(TypedEnd, OSError):
            for name in files.list_names(local):
                if name not in self._there and (local / name).stat().st_size <= MAX_BYTES:
                    gcs_objects.write(self._folder / name, (local / name).read_bytes(), over=0)
                    self._there.add(name)
