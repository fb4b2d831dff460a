"""What the supervisors before this one have come to, as the run log tells it. Pure.

A supervisor may be killed at any moment, and something that starts it again may do so for ever. So
its successor counts on from what the log says, until a person has had a word: a supervisor that
gave up, or was told to stop, is only started again by somebody who means it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from jaxres.faults import Exit
from jaxres.runlog import Claim, Commit, Leave, Record, Stop
from jaxres.supervise.restart import FINAL, Outcome

KILLED = 128 + signal.SIGKILL
AGAIN = (Exit.PREEMPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""Ends of a supervisor after which a scheduler starts it again, and no person was asked."""
NO_WORD = "it left no word: it was killed with its supervisor, or the machine went down"


@dataclass(frozen=True)
class Past:
    """What a new supervisor goes on from."""

    outcomes: tuple[Outcome, ...] = ()
    """Of supervised attempts since the last end that nobody but a person follows; oldest first."""
    was_killed: bool = False
    """Whether the supervisor before this one has left no word; it may hang, too."""


@dataclass(frozen=True)
class _Open:
    """A supervised attempt whose end has not come yet, on the way through the records."""

    claim: Claim
    step_before: int


def recall(records: Sequence[Record]) -> Past:
    """Reads what earlier supervisors have left; none of their attempts is still at work."""
    outcomes: list[Outcome] = []
    attempt: _Open | None = None
    step, was_killed = 0, False
    for record in records:
        match record.body:
            case Claim():
                outcomes += _without_a_word(attempt, step)
                is_supervised = record.body.places is not None
                attempt, was_killed = None, is_supervised
                if is_supervised:
                    attempt = _Open(record.body, step)
            case Commit():
                step = max(step, record.body.step)
            case Stop() if attempt is not None and record.attempt == attempt.claim.attempt:
                outcomes.append(_outcome(attempt, record.body, step))
                attempt = None
            case Leave():
                outcomes += _without_a_word(attempt, step)
                attempt, was_killed = None, False
            case _:
                pass
        if isinstance(record.body, Stop | Leave) and _is_last(record.body):
            outcomes.clear()
    outcomes += _without_a_word(attempt, step)
    return Past(tuple(outcomes), was_killed)


def _is_last(end: Stop | Leave) -> bool:
    """Whether only a person goes on after this end."""
    return end.exit not in AGAIN if isinstance(end, Leave) else end.exit in FINAL


def _outcome(attempt: _Open, stop: Stop, step: int) -> Outcome:
    places, culprit = attempt.claim.places or (), stop.culprit
    place = places[culprit] if culprit is not None and culprit < len(places) else None
    return Outcome(stop.exit, stop.reason, attempt.step_before, step, place)


def _without_a_word(attempt: _Open | None, step: int) -> list[Outcome]:
    return [] if attempt is None else [Outcome(KILLED, NO_WORD, attempt.step_before, step)]
