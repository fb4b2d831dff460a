"""The launcher lease: of several launchers of a run, only its holder may act on the VMs.

Home of: launcher_lost. The lease is one object in the run's bucket. A launcher replaces it only if
the generation is the one that it read. The holder's term starts before its last write was sent. A
waiting launcher takes the lease when it has not changed for 1.5 terms, measured on the waiter's own
clock. So clocks of two machines are never compared and no wall clock is used. The epoch grows with
every change of the holder and is part of everything that a holder writes. (Gray & Cheriton,
Leases, SOSP 1989; Lamport's fencing by a growing number.)
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxres.clock import boot_seconds
from jaxres.faults import ConfigError, Fenced, StorageUnavailable
from jaxres.storage import codec, gcs_objects
from jaxres.storage.path import GcsPath

TAKEOVER_TERMS = 1.5
"""Another launcher takes a lease that is unchanged for so many of the holder's terms."""
FORMAT = 2
RENEW_SHARE = 1 / 3
"""Share of its term after which a lease is renewed."""


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
    ) -> None:
        """Stores the settings; sends no request.

        Args:
          path: the lease object.
          holder: description of this launcher, for the operator.
          seconds: the term.
          now: a clock in seconds that keeps running while the machine is suspended.
        """
        self._path, self._holder, self._seconds, self._now = path, holder, seconds, now
        self._nonce = secrets.token_hex(8)
        self._mine: tuple[LeaseRecord, int, float] | None = None
        """Record written last, its generation, and the time before the write."""
        self._other: tuple[int, float] | None = None
        """Generation of another launcher's lease, and since when it is unchanged."""

    @property
    def epoch(self) -> int:
        """Epoch of this launcher's lease."""
        assert self._mine is not None, "no lease"
        return self._mine[0].epoch

    @property
    def other_generation(self) -> int | None:
        """Generation of another launcher's lease when `acquire` read it last; None: none."""
        return None if self._other is None else self._other[0]

    def other_holder(self) -> LeaseRecord | None:
        """Returns the lease of another launcher; None: the lease is free or held by this one."""
        found = self._read()
        if found is None or found[0].released or found[0].nonce == self._nonce:
            return None
        return found[0]

    def acquire(self) -> bool:
        """Takes the lease if it is free or has expired; False: another launcher may still hold it.

        Call this repeatedly: between the calls it measures how long another's lease is unchanged.
        """
        found, started = self._read(), self._now()
        if found is None:
            return self._write(epoch=1, over=0, started=started)
        terms, generation = found
        if not terms.released and terms.nonce != self._nonce:
            if self._other is None or self._other[0] != generation:
                self._other = generation, self._now()
            if self._now() - self._other[1] < TAKEOVER_TERMS * terms.seconds:
                return False
        return self._write(epoch=terms.epoch + 1, over=generation, started=self._now())

    def held(self) -> bool:
        """Returns whether this launcher certainly holds the lease now."""
        return self._mine is not None and self._now() < self._mine[2] + self._mine[0].seconds

    def renew(self, *, only_if_due: bool = True) -> None:
        """Extends the lease once a third of its term has passed.

        Raises:
          Fenced: another launcher has taken it.
          StorageUnavailable: the bucket does not answer; the lease may still be valid.
        """
        assert self._mine is not None, "no lease"
        terms, generation, started = self._mine
        if only_if_due and self._now() < started + RENEW_SHARE * terms.seconds:
            return
        if self._write(epoch=terms.epoch, over=generation, started=self._now()):
            return
        found = self._read()
        if found is not None and found[0] == terms:  # The response to an earlier write was lost.
            self._mine = terms, found[1], started
            self.renew(only_if_due=False)
        else:
            self._mine = None
            other = self.other_holder()
            holder = "another launcher" if other is None else other.holder
            raise Fenced(
                f"{self._path.parent.parent}: {holder} holds the lease of this run now; this one "
                "stops acting, the training continues. `jaxres launch gce status` shows its state."
            )

    def release(self) -> None:
        """Marks the lease as free, so that the next launcher takes it at once."""
        if self._mine is None:
            return
        terms, generation, _ = self._mine
        self._mine = None
        released = LeaseRecord(terms.holder, terms.epoch, terms.seconds, self._nonce, released=True)
        gcs_objects.write(self._path, _encode(released), over=generation)

    def _write(self, *, epoch: int, over: int, started: float) -> bool:
        terms = LeaseRecord(self._holder, epoch, self._seconds, self._nonce)
        generation = gcs_objects.write(self._path, _encode(terms), over=over)
        if generation is None:
            return False
        self._mine, self._other = (terms, generation, started), None
        return True

    def _read(self) -> tuple[LeaseRecord, int] | None:
        found = gcs_objects.read_at(self._path)
        return None if found is None else (_decode(found[0], self._path), found[1])


def _encode(terms: LeaseRecord) -> bytes:
    return json.dumps({codec.FORMAT: FORMAT} | codec.encode(terms), sort_keys=True).encode()


def _decode(data: bytes, path: GcsPath) -> LeaseRecord:
    try:
        fields: dict[str, Any] = json.loads(data)
        codec.require_format(fields, number=FORMAT)
        return codec.decode(LeaseRecord, fields, ignore_unknown=True)
    except codec.OtherFormat as error:
        raise ConfigError(f"{path}: {error}.") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise StorageUnavailable(
            f"{path}: is not a lease ({error}). If no launcher runs, delete it."
        ) from error
