"""Home of: launcher_lost. Home of: two_launchers. Who may act on a run's VMs.

One object in the run's bucket, changed only over the generation that was read. Who holds it counts
from before its last write began; who waits for it counts how long it has stood still on a clock of
its own: two clocks are never compared, and a wall clock never asked. The epoch grows with every
change of hands, and goes into everything that a holder writes. (facts: Gray & Cheriton, Leases,
SOSP 1989; Lamport's fencing by a number that grows.)
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from jaxres.clock import boot_seconds
from jaxres.faults import Fenced, StorageUnavailable
from jaxres.storage import gcs_objects
from jaxres.storage.path import BucketPath

PATIENCE = 1.5
"""Times the holder's term that a lease must stand still before another takes it."""
RENEW_SHARE = 1 / 3
"""Of its term after which a lease is renewed."""


@dataclass(frozen=True)
class Terms:
    """What stands in the object."""

    holder: str
    """For a person: host and pid."""
    epoch: int
    seconds: float
    """For how long it holds from the moment before the write."""
    nonce: str
    released: bool = False


class Lease:
    """One launcher's hold on a run; `acquire` first."""

    def __init__(
        self,
        path: BucketPath,
        *,
        holder: str,
        seconds: float,
        now: Callable[[], float] = boot_seconds,
    ) -> None:
        """Asks for nothing yet.

        Args:
          path: of the object.
          holder: who this is, for a person.
          seconds: the term.
          now: seconds that go on while the machine sleeps.
        """
        self._path, self._holder, self._seconds, self._now = path, holder, seconds, now
        self._nonce = secrets.token_hex(8)
        self._mine: tuple[Terms, int, float] | None = None
        """What was written last, its generation, and the moment before the write."""
        self._seen: tuple[int, float] | None = None
        """Generation of another's lease, and since when it stands still."""

    @property
    def epoch(self) -> int:
        """The holder's number."""
        assert self._mine is not None, "no lease"
        return self._mine[0].epoch

    @property
    def seen(self) -> int | None:
        """Generation of another's lease, as `acquire` has seen it last; None: of none."""
        return None if self._seen is None else self._seen[0]

    def other(self) -> Terms | None:
        """Returns what stands there now, if it is another's; None: it may be had."""
        found = self._read()
        if found is None or found[0].released or found[0].nonce == self._nonce:
            return None
        return found[0]

    def acquire(self) -> bool:
        """Takes the lease if it is free; False: another holds it, as far as one can see by now.

        To be asked again and again: how long another's stands still is counted between the calls.
        """
        found, began = self._read(), self._now()
        if found is None:
            return self._write(epoch=1, over=0, began=began)
        terms, generation = found
        if not terms.released and terms.nonce != self._nonce:
            if self._seen is None or self._seen[0] != generation:
                self._seen = generation, self._now()
            if self._now() - self._seen[1] < PATIENCE * terms.seconds:
                return False
        return self._write(epoch=terms.epoch + 1, over=generation, began=self._now())

    def held(self) -> bool:
        """Says whether it certainly holds at this moment."""
        return self._mine is not None and self._now() < self._mine[2] + self._mine[0].seconds

    def renew(self, *, only_if_due: bool = True) -> None:
        """Prolongs it, once a third of its term is over.

        Raises:
          Fenced: another has it.
          StorageUnavailable: the bucket does not answer; it may still be had.
        """
        assert self._mine is not None, "no lease"
        terms, generation, began = self._mine
        if only_if_due and self._now() < began + RENEW_SHARE * terms.seconds:
            return
        if self._write(epoch=terms.epoch, over=generation, began=self._now()):
            return
        found = self._read()
        if found is not None and found[0] == terms:  # An earlier write's answer was lost.
            self._mine = terms, found[1], began
            self.renew(only_if_due=False)
        else:
            self._mine = None
            now_there = self.other()
            who = "another launcher" if now_there is None else now_there.holder
            raise Fenced(
                f"{self._path.parent.parent}: {who} leads this run by now; this launcher acts no "
                "more, the training goes on. `jaxres launch gce status` tells how it is."
            )

    def release(self) -> None:
        """Leaves it to whoever comes next, at once."""
        if self._mine is None:
            return
        terms, generation, _ = self._mine
        self._mine = None
        released = Terms(terms.holder, terms.epoch, terms.seconds, self._nonce, released=True)
        gcs_objects.write(self._path, _packed(released), over=generation)

    def _write(self, *, epoch: int, over: int, began: float) -> bool:
        terms = Terms(self._holder, epoch, self._seconds, self._nonce)
        generation = gcs_objects.write(self._path, _packed(terms), over=over)
        if generation is None:
            return False
        self._mine, self._seen = (terms, generation, began), None
        return True

    def _read(self) -> tuple[Terms, int] | None:
        found = gcs_objects.read_at(self._path)
        return None if found is None else (_unpacked(found[0], self._path), found[1])


def _packed(terms: Terms) -> bytes:
    return json.dumps(asdict(terms), sort_keys=True).encode()


def _unpacked(data: bytes, path: BucketPath) -> Terms:
    try:
        fields: dict[str, Any] = json.loads(data)
        known = Terms.__dataclass_fields__  # A newer version may have added something.
        return Terms(**{name: value for name, value in fields.items() if name in known})
    except (ValueError, TypeError, AttributeError) as error:
        raise StorageUnavailable(
            f"{path}: is no lease ({error}). If no launcher runs, delete it."
        ) from error
