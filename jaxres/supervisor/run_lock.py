"""Who may train in a run directory: a kernel lock where there is one, and the owner's beat.

The owner rewrites `owner.json` every second, with a count that never repeats. Another process that
finds the lock taken watches that count on its own clock: if it moves, the owner lives and the other
is refused; if it stands still for three beats, the other goes on to claim, and the log fences the
old owner. The log alone decides; lock and beat only keep healthy owners from being fenced.

In a bucket there is no lock and the beat comes every five seconds. So an owner that ends says that
it has left, and one of this very machine whose process is gone is seen to be dead. The first beat
is written over what was found there and over nothing else: of several starts at once one is owner.
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
from pathlib import Path
from typing import Any

from jaxres.clock import Clock
from jaxres.faults import Fenced, TypedEnd
from jaxres.runlog.paths import RunDir
from jaxres.storage import files, gcs_objects
from jaxres.storage.path import BucketPath

BEAT_SECONDS = 1.0
BUCKET_BEAT_SECONDS = 5.0
"""One name takes about one write a second, and each has its price."""
MISSED_BEATS = 3
LOOK_SECONDS = 0.1
BEAT_BYTES = 511


class Owner:
    """Owns a run directory until closed or killed; a context manager.

    Raises:
      Fenced: on entering, if another process owns the directory and lives; nothing was written.
    """

    def __init__(self, run_dir: RunDir, *, clock: Clock) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._nonce = secrets.token_hex(8)
        self._count = 0
        self._locked = False
        self._left_open = False
        self._files: list[int] = []
        """Descriptors of the lock and, once this process owns the directory, of the beat."""
        self._generation: int | None = None
        """Of the newest beat in a bucket."""
        self._beat_at = -math.inf
        """When that was."""

    def __enter__(self) -> Owner:
        if isinstance(self._run_dir.root, BucketPath):
            self._succeed_in_bucket()
            return self
        files.make_dir(self._run_dir.root)
        path = self._run_dir.lock
        with files.typed_errors(path):
            self._files = [os.open(path, os.O_RDWR | os.O_CREAT, 0o644)]
        try:
            self._locked = self._lock()
            if not self._locked or _was_unlocked(read(self._run_dir)):
                self._refuse_if_alive(read(self._run_dir))
            self.beat()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is None and self._generation is not None and not self._left_open:
            with contextlib.suppress(TypedEnd):  # Who comes next waits for three beats then.
                self._write_to_bucket({**self._words(), "left": True}, over=self._generation)
        while self._files and not self._left_open:
            os.close(self._files.pop())

    def leave_open(self) -> None:
        """Leaves lock and beat to the end of the process: somebody may hang in a write to them."""
        self._left_open = True

    def beat(self) -> None:
        """Shows that the owner lives; takes the lock if the one before has left it meanwhile."""
        if not self._locked:
            self._locked = self._lock()
        self._count += 1
        words = self._words()
        if isinstance(self._run_dir.owner, BucketPath):
            if self._clock.monotonic() - self._beat_at > BEAT_SECONDS:
                self._beat_at = self._clock.monotonic()
                self._write_to_bucket(words, over=None)
            return
        # In place and of one size: needs no space, so that a full disk does not stop the beat.
        line = json.dumps(words).encode().ljust(BEAT_BYTES) + b"\n"
        with files.typed_errors(self._run_dir.owner):
            os.pwrite(self._beat_file(), line, 0)

    def _succeed_in_bucket(self) -> None:
        """Writes the first beat over that of an owner that is gone."""
        assert isinstance(self._run_dir.owner, BucketPath)
        self._count = 1
        while self._generation is None:  # Else another was faster, and is to be looked at.
            data, generation = gcs_objects.read_at(self._run_dir.owner) or (b"", 0)
            there = _decoded(data)
            if not _has_left(there):
                self._refuse_if_alive(there)
            self._beat_at = self._clock.monotonic()
            self._write_to_bucket(self._words(), over=generation)

    def _words(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "nonce": self._nonce,
            "count": self._count,
            "locked": self._locked,
            "time": self._clock.wall(),
        }

    def _write_to_bucket(self, words: dict[str, Any], *, over: int | None) -> None:
        assert isinstance(self._run_dir.owner, BucketPath)
        data = json.dumps(words | {"process": _process(os.getpid())}).encode()
        self._generation = gcs_objects.write(self._run_dir.owner, data, over=over)

    def _beat_file(self) -> int:
        assert isinstance(self._run_dir.owner, Path)
        if len(self._files) == 1:
            self._files.append(os.open(self._run_dir.owner, os.O_RDWR | os.O_CREAT, 0o644))
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

    def _refuse_if_alive(self, seen: dict[str, Any] | None) -> None:
        """Watches the beat for as long as three of them take."""
        seconds = MISSED_BEATS * beat_seconds(self._run_dir) + LOOK_SECONDS
        deadline = self._clock.monotonic() + seconds
        while self._clock.monotonic() < deadline:
            self._clock.sleep(LOOK_SECONDS * beat_seconds(self._run_dir))
            now = read(self._run_dir)
            if now is not None and _who(now) != _who(seen):
                raise Fenced(
                    f"{self._run_dir.root}: owned by host {now['host']}, pid {now['pid']}, which "
                    "is alive. Nothing was written. Look with `jaxres status`, or end it first."
                )
            if not self._locked and self._lock():
                self._locked = True
                if not _was_unlocked(now):
                    return


def beat_seconds(run_dir: RunDir) -> float:
    """Returns how often an owner of this run beats."""
    return BUCKET_BEAT_SECONDS if isinstance(run_dir.root, BucketPath) else BEAT_SECONDS


def _process(pid: int) -> str | None:
    """Returns what tells a process from all others of all machines and boots; None: it is gone."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{pid}/{began}"
    except OSError:
        return None


def _has_left(owner: dict[str, Any] | None) -> bool:
    """Whether nobody owns the run for sure, so that no beats need be waited for."""
    if owner is None or owner.get("left"):
        return True
    there, pid = owner.get("process"), owner["pid"]
    here = _process(os.getpid())
    if there is None or here is None or there.split("/")[:2] != here.split("/")[:2]:
        return False  # On another machine, or in another container.
    return _process(pid) != there


def _who(owner: dict[str, Any] | None) -> tuple[Any, Any] | None:
    return None if owner is None else (owner["nonce"], owner["count"])


def _was_unlocked(owner: dict[str, Any] | None) -> bool:
    """Whether the last owner had no lock, so that a free lock says nothing about it."""
    return owner is not None and not owner["locked"]


def read(run_dir: RunDir) -> dict[str, Any] | None:
    """Returns the newest beat: host, pid, nonce, count, locked, time; None if there is none."""
    return _decoded(files.read(run_dir.owner))


def _decoded(data: bytes | None) -> dict[str, Any] | None:
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:
        return None


def is_alive(run_dir: RunDir, *, clock: Clock) -> bool:
    """Says whether the last beat is younger than three beats; for people, since clocks differ."""
    owner = read(run_dir)
    if owner is None or owner.get("left"):
        return False
    return clock.wall() - owner["time"] < MISSED_BEATS * beat_seconds(run_dir)


def moves(run_dir: RunDir, *, clock: Clock, seconds: float) -> bool:
    """Says whether the beat moves within some seconds, whatever the clocks say."""
    seen, deadline = _who(read(run_dir)), clock.monotonic() + seconds
    while clock.monotonic() < deadline:
        clock.sleep(LOOK_SECONDS)
        now = _who(read(run_dir))
        if now is not None and now != seen:
            return True
    return False
