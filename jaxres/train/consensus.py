"""How all hosts come to act at the same step: a small word of each goes through the step itself.

Every host gives its word (a stop or a save that it was asked for, how long it worked by itself)
with the batch; the step returns the words of all, and `look` lands them at a fixed lag. So all
hosts know the same at the same step, whenever and wherever a request came, and no message can
overtake a dispatch. docs/adr/0007 has the alternative that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxres.engine import guards
from jaxres.engine import mesh as meshes
from jaxres.engine.guards import gravest
from jaxres.faults import Continue, Exit, Stop, Verdict, fault
from jaxres.train.stop_requests import Requests

FACTS = ("stop", "save", "storage", "busy_seconds", "no_batch")
"""What the columns of a word mean; see Word."""
TIMED_STEPS = 8
"""Steps whose mean is a host's timing: a word that stays as it is costs nothing to give again."""
STOPS: tuple[Exit | None, ...] = (None, Exit.PREEMPTED, Exit.STOPPED)
"""What a stop's number means; of two the greater stands: an operator's stop is for good. Greater
by as many as there are: the same without time to save, which holds for all where it does for one.
"""


@dataclass(frozen=True)
class Word:
    """What one host has to say at one step."""

    stop: Exit | None = None
    has_time: bool = True
    """Whether there is time to save before that stop."""
    save: bool = False
    storage: bool = False
    """Whether storage has refused too many saves; only the lead knows."""
    busy_seconds: float = 0.0
    """How long this host worked by itself for a step, waiting for nobody; see TIMED_STEPS."""
    no_batch: bool = False
    """Whether this host has bad records at this step, and others stand in for its rows."""

    def encode(self) -> np.ndarray:
        """Returns the word as float32[len(FACTS)]."""
        stop = STOPS.index(self.stop) + len(STOPS) * (not self.has_time)
        values = [stop, self.save, self.storage, self.busy_seconds, self.no_batch]
        return np.asarray(values, np.float32)

    @staticmethod
    def decode(facts: np.ndarray) -> Word:
        """Reads a word back.

        >>> word = Word(Exit.STOPPED, save=True, busy_seconds=0.5)
        >>> Word.decode(word.encode()) == word
        True
        """
        stop, save, storage, seconds, no_batch = (float(value) for value in facts)
        no_time, number = divmod(int(stop), len(STOPS))
        return Word(STOPS[number], not no_time, save > 0, storage > 0, seconds, no_batch > 0)


class Agreement(Protocol):
    """What the loop asks before it acts; the answers are the same on every host."""

    def facts(self, *, busy_seconds: float | None, no_batch: bool = False) -> Any:
        """Returns this host's word as it enters the next step; None where nobody else listens.

        Args:
          busy_seconds: how long this host worked by itself for that step; None: it is no step.
          no_batch: whether other rows stand in for its own, which can't be used.
        """
        ...

    def heard(self, facts: np.ndarray) -> tuple[float, ...]:
        """Takes what a landed step has returned of all hosts' words; returns their busy seconds."""
        ...

    def had_no_batch(self) -> bool:
        """Says whether anywhere other rows stood in for bad records, at the step heard of last."""
        ...

    def verdict(self) -> Verdict:
        """Returns the stop that was asked for anywhere, or that storage calls for."""
        ...

    def save_asked(self) -> bool:
        """Says whether an extra save was asked for anywhere since the last one."""
        ...

    def save_taken(self) -> None:
        """Marks the extra save as honoured."""
        ...


def never() -> bool:
    """Is no clock's: nothing is due by it."""
    return False


class OwnWord:
    """The agreement of a host that is alone: what it was asked for holds at once."""

    def __init__(
        self,
        requests: Requests,
        storage: Callable[[], Verdict],
        *,
        is_due: Callable[[], bool] = never,
    ) -> None:
        self._requests = requests
        self._storage = storage
        self._is_due = is_due

    def facts(self, *, busy_seconds: float | None, no_batch: bool = False) -> None:
        """Has nobody to tell."""

    def heard(self, facts: np.ndarray) -> tuple[float, ...]:
        """Has nobody to hear."""
        return ()

    def had_no_batch(self) -> bool:
        """Never: a host that is alone takes no step without its rows."""
        return False

    def verdict(self) -> Verdict:
        """Returns the stop that was asked for, or that storage calls for; of two alike the first
        stands, so that a stop keeps its code on a full disk too.
        """
        asked, has_time = self._requests.stop_asked(), self._requests.has_time()
        return gravest([guards.judge(asked, has_time=has_time), self._storage()])

    def save_asked(self) -> bool:
        """Says whether a save was asked for since the last one, or is due by the clock."""
        return self._requests.save_asked() or self._is_due()

    def save_taken(self) -> None:
        """Marks the extra save as honoured."""
        self._requests.save_taken()


