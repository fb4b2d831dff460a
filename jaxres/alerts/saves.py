"""Says once that storage refuses a run's saves, and once that it takes them again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxres.alerts.incidents import Incident
from jaxres.beat import SaveNews, SavesRefused


@dataclass
class Saves:
    """What is known of a run's saves over all attempts of a supervisor."""

    tell: Callable[[Incident], None]
    run: str
    """Name of the run."""
    times_refused: int = 0
    """Of the present row or, while there is none, of earlier ones too: the incident's seq."""
    is_refused: bool = False

    def heard(self, news: SaveNews, *, attempt: int) -> None:
        """Takes what an attempt's lead says; tells what has changed."""
        was_refused, self.is_refused = self.is_refused, isinstance(news, SavesRefused)
        if self.is_refused == was_refused:
            return
        self.times_refused += self.is_refused
        self.tell(
            Incident(
                kind="saves_refused" if self.is_refused else "saves_again",
                run=self.run,
                attempt=attempt,
                step=news.step,
                reason=news.reason if isinstance(news, SavesRefused) else "",
                next="training goes on, and every save is tried" if self.is_refused else "",
                seq=self.times_refused,
            )
        )
