"""The agent of a VM: runs this host's training process as the desired state has it. No jax.

The agent decides nothing. It starts the host's supervisor for the running attempt, ends it when
that attempt is over, and reports. While the bucket is unavailable it continues with the state that
it read last: the loss of the launcher stops no training.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxres import config as configs
from jaxres.clock import Clock, SystemClock
from jaxres.cluster.host_identity import HOST_NAME, INSTANCE, PHYSICAL_HOST
from jaxres.config import RunConfig
from jaxres.config.argparser import Parser
from jaxres.config.gce_machine_types import num_gpus
from jaxres.config.schema.supervision import PreemptionSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Fenced, RunError, StorageUnavailable, UsageError
from jaxres.host.processes import kill_me_with_parent
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.observed_state import AgentReport, AgentState
from jaxres.launch.gce.state.paths import OUTPUT_START, LaunchPaths
from jaxres.launch.gce.state.state_object import decode_state
from jaxres.launch.gce.vm.code_package import digest_of
from jaxres.launch.gce.vm.instance_spec import POWER_OFF, read_uploaded
from jaxres.launch.gce.vm.standby_supervisor import STANDBY_SECONDS, StandbySupervisor
from jaxres.runlog.events import Noted
from jaxres.runlog.paths import RunDir
from jaxres.runlog.supervisor_events import PreemptionNoticeReceived
from jaxres.storage import gcs_objects
from jaxres.storage.gcs_client import NoBucket
from jaxres.storage.path import GcsPath, is_remote, parse_path
from jaxres.storage.threads import spawn_thread
from jaxres.supervisor.attempt_runner import MIN_DEVICES, PLATFORM, RESTART_VARIABLE
from jaxres.supervisor.companions import attempt_alerts
from jaxres.supervisor.preemption.notices import PreemptionNotice
from jaxres.supervisor.preemption.watcher import PreemptionWatcher

POLL_SECONDS = 1.0
REPORT_SECONDS = 2.0
LEASE_SECONDS = 20.0
"""Time between two looks at the launcher lease while nothing is trained."""
LOG_SECONDS = 20.0
"""Time between two uploads of the training process' output."""
LOG_BYTES = 2**20
"""Size of the end of the output that is uploaded."""
END_GRACE_SECONDS = 6.0
"""Time until a training process that should end at once is killed."""
DEVICE_VARIABLES = (
    MIN_DEVICES,
    PLATFORM,
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "CUDA_VISIBLE_DEVICES",
)
"""Variables of `launch.gce.env` that decide which devices the training has."""
MAX_GAP_SECONDS = 60.0
"""Most that one observation adds to the idle time: a suspended agent observes nothing."""
LOCK = "agent.lock"
"""File in the agent's folder; the one agent of the VM holds a lock on it."""
STOPPED_BYTES = 64 * 2**10
"""Size of the end of the output in which the exit line is searched."""


@dataclass
class LocalAttempt:
    """The training process (a supervisor) of one attempt on this host."""

    attempt: int
    process: subprocess.Popen[bytes]
    output: Path
    is_leaving: bool = False
    """Whether it was told to save and exit: this VM is drained, or the agent ends."""


@dataclass(frozen=True)
class IdleTime:
    """Time without training and without a launcher, measured by one agent on its own clock.

    A launcher deletes the VMs of a job that has ended. Without one they would exist until
    `launch.gce.max_run_hours`. An agent powers its VM off before that, which needs no permission; a
    VM that is off costs its disk only.
    """

    seconds: float = 0.0
    at: float | None = None
    """Time of the last observation."""
    lease: int | None = None
    """Generation of the launcher lease then; None: not read yet."""


def next_idle(before: IdleTime, *, now: float, is_training: bool, lease: int | None) -> IdleTime:
    """Returns the idle time after an observation.

    A lease that has changed was renewed or taken by a launcher.

    Args:
      before: the idle time at the last observation.
      is_training: whether the VM has a training process.
      lease: generation of the launcher lease; 0: there is none; None: the bucket has not answered,
        and the time is not counted.
    """
    if is_training:
        return replace(before, seconds=0.0, at=now)
    if lease is None:
        return replace(before, at=now)
    if lease != before.lease or before.at is None:
        return IdleTime(0.0, now, lease)
    return IdleTime(before.seconds + min(MAX_GAP_SECONDS, now - before.at), now, lease)


