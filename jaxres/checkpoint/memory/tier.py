"""Tier of checkpoints in host memory: the newest judged states, for a restart after a crash.

The files are in shared memory (storage/memory_folder.py), so they survive the worker but not the
machine; a neighbour may keep copies (neighbor.py). A state there is not committed: the run
log names committed steps only, and saves to the run directory do not depend on this tier. At a
restart it is used only if every host holds it whole or gets it back from its neighbour, the run log
still continues from it (`RunHistory.continues`), and every byte on every device has the digest that
was written. Wrong bytes close the tier for this and later attempts.

No failure here ends or delays training: the tier is closed, and an event has the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxres.checkpoint.memory import neighbor as memory_neighbor
from jaxres.checkpoint.memory.neighbor import CopyServer, Neighbor
from jaxres.checkpoint.memory.slots import (
    NUM_SLOTS,
    Key,
    MemoryDamaged,
    Slot,
    SlotPiece,
    StateKey,
    layout,
    oldest,
    parts_of,
    slot_bytes,
)
from jaxres.checkpoint.snapshot import SnapshotMemory, take_snapshot
from jaxres.checkpoint.state_arrays import Tree
from jaxres.checkpoint.throttle import UNTHROTTLED, Throttle
from jaxres.cluster.host_group import MESSAGE_SECONDS, HostGroup, SingleHost
from jaxres.engine import device_use
from jaxres.engine.state import Progress
from jaxres.faults import StorageUnavailable
from jaxres.runlog.events import (
    Emit,
    MemoryFetched,
    MemoryTierClosed,
    MemoryTierOpened,
    Noted,
    PhaseChanged,
)
from jaxres.runlog.history import RunHistory
from jaxres.storage import codec, files, memory_folder
from jaxres.telemetry.stdio import format_bytes

DAMAGED = "damaged"
"""File in the folder that closes the tier for every attempt until the supervisor deletes it."""
WAIT_SECONDS = 60.0
"""Longest wait, at a rollback, for a state that is being written."""
CLOSE_SECONDS = 5.0
"""Longest wait, at the end, for a state that is being written."""


@dataclass(frozen=True)
class FromMemory:
    """A state from host memory, verified."""

    state: Tree
    progress: Progress


def size_bytes(shapes: Tree) -> int:
    """Returns the memory that states of these shapes take on this host, without others' copies."""
    return NUM_SLOTS * slot_bytes(layout(shapes, host=jax.process_index()))


def fit_problem(*, missing: int, base: Path, free: int, available: int) -> str | None:
    """Returns why the tier does not fit; None: it fits. Pure.

    Args:
      missing: bytes that it needs besides those that it has.
      base: the setting `checkpoint.memory.folder`.
      free: bytes that its file system has left.
      available: bytes of memory that this machine, or its container, has left.
    """
    in_memory = base == memory_folder.SHARED_MEMORY
    if missing <= (min(free, available) if in_memory else free):
        return None
    left = f", and {format_bytes(available)} of memory are available" if in_memory else ""
    return (
        f"it needs {format_bytes(missing)} more; {base} has {format_bytes(free)} free{left}. Free "
        "some, choose another checkpoint.memory.folder, or set checkpoint.memory=null"
    )


@dataclass(frozen=True)
class TierSettings:
    """When and where the states of a host are kept in memory."""

    every_steps: int | None
    """Steps between two states; None: there is no tier."""
    neighbor_copies: bool = False
    """Whether hosts keep copies for each other."""
    folder: Path = memory_folder.SHARED_MEMORY
    """Folder of the run in shared memory."""
    snapshot: str = "auto"
    """The setting `checkpoint.snapshot`."""


@dataclass(frozen=True)
class HeldStates:
    """One host's report to host 0 on its states in memory."""

    problem: str = ""
    """Why this host can't use the tier; empty if it can."""
    is_damaged: bool = False
    """Whether wrong data is the reason."""
    held: tuple[StateKey, ...] = ()
    """Its own states."""
    copied: tuple[StateKey, ...] = ()
    """States of the host before this one."""
    server: tuple[str, str] = ("", "")
    """Address and token of its server of copies; empty: it has none."""


