"""Saves to a bucket: which requests run at the same time, and how many rounds of them are left.

An answer is held until all requests of its round have arrived: one that waited for another one's
answer would never arrive.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.checkpoint.write import bucket_writer
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import SingleHost
from jaxres.config.schema.checkpoint import CheckpointSection
from jaxres.engine.state import Progress
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog
from jaxres.storage import gcs_client, gcs_objects
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from jaxres_emulators.gcs.server import GcsRequest
from jaxres_emulators.gcs.uploads import multipart
from tests.unit.checkpoint.write.test_bucket_writer import state
from tests.unit.runlog.example_records import CLAIM

STEP = "checkpoints/00000008-0001"
DATABASE = "state/ocdbt.process_0.0"
HELD_SECONDS = 60.0
"""Longest time that a request is held; then the test fails."""

BESIDE_THE_LAST_PART = {
    f"POST {STEP}/{name} 1"
    for name in (
        *(f"{DATABASE}/d/3", f"{DATABASE}/d/index", f"{DATABASE}/manifest.ocdbt"),
        *("digests/process_0.json", "state/d/index", "state/manifest.ocdbt"),
        *("_CHECKPOINT_METADATA", "orbax.checkpoint", "state/_METADATA", "state/_sharding"),
    )
}
LAST_FILES = ("progress.json", "run_log.jsonl", "commit_success.txt", "MANIFEST.json")
AFTER_IT = [
    {"GET log/00000002.json 1", f"LIST {STEP}/ 1", f"GET {STEP}/digests/process_0.json 2"},
    {f"POST {STEP}/{name} 1" for name in LAST_FILES},
    {f"LIST {STEP}/ 2", *(f"GET {STEP}/{name} 1" for name in LAST_FILES)},
    {"POST log/00000002.json 1"},
    {"GET log/00000003.json 1", "LIST pins/ 1"},
    {"GET log/00000003.json 2", "LIST checkpoints/ 1"},
]
"""Each request with the number of times that it was made so far; the fourth is the commit."""


class Rounds:
    """Answers for an emulator, and holds each request until all of its round have arrived."""

    def __init__(self, server: GcsServer, rounds: Sequence[set[str]]) -> None:
        self._answer = server.answer
        self._rounds = rounds
        self._changed = threading.Condition()
        self._count: Counter[str] = Counter()
        self.arrived = [set[str]() for _ in rounds]
        self.order: list[str] = []
        """All requests, in the order in which they were answered."""

    def answer(self, request: GcsRequest, fault: Any) -> Any:
        """Waits for the others of the round, and answers."""
        with self._changed:
            name = _name(request)
            self._count[name] += 1
            numbered = f"{name} {self._count[name]}"
            for expected, arrived in zip(self._rounds, self.arrived, strict=True):
                if numbered in expected:
                    arrived.add(numbered)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda e=expected, a=arrived: e == a, HELD_SECONDS)
                    if expected != arrived:
                        arrived.discard(numbered)  # It is answered alone.
            self.order.append(numbered)
        return self._answer(request, fault)


def _name(request: GcsRequest) -> str:
    """Returns method and name of a request, without the run directory."""
    _, _, key = request.path.partition("/o/")
    method = request.method
    if request.method == "GET" and not key:
        method, key = "LIST", request.query.get("prefix", "of the bucket")
    elif request.method == "POST":
        fields, _, _ = multipart(request.body, request.headers.get("Content-Type", ""))
        key = fields["name"]
    return f"{method} {key.replace('%2F', '/').removeprefix('run/')}"


@pytest.mark.slow
def test_a_save_has_six_rounds_of_requests_after_its_last_part_is_verified(
    gcs_bucket: str, gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three before the commit and two after it; nothing is asked before the first part."""
    monkeypatch.setattr(bucket_writer, "MIN_PART_BYTES", 2**14)  # Four parts.
    patient = (4 * HELD_SECONDS, 4 * HELD_SECONDS)
    monkeypatch.setattr(gcs_client, "TIMEOUT_SECONDS", patient)
    monkeypatch.setattr(gcs_objects, "UPLOAD_SECONDS", patient)
    run_dir = RunDir(GcsPath(gcs_bucket, "run"))
    log = RunLog.claim(run_dir.log, CLAIM, after=[], clock=SystemClock())
    checkpoints = Checkpointer(
        CheckpointSection(timeout_seconds=10 * HELD_SECONDS),
        run_dir=run_dir,
        log=log,
        claim=CLAIM,
        peers=SingleHost(),
        emit=lambda event: None,
        before_commit=lambda: None,
    )
    expected = [BESIDE_THE_LAST_PART, *AFTER_IT]
    rounds = Rounds(gcs_server, expected)
    with checkpoints:
        monkeypatch.setattr(gcs_server, "answer", rounds.answer)
        checkpoints.save(state(), Progress(step=8))
        checkpoints.wait()
    assert [sorted(one) for one in rounds.arrived] == [sorted(one) for one in expected]
    assert checkpoints.committed_step == 8
    order = [one for one in rounds.order if "of the bucket" not in one]  # Asked by the library.
    assert order[0].startswith(f"POST {STEP}/{DATABASE}/d/"), order
    last = order[-sum(map(len, AFTER_IT)) :]
    assert sorted(last) == sorted(one for each in AFTER_IT for one in each)
