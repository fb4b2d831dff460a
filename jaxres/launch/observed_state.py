"""What a leader can see of its VMs, and since when: lists of the service and reports of the agents.

Time runs here only while the one who is asked answers: a bucket or a control plane that is away for
a while makes nobody look dead.

What the agent of a VM says: a few words that a list of the bucket shows for all VMs at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxres.launch.capacity_options import Trouble
from jaxres.runlog.run_log import Stop

MAX_REASON = 600
State = Literal["ready", "running", "ended"]
STATES: tuple[State, ...] = ("ready", "running", "ended")


@dataclass(frozen=True)
class Report:
    """The newest word of one agent."""

    state: State
    boot: str
    """A word that is new with every start of the agent."""
    attempt: int = 0
    """That it has a part in, or had; 0: none yet."""
    exit: int | None = None
    """Of its part, once that has ended."""
    reason: str = ""
    """Why it ended, for a person."""
    notice: str = ""
    """That its VM goes; empty: nobody has said so."""

    def words(self) -> dict[str, str]:
        """Returns it as an object's words.

        >>> Report.of(Report("ended", "a1", 3, 75, "saved").words()).exit
        75
        """
        code = "" if self.exit is None else str(self.exit)
        return {
            "state": self.state,
            "boot": self.boot,
            "attempt": str(self.attempt),
            "exit": code,
            "reason": _ascii(self.reason),
            "notice": _ascii(self.notice),
        }

    @classmethod
    def of(cls, words: Mapping[str, str]) -> Report | None:
        """Reads an object's words; None: they are none of an agent."""
        attempt, code = words.get("attempt", ""), words.get("exit", "")
        states: dict[str | None, State] = {state: state for state in STATES}
        state = states.get(words.get("state"))
        if state is None or re.fullmatch("[0-9]{1,9}", attempt) is None:
            return None
        return cls(
            state,
            words.get("boot", ""),
            int(attempt),
            int(code) if re.fullmatch("-?[0-9]{1,9}", code) else None,
            words.get("reason", ""),
            words.get("notice", ""),
        )


def _ascii(text: str) -> str:
    """Returns what may stand in a header, cut where it is long."""
    line = " ".join(text.split())
    return "".join(c if " " <= c <= "~" else "?" for c in line)[:MAX_REASON]


MOST_SECONDS = 2.0
"""That one look adds to a silence: whoever was elsewhere in between has not listened."""
AWAY_SECONDS = 1.5
"""A bucket that takes longer was away, for the agents too, though it has answered in the end."""
HALTED = ("TERMINATED", "STOPPED", "SUSPENDED")
HOST_ERROR = "compute.instances.hostError"
EVENTS = {
    HOST_ERROR: "its host has failed",
    "compute.instances.preempted": "it was preempted",
    "compute.instances.terminateOnHostMaintenance": "it was ended for maintenance of its host",
    "compute.instances.guestTerminate": "it was shut down from inside",
}
"""What the service itself does to a VM, by the type of its operation, in words for a person."""


@dataclass(frozen=True)
class Observed:
    """A VM as the service lists it."""

    name: str
    zone: str
    status: str
    ip: str = ""
    id: int = 0
    """Its own for ever; a name may have been another run's, which was deleted since."""


@dataclass(frozen=True)
class Refused:
    """A creation that has failed."""

    trouble: Trouble
    words: str
    """For a person."""


@dataclass(frozen=True)
class Log:
    """What the run's log says."""

    step: int = 0
    """Newest committed step."""
    seq: int = 0
    """Number of the newest record."""
    stop: Stop | None = None
    """How the newest attempt that left a word has ended."""
    stop_seq: int = 0
    """Number of that record."""
    longest_wait: float | None = None
    """Between two commits of one attempt, in seconds; None: there were no two yet."""


@dataclass(frozen=True)
class Seen:
    """All that a decision goes by, besides what is intended."""

    now: float
    """Seconds since the epoch."""
    vms: Mapping[str, Observed] | None
    """The run's VMs, as the service lists them; None: it has not answered."""
    absent: Mapping[str, float]
    """By name: seconds for which lists have lacked it."""
    not_found: frozenset[str]
    """Doomed VMs that are not listed, and that the service, asked for by name, does not know."""
    reports: Mapping[str, Report]
    silent: Mapping[str, float]
    """By name: seconds for which its agent has said nothing, though the bucket answers."""
    creation: Refused | bool | None
    """What has become of the creation that is on: True: done, False: it is on its way, None: the
    service, if it answers, knows nothing of it."""
    log: Log
    still_seconds: float
    """For how long no step was committed while an attempt was on, though the bucket answers."""
    ended_seconds: float | None
    """Since the first end of a part of the attempt was seen; None: none has ended."""
    events: Mapping[str, str] = field(default_factory=dict)
    """By name: what the service itself has done to a VM last, a key of EVENTS."""
    unasked_seconds: float = 0.0
    """Since this leader has asked for a creation last, or has begun to lead."""
    stop_asked: bool = False
    down_asked: bool = False