@dataclass(frozen=True)
class AgreedState:
    """Host 0's decision on the reports of all hosts."""

    problem: str = ""
    """Why no host uses the tier; empty if all do."""
    is_damaged: bool = False
    key: StateKey | None = None
    """The state that all hosts restore; None: a committed step."""
    servers: tuple[tuple[str, str], ...] = ()
    """Address and token of each host's server of copies."""


@dataclass(frozen=True)
class ReadFailures:
    """Why a state could not be restored, on one host or over all hosts; empty: it was."""

    damage: str = ""
    unreachable: str = ""


class MemoryTier:
    """The states of this host in shared memory; owns the slots and the thread that writes them."""

    def __init__(
        self,
        settings: TierSettings | None = None,
        *,
        shapes: Tree | None = None,
        nonce: str = "",
        available: Callable[[], int] = lambda: 0,
        pace: Throttle = UNTHROTTLED,
        peers: HostGroup | None = None,
        emit: Emit = lambda event: None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens nothing yet; `restore` does.

        Args:
          settings: when and where states are kept; None: there is no tier.
          shapes: nested dict of jax.ShapeDtypeStruct with shardings.
          nonce: nonce of this attempt's claim.
          available: returns the bytes of memory that are left.
          peers: the other hosts; None: this host is alone.
          flush: writes the metrics lines up to the state, so that they survive the process.
        """
        self._settings = settings or TierSettings(None)
        self._every_steps, self._folder = self._settings.every_steps, self._settings.folder
        self._shapes: Tree = shapes or {}
        self._nonce = nonce
        self._available = available
        self._snapshot = self._settings.snapshot
        self._pace = pace
        self._peers = peers or SingleHost()
        self._emit, self._flush = emit, flush
        self._slots = self._own_slots() if self._every_steps is not None else []
        """Slots for this host's states."""
        self._copies = self._copy_slots() if self._slots and self._settings.neighbor_copies else []
        """Slots for the states of the host before this one."""
        self._server: CopyServer | None = None
        self._neighbor: Neighbor | None = None
        self._is_agreed = False
        """Whether all hosts have opened it: the same on every host."""
        self._is_open: bool | None = None
        """Whether this host can write to it; None: `restore` has not opened it yet."""
        self._problem, self._is_damaged = "", False
        """Why this host can't, and whether wrong data is the reason."""
        self._seq = 0
        """Number of the start record of this segment of training."""
        self._saved_step = 0
        """Newest step at which all hosts were asked to keep the state."""
        self._generation = 0
        """Number of `discard` calls: a write of before is not published."""
        self._is_closed = False
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="jaxres-memory")
        self._writing: Future[None] | None = None
        self._memory: defaultdict[Any, SnapshotMemory] = defaultdict(SnapshotMemory)  # By device.

    @property
    def _holder(self) -> int:
        return memory_neighbor.holder(self._peers.member.host, self._peers.member.num_hosts)

    def _own_slots(self) -> list[Slot]:
        host = self._peers.member.host
        return _slots(self._folder, _own_name(host), layout(self._shapes, host=host))

    def _copy_slots(self) -> list[Slot]:
        if self._peers.member.is_alone:
            return []
        host, num_hosts = self._peers.member.host, self._peers.member.num_hosts
        pieces = layout(self._shapes, host=memory_neighbor.origin(host, num_hosts))
        return _slots(self._folder, _copy_name(host, num_hosts), pieces)

    def _delete_unused(self) -> None:
        """Deletes the files of hosts and copies that no host of this attempt has.

        Hosts on one machine share the folder, so the files of all of them stay.
        """
        num_hosts = self._peers.member.num_hosts
        names = {_own_name(host) for host in range(num_hosts)}
        if self._copies:
            names |= {_copy_name(host, num_hosts) for host in range(num_hosts)}
        kept = {f"{name}-{number}" for name in names for number in range(NUM_SLOTS)}
        for file in self._folder.iterdir():
            if file.stem not in kept and file.name not in (DAMAGED, memory_folder.OWNER):
                file.unlink(missing_ok=True)

    def is_due(self, step: int) -> bool:
        """Returns whether the state of a step is to be kept; the same on every host."""
        every = self._every_steps
        return (
            self._is_agreed and every is not None and step % every == 0 and step > self._saved_step
        )

    def restore(
        self, history: RunHistory, *, dataset: str, topic: str, seconds: float
    ) -> FromMemory | None:
        """Returns the newest state that all hosts hold; None: a committed step is to be restored.

        States that the run does not continue from are forgotten.

        Args:
          history: the run history; the same on every host.
          dataset: fingerprint of the data set as it is now.
          topic: unique within the attempt, the same on all hosts.
          seconds: longest wait for the other hosts.
        """
        if self._every_steps is None:
            return None
        if self._is_open is None:
            self._open()
        transfer_seconds = seconds / 2  # The other half is for reading it.
        seconds += MESSAGE_SECONDS
        reports = self._peers.gather(topic, codec.to_text(self._report()), seconds=seconds)
        choice = self._peers.broadcast(
            topic, lambda: _choose(reports, history, dataset), seconds=2 * seconds
        )
        agreed = codec.from_text(AgreedState, choice)
        self._is_agreed = not agreed.problem
        if not self._is_agreed:
            self._close(agreed.problem, is_damaged=agreed.is_damaged)
            self._give_back_unused()
            return None
        self._meet_neighbor(agreed.servers, seconds=transfer_seconds)
        self._drop_all_but(agreed.key)
        return None if agreed.key is None else self._read(agreed.key, f"{topic}/read", seconds)

    def _meet_neighbor(self, servers: Sequence[tuple[str, str]], *, seconds: float) -> None:
        """Learns the address and the token of the neighbour's server; empty: it has none.

        `seconds` is the longest transfer of a state: one that takes longer could not be restored.
        """
        if not self._copies or self._neighbor is not None:
            return
        host = self._holder
        address, token = servers[host]
        if address:
            self._neighbor = Neighbor(host, address, token, seconds=seconds, emit=self._emit)

    def begin(self, seq: int, *, step: int) -> None:
        """Sets the number of the start record, and the step that training begins with."""
        self._seq, self._saved_step = seq, step

    def is_writing(self) -> bool:
        """Returns whether a state is being written, or sent to the neighbour."""
        return self._writing is not None and not self._writing.done()

    def save(self, state: Tree, progress: Progress, *, is_busy: bool = False) -> None:
        """Keeps the state of a step if that is due; a copy of it is written in the background.

        While the state before is still being written on any host, this one is left out on all:
        hosts that left out states of their own choice would soon hold none in common.

        Args:
          state: nested dict of jax.Array, judged by the guards; may be donated once this returns.
          is_busy: whether any host is still writing; the same on every host.
        """
        if not self.is_due(progress.step):
            return
        self._saved_step = progress.step
        if not self._is_open or is_busy or self.is_writing():
            return
        begun = self._seq, self._generation
        try:
            parts = self._copies_of(parts_of(state, self._slots[0].pieces))
            self._writing = self._saver.submit(self._write, parts, progress, *begun)
        except Exception as error:  # noqa: BLE001 - no memory for the copy, or for a thread.
            self._close(f"{type(error).__name__}: {error}")

    def discard(self) -> None:
        """Forgets all states: training resumes from an older step."""
        self._generation += 1
        if self._writing is not None:
            wait([self._writing], WAIT_SECONDS)
        self._drop_all_but(None)

    def close(self) -> None:
        """Waits for the state that is being written, for a limited time; the states stay."""
        if self._server is not None:
            self._server.close()
        is_over = self._writing is None or bool(wait([self._writing], CLOSE_SECONDS).done)
        self._saver.shutdown(wait=is_over)
        if is_over:
            for slot in self._slots:  # A copy may still be arriving; they end with the process.
                slot.close()

    def _open(self) -> None:
        """Reserves the memory; if it does not fit, or the files are damaged, keeps the reason."""
        assert self._every_steps is not None
        try:
            memory_folder.make(self._folder)
            with contextlib.suppress(FileNotFoundError):
                text = files.read_whole(self._folder / DAMAGED).decode(errors="replace")
                raise MemoryDamaged(text)
            self._delete_unused()
            slots = (*self._slots, *self._copies)
            missing = sum(slot.missing_bytes() for slot in slots)
            free, available = shutil.disk_usage(self._folder).free, self._available()
            problem = fit_problem(
                missing=missing, base=self._folder.parent, free=free, available=available
            )
            self._problem = problem or ""
            if not self._problem:
                for slot in slots:
                    slot.open()
                self._serve()
        except OSError as error:
            self._problem = str(error)
        except MemoryDamaged as error:
            self._problem, self._is_damaged = str(error), True
        self._is_open = not self._problem
        if self._is_open:
            size = sum(slot.size_bytes for slot in (*self._slots, *self._copies))
            host = self._holder if self._copies else None
            self._emit(MemoryTierOpened(str(self._folder), size, self._every_steps, host))

    def _serve(self) -> None:
        """Listens for copies of another host; where that fails, there are none."""
        if not self._copies:
            return
        try:
            coordinator = self._peers.member.coordinator or ""
            self._server = CopyServer(self._copies, coordinator=coordinator)
        except OSError as error:
            self._emit(Noted(f"this host can't keep copies of another host's states: {error}"))

    def _report(self) -> HeldStates:
        """Returns this host's report to host 0."""
        return HeldStates(
            problem=self._problem,
            is_damaged=self._is_damaged,
            held=_keys(self._slots),
            copied=_keys(self._copies),
            server=(self._server.address, self._server.token) if self._server else ("", ""),
        )

    def _drop_all_but(self, chosen: StateKey | None) -> None:
        for slot in (*self._slots, *self._copies):
            if slot.index is not None and slot.index.key != chosen:
                try:
                    slot.drop()
                except OSError as error:
                    self._close(str(error))

    def _read(self, chosen: StateKey, topic: str, seconds: float) -> FromMemory | None:
        """Reads a state on all hosts; None: one of them could not."""
        self._emit(PhaseChanged("restore", f"step {chosen[0]} from host memory"))
        restored, damage, unreachable = None, "", ""
        try:
            slot = self._held(chosen) or self._fetched(chosen)
            assert slot.index is not None
            progress = Progress(**slot.index.progress)
            restored = FromMemory(slot.read(self._shapes), progress)
        except OSError as error:  # A ConnectionError too; no proof that the bytes are wrong.
            unreachable = str(error)
        except (MemoryDamaged, TypeError) as error:
            damage = str(error)
        own = codec.to_text(ReadFailures(damage, unreachable))
        messages = self._peers.gather(topic, own, seconds=seconds)
        joined = self._peers.broadcast(topic, lambda: _joined(messages), seconds=2 * seconds)
        failures = codec.from_text(ReadFailures, joined)
        if failures.damage:
            self._is_agreed = False
            self._close(failures.damage, is_damaged=True)
            return None
        if failures.unreachable:
            self._drop_all_but(None)  # Its slot is free for the first of the states to come.
            why = failures.unreachable
            self._emit(Noted(f"step {chosen[0]} can't be read from host memory: {why}"))
            return None
        return restored

    def _held(self, chosen: StateKey) -> Slot | None:
        held = (slot for slot in self._slots if slot.index and slot.index.key == chosen)
        return next(held, None)

    def _fetched(self, chosen: StateKey) -> Slot:
        """Gets a state of this host back from the neighbour.

        Raises:
          ConnectionError: the neighbour can't be reached, or does not have it any more.
          MemoryDamaged: what came differs from what was written.
        """
        slot = self._slots[0]
        if self._neighbor is None:
            raise ConnectionError("no other host has it")
        try:
            self._neighbor.fetch(chosen, slot)
        except ConnectionError:
            raise
        except OSError as error:  # Such as a time limit.
            raise ConnectionError(str(error)) from error
        self._emit(MemoryFetched(chosen[0], self._neighbor.host))
        return slot

    def _write(
        self, parts: Mapping[Key, Any], progress: Progress, seq: int, generation: int
    ) -> None:
        """Writes one state over the older of the two; runs in the background thread."""
        slot = oldest(self._slots)
        try:
            with self._pace.piece():
                digests = slot.write(parts)
            self._give_back(parts)
            self._flush()
            if generation == self._generation:
                slot.publish(
                    digests,
                    step=progress.step,
                    seq=seq,
                    nonce=self._nonce,
                    progress=dataclasses.asdict(progress),
                )
                if self._neighbor is not None:
                    self._neighbor.send(slot)
        except StorageUnavailable:
            pass  # Its metrics lines wait for storage, so a restart must compute it again.
        except Exception as error:  # noqa: BLE001 - no failure of this tier may end training.
            self._close(f"{type(error).__name__}: {error}")

    def _give_back_unused(self) -> None:
        """Gives back the memory that is reserved for states: this attempt writes none.

        States of earlier attempts stay, for a later one that all hosts have room for.
        """
        if self._server is not None:
            self._server.close()
            self._server = None
        with contextlib.suppress(OSError):
            for slot in (*self._slots, *self._copies):
                if slot.is_unused:
                    slot.delete()

    def _copies_of(self, parts: Mapping[Key, jax.Array]) -> dict[Key, Any]:
        """Returns copies of the pieces, on the devices if they have room, else on the host.

        Each device copies its own pieces: a computation over all hosts would have to run on all.
        """
        copies: dict[Key, Any] = {}
        for device, group in _by_device(parts).items():
            copied, is_own = take_snapshot(group, self._snapshot, self._memory[device])
            if not is_own:
                copied = dict(zip(copied, device_use.fetch(list(copied.values())), strict=True))
            copies |= copied
        return copies

    def _give_back(self, copies: Mapping[Key, Any]) -> None:
        """Keeps the memory of copies on devices for the next ones."""
        on_devices = {key: part for key, part in copies.items() if isinstance(part, jax.Array)}
        for device, group in _by_device(on_devices).items():
            self._memory[device].give_back(group)

    def _close(self, reason: str, *, is_damaged: bool = False) -> None:
        """Closes the tier for this attempt; a damaged one for all, until the supervisor ends."""
        if self._is_closed:
            return
        self._is_closed, self._is_open = True, False
        self._problem, self._is_damaged = reason, is_damaged
        if is_damaged:
            with contextlib.suppress(OSError):
                (self._folder / DAMAGED).write_text(reason)
                for slot in (*self._slots, *self._copies):
                    slot.delete()
        self._emit(MemoryTierClosed(reason, is_damaged))


