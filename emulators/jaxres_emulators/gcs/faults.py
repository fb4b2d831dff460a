"""Faults of requests, by rule: a number of times, for a time, or at random from a seed."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass

BEFORE, AFTER = "before", "after"
STORM = ("429", "500", "503", "drop", "stall", "503 after", "drop after", "damage")
STALL_SECONDS = 0.3


@dataclass
class FaultRule:
    """Fault of the requests that a rule matches."""

    kind: str
    """A status ("503"), "drop" (the connection ends without an answer), "stall" (the answer comes
    late), "damage" (one bit of the body is another, of what is read or of what is written),
    "stale" (a list of some seconds ago), "short" (the body ends early); "storm": any of STORM.
    With " after": only once the request has done what it asks for."""
    method: str = ".*"
    path: str = ".*"
    """Regular expression that is searched in path and query."""
    times: int | None = 1
    """Number of times; None: always."""
    probability: float = 1.0
    seconds: float | None = None
    """Duration from the first such request on; None: forever."""
    late_seconds: float = STALL_SECONDS
    """Duration of a stall, or age of a stale list."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.until: float | None = None
        self.chance = random.Random(self.seed)
        self.ended = threading.Event()
        """A test may set it: stalls of the emulated Compute API end at once."""
        self.hits = 0

    def takes(self, method: str, path: str) -> bool:
        """Returns whether it applies to this request, and counts it."""
        if self.times == 0 or (self.until is not None and time.monotonic() > self.until):
            return False
        if not (re.fullmatch(self.method, method) and re.search(self.path, path)):
            return False
        if self.seconds is not None and self.until is None:
            self.until = time.monotonic() + self.seconds
        if self.probability < 1.0 and self.chance.random() >= self.probability:
            return False
        if self.times is not None:
            self.times -= 1
        self.hits += 1
        return True

    def fault(self) -> RequestFault:
        kind = self.chance.choice(STORM) if self.kind == "storm" else self.kind
        word, _, when = kind.partition(" ")
        return RequestFault(word, AFTER if when == AFTER else BEFORE, self.late_seconds, self.ended)


@dataclass(frozen=True)
class RequestFault:
    """Fault of one request."""

    word: str
    when: str
    late_seconds: float
    ended: threading.Event


class Faults:
    """The active rules; the first that matches a request applies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.rules: list[FaultRule] = []
        self.done: Counter[str] = Counter()

    def add(self, fault: FaultRule) -> FaultRule:
        with self._lock:
            self.rules.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self.rules.clear()

    def of(self, method: str, path: str) -> RequestFault | None:
        with self._lock:
            for rule in self.rules:
                if rule.takes(method, path):
                    fault = rule.fault()
                    self.done[f"{fault.word} {fault.when}"] += 1
                    return fault
        return None


def damaged(data: bytes) -> bytes:
    """Returns a copy of the data in which one bit in the middle is flipped."""
    if not data:
        return data
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
