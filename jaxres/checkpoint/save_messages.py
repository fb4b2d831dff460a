"""Messages of host 0 to the other hosts about a save: its decision, and the outcome."""

from __future__ import annotations

import json
from dataclasses import dataclass

from jaxres.storage.codec import TaggedCodec


@dataclass(frozen=True)
class NothingToDo:
    """No host writes: the save is skipped, not needed, or storage does not answer."""


@dataclass(frozen=True)
class Begin:
    """Each host writes its part of the step."""

    step_dir: str
    """Name of the step directory."""
    linked: str | None = None
    """Name of the step directory whose frozen arrays are linked; None: they are written."""


@dataclass(frozen=True)
class Committed:
    """The step has a commit record."""


@dataclass(frozen=True)
class Abandoned:
    """The step is not committed: a rollback precedes it."""


@dataclass(frozen=True)
class Failed:
    """The save has failed."""

    reason: str


SaveDecision = NothingToDo | Begin | Committed | Failed
SaveOutcome = Committed | Abandoned | Failed
SaveMessage = SaveDecision | SaveOutcome

MESSAGES: TaggedCodec[SaveMessage] = TaggedCodec(
    "kind",
    {
        "nothing_to_do": NothingToDo,
        "begin": Begin,
        "committed": Committed,
        "abandoned": Abandoned,
        "failed": Failed,
    },
)


def encode(message: SaveMessage) -> str:
    """Returns a message as JSON text."""
    return json.dumps(MESSAGES.encode(message))


def decode(text: str) -> SaveMessage:
    """Returns the message of a JSON text: the inverse of `encode`."""
    return MESSAGES.decode(json.loads(text))