def _by_device(parts: Mapping[Key, Any]) -> dict[Any, dict[Key, Any]]:
    groups: dict[Any, dict[Key, Any]] = {}
    for key, part in parts.items():
        (device,) = part.devices()
        groups.setdefault(device, {})[key] = part
    return groups


def _own_name(host: int) -> str:
    return f"host{host:03d}"


def _copy_name(host: int, num_hosts: int) -> str:
    return f"copy{host:03d}-host{memory_neighbor.origin(host, num_hosts):03d}"


def _slots(folder: Path, name: str, pieces: Sequence[SlotPiece]) -> list[Slot]:
    return [Slot(folder / f"{name}-{number}.data", pieces) for number in range(NUM_SLOTS)]


def _keys(slots: Sequence[Slot]) -> tuple[StateKey, ...]:
    return tuple(slot.index.key for slot in slots if slot.index is not None)


def _joined(messages: Sequence[str]) -> str:
    """Returns the encoded failures of all hosts, each kind in one text."""
    failures = [codec.from_text(ReadFailures, message) for message in messages]
    return codec.to_text(
        ReadFailures(
            damage="; ".join(each.damage for each in failures if each.damage),
            unreachable="; ".join(each.unreachable for each in failures if each.unreachable),
        )
    )


def _choose(messages: Sequence[str], history: RunHistory, dataset: str) -> str:
    """Returns host 0's encoded decision on the encoded reports of all hosts."""
    reports = [codec.from_text(HeldStates, message) for message in messages]
    return codec.to_text(agree(reports, history, dataset))


def agree(reports: Sequence[HeldStates], history: RunHistory, dataset: str) -> AgreedState:
    """Returns the newest usable state that all hosts hold, or the problem. Pure."""
    problems = [
        report.problem if len(reports) == 1 else f"host {host}: {report.problem}"
        for host, report in enumerate(reports)
        if report.problem
    ]
    if problems:
        is_damaged = any(report.is_damaged for report in reports)
        return AgreedState("; ".join(problems), is_damaged)
    holders = [memory_neighbor.holder(host, len(reports)) for host in range(len(reports))]
    held = [
        {*own.held, *reports[holder].copied} for own, holder in zip(reports, holders, strict=True)
    ]
    usable = [
        (step, seq, nonce)
        for step, seq, nonce in set.intersection(*held)
        if history.continues(seq=seq, nonce=nonce, step=step, dataset=dataset)
    ]
    return AgreedState(
        key=max(usable, default=None), servers=tuple(report.server for report in reports)
    )
