"""What the agent of a VM says: a few words that a list of the bucket shows for all VMs at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
