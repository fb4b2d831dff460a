"""The launcher lease: of several launchers of a run, only its holder may act on the VMs.

Home of: launcher_lost. The lease is one object in the run's bucket. A launcher replaces it only if
the generation is the one that it read. The holder's term starts before its last write was sent. A
waiting launcher takes the lease when it has not changed for 1.5 terms, measured on the waiter's own
clock while the bucket answers. So clocks of two machines are never compared and no wall clock is
used. The epoch grows with every change of the holder and is part of everything that a holder
writes. (Gray & Cheriton, Leases, SOSP 1989; Lamport's fencing by a growing number.)

A holder renews its lease in a thread (`lease_wait.holding`), however long its other calls take. It
writes its lease again if it was deleted, damaged or replaced by an older copy. A damaged
lease is kept beside it.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxres.clock import boot_seconds
from jaxres.faults import ConfigError, Fenced
from jaxres.storage import codec, gcs_objects
from jaxres.storage.path import GcsPath

TAKEOVER_TERMS = 1.5
"""Another launcher takes a lease that is unchanged for so many of the holder's terms."""
FORMAT = 2
RENEW_SHARE = 1 / 3
"""Share of its term after which a lease is renewed."""
MAX_HANG_SECONDS = 600.0
"""A launcher that has not renewed its lease itself for so long loses it, though its thread runs."""
COUNTED_SECONDS = 1.0
"""Most of the duration of one read of the lease that a waiter counts."""


@dataclass(frozen=True)
class LeaseRecord:
    """Content of the lease object."""

    holder: str
    """Host and pid of the holder, for the operator."""
    epoch: int
    seconds: float
    """Term of the lease, from the moment before the write."""
    nonce: str
    released: bool = False


