"""Incidents in the run directory, of supervisors that send no alerts themselves.

On a VM of `launch gce`, and on every host but the first of `jaxres train`, a supervisor writes its
incidents to a file of its own. The launcher, or the supervisor of host 0, reads and sends them.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterable
from typing import Any

from jaxres.clock import Clock
from jaxres.faults import RunError
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.storage import codec, files
from jaxres.storage.line_writer import LineWriter, open_line_writer
from jaxres.storage.threads import make_thread
from jaxres.telemetry import incidents
from jaxres.telemetry.incidents import Incident

MAX_WAITING = 1000
"""Most incidents that wait in memory while storage does not answer."""
RETRY_SECONDS = 2.0
"""Time until the file is opened again if storage has not answered."""
CLOSE_SECONDS = 3.0
"""Longest delay of the exit for incidents that are not written yet."""


class IncidentRecorder:
    """Writes the incidents of one attempt on this host, in a thread; a context manager.

    The thread starts with the first incident, so an attempt without one has no file.
    """

    def __init__(self, run_dir: RunDir, *, host: int, clock: Clock) -> None:
        self._run_dir, self._host, self._clock = run_dir, host, clock
        self._queue: queue.Queue[tuple[float, Incident] | None] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> IncidentRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_SECONDS)

    def send(self, incident: Incident) -> None:
        """Queues an incident and returns at once, from any thread."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((self._clock.wall(), incident))
        with self._lock:
            if self._thread is None:
                self._thread = make_thread("incidents", self._run, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        lines: LineWriter | None = None
        while (item := self._queue.get()) is not None:
            time, incident = item
            while lines is None:
                path = self._run_dir.incidents(incident.attempt) / file_name(self._host)
                with contextlib.suppress(RunError, OSError):
                    lines = open_line_writer(
                        path, max_waiting=MAX_WAITING, on_overflow="drop oldest"
                    )
                if lines is None and self._closing.wait(RETRY_SECONDS):
                    return
            lines.append(json.dumps(line(incident, time=time)).encode())
        if lines is not None:
            lines.close()


def file_name(host: int) -> str:
    """Returns the name of a host's file.

    >>> file_name(3)
    'host003.jsonl'
    """
    return f"host{host:03d}.jsonl"


def line(incident: Incident, *, time: float) -> dict[str, Any]:
    """Returns one line of a file."""
    return {"time": time, "incident": codec.encode(incident)}


class RecordedIncidents:
    """Reads the incidents that supervisors have written; each is returned once."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._sizes: dict[int, dict[str, int]] = {}
        """Sizes of the files of an attempt when they were read last."""
        self._num_read: dict[tuple[int, str], int] = {}
        """Number of lines that were read, by attempt and file."""

    def read_new(self, attempts: Iterable[int]) -> list[tuple[float, Incident]]:
        """Returns the incidents of these attempts that are new, with their times.

        Raises:
          RunError: storage does not answer; those that are not returned are read again.
        """
        found: list[tuple[float, Incident]] = []
        num_read, new_sizes = dict(self._num_read), dict(self._sizes)
        for attempt in attempts:
            folder = self._run_dir.incidents(attempt)
            sizes = files.sizes(folder)
            if sizes == self._sizes.get(attempt, {}):
                continue
            for name in sorted({path.partition("/")[0] for path in sizes}):
                rows = read_json_lines(folder / name)
                first = num_read.get((attempt, name), 0)
                found += [item for row in rows[first:] if (item := _parse(row)) is not None]
                num_read[attempt, name] = len(rows)
            new_sizes[attempt] = sizes
        self._num_read, self._sizes = num_read, new_sizes
        return found


def _parse(row: dict[str, Any]) -> tuple[float, Incident] | None:
    """Returns the incident of a line with its time; None: it was written by another version."""
    try:
        return incidents.parse(row.get("incident"), time=row.get("time"))
    except ValueError:
        return None