class AllWords:
    """The agreement of many hosts: what holds is what a landed step has brought."""

    def __init__(
        self,
        requests: Requests,
        storage: Callable[[], Verdict],
        *,
        mesh: Mesh,
        is_due: Callable[[], bool] = never,
    ) -> None:
        self._requests = requests
        self._storage = storage
        self._is_due = is_due
        self._place, self._rows = _through(mesh)
        self._stop: Exit | None = None
        self._has_time = True
        self._storage_stop = False
        self._save = False
        self._no_batch = False
        self._busy: list[float] = []
        self._given: tuple[Word, jax.Array] | None = None

    def facts(self, *, busy_seconds: float | None, no_batch: bool = False) -> jax.Array:
        """Returns this host's word, laid on its devices."""
        word = Word(
            stop=self._requests.stop_asked(),
            has_time=self._requests.has_time(),
            save=self._requests.save_asked() or self._is_due(),
            storage=isinstance(self._storage(), Stop),
            busy_seconds=self._timing(busy_seconds),
            no_batch=no_batch,
        )
        if self._given is None or self._given[0] != word:
            self._given = word, self._place(word.encode())
        return self._given[1]

    def _timing(self, busy_seconds: float | None) -> float:
        """Returns the mean of the last TIMED_STEPS whole, so that it changes once in as many."""
        if busy_seconds is not None:
            self._busy.append(busy_seconds)
        if len(self._busy) < TIMED_STEPS:
            return self._given[0].busy_seconds if self._given else 0.0
        mean = sum(self._busy) / len(self._busy)
        self._busy.clear()
        return mean

    def heard(self, facts: np.ndarray) -> tuple[float, ...]:
        """Folds the words of all hosts at one step."""
        words = [Word.decode(row) for row in facts.reshape(-1, len(FACTS))[self._rows]]
        self._stop = max(self._stop, *(word.stop for word in words), key=STOPS.index)
        self._has_time &= all(word.has_time for word in words)
        self._save |= any(word.save for word in words)
        self._storage_stop |= any(word.storage for word in words)
        self._no_batch = any(word.no_batch for word in words)
        return tuple(word.busy_seconds for word in words)

    def had_no_batch(self) -> bool:
        """Says whether any host had bad records at the step heard of last."""
        return self._no_batch

    def verdict(self) -> Verdict:
        """Returns the stop that all hosts have heard of."""
        storage: Verdict = Continue()
        if self._storage_stop:
            own = self._storage()
            words = "the saves of this run have failed too often in a row, says its lead host"
            storage = own if isinstance(own, Stop) else Stop(fault("storage_unavailable"), words)
        return gravest([guards.judge(self._stop, has_time=self._has_time), storage])

    def save_asked(self) -> bool:
        """Says whether an extra save was asked for anywhere since the last one."""
        return self._save

    def save_taken(self) -> None:
        """Marks the extra save as honoured, here and for what is still on its way."""
        self._save = False
        self._requests.save_taken()


def facts_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns the array of all words without its content."""
    sharding = meshes.one_row_a_device(mesh)
    return jax.ShapeDtypeStruct((mesh.size, len(FACTS)), np.float32, sharding=sharding)


def _through(mesh: Mesh) -> tuple[Callable[[np.ndarray], jax.Array], Sequence[int]]:
    """Returns how a word is laid on the devices, and which rows to read: one of every host."""
    form = facts_shape(mesh)
    sharding = form.sharding
    assert sharding is not None
    mine = list(sharding.addressable_devices)
    hosts = [device.process_index for device in mesh.devices.flat]
    rows = [hosts.index(host) for host in sorted(set(hosts))]

    def place(word: np.ndarray) -> jax.Array:
        pieces = jax.device_put([word[None]] * len(mine), mine)
        return jax.make_array_from_single_device_arrays(form.shape, sharding, pieces)

    return place, rows