class StatusPublisher:
    """Writes this agent's report to the bucket periodically, in its own thread."""

    def __init__(self, path: GcsPath, *, clock: Clock) -> None:
        """Sets the first report; writes nothing yet."""
        self._path, self._clock = path, clock
        self._report = AgentReport("ready", secrets.token_hex(6))
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def report(self) -> AgentReport:
        """Current report."""
        return self._report

    def publish(self, report: AgentReport) -> None:
        """Sets a new report, which is written as soon as the bucket accepts it."""
        with self._changed:
            if report != self._report:
                self._report = report
                self._changed.notify()

    def run(self) -> None:
        """Writes reports until `close` is called."""
        while True:
            report = self._report
            with contextlib.suppress(RunError):  # The controller detects missing reports.
                gcs_objects.write(self._path, b"", over=None, metadata=report.metadata())
            with self._changed:
                if self._report == report:
                    self._changed.wait(REPORT_SECONDS)
                if self._is_closed:
                    return
            self._clock.sleep(1.0)  # An object accepts one write per second.

    def close(self) -> None:
        """Ends `run`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class Agent:
    """The agent process of one VM."""

    def __init__(
        self,
        paths: LaunchPaths,
        *,
        name: str,
        folder: Path,
        clock: Clock,
        notice_seconds: float = 0.0,
        max_idle_seconds: float = float("inf"),
    ) -> None:
        """Stores the settings; starts nothing.

        Args:
          folder: folder for files on this machine.
          notice_seconds: seconds until the VM is stopped once it is preempted, as requested.
          max_idle_seconds: idle time after which the VM is powered off.
        """
        self._paths, self._name, self._folder, self._clock = paths, name, folder, clock
        self._notice_seconds = notice_seconds
        self._max_idle_seconds, self._idle = max_idle_seconds, IdleTime()
        self._publisher = StatusPublisher(paths.report(name), clock=clock)
        self._local: LocalAttempt | None = None
        self._watcher: PreemptionWatcher | None = None
        self._notice: PreemptionNotice | None = None
        self._is_leaving = False
        self._uploaded_at = -LOG_SECONDS
        self._standby = StandbySupervisor(folder)
        self._standby_due = clock.monotonic()
        """When the next standby is started; inf: it was, for this attempt or this wait."""

    def run(self, env: Mapping[str, str]) -> None:
        """Follows the desired state until SIGTERM is received and the training process exits.

        It also ends when the VM has been idle for too long, which powers the VM off.
        """
        for number in (signal.SIGTERM, signal.SIGHUP):  # A handler: ignored ones are inherited.
            signal.signal(number, lambda *_: self._leave())
        spawn_thread("agent-beat", self._publisher.run, daemon=True)
        env = {**env, attempt_alerts.VARIABLE: attempt_alerts.RECORDED}  # The launcher sends them.
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._standby)
            while not (self._is_leaving and self._local is None):
                if (desired := self._read()) is not None:
                    if self._watcher is None and (section := self._watched(desired)) is not None:
                        watcher = PreemptionWatcher(section, env=env, clock=self._clock)
                        self._watcher = stack.enter_context(watcher)
                    self._follow(desired, env)
                    self._keep_standby(desired, env)
                self._poll()
                self._end_if_idle()
                self._clock.sleep(POLL_SECONDS)
        self._publisher.close()

    def _leave(self) -> None:
        """Handles SIGTERM: requests the save of the training process, after whose exit it ends."""
        self._is_leaving = True
        if self._local is not None:
            self._request_save(self._local)

    def _read(self) -> DesiredState | None:
        with contextlib.suppress(StorageUnavailable):
            data = gcs_objects.read(self._paths.desired_state)
            return None if data is None else decode_state(data, self._paths.desired_state)
        return None

    def _config(self, desired: DesiredState) -> RunConfig | None:
        """Returns the run's config; None: the bucket has not returned it yet.

        Raises:
          ConfigError: the object does not have the digest in the desired state, or is no config.
        """
        path = self._folder / f"{desired.config}.yaml"
        with contextlib.suppress(StorageUnavailable):
            if not path.exists() or digest_of(path.read_bytes()) != desired.config:
                data = read_uploaded(self._paths.config(desired.config), desired.config)
                if data is None:
                    return None
                path.write_bytes(data)
            return configs.load(path).config
        return None

    def _watched(self, desired: DesiredState) -> PreemptionSection | None:
        """Returns the section for the watcher of notices; None: there is no valid config yet."""
        with contextlib.suppress(ConfigError):  # `_start` reports it.
            if (config := self._config(desired)) is not None:
                return self._preemption(config)
        return None

    def _preemption(self, config: RunConfig) -> PreemptionSection:
        """Returns the config's section, with the longer notice that this VM may have."""
        given = config.preemption
        longest = max(given.notice_seconds, self._notice_seconds)
        return given.model_copy(update={"notice_seconds": longest})

    def _follow(self, desired: DesiredState, env: Mapping[str, str]) -> None:
        """Starts or ends this host's training process according to the desired state."""
        names = [host.name for host in desired.attempt.hosts]
        is_member = desired.phase == "running" and self._name in names
        local = self._local
        if local is not None and not (is_member and local.attempt == desired.attempt.number):
            self._end(local, f"attempt {local.attempt} is over")
        elif local is not None and self._name in desired.attempt.draining:
            self._request_save(local)
        if not is_member or self._is_leaving or self._local is not None:
            return
        if self._newest_attempt() < desired.attempt.number:
            self._start(desired, names.index(self._name), env)
        elif self._publisher.report.attempt < desired.attempt.number:
            reason = "the agent was restarted; its training process ended with the previous agent"
            self._publish("ended", desired.attempt.number, exit=128 + signal.SIGKILL, reason=reason)

    def _start(self, desired: DesiredState, host: int, env: Mapping[str, str]) -> None:
        try:
            config = self._config(desired)
        except ConfigError as error:
            self._attempt_file.write_text(f"{desired.attempt.number}\n")
            self._publish("ended", desired.attempt.number, exit=ExitCode.CONFIG, reason=str(error))
            return
        if config is None:
            return  # The bucket is unavailable; the next poll tries again.
        arguments = self._arguments(desired, host, config)
        output = self._folder / f"output-{desired.attempt.number:04d}.txt"
        self._attempt_file.write_text(f"{desired.attempt.number}\n")
        env = self._training_env(env, config, desired)
        env[RESTART_VARIABLE] = "1" if desired.history else "0"
        key = desired.code, desired.config
        process = self._standby.take(arguments, env=env, key=key, output=output)
        if process is None:
            process = _start_supervisor(arguments, env=env, output=output)
        self._set_local(local := LocalAttempt(desired.attempt.number, process, output))
        if self._is_leaving:  # SIGTERM was received while the process was started.
            self._request_save(local)
        self._publish("running", desired.attempt.number)

    def _set_local(self, local: LocalAttempt | None) -> None:
        self._local = local
        self._standby_due = self._clock.monotonic() + STANDBY_SECONDS

    def _keep_standby(self, desired: DesiredState, env: Mapping[str, str]) -> None:
        """Starts a supervisor that waits for the next attempt, once per attempt or wait for one."""
        used = {vm.name for vm in (*desired.vms, *desired.early_vms, *desired.spares)}
        is_used = self._name in used.difference(desired.attempt.draining) and not self._is_leaving
        if desired.phase == "ended" or not is_used:
            self._standby.stop()
            return
        if self._standby.poll():
            sys.stdout.write("agent: a supervisor is ready for the next attempt\n")
        key = desired.code, desired.config
        if self._clock.monotonic() < self._standby_due or self._standby.is_running(key):
            return
        with contextlib.suppress(ConfigError):  # `_start` reports it.
            if (config := self._config(desired)) is None:
                return
            self._standby_due = float("inf")
            if config.restart.fork:
                training_env = self._training_env(env, config, desired)
                self._standby.start(RunDir(self._paths.run), config, env=training_env, key=key)

    def _arguments(self, desired: DesiredState, host: int, config: RunConfig) -> list[str]:
        """Returns the arguments of `jaxres.train` for one host of the desired attempt."""
        arguments = [str(self._folder / f"{desired.config}.yaml"), f"run.dir={self._paths.run}"]
        if (notice := self._preemption(config).notice_seconds) != config.preemption.notice_seconds:
            arguments += [f"preemption.notice_seconds={notice:g}"]
        if desired.attempt.seq_before:  # The run has begun: never again at step 0.
            arguments += ["run.must_exist=true"]
        if len(desired.attempt.hosts) > 1:
            coordinator = f"{desired.attempt.hosts[0].ip}:{desired.attempt.port}"
            arguments += ["--coordinator", coordinator]
            arguments += ["--num-hosts", str(len(desired.attempt.hosts)), "--host-id", str(host)]
        return arguments

    def _training_env(
        self, env: Mapping[str, str], config: RunConfig, desired: DesiredState
    ) -> dict[str, str]:
        """Returns the environment of the training: identity of this VM, its GPUs and their number.

        The GPUs are left out if `launch.gce.env` chooses devices itself. The identity is known once
        the VM is a host.
        """
        env = dict(env)
        for host in desired.attempt.hosts:
            if host.name == self._name:
                env |= {HOST_NAME: host.name, INSTANCE: host.instance}
                env |= {PHYSICAL_HOST: host.physical_host}
        gce = config.launch.gce
        if gce is None or any(name in env for name in DEVICE_VARIABLES):
            return env
        options = [vm.option for vm in desired.all_vms if vm.name == self._name]
        types = [gce.capacity_options[option].machine_type for option in options]
        counts = [count for kind in types if (count := num_gpus(kind)) is not None]
        return {**env, MIN_DEVICES: str(counts[0]), PLATFORM: "gpu"} if counts else env

    @property
    def _attempt_file(self) -> Path:
        return self._folder / "attempt"

    def _newest_attempt(self) -> int:
        """Returns the newest attempt in which this VM has trained, also under a previous agent."""
        try:
            return int(self._attempt_file.read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _poll(self) -> None:
        """Reports a training process' exit or a preemption notice, and uploads the output."""
        if self._watcher is not None:
            for event in self._watcher.poll():
                if isinstance(event, PreemptionNoticeReceived | Noted):
                    sys.stdout.write(f"agent: {event}\n")
            self._report_notice(self._watcher.most_urgent())
        local = self._local
        if local is None:
            return
        code = local.process.poll()
        now = self._clock.monotonic()
        if code is not None or now - self._uploaded_at >= LOG_SECONDS:
            self._uploaded_at = now
            self._upload(local)
        if code is not None:
            self._set_local(None)
            exit = 128 - code if code < 0 else code
            self._publish("ended", local.attempt, exit=exit, reason=exit_line(local.output))

    def _end_if_idle(self) -> None:
        """Ends the agent once the VM has been idle for too long; the VM is then powered off."""
        now, before = self._clock.monotonic(), self._idle
        is_training = self._local is not None
        every = min(LEASE_SECONDS, self._max_idle_seconds / 3)
        if not is_training and before.at is not None and now - before.at < every:
            return
        lease = None if is_training else self._lease_generation()
        self._idle = next_idle(before, now=now, is_training=is_training, lease=lease)
        if self._idle.seconds < self._max_idle_seconds:
            return
        reason = f"powers itself off: idle for {self._idle.seconds / 60:.0f} minutes, no launcher"
        sys.stdout.write(f"agent: this VM {reason} (launch.gce.idle_minutes)\n")
        self._publisher.publish(replace(self._publisher.report, notice=reason))
        (self._folder / POWER_OFF).touch()
        self._is_leaving = True

    def _lease_generation(self) -> int | None:
        """Returns the generation of the launcher lease; 0: there is none; None: no answer."""
        try:
            found = gcs_objects.stat(self._paths.lease)
        except NoBucket:
            return 0
        except StorageUnavailable:
            return None
        return 0 if found is None else found.generation

    def _report_notice(self, notice: PreemptionNotice | None) -> None:
        """Reports the notice in force and its deadline; None: there is none, or none any more."""
        if notice == self._notice:
            return
        self._notice = notice
        text, until = "", None
        if notice is not None:
            left = notice.seconds_left(self._clock.monotonic())
            text, until = notice.description, round(self._clock.wall() + (left or 0.0))
        report = replace(self._publisher.report, notice=text, notice_until=until)
        self._publisher.publish(report)

    def _request_save(self, local: LocalAttempt) -> None:
        """Requests once that the training process saves and exits with 75, as at a preemption.

        The request is a SIGHUP because a second SIGTERM would end the training without a save:
        what stops the VM may have sent one to all processes, not just to the agent.
        """
        if not local.is_leaving:
            local.is_leaving = True
            with contextlib.suppress(ProcessLookupError):
                local.process.send_signal(signal.SIGHUP)

    def _end(self, local: LocalAttempt, reason: str) -> None:
        """Ends a training process at once; the controller has given up its uncommitted steps."""
        for _ in range(2):  # The second SIGTERM ends the process at once.
            with contextlib.suppress(ProcessLookupError):
                local.process.send_signal(signal.SIGTERM)
            self._clock.sleep(0.3)
        try:
            local.process.wait(END_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(local.process.pid, signal.SIGKILL)
            local.process.wait()
        self._upload(local)
        self._set_local(None)
        self._publish("ready", local.attempt, reason=reason)

    def _publish(
        self, state: AgentState, attempt: int, *, exit: int | None = None, reason: str = ""
    ) -> None:
        now = self._publisher.report
        self._publisher.publish(
            replace(now, state=state, attempt=attempt, exit=exit, reason=reason)
        )

    def _upload(self, local: LocalAttempt) -> None:
        with contextlib.suppress(RunError, OSError):
            path = self._paths.output(local.attempt, self._name)
            start, data = _tail_from(local.output, LOG_BYTES)
            gcs_objects.write(path, data, over=None, metadata={OUTPUT_START: str(start)})


def _start_supervisor(
    arguments: Sequence[str], *, env: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxres.train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
            preexec_fn=functools.partial(kill_me_with_parent, os.getpid()),
        )


def exit_line(output: Path) -> str:
    """Returns the last line of the output that has an exit code, or else the last line."""
    _, tail = _tail_from(output, STOPPED_BYTES)
    lines = tail.decode("utf-8", "replace").splitlines()
    nonempty = [line.strip() for line in lines if line.strip()]
    exits = [line for line in nonempty if "(exit " in line]
    return (exits or nonempty or ["it has printed nothing"])[-1]


def _tail_from(path: Path, size: int) -> tuple[int, bytes]:
    """Returns the position in a file from which its end is read, and that end."""
    with path.open("rb") as file:
        start = file.seek(max(0, path.stat().st_size - size))
        return start, file.read()


@contextlib.contextmanager
def agent_lock(folder: Path) -> Iterator[None]:
    """Holds the lock of the one agent of a VM; the kernel releases it however the agent ends.

    It holds between containers too: they share the folder.

    Raises:
      Fenced: another agent holds it.
    """
    with (folder / LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fenced(
                f"another agent of this VM runs (it holds {file.name}); two would train twice. "
                "This one is started again once the other one has ended."
            ) from None
        yield


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs the agent of this machine."""
    parser = Parser(prog="python -m jaxres.launch agent")
    parser.add_argument("--run", type=parse_path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--notice-seconds", type=float, default=0.0)
    parser.add_argument("--max-idle-seconds", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    if not is_remote(options.run):
        raise UsageError(f"--run {options.run}: expected gs://BUCKET/FOLDER")
    paths = LaunchPaths(options.run)
    agent = Agent(
        paths,
        name=options.name,
        folder=options.folder,
        clock=SystemClock(),
        notice_seconds=options.notice_seconds,
        max_idle_seconds=options.max_idle_seconds,
    )
    with agent_lock(options.folder):
        agent.run(env)
    return ExitCode.DONE
