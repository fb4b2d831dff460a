"""Lock on a run directory: a kernel file lock where available, and the lock holder's heartbeat.

The lock holder rewrites `owner.json` every second, with a count that never repeats. Another process
that finds the lock taken watches that count on its own clock. If the count changes, the holder is
alive and the other process is refused. If it does not change for three heartbeats, the other one
continues to its claim, and the run log fences the old holder. The run log alone decides; lock and
heartbeat only keep healthy holders from being fenced.

A holder marks its heartbeat as released when it exits. The heartbeat also has an id of the holder's
process, so that on the same machine it is known whether that process still exists.

In a bucket there is no file lock, and the heartbeat is written every five seconds. The first
heartbeat replaces exactly the object generation that was read: of several processes that start at
once, one gets the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any, Literal

from jaxres.clock import Clock
from jaxres.faults import Fenced, RunError
from jaxres.host.proc_stat import process_exists, process_id
from jaxres.runlog.paths import RunDir
from jaxres.storage import codec, files, gcs_objects
from jaxres.storage.path import is_remote
from jaxres.storage.timeouts import CallTimeout, call_with_timeout

HEARTBEAT_SECONDS = 1.0
BUCKET_HEARTBEAT_SECONDS = 5.0
"""GCS accepts about one write per second to one object, and bills each write."""
MISSED_HEARTBEATS = 3
POLL_SECONDS = 0.1
HEARTBEAT_BYTES = 511
PROGRESS = "progress"
"""Key of the progress in a heartbeat."""
RELEASE_SECONDS = 1.0
"""Longest wait for storage at the exit; without the mark, the heartbeat only looks recent."""
MAX_TIME = 1e11
"""Largest time stamp of a heartbeat that is taken for one, in seconds since 1970."""

Liveness = Literal["alive", "suspended", "gone"]
"""State of the lock holder: its heartbeat advances; its process exists on this machine but writes
no heartbeat (suspended, or it hangs in storage); neither."""


@dataclass(frozen=True)
class TrainingProgress:
    """The newest step of the attempt that the lock holder runs, as its heartbeat has it."""

    attempt: int
    step: int
    loss: float | None
    """None: not finite."""
    tokens_per_second: float | None
    """None: this is the first step of the attempt."""


class RunLock:
    """Holds the lock on a run directory until closed or killed; a context manager.

    Raises:
      Fenced: on entering, if a live process holds the lock; nothing was written.
    """

    def __init__(self, run_dir: RunDir, *, clock: Clock) -> None:
        self.run_dir = run_dir
        self.clock = clock
        self._nonce = secrets.token_hex(8)
        self._process = process_id(os.getpid())
        self._count = 0
        self._locked = False
        self._is_abandoned = False
        self._files: list[int] = []
        """Descriptors of the lock file and, once the lock is held, of the heartbeat file."""
        self._generation: int | None = None
        """Object generation of the newest heartbeat in a bucket."""
        self._heartbeat_at = -math.inf
        """When that heartbeat was written, on the clock."""
        self._progress: TrainingProgress | None = None

    def __enter__(self) -> RunLock:
        if self.run_dir.is_remote:
            self._take_over_in_bucket()
            return self
        files.make_dir(self.run_dir.root)
        path = self.run_dir.lock
        with files.typed_errors(path):
            self._files = [files.only_files(str(path), os.O_RDWR | os.O_CREAT)]
        try:
            self._locked = self._lock()
            if not self._locked or _was_unlocked(read(self.run_dir)):
                self._refuse_if_alive(read(self.run_dir))
            self.heartbeat()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is None and self._generation is not None and not self._is_abandoned:
            with contextlib.suppress(RunError):  # The next process then waits for three heartbeats.
                self._write_to_bucket({**self._fields(), "released": True}, over=self._generation)
        if len(self._files) > 1 and not self._is_abandoned:  # It has written a heartbeat.
            try:
                call_with_timeout(self._release, seconds=RELEASE_SECONDS)
            except CallTimeout:
                self.abandon()
            except (RunError, OSError):  # The heartbeat looks recent for some seconds.
                pass
        while self._files and not self._is_abandoned:
            os.close(self._files.pop())

    def abandon(self) -> None:
        """Keeps the files open until the process exits: a thread may hang in a write to them."""
        self._is_abandoned = True

    def heartbeat(self, progress: TrainingProgress | None = None) -> None:
        """Writes a heartbeat; takes the file lock if its previous holder has released it."""
        self._progress = progress
        if not self._locked:
            self._locked = self._lock()
        self._count += 1
        fields = self._fields()
        if self.run_dir.is_remote:
            if self.clock.monotonic() - self._heartbeat_at > HEARTBEAT_SECONDS:
                self._heartbeat_at = self.clock.monotonic()
                self._write_to_bucket(fields, over=None)
            return
        self._write_to_disk(fields)

    def _write_to_disk(self, fields: dict[str, Any]) -> None:
        """Writes in place and at constant size: a full disk does not stop the heartbeat."""
        line = json.dumps(fields).encode().ljust(HEARTBEAT_BYTES) + b"\n"
        with files.typed_errors(self.run_dir.owner):
            os.pwrite(self._heartbeat_file(), line, 0)

    def _release(self) -> None:
        """Marks the heartbeat as released, with its count unchanged; never a successor's."""
        newest = read(self.run_dir)
        if newest is not None and newest["nonce"] == self._nonce:
            self._write_to_disk({**self._fields(), "released": True})

    def _take_over_in_bucket(self) -> None:
        """Replaces the heartbeat of a dead or released holder by this process's first one."""
        assert is_remote(self.run_dir.owner)
        self._count = 1
        while self._generation is None:  # None: another process was faster; read its heartbeat.
            data, generation = gcs_objects.read_at(self.run_dir.owner) or (b"", 0)
            owner = _decode(data)
            if not _is_released(owner):
                self._refuse_if_alive(owner)
            self._heartbeat_at = self.clock.monotonic()
            self._write_to_bucket(self._fields(), over=generation)

    def _fields(self) -> dict[str, Any]:
        progress = {} if self._progress is None else {PROGRESS: codec.encode(self._progress)}
        return {
            **progress,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "nonce": self._nonce,
            "count": self._count,
            "locked": self._locked,
            "time": self.clock.wall(),
            "process": self._process,
        }

    def _write_to_bucket(self, fields: dict[str, Any], *, over: int | None) -> None:
        assert is_remote(self.run_dir.owner)
        data = json.dumps(fields).encode()
        self._generation = gcs_objects.write(self.run_dir.owner, data, over=over)

    def _heartbeat_file(self) -> int:
        assert not is_remote(self.run_dir.owner)
        if len(self._files) == 1:
            owner = files.only_files(str(self.run_dir.owner), os.O_RDWR | os.O_CREAT)
            self._files.append(owner)
            if os.fstat(self._files[1]).st_size > HEARTBEAT_BYTES + 1:  # No heartbeat of jaxres.
                os.ftruncate(self._files[1], HEARTBEAT_BYTES + 1)
        return self._files[1]

    def _lock(self) -> bool:
        if not self._files:
            return False
        try:
            fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return False
            raise
        return True

    def _refuse_if_alive(self, before: dict[str, Any] | None) -> None:
        """Watches the heartbeat for three intervals; raises Fenced if it changes."""
        seconds = MISSED_HEARTBEATS * heartbeat_interval_seconds(self.run_dir) + POLL_SECONDS
        deadline = self.clock.monotonic() + seconds
        while self.clock.monotonic() < deadline:
            self.clock.sleep(POLL_SECONDS * heartbeat_interval_seconds(self.run_dir))
            now = read(self.run_dir)
            if now is not None and _heartbeat_id(now) != _heartbeat_id(before):
                raise Fenced(
                    f"{self.run_dir.root}: owned by host {now['host']}, pid {now['pid']}, which "
                    "is alive. Nothing was written. Run `jaxres status`, or stop it first."
                )
            if not self._locked and self._lock():
                self._locked = True
                if not _was_unlocked(now):
                    return


