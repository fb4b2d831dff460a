"""What unit tests of several files are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.emulators.gce import GceEmulator
    from tests.unit.emulators.gce_requests import Clients


@pytest.fixture
def gce() -> Iterator[GceEmulator]:
    """An emulated Compute Engine whose VMs have no processes."""
    from tests.emulators.gce import GceEmulator

    with GceEmulator(speed=200, is_simulated=True) as gce:
        yield gce
    assert gce.bugs == [], gce.bugs[0]


@pytest.fixture
def clients(gce: GceEmulator) -> Iterator[Clients]:
    """Google's own clients of it."""
    from tests.unit.emulators.gce_requests import Clients

    with Clients(gce) as clients:
        yield clients
