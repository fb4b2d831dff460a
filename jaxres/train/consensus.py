"""Consensus of the hosts on stops and saves: the flags of every host go through the step itself.

Every host passes its flags (a requested stop or save, its busy seconds) with the batch. The step
returns the flags of all hosts, and `process_completed` reads them at a fixed lag. So all hosts have
the same information at the same step, whenever and wherever a request arrived, and no message can
overtake a dispatch. docs/adr/0007 describes the alternative that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxres.engine import guards
from jaxres.engine import mesh as meshes
from jaxres.engine.guards import most_severe
from jaxres.exit_codes import STOP_REQUESTS, ExitCode
from jaxres.faults import Continue, StopRun, Verdict, fault
from jaxres.train.checks.host_times import LocalTimes, MeanTimes, Times
from jaxres.train.stop_requests import StopRequests

FACTS = (
    *("stop", "save", "storage", "busy_seconds", "no_batch", "data_seconds", "probe_seconds"),
    "is_keeping",
)
"""Names of the columns of the array of flags; see HostFlags."""


@dataclass(frozen=True)
class HostFlags:
    """Flags of one host at one step, of which each of its devices has a row.

    A stop is encoded as its index in STOP_REQUESTS; the maximum over the hosts wins. index +
    len(STOP_REQUESTS) is the same stop without time to save; one such host decides for all.
    """

    stop: ExitCode | None = None
    has_time: bool = True
    """Whether there is time to save before the stop."""
    save: bool = False
    storage: bool = False
    """Whether too many saves have failed in a row; only host 0 sets it."""
    busy_seconds: float = 0.0
    """How long this host worked for a step, without waits for other hosts; see host_times.py."""
    no_batch: bool = False
    """Whether this host has bad records at this step, and other rows replace its own."""
    data_seconds: float = 0.0
    """The part of it in which it got the batch."""
    probe_seconds: float = 0.0
    """Duration of the probe on the device of this row; 0: none yet."""
    is_keeping: bool = False
    """Whether this host is still writing or sending a state to host memory."""

    def encode(self) -> np.ndarray:
        """Returns the flags as float32[len(FACTS)]."""
        stop = STOP_REQUESTS.index(self.stop) + len(STOP_REQUESTS) * (not self.has_time)
        times = (self.data_seconds, self.probe_seconds)
        values = [stop, self.save, self.storage, self.busy_seconds, self.no_batch, *times]
        values.append(self.is_keeping)
        return np.asarray(values, np.float32)

    @staticmethod
    def decode(facts: np.ndarray) -> HostFlags:
        """Returns the flags that `encode` has encoded.

        >>> flags = HostFlags(ExitCode.STOPPED, save=True, busy_seconds=0.5)
        >>> HostFlags.decode(flags.encode()) == flags
        True
        """
        stop, save, storage, seconds, no_batch, *times, keeping = map(float, facts)
        no_time, number = divmod(int(stop), len(STOP_REQUESTS))
        flags = STOP_REQUESTS[number], not no_time, save > 0, storage > 0, seconds, no_batch > 0
        return HostFlags(*flags, *times, is_keeping=keeping > 0)


class Consensus(Protocol):
    """Interface of the stops and saves that all hosts have agreed on; equal on every host."""

    def local_flags(self, *, times: LocalTimes | None, no_batch: bool = False) -> Any:
        """Returns this host's flags as input of the next step; None with a single host.

        Args:
          times: this host's times for that step; None: not a training step.
          no_batch: whether other rows replace this host's rows, which can't be used.
        """
        ...

    def on_flags(self, facts: np.ndarray) -> Times:
        """Reads the flags of all hosts that a completed step has returned; returns their times."""
        ...

    def any_host_without_batch(self) -> bool:
        """Returns whether any host had bad records at the step that was read last."""
        ...

    def any_host_keeping(self) -> bool:
        """Returns whether any host was still writing a state to host memory at that step."""
        ...

    def verdict(self) -> Verdict:
        """Returns the stop that any host has requested or that failed saves require."""
        ...

    def save_requested(self) -> bool:
        """Returns whether any host has requested an extra save since the last one."""
        ...

    def clear_save_request(self) -> None:
        """Clears the request for an extra save."""
        ...


def never() -> bool:
    """Default of `is_due` and `is_keeping`: always False (no time-based saves, no memory tier)."""
    return False


class SingleHostConsensus:
    """Consensus of a single host: its own requests take effect at once."""

    def __init__(
        self,
        requests: StopRequests,
        storage: Callable[[], Verdict],
        *,
        is_due: Callable[[], bool] = never,
    ) -> None:
        self._requests = requests
        self._storage = storage
        self._is_due = is_due
        self._means = MeanTimes()
        self._times = Times()

    def local_flags(self, *, times: LocalTimes | None, no_batch: bool = False) -> None:
        """Keeps the times (single host)."""
        means = self._means.add(times)
        self._times = Times(
            (means.busy_seconds,), (means.data_seconds,), tuple(means.probe_seconds.values())
        )

    def on_flags(self, facts: np.ndarray) -> Times:
        """Returns the newest times (single host)."""
        return self._times

    def any_host_without_batch(self) -> bool:
        """Returns False: a single host runs no step without its rows."""
        return False

    def any_host_keeping(self) -> bool:
        """Returns False: a single host asks its own memory tier."""
        return False

    def verdict(self) -> Verdict:
        """Returns the requested stop, or the one that failed saves require.

        Of two with the same severity the first wins, so that a requested stop keeps its exit code
        on a full disk.
        """
        stop, has_time = self._requests.requested_stop(), self._requests.may_save()
        return most_severe([guards.judge(stop, has_time=has_time), self._storage()])

    def save_requested(self) -> bool:
        """Returns whether a save is requested since the last one, or is due by the clock."""
        return self._requests.save_requested() or self._is_due()

    def clear_save_request(self) -> None:
        """Clears the request for an extra save."""
        self._requests.clear_save_request()


class StepConsensus:
    """Consensus of several hosts: only results of a completed step take effect."""

    def __init__(
        self,
        requests: StopRequests,
        storage: Callable[[], Verdict],
        *,
        mesh: Mesh,
        is_due: Callable[[], bool] = never,
        is_keeping: Callable[[], bool] = never,
    ) -> None:
        self._requests = requests
        self._storage = storage
        self._is_due = is_due
        self._is_keeping = is_keeping
        self._place, self._local, self._rows = _transfer(mesh)
        self._stop: ExitCode | None = None
        self._has_time = True
        self._storage_stop = False
        self._save = False
        self._no_batch = False
        self._any_keeping = False
        self._means = MeanTimes()
        self._placed: tuple[tuple[HostFlags, ...], jax.Array] | None = None

    def local_flags(self, *, times: LocalTimes | None, no_batch: bool = False) -> jax.Array:
        """Returns this host's flags as an array on its devices."""
        means = self._means.add(times)
        own = HostFlags(
            stop=self._requests.requested_stop(),
            has_time=self._requests.may_save(),
            save=self._requests.save_requested() or self._is_due(),
            storage=isinstance(self._storage(), StopRun),
            busy_seconds=means.busy_seconds,
            no_batch=no_batch,
            data_seconds=means.data_seconds,
            is_keeping=self._is_keeping(),
        )
        probes = means.probe_seconds
        flags = tuple(replace(own, probe_seconds=probes.get(one, 0.0)) for one in self._local)
        if self._placed is None or self._placed[0] != flags:
            self._placed = flags, self._place([one.encode() for one in flags])
        return self._placed[1]

    def on_flags(self, facts: np.ndarray) -> Times:
        """Folds in the flags of all hosts at one step."""
        rows = facts.reshape(-1, len(FACTS))
        hosts = [HostFlags.decode(row) for row in rows[self._rows]]
        self._stop = max(self._stop, *(host.stop for host in hosts), key=STOP_REQUESTS.index)
        self._has_time &= all(host.has_time for host in hosts)
        self._save |= any(host.save for host in hosts)
        self._storage_stop |= any(host.storage for host in hosts)
        self._no_batch = any(host.no_batch for host in hosts)
        self._any_keeping = any(host.is_keeping for host in hosts)
        return Times(
            tuple(host.busy_seconds for host in hosts),
            tuple(host.data_seconds for host in hosts),
            tuple(map(float, rows[:, FACTS.index("probe_seconds")])),
        )

    def any_host_without_batch(self) -> bool:
        """Returns whether any host had bad records at the step that was read last."""
        return self._no_batch

    def any_host_keeping(self) -> bool:
        """Returns whether any host was still writing a state to host memory at that step."""
        return self._any_keeping

    def verdict(self) -> Verdict:
        """Returns the stop that all hosts have received."""
        storage: Verdict = Continue()
        if self._storage_stop:
            own = self._storage()
            reason = "too many saves in a row have failed on host 0"
            storage = (
                own if isinstance(own, StopRun) else StopRun(fault("storage_unavailable"), reason)
            )
        return most_severe([guards.judge(self._stop, has_time=self._has_time), storage])

    def save_requested(self) -> bool:
        """Returns whether any host has requested an extra save since the last one."""
        return self._save

    def clear_save_request(self) -> None:
        """Clears the requests for an extra save: the agreed one and this host's own."""
        self._save = False
        self._requests.clear_save_request()


def facts_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of the array of all hosts' flags."""
    sharding = meshes.row_per_device(mesh)
    return jax.ShapeDtypeStruct((mesh.size, len(FACTS)), np.float32, sharding=sharding)


def _transfer(
    mesh: Mesh,
) -> tuple[Callable[[Sequence[np.ndarray]], jax.Array], Sequence[Any], Sequence[int]]:
    """Returns a function that places flags, their devices, and one row index of every host."""
    shape = facts_shape(mesh)
    sharding = shape.sharding
    assert sharding is not None
    local = list(sharding.addressable_devices)
    hosts = [device.process_index for device in mesh.devices.flat]
    rows = [hosts.index(host) for host in sorted(set(hosts))]

    def place(flags: Sequence[np.ndarray]) -> jax.Array:
        pieces = jax.device_put([row[None] for row in flags], local)
        return jax.make_array_from_single_device_arrays(shape.shape, sharding, pieces)

    return place, local, rows