def heartbeat_interval_seconds(run_dir: RunDir) -> float:
    """Returns the heartbeat interval of this run's lock holder."""
    return BUCKET_HEARTBEAT_SECONDS if run_dir.is_remote else HEARTBEAT_SECONDS


def _is_released(owner: dict[str, Any] | None) -> bool:
    """Whether the run surely has no lock holder, so that no heartbeat has to be awaited."""
    return owner is None or bool(owner.get("released")) or _process_exists(owner) is False


def _process_exists(owner: dict[str, Any]) -> bool | None:
    """Whether the lock holder's process exists; None: unknown, on another machine or container."""
    recorded = owner.get("process")
    return process_exists(recorded) if isinstance(recorded, str) else None


def _heartbeat_id(owner: dict[str, Any] | None) -> tuple[Any, Any] | None:
    return None if owner is None else (owner["nonce"], owner["count"])


def _was_unlocked(owner: dict[str, Any] | None) -> bool:
    """Whether the last holder had no file lock, so that a free file lock proves nothing."""
    return owner is not None and not owner["locked"]


def read(run_dir: RunDir) -> dict[str, Any] | None:
    """Returns the newest heartbeat: host, pid, nonce, count, locked, time, process.

    None: there is no file, or its content is no heartbeat.
    """
    return _decode(files.read(run_dir.owner))


def progress_of(run_dir: RunDir) -> TrainingProgress | None:
    """Returns the progress in the newest heartbeat; None: it has none."""
    with contextlib.suppress(ValueError):
        return codec.decode(TrainingProgress, (read(run_dir) or {}).get(PROGRESS))
    return None


_FIELDS: dict[str, tuple[type, ...]] = {
    "host": (str,),
    "pid": (int,),
    "nonce": (str,),
    "count": (int,),
    "locked": (bool,),
    "time": (int, float),
}


def _decode(data: bytes | None) -> dict[str, Any] | None:
    try:
        fields = json.loads(data or b"null")
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    if any(type(fields.get(name)) not in types for name, types in _FIELDS.items()):
        return None
    return fields if 0 <= fields["time"] < MAX_TIME else None  # False for NaN.


def liveness(run_dir: RunDir, *, clock: Clock, watch: bool = False) -> Liveness:
    """Returns whether the lock holder is alive, suspended or gone, by its heartbeat; for display.

    A recent time stamp proves life; clocks differ, so an old one of a process that exists, or one
    of the future, proves nothing: then the heartbeat is watched for three intervals, as it always
    is with `watch`.
    """
    owner = read(run_dir)
    if owner is None or _is_released(owner):
        return "gone"
    limit = MISSED_HEARTBEATS * heartbeat_interval_seconds(run_dir)
    age, exists = clock.wall() - owner["time"], _process_exists(owner)
    if not watch and abs(age) < limit:
        return "alive"
    if (watch or exists or age < 0) and heartbeat_advances(run_dir, clock=clock, seconds=limit):
        return "alive"
    return "suspended" if exists else "gone"


def heartbeat_advances(run_dir: RunDir, *, clock: Clock, seconds: float) -> bool:
    """Whether the heartbeat changes within some seconds; independent of wall clocks."""
    before, deadline = _heartbeat_id(read(run_dir)), clock.monotonic() + seconds
    while clock.monotonic() < deadline:
        clock.sleep(POLL_SECONDS)
        now = _heartbeat_id(read(run_dir))
        if now is not None and now != before:
            return True
    return False