@dataclass
class Sight:
    """What is remembered between two looks of one leader. Durations are on its own clock."""

    _heard: dict[str, tuple[int, Report, float]] = field(default_factory=dict)
    """By name: generation, report, and for how long it has stood still."""
    _absent: dict[str, tuple[bool, float]] = field(default_factory=dict)
    """By name: whether it was made by then, and for how long lists have lacked it since."""
    _vms: Mapping[str, Observed] | None = None
    _ids: dict[str, int] = field(default_factory=dict)
    _events: dict[str, str] = field(default_factory=dict)
    _bucket_at: float | None = None
    """When the bucket answered last, if it did at the last look."""
    _service_at: float | None = None
    _log: Log = Log()
    _still: float = 0.0
    _attempt: int = 0
    _ended: float | None = None

    def bucket_silent(self) -> None:
        """Notes a look to which the bucket gave no answer."""
        self._bucket_at = None

    def heard(
        self,
        listed: Mapping[str, tuple[int, Mapping[str, str]]],
        *,
        now: float,
        waited: float = 0.0,
    ) -> None:
        """Takes in what the bucket lists of the agents' reports.

        Args:
          listed: by name: generation and words.
          now: when that was.
          waited: how many seconds of those since the last look went by in waiting for the bucket.
        """
        was_away = self._bucket_at is None or waited > AWAY_SECONDS
        since = 0.0 if self._bucket_at is None else min(MOST_SECONDS, now - self._bucket_at)
        if was_away:  # Agents had no answer either: they get their time anew.
            since = 0.0
            self._heard = {name: (g, r, 0.0) for name, (g, r, _) in self._heard.items()}
        self._bucket_at = now
        for name, (generation, words) in listed.items():
            report = Report.of(words)
            before = self._heard.get(name)
            if report is None:
                continue
            still = before[2] + since if before is not None and before[0] == generation else 0.0
            self._heard[name] = generation, report, still
        for name in self._heard.keys() - listed.keys():
            generation, report, still = self._heard[name]
            self._heard[name] = generation, report, still + since

    def listed(
        self, vms: Mapping[str, Observed] | None, wanted: Mapping[str, bool], *, now: float
    ) -> None:
        """Takes in what the service lists; None: it has not answered.

        `wanted` says of each VM whether it is known to have been made: how long it was absent
        before that says nothing of how long it is afterwards.
        """
        since = 0.0 if self._service_at is None else min(MOST_SECONDS, now - self._service_at)
        self._vms, self._service_at = vms, None if vms is None else now
        self._ids |= {name: vm.id for name, vm in (vms or {}).items()}
        before, self._absent = self._absent, {}
        for name, is_made in wanted.items():
            was_made, absent = before.get(name, (not is_made, 0.0))
            absent = absent if was_made == is_made else 0.0
            if vms is None:
                self._absent[name] = is_made, absent
            elif name not in vms:
                self._absent[name] = is_made, absent + since

    def told(self, events: Mapping[int, str]) -> None:
        """Takes in what the service itself has done last to VMs, by id."""
        self._events |= {name: events[id] for name, id in self._ids.items() if id in events}

    def progressed(
        self, log: Log, attempt: int, *, is_on: bool, any_ended: bool, since: float
    ) -> None:
        """Takes in what the log says, and whether a part of the attempt has ended.

        `since` seconds after the last look.
        """
        since = min(MOST_SECONDS, since)
        if log.step != self._log.step or attempt != self._attempt or not is_on:
            self._still = 0.0
        else:
            self._still += since
        if attempt != self._attempt or not is_on or not any_ended:
            self._ended = None
        else:
            self._ended = 0.0 if self._ended is None else self._ended + since
        self._log, self._attempt = log, attempt

    def seen(
        self,
        *,
        wall: float,
        creation: Refused | bool | None,
        unasked_seconds: float,
        not_found: frozenset[str] = frozenset(),
        stop_asked: bool = False,
        down_asked: bool = False,
    ) -> Seen:
        """Returns what there is to decide by."""
        return Seen(
            now=wall,
            vms=self._vms,
            absent={name: absent for name, (_, absent) in self._absent.items()},
            not_found=not_found,
            reports={name: report for name, (_, report, _) in self._heard.items()},
            silent={name: still for name, (_, _, still) in self._heard.items()},
            creation=creation,
            log=self._log,
            still_seconds=self._still,
            ended_seconds=self._ended,
            events=self._events,
            unasked_seconds=unasked_seconds,
            stop_asked=stop_asked,
            down_asked=down_asked,
        )
