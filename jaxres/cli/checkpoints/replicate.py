"""`jaxres checkpoints replicate`: copies a run's committed steps and log to a second place.

With `--follow` it goes on with every new step. A supervisor starts it that way, as a process of its
own (supervisor/companions/replica_process.py), and reads the replica's progress in
`RUN_DIR/replica.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import select
import sys
import threading
from collections.abc import Iterator

from jaxres import faults
from jaxres.checkpoint.replica import Replica, ReplicaUpdate
from jaxres.checkpoint.throttle import BandwidthLimit
from jaxres.clock import Clock
from jaxres.config.argparser import require_writable
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, RunError, UsageError
from jaxres.runlog import replica_files
from jaxres.runlog.paths import RunDir
from jaxres.runlog.replica_files import Diverged, ReplicaProgress
from jaxres.storage.path import RunPath, run_root
from jaxres.storage.threads import make_thread
from jaxres.supervisor.run_lock import RunLock, heartbeat_interval_seconds
from jaxres.telemetry import stdio
from jaxres.telemetry.stdio import format_bytes

POLL_SECONDS = 2.0
"""Seconds between two looks at the source's log."""
LONGEST_RETRY_SECONDS = 60.0
NICE = 10
"""Lower priority of a copier beside training."""
DAMAGED = 1
"""Exit code if a step is damaged in the source, which is not copied."""


def run(options: argparse.Namespace, *, clock: Clock) -> int:
    """Runs the command and returns its exit code.

    Raises:
      UsageError, ConfigError: the places or the limit can't be used; nothing was changed.
      Fenced: a run goes on in the second place, or another process copies to it.
      StorageUnavailable: without `--follow`, a place failed; the same command goes on.
    """
    rate = options.max_mb_per_second
    if rate is not None and not 0 < rate < float("inf"):
        raise UsageError("--max-mb-per-second: expected a number above 0")
    source, target = RunDir(_root(options.run_dir)), RunDir(_root(options.to))
    limit = BandwidthLimit(None if rate is None else rate * 1e6, clock=clock)
    replica = Replica(source, target, limit=limit, clock=clock)
    if options.until_stdin_closes:
        os.nice(NICE)
    if options.follow:
        report = Reporter(source, target, is_on=options.until_stdin_closes)
        return _follow(replica, target, options, report=report, clock=clock)
    require_writable("checkpoints replicate", target.root)
    replica.has_news()
    done = _update(replica, target, clock=clock)
    _show(done, target, as_json=options.json)
    return DAMAGED if done.damaged else ExitCode.DONE


def _root(path: RunPath) -> RunPath:
    try:
        return run_root(path)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _update(replica: Replica, target: RunDir, *, clock: Clock) -> ReplicaUpdate:
    replica.check()
    with RunLock(target, clock=clock) as lock, _heartbeats(lock, target):
        return replica.update()


@contextlib.contextmanager
def _heartbeats(lock: RunLock, run_dir: RunDir) -> Iterator[None]:
    """Writes the lock's heartbeat while the block runs."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(heartbeat_interval_seconds(run_dir)):
            with contextlib.suppress(RunError, OSError):  # The copy itself reports it.
                lock.heartbeat()

    thread = make_thread("replica-heartbeat", beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(done: ReplicaUpdate, target: RunDir, *, as_json: bool) -> None:
    for step, evidence in done.damaged.items():
        stdio.eprint(
            f"step {step}: damaged in the source and not copied: {evidence}. Older steps stay in "
            "the replica\n"
        )
    if as_json:
        text = json.dumps({"replica": str(target.root), **dataclasses.asdict(done)})
    else:
        copied = ", ".join(map(str, sorted(done.copied))) or "none"
        text = f"{target.root}: has step {done.step}; copied now: {copied}"
        text += f", {format_bytes(done.num_bytes)}" * bool(done.copied)
        text += f"; deleted, as in the source: {', '.join(done.pruned)}" * bool(done.pruned)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Reporter:
    """Writes `RUN_DIR/replica.json`, which `status` and the supervisor read."""

    def __init__(self, source: RunDir, target: RunDir, *, is_on: bool) -> None:
        self._source, self._is_on = source, is_on
        self._progress = ReplicaProgress(str(target.root))
        if is_on and (before := replica_files.read_progress(source)) is not None:
            self._progress = before if before.path == str(target.root) else self._progress

    def show(self, done: ReplicaUpdate) -> None:
        """Writes the progress of the replica."""
        error = "".join(f"step {step}: {what}; " for step, what in done.damaged.items())
        self._write(ReplicaProgress(self._progress.path, done.seq, done.step, error.rstrip("; ")))

    def failed(self, error: RunError) -> None:
        """Writes why a copy has failed."""
        self._write(dataclasses.replace(self._progress, error=str(error)))

    def _write(self, progress: ReplicaProgress) -> None:
        if self._is_on and progress != self._progress:
            with contextlib.suppress(RunError):  # The source's disk may be full.
                replica_files.write_progress(self._source, progress)
                self._progress = progress


def _follow(
    replica: Replica, target: RunDir, options: argparse.Namespace, *, report: Reporter, clock: Clock
) -> int:
    """Copies every new step until a signal, or until standard input closes."""
    wait, code, error = 0.0, int(ExitCode.DONE), ""
    while True:
        is_last = _wait(wait, clock, until_stdin_closes=options.until_stdin_closes)
        try:
            if replica.has_news():
                done = _update(replica, target, clock=clock)
                _show(done, target, as_json=options.json)
                report.show(done)
                code = DAMAGED if done.damaged else ExitCode.DONE
            wait, error = POLL_SECONDS, ""
        except (ConfigError, UsageError, Diverged) as end:
            report.failed(end)
            raise
        except RunError as end:
            report.failed(end)
            if is_last:
                raise
            if type(end).__name__ != error:
                text = faults.by_phase(end, at_start=False)
                stdio.eprint(f"replica: {text} It is tried again; nothing committed is lost.\n")
            wait, error = min(2 * max(wait, 1.0), LONGEST_RETRY_SECONDS), type(end).__name__
        if is_last:
            return code


def _wait(seconds: float, clock: Clock, *, until_stdin_closes: bool) -> bool:
    """Waits; returns whether standard input has closed."""
    if until_stdin_closes:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    clock.sleep(seconds)
    return False
