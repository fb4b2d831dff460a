"""Reads a launcher's inputs of each cycle from the bucket, and measures the wait. No jax.

The requests of a cycle are sent at the same time: their number does not depend on the number of
VMs, and a cycle takes as long as the slowest of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jaxres.clock import Clock
from jaxres.faults import Unrestorable
from jaxres.launch.gce.state import run_speed
from jaxres.launch.gce.state.observed_state import RunLogSummary
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.runlog import faulty_hosts, run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects, threads

MAX_REQUESTS = 8
"""Most requests to the bucket at the same time."""
LEFT_OUT_SECONDS = 5.0
"""Time between two reads of the hosts that the run leaves out, unless the run log has news."""
LEFT_OUT_REQUESTS = 2
"""Fewest requests, one after the other, that such a read takes."""
T = TypeVar("T")
Listed = Mapping[str, tuple[int, Mapping[str, str]]]


@dataclass
class BucketReader:
    """Reads the reports of the agents, the requests to end, and the run log, for one launcher."""

    paths: LaunchPaths
    clock: Clock
    console: Callable[[str], None]
    log: RunLogSummary = field(default_factory=RunLogSummary)
    """The run log as it was read last."""
    waited: float = 0.0
    """Longest wait for one answer of the bucket since it was set to 0."""
    _records: list[run_log.Record] = field(default_factory=list[run_log.Record])
    _left_out_at: float = -LEFT_OUT_SECONDS
    """When the hosts that the run leaves out were read last."""

    def __post_init__(self) -> None:
        self._warn_once = functools.cache(self.console)  # Each cycle reads the same files again.

    @contextlib.contextmanager
    def count_wait(self, *, requests: int = 1) -> Iterator[None]:
        """Counts the time spent in the block as the wait of so many requests, one after the other.

        A bucket whose answers take 0.4 s each answers, however many requests a cycle makes.
        """
        began = self.clock.monotonic()
        try:
            yield
        finally:
            self._add_wait((self.clock.monotonic() - began) / requests)

    def _add_wait(self, seconds: float) -> None:
        self.waited = max(self.waited, seconds)

    def _timed(self, call: Callable[[], T]) -> Callable[[], tuple[T, float]]:
        """Returns a call that returns its duration, too."""

        def run() -> tuple[T, float]:
            began = self.clock.monotonic()
            return call(), self.clock.monotonic() - began

        return run

    def read(self) -> tuple[Listed, bool, bool]:
        """Reads the run log, and returns the agents' reports and whether there are two requests.

        Returns the generation and metadata of each report by name; whether there is a request to
        save and stop; whether there is one to end at once.

        Raises:
          StorageUnavailable: the bucket does not answer.
        """
        reports = self._timed(lambda: gcs_objects.list_metadata(self.paths.reports))
        stop = self._timed(lambda: gcs_objects.stat(self.paths.stop))
        down = self._timed(lambda: gcs_objects.stat(self.paths.down))
        calls: list[Callable[[], tuple[Any, float]]] = [
            *(self._timed(self._read_records), stop, down, reports)
        ]
        known = run_log.last_seq(self._records)
        (records, seconds), *others = threads.call_all(calls, most=MAX_REQUESTS)
        requests = 1 + run_log.last_seq(records) - known  # One for each new record, at least.
        self._add_wait(seconds / requests)
        for _, seconds in others:
            self._add_wait(seconds)
        self._use(records, has_news=run_log.last_seq(records) > known)
        (has_stop, _), (has_down, _), (listed, _) = others
        return listed, has_stop is not None, has_down is not None

    def _read_records(self) -> list[run_log.Record]:
        """Returns the run log; as it was before if it is damaged now."""
        try:
            return run_log.read_records(RunDir(self.paths.run).log)
        except Unrestorable as error:  # The hosts decide what follows; VMs must still be ended.
            self._warn_once(f"{error} The launcher continues with what it has read before")
            return self._records

    def _use(self, records: list[run_log.Record], *, has_news: bool) -> None:
        """Takes over the records of the log, and reads which hosts the run leaves out."""
        if has_news:
            self._records = records
            history = run_log.fold(self._records)
            end = history.last_stop
            self.log = RunLogSummary(
                history.step,
                run_log.last_seq(records),
                end.body if end and isinstance(end.body, run_log.AttemptEnded) else None,
                end.seq if end else 0,
                run_speed.longest_wait(run_log.in_force(self._records)),
                run_speed.measure(self._records),
            )
        now = self.clock.monotonic()
        if has_news or now - self._left_out_at >= LEFT_OUT_SECONDS:  # `jaxres hosts` always works.
            self._left_out_at = now
            with self.count_wait(requests=LEFT_OUT_REQUESTS):
                run_dir = RunDir(self.paths.run)
                left_out = faulty_hosts.read(run_dir, self._records, warn=self._warn_once)
            self.log = replace(self.log, faulty_hosts=left_out)
