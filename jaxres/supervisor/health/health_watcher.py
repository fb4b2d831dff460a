"""Runs the health process of a host, reads the host itself, and judges the readings.

A thread reads the process's lines and passes them to the supervisor, through a queue and a pipe
that wakes it. If the driver hangs, the lines stop: the thread kills the process and reports that,
and the supervisor starts another process later. Another thread reads memory, disk, clock and
network. Nothing here delays the supervisor. Without an NVIDIA driver's library no process is
started.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from jaxres.clock import Awake, Clock
from jaxres.config.schema.hardware import HealthSection
from jaxres.host.side_process import SideProcess
from jaxres.runlog.supervisor_events import HardwareFaultFound, HealthWatchStarted
from jaxres.storage.threads import WatcherThreads
from jaxres.supervisor.health import gpu_health, health_messages, host_health, kernel_log, nvml
from jaxres.supervisor.health.gpu_health import Finding, GpuState, XidReports
from jaxres.supervisor.health.health_messages import (
    MESSAGES,
    GpuReading,
    Message,
    WatchStarted,
    WatchUnavailable,
    XidReported,
)
from jaxres.supervisor.health.host_health import HostReading

MODULE = "jaxres.supervisor.health.health_process"
START_SECONDS = 60.0
"""Longest time until the first message, if that is more than answer_seconds."""
RETRY_SECONDS = 600.0
"""Time after which a process that has ended or was killed is started again."""
KILL_SECONDS = 1.0
"""Longest wait for a killed process; one that hangs in the driver is left behind."""
ALL_GPUS = "GPUs of this host"
MAX_LINE = 1 << 20
"""Most bytes that are kept of a line without an end."""


def may_use_gpus(env: Mapping[str, str]) -> bool:
    """Returns whether a run with this environment uses GPUs where there are some.

    >>> may_use_gpus({"JAX_PLATFORMS": "cpu"}), may_use_gpus({"CUDA_VISIBLE_DEVICES": ""})
    (False, False)
    """
    platforms = [name for name in env.get("JAX_PLATFORMS", "").split(",") if name]
    may_use = not platforms or bool({"cuda", "gpu"} & set(platforms))
    return may_use and env.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def may_have_gpus(env: Mapping[str, str]) -> bool:
    """Returns whether this host may have GPUs that the run uses."""
    return may_use_gpus(env) and nvml.find_library(env.get("LD_LIBRARY_PATH", "")) is not None


class HealthWatcher:
    """Watches the GPUs and the rest of this host until closed; a context manager."""

    def __init__(
        self,
        section: HealthSection | None,
        folder: Path,
        *,
        env: Mapping[str, str],
        clock: Clock,
        log: Path = kernel_log.PATH,
    ) -> None:
        """Starts nothing yet.

        Args:
          section: the policy; None: no guard.
          folder: folder of the run's local files, whose disk is watched.
          env: the environment of the run, which the process gets too.
          log: the kernel's log.
        """
        self._section, self._folder = section, folder
        self._env, self._clock, self._log = env, clock, log
        self.on_fault: Callable[[HardwareFaultFound], None] | None = None
        """Called with each fault after which training continues."""
        self._threads = WatcherThreads[Message | HostReading | Finding]()
        self._gpus: tuple[str, ...] = ()
        """Labels of the GPUs that are watched."""
        self._states: dict[str, GpuState] = {}
        self._is_silent = False
        """Whether the GPUs can't be read now."""
        self._xids: dict[tuple[str, int], XidReports] = {}
        """Label of a GPU, number -> the reports of this Xid error."""
        self._host = deque[HostReading](maxlen=host_health.NUM_READINGS)
        self._host_reported: set[tuple[str, str]] = set()
        """Kind and device of the findings of the reading before."""
        self._process = SideProcess(env)
        self._retry_at = math.inf
        """When the process is started again, on the clock."""

    def __enter__(self) -> HealthWatcher:
        if self._section is not None:
            self._threads.start("host-health", self._watch_host)
            if may_have_gpus(self._env):
                self._start(self._section)
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.closed.set()
        self._process.kill(seconds=KILL_SECONDS)
        self._threads.close(seconds=KILL_SECONDS)  # One may wait for the storage.

    @property
    def wakeup(self) -> int:
        """A descriptor that is readable whenever `poll` may return something."""
        return self._threads.wakeup

    @property
    def pids(self) -> set[int]:
        """Pid of the process, if it runs."""
        return self._process.pids

    def gpu_values(self) -> Mapping[str, Mapping[str, int]]:
        """Returns label of each GPU -> its newest readings; may be called from any thread.

        What can't be read now has no value: the last one would look like that of a healthy GPU.
        """
        states = {} if self._is_silent else self._states.copy()
        return {gpu: gpu_health.readable(state) for gpu, state in states.items()}

    def host_reading(self) -> HostReading | None:
        """Returns the newest reading of the host, if there is one; from any thread."""
        return next(iter(list(self._host)[-1:]), None)

    def poll(self) -> list[HealthWatchStarted | Finding]:
        """Returns the findings since the last call."""
        if self._section is not None:
            self._restart_if_due(self._section)
        found: list[HealthWatchStarted | Finding] = []
        for message in self._threads.take():
            found += self._judge(message)
        return found

    def _judge(
        self, message: Message | HostReading | Finding
    ) -> Iterator[HealthWatchStarted | Finding]:
        section = self._section
        assert section is not None
        match message:
            case Finding():
                self._is_silent = True
                yield message
            case WatchStarted(driver, gpus, unreadable):
                self._is_silent = False
                yield HealthWatchStarted(driver, gpus, dict(unreadable), "")
                for gpu in health_messages.gone(self._gpus, gpus):
                    text = "the driver does not list it any more"
                    yield Finding("lost", gpu, text, section.lost)
                    self._states.pop(gpu, None)
                self._gpus = gpus
            case WatchUnavailable(reason) if self._gpus:
                text = f"they can't be read any more: {reason}"
                yield Finding("silent", ALL_GPUS, text, section.silent)
                self._retry_at = self._clock.monotonic() + RETRY_SECONDS
            case WatchUnavailable(reason):
                yield HealthWatchStarted("", (), {}, reason)
            case XidReported():
                yield from self._judge_xid(message, section)
            case GpuReading():
                state = self._states.get(message.gpu, GpuState())
                now = self._clock.monotonic()
                self._states[message.gpu], found = gpu_health.judge(
                    state, message, section, now=now
                )
                yield from found
            case HostReading():
                self._host.append(message)
                reported = self._host_reported
                found = host_health.judge(tuple(self._host), section)
                new = [each for each in found if (each.kind, each.device) not in reported]
                self._host_reported = {(each.kind, each.device) for each in found}
                yield from new

    def _judge_xid(self, message: XidReported, section: HealthSection) -> Iterator[Finding]:
        """Yields the finding of an Xid error, unless it is known; a warning is yielded once."""
        finding, key = gpu_health.judge_xid(message, section), (message.gpu, message.xid)
        is_first, reports = key not in self._xids, self._xids.get(key, XidReports())
        now = self._clock.monotonic()
        self._xids[key], is_new = reports.add(message.source, now=now)
        if is_first or (is_new and finding.action != "warn"):
            yield finding

    def _watch_host(self) -> None:
        while not self._threads.closed.wait(host_health.READ_SECONDS):
            reading = host_health.read(self._folder, supervisor=os.getpid(), clock=self._clock)
            self._threads.put(reading)

    def _start(self, section: HealthSection) -> None:
        """Starts the process; called by the main thread alone, so that `pids` is never behind."""
        self._retry_at = math.inf
        command = [sys.executable, "-m", MODULE, "--parent", str(os.getpid())]
        command += ["--poll-seconds", str(section.poll_seconds), f"--kernel-log={self._log}"]
        if (visible := self._env.get("CUDA_VISIBLE_DEVICES")) is not None:
            command += [f"--visible={visible}"]
        try:
            output = self._process.start(command, stdout=subprocess.PIPE)
        except OSError as error:
            self._threads.put(WatchUnavailable(f"the health process did not start: {error}"))
            return
        assert output is not None
        self._threads.start("health", lambda: self._watch(output, section))

    def _watch(self, output: IO[bytes], section: HealthSection) -> None:
        """Passes on the messages of the process until it ends or is silent."""
        why = self._forward(output, section)
        self._process.kill(seconds=KILL_SECONDS)
        if why is not None and not self._threads.closed.is_set():
            self._threads.put(Finding("silent", ALL_GPUS, why, section.silent))
            self._retry_at = self._clock.monotonic() + RETRY_SECONDS

    def _restart_if_due(self, section: HealthSection) -> None:
        """Starts another process, unless the one before still hangs in the driver."""
        if self._clock.monotonic() >= self._retry_at and not self.pids:
            self._start(section)

    def _forward(self, output: IO[bytes], section: HealthSection) -> str | None:
        """Passes the messages on; returns why they have ended, None: there is nothing to read."""
        limit = section.poll_seconds + section.answer_seconds
        awake = Awake(self._clock, beyond_seconds=max(limit, START_SECONDS) + 1)
        until, partial = awake.now() + max(limit, START_SECONDS), b""
        with output:
            while (left := until - awake.now()) > 0:
                if not select.select([output], [], [], left)[0]:
                    continue
                data = os.read(output.fileno(), 65536)
                if not data:
                    return "the process that reads them has ended"
                *lines, partial = (partial + data).split(b"\n")
                partial = partial[-MAX_LINE:]
                for line in lines:
                    if (message := _decoded(line)) is None:
                        continue
                    self._threads.put(message)
                    if isinstance(message, WatchUnavailable):
                        return None
                    if not isinstance(message, XidReported):  # The kernel's log is no answer.
                        until = awake.now() + limit
        return f"NVIDIA's library (NVML) has not answered for {section.answer_seconds:g} s"


def _decoded(line: bytes) -> Message | None:
    """Returns the message of a line; None: it is none, as other output of the process."""
    try:
        return MESSAGES.decode(json.loads(line))
    except (ValueError, AttributeError, RecursionError):
        return None