class Lease:
    """One launcher's hold on a run; call `acquire` first."""

    def __init__(
        self,
        path: GcsPath,
        *,
        holder: str,
        seconds: float,
        now: Callable[[], float] = boot_seconds,
        console: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Stores the settings; sends no request.

        Args:
          path: the lease object.
          holder: description of this launcher, for the operator.
          seconds: the term.
          now: a clock in seconds that keeps running while the machine is suspended.
          console: prints that a damaged lease was found.
        """
        self._path, self._holder, self._seconds, self._now = path, holder, seconds, now
        self._console = console
        self._nonce = secrets.token_hex(8)
        self._mine: tuple[LeaseRecord, int, float] | None = None
        """Record written last, its generation, and the time before the write."""
        self._other: tuple[int, float] | None = None
        """Generation of another launcher's lease, and since when it is unchanged; later by the time
        in which the bucket did not answer."""
        self._other_name, self._other_seconds = "", seconds
        self._found: _LeaseObject | None = None
        """The lease as `acquire` has read it last."""
        self._lock = threading.RLock()
        """Held while the lease is written: the launcher and its thread both renew it."""
        self._used_at = now()
        """When the launcher itself has acquired or renewed the lease last."""
        self._fenced: Fenced | None = None
        """Set once another launcher has taken the lease."""

    @property
    def epoch(self) -> int:
        """Epoch of this launcher's lease; raises Fenced if another launcher has taken it."""
        return self._required()[0].epoch

    def _required(self) -> tuple[LeaseRecord, int, float]:
        if (mine := self._mine) is None:
            assert self._fenced is not None, "no lease"
            raise self._fenced
        return mine

    @property
    def other_generation(self) -> int | None:
        """Generation of another launcher's lease when `acquire` read it last; None: none."""
        return None if self._other is None else self._other[0]

    @property
    def wait_seconds(self) -> float:
        """Longest time for which `acquire` waits for the lease of a launcher that is gone."""
        return TAKEOVER_TERMS * self._other_seconds

    @property
    def other(self) -> str:
        """Who may hold the lease that `acquire` waits for, for the operator."""
        return self._other_name

    def other_holder(self) -> LeaseRecord | None:
        """Returns the lease of another launcher; None: no valid lease, or held by this one."""
        terms = self._read().terms
        return None if terms is None or terms.released or terms.nonce == self._nonce else terms

    def acquire(self, *, after_epoch: int = 0, may_be_led: bool = False) -> bool:
        """Takes the lease if it is free or has expired; False: another launcher may still hold it.

        Call this repeatedly: between the calls it measures how long another's lease is unchanged.
        A damaged lease, and a missing or an older one if `may_be_led`, is waited for like one of an
        unknown launcher: its holder writes it again within a third of its term.

        Args:
          after_epoch: epoch of the desired state; that of the new lease is above it.
          may_be_led: whether a launcher may lead the job now.

        Raises:
          StorageUnavailable: the bucket does not answer; this time is no part of the wait.
        """
        found = self._read_and_count()
        terms = found.terms
        is_free = terms is None or terms.released or terms.nonce == self._nonce
        is_stale = may_be_led and (terms is None or terms.epoch < after_epoch)
        if found.problem or is_stale or not is_free:
            if self._other is None or self._other[0] != found.generation:
                self._other = found.generation, self._now()
            self._other_name = self._describe(found)
            self._other_seconds = self._seconds if terms is None else terms.seconds
            if self._now() - self._other[1] < self.wait_seconds:
                return False
        self._set_aside(found)
        epoch = max(after_epoch, 0 if terms is None else terms.epoch) + 1
        self._used_at = self._now()
        return self._write(epoch=epoch, over=found.generation, started=self._now())

    def watch(self) -> None:
        """Begins to measure how long another launcher's lease is unchanged, as `acquire` does.

        A launcher that calls this first waits meanwhile: its start-up is part of the wait.
        """
        found = self._read_and_count()
        if found.terms is not None and not found.terms.released:
            self._other = found.generation, self._now()

    def _read_and_count(self) -> _LeaseObject:
        """Reads the lease; the time in which the bucket does not answer is no part of the wait.

        The holder could not renew the lease meanwhile. A bucket or a machine that is only slow
        delays the wait by what a read takes beyond COUNTED_SECONDS. What a lease has is read once.
        """
        asked = self._now()
        try:
            known = self._found
            current = None if known is None else gcs_objects.stat(self._path)
            if known is None or current is None or current.generation != known.generation:
                known = self._found = self._read()
            return known
        finally:
            took = self._now() - asked
            if self._other is not None and took > COUNTED_SECONDS:
                self._other = self._other[0], self._other[1] + took - COUNTED_SECONDS

    def _describe(self, found: _LeaseObject) -> str:
        if found.terms is not None:
            return found.terms.holder
        return f"an unknown launcher ({self._path} is {found.problem or 'missing'})"

    def _set_aside(self, found: _LeaseObject) -> None:
        """Keeps a copy of a damaged lease before it is overwritten."""
        if found.problem:
            aside = gcs_objects.set_aside(self._path, found.data, generation=found.generation)
            self._console(f"{self._path} is {found.problem}; moved to {aside.name}")

    def held(self) -> bool:
        """Returns whether this launcher certainly holds the lease now."""
        mine = self._mine
        return mine is not None and self._now() < mine[2] + mine[0].seconds

    def renew_if_held(self) -> None:
        """Extends the lease, unless it was released or taken, or the launcher hangs: for a thread.

        Raises:
          Fenced, StorageUnavailable: as `renew`.
        """
        with self._lock:
            if self._mine is not None and self._now() < self._used_at + MAX_HANG_SECONDS:
                self._renew(only_if_due=True)

    def renew(self, *, only_if_due: bool = True) -> None:
        """Extends the lease once a third of its term has passed.

        Raises:
          Fenced: another launcher has taken it.
          StorageUnavailable: the bucket does not answer; the lease may still be valid.
        """
        with self._lock:
            self._used_at = self._now()
            self._renew(only_if_due=only_if_due)

    def _renew(self, *, only_if_due: bool) -> None:
        terms, generation, started = self._required()
        if only_if_due and self._now() < started + RENEW_SHARE * terms.seconds:
            return
        if self._write(epoch=terms.epoch, over=generation, started=self._now()):
            return
        found = self._read()
        if found.terms == terms:  # The response to an earlier write was lost.
            self._mine = terms, found.generation, started
            self._renew(only_if_due=False)
        elif not self._rewrite(found, terms, started=started):
            self._mine = None
            other = self.other_holder()
            holder = "another launcher" if other is None else other.holder
            self._fenced = Fenced(
                f"{self._path.parent.parent}: {holder} holds the lease of this run now; this one "
                "stops acting, the training continues. `python -m jaxres.launch gce status` shows "
                "its state."
            )
            raise self._fenced

    def _rewrite(self, found: _LeaseObject, terms: LeaseRecord, *, started: float) -> bool:
        """Writes a lease again that was deleted, damaged or replaced by an older copy.

        Returns False if another launcher holds it, or may have held it since this one, which was
        suspended. A lease of another launcher with an older epoch may be a copy, or that of a run
        without a state. The former does not change; until that is certain this lease is not
        extended.
        """
        if self._other is None and self._now() - started >= TAKEOVER_TERMS * terms.seconds:
            return False
        if found.terms is not None and found.terms.nonce != self._nonce:
            is_newer = found.terms.epoch >= terms.epoch
            if is_newer or (self._other is not None and self._other[0] != found.generation):
                return False
            self._other = self._other or (found.generation, self._now())
            if self._now() - self._other[1] < TAKEOVER_TERMS * found.terms.seconds:
                return True
        self._set_aside(found)
        if not self._write(epoch=terms.epoch, over=found.generation, started=self._now()):
            return False
        state = found.problem or ("missing" if found.terms is None else "an older copy")
        self._console(f"{self._path} was {state}; this launcher has written it again")
        return True

    def release(self) -> None:
        """Marks the lease as free, so that the next launcher takes it at once."""
        with self._lock:
            if self._mine is None:
                return
            terms, generation, _ = self._mine
            self._mine = None
            released = replace(terms, released=True)
            gcs_objects.write(self._path, _encode(released), over=generation)

    def _write(self, *, epoch: int, over: int, started: float) -> bool:
        terms = LeaseRecord(self._holder, epoch, self._seconds, self._nonce)
        generation = gcs_objects.write(self._path, _encode(terms), over=over)
        if generation is None:
            return False
        self._mine, self._other = (terms, generation, started), None
        return True

    def _read(self) -> _LeaseObject:
        found = gcs_objects.read_at(self._path)
        if found is None:
            return _LeaseObject(0)
        try:
            return _LeaseObject(found[1], _decode(found[0], self._path), found[0])
        except ValueError as error:
            return _LeaseObject(found[1], None, found[0], f"damaged ({error})")


@dataclass(frozen=True)
class _LeaseObject:
    """The lease object as it was read."""

    generation: int
    """0: there is no object."""
    terms: LeaseRecord | None = None
    """None: there is no object, or it is damaged."""
    data: bytes = b""
    problem: str = ""
    """Why the object is no lease; empty: it is one, or there is none."""


def _encode(terms: LeaseRecord) -> bytes:
    return json.dumps({codec.FORMAT: FORMAT} | codec.encode(terms), sort_keys=True).encode()


def _decode(data: bytes, path: GcsPath) -> LeaseRecord:
    """Parses a lease.

    Raises:
      ConfigError: it was written in another format.
      ValueError: it is damaged.
    """
    try:
        fields: dict[str, Any] = json.loads(data)
        codec.require_format(fields, number=FORMAT)
        return codec.decode(LeaseRecord, fields, ignore_unknown=True)
    except codec.OtherFormat as error:
        raise ConfigError(f"{path}: {error}.") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
