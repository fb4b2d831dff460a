"""`status` names the launcher that leads a job only while that launcher renews its lease."""

from __future__ import annotations

import time

import pytest

from jaxres.launch.gce.state.lease import Lease, LeaseRecord
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.status import describe_leader
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath

TERMS = LeaseRecord("laptop (pid 7)", 3, 60.0, "nonce")


@pytest.mark.parametrize(
    ("terms", "age", "leader", "text"),
    [
        (TERMS, 20.0, "laptop (pid 7)", "laptop (pid 7), renewed 20 s ago"),
        (TERMS, 89.0, "laptop (pid 7)", "laptop (pid 7), renewed 89 s ago"),
        (TERMS, 91.0, None, "no launcher: laptop (pid 7) has not renewed it for 91 s (run"),
        (TERMS, None, "laptop (pid 7)", "laptop (pid 7)"),
        (None, 5.0, None, "no launcher (run `launch gce up` again)"),
    ],
)
def test_a_launcher_that_no_longer_renews_its_lease_does_not_lead(
    terms: LeaseRecord | None, age: float | None, leader: str | None, text: str
) -> None:
    found = describe_leader(terms, age)
    assert found[0] == leader
    assert found[1].startswith(text)


def test_the_age_of_a_lease_is_that_of_its_object(gcs_bucket: str) -> None:
    path = LaunchPaths(GcsPath(gcs_bucket, "run")).lease
    assert Lease(path, holder="a", seconds=60.0).acquire()
    stat = gcs_objects.stat(path)
    assert stat is not None
    assert abs(time.time() - stat.updated) < 3600
