"""What unit tests of several files are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.compiling import quickly_compiled

if TYPE_CHECKING:
    from jaxres_emulators.gce import GceEmulator
    from jaxres_emulators.gcs import GcsServer
    from tests.unit.emulators.gce_requests import Clients


@pytest.fixture
def own_requests(
    gcs_server: GcsServer, gcs_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Returns the requests so far to this test's bucket; threads of other tests may use others."""
    rows = list[str]()
    monkeypatch.setattr(gcs_server, "log", rows)
    return lambda: [row for row in rows if f"/{gcs_bucket}/" in row]


@pytest.fixture
def quick_compile() -> Iterator[None]:
    """XLA compiles fast: for slow tests that prove the same of code that is not optimised."""
    with quickly_compiled():
        yield


@pytest.fixture
def gce() -> Iterator[GceEmulator]:
    """An emulated Compute Engine whose VMs have no processes."""
    from jaxres_emulators.gce import GceEmulator

    with GceEmulator(speed=200, is_simulated=True) as gce:
        yield gce
    assert gce.bugs == [], gce.bugs[0]


@pytest.fixture
def clients(gce: GceEmulator) -> Iterator[Clients]:
    """Google's own clients of it."""
    from tests.unit.emulators.gce_requests import Clients

    with Clients(gce) as clients:
        yield clients
