"""The services and zones that answer a launcher, and the lines about the others. No jax."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from jaxres.launch.gce.api.compute import ApiUnavailable
from jaxres.storage import threads

MAX_CALLS = 8
"""Most calls of the Compute API at the same time; its HTTP sessions keep ten connections."""
ZONE = "the Compute API of the zone "
T = TypeVar("T")


@dataclass
class ServiceAnswers:
    """Makes calls of zones: one that does not answer holds up no other."""

    console: Callable[[str], None]
    silent_zones: dict[str, str] = field(default_factory=dict[str, str])
    """Why zones have not answered in this cycle, by zone."""
    _printed: set[str] = field(default_factory=set[str])
    """Services that do not answer and have been printed."""

    def ask(self, calls: Mapping[str, tuple[str, Callable[[], T]]]) -> dict[str, T]:
        """Makes calls of zones, several at a time; returns the results by name.

        Calls of a zone that does not answer have no result, and it is asked no more in this cycle.

        Args:
          calls: zone and call, by name.
        """

        def ask(zone: str, call: Callable[[], T]) -> tuple[T] | None:
            if zone not in self.silent_zones:
                try:
                    return (call(),)
                except ApiUnavailable as error:
                    self.silent_zones[zone] = str(error)
            return None

        asked = [partial(ask, zone, call) for zone, call in calls.values()]
        results = zip(calls, threads.call_all(asked, most=MAX_CALLS), strict=True)
        return {name: result[0] for name, result in results if result is not None}

    def report(self, service: str, answers: bool, error: str = "", *, where: str = "") -> None:
        """Prints once that a service does not answer, and once that it answers again.

        `where`: of which VMs nothing is known; empty: of all.
        """
        if answers and service in self._printed:
            self._printed.discard(service)
            self.console(f"{service} answers again")
        elif not answers and service not in self._printed:
            self._printed.add(service)
            cause = re.sub(r"; rerun the same command[^.;)]*", "", error)  # This launcher retries.
            self.console(
                f"{service} does not answer; training continues, no VM{where} counts as lost "
                f"({cause})"
            )

    def report_zones(self) -> None:
        """Prints which zones answer again or no longer, as `report`."""
        silent = {ZONE + zone: why for zone, why in self.silent_zones.items()}
        for service in sorted(name for name in self._printed if name.startswith(ZONE)):
            self.report(service, service not in silent, silent.get(service, ""))
        for service, why in silent.items():
            self.report(service, False, why, where=" there")
