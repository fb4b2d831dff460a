"""Lists of all zones at once, and which zones such a list lacks.

The Compute API fails the whole list while a zone is unreachable, unless it is requested with
`returnPartialSuccess`. Then a warning is in place of that zone. What the zone has is unknown: it is
neither there nor absent. The requests of google-cloud-compute 1.57 lack the field, so the HTTP
session of a client of its own adds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxres.launch.gce.state.observed_state import VmStatus

UNREACHABLE = "UNREACHABLE"
NOTHING = ("", "NO_RESULTS_ON_PAGE")
"""Codes of a scope without a warning, and of an empty one."""


@dataclass(frozen=True)
class ListedVms:
    """VMs of a run in all zones that have answered."""

    vms: Mapping[str, VmStatus] = field(default_factory=dict[str, VmStatus])
    unreachable: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why the VMs of a zone are unknown, by zone."""
    programs_secret: str = field(default="", repr=False)
    """Secret of the VMs for compiled steps, of the first one that has it; empty: none has."""


def accept_partial_success(client: Any) -> Any:
    """Returns a client whose requests accept partial results, of the reachable zones."""
    client.transport._session.auth = _add_partial_success
    return client


def _add_partial_success(request: Any) -> Any:
    request.prepare_url(request.url, {"returnPartialSuccess": "true"})
    return request


def read_pages(pages: Iterable[Any], word: str) -> tuple[list[Any], dict[str, str]]:
    """Returns the items of a list of all zones, and why it lacks others, by zone.

    Args:
      word: field of a scope that has the items.
    """
    items, unreachable = list[Any](), dict[str, str]()
    for page in pages:
        for scope, scoped in page.items.items():
            found, code = getattr(scoped, word), scoped.warning.code
            items += found
            if code == UNREACHABLE or (code not in NOTHING and not found):
                unreachable[_zone(scope)] = scoped.warning.message or code
        for scope in page.unreachables:
            unreachable.setdefault(_zone(scope), UNREACHABLE)
    return items, unreachable


def _zone(scope: str) -> str:
    """Returns the zone of a scope.

    >>> _zone("projects/p/zones/us-central1-a")
    'us-central1-a'
    """
    return scope.rpartition("/")[2]
