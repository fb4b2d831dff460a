"""Promises of what a launcher's cycle asks of the bucket: few requests, all at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from jaxres.clock import SystemClock
from jaxres.launch.gce.api.compute import ApiUnavailable
from jaxres.launch.gce.api.service_answers import MAX_CALLS, ServiceAnswers
from jaxres.launch.gce.state.bucket_reader import LEFT_OUT_SECONDS, MAX_REQUESTS, BucketReader
from jaxres.launch.gce.state.observed_state import SLOW_BUCKET_SECONDS, AgentReport
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.runlog import faulty_hosts
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Record, file_name
from jaxres.storage import gcs_objects, threads
from jaxres.storage.path import GcsPath
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS

REPORT = AgentReport("running", "b", 1).metadata()


class ManualClock(SystemClock):
    """Time that passes only where a test lets it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def reader_of(path: GcsPath, clock: SystemClock, *, vms: int) -> BucketReader:
    """Returns a reader that has read once, of a job with reports of so many VMs."""
    paths = LaunchPaths(path)
    for number in range(vms):
        gcs_objects.write(paths.report(f"jx-{number:04d}"), b"", over=0, metadata=REPORT)
    record = Record(1, 1, 0.0, CLAIM).encode()
    gcs_objects.write(RunDir(path).log / file_name(1), record, over=0)  # pyright: ignore
    made = BucketReader(paths, clock, lambda _: None)
    made.read()
    return made


@pytest.fixture
def run(gcs_bucket: str) -> GcsPath:
    return GcsPath(gcs_bucket, "run")


@pytest.mark.parametrize("vms", [1, 200])
def test_a_cycle_makes_as_many_requests_for_one_vm_as_for_many(
    run: GcsPath, own_requests: Callable[[], list[str]], vms: int
) -> None:
    reader = reader_of(run, ManualClock(), vms=vms)
    before = len(own_requests())
    listed, has_stop, has_down = reader.read()
    assert (len(listed), has_stop, has_down) == (vms, False, False)
    assert len(own_requests()[before:]) == 4, own_requests()[before:]


def test_the_requests_of_a_cycle_are_made_at_the_same_time(
    run: GcsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, batches = reader_of(run, ManualClock(), vms=2), list[tuple[int, int]]()

    def call_all(calls: Sequence[Callable[[], Any]], *, most: int) -> list[Any]:
        batches.append((len(calls), most))
        return [call() for call in calls]

    monkeypatch.setattr(threads, "call_all", call_all)
    assert len(reader.read()[0]) == 2
    assert batches == [(4, MAX_REQUESTS)], "requests wait for each other"


def test_calls_are_made_at_the_same_time_and_return_in_order() -> None:
    """Each waits until all have begun."""
    together = threading.Barrier(4)

    def call(number: int) -> int:
        together.wait(SURE_SECONDS)
        return number

    calls = [partial(call, number) for number in range(4)]
    assert threads.call_all(calls, most=4) == [0, 1, 2, 3]


def test_requests_one_after_the_other_are_no_slow_answer(run: GcsPath) -> None:
    """At 0.35 s a request no silence of an agent was ever counted: their sum looked like one."""
    clock = ManualClock()
    reader = BucketReader(LaunchPaths(run), clock, lambda _: None)
    for _ in range(10):
        with reader.count_wait():
            clock.now += 0.35
    with reader.count_wait(requests=4):
        clock.now += 4 * 0.35
    assert reader.waited == pytest.approx(0.35)
    with reader.count_wait():
        clock.now += 2 * SLOW_BUCKET_SECONDS
    assert reader.waited == pytest.approx(2 * SLOW_BUCKET_SECONDS)


def test_files_of_excluded_hosts_are_read_at_the_same_time(
    run: GcsPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        faulty_hosts.exclude(RunDir(run), f"host-{number}", slot=None, reason="r", now=1.0)
    read_all, batches = gcs_objects.read_all, list[int]()

    def counted(paths: list[GcsPath]) -> list[bytes | None]:
        batches.append(len(paths))
        return read_all(paths)

    monkeypatch.setattr(gcs_objects, "read_all", counted)
    assert len(faulty_hosts.excluded_hosts(RunDir(run))) == 4
    assert batches == [4], "files wait for each other"


def test_a_file_that_can_not_be_understood_is_printed_once(run: GcsPath) -> None:
    gcs_objects.write(RunDir(run).excluded_hosts / "odd", b"{}", over=0)  # pyright: ignore
    clock, printed = ManualClock(), list[str]()
    reader = BucketReader(LaunchPaths(run), clock, printed.append)
    for _ in range(3):
        reader.read()
        clock.now += LEFT_OUT_SECONDS
    assert len(printed) == 1
    assert "odd: can't be understood" in printed[0]


def test_vms_are_looked_up_at_the_same_time_and_a_silent_zone_is_asked_no_more() -> None:
    together, asked = threading.Barrier(MAX_CALLS), list[str]()

    def answer() -> str:
        together.wait(SURE_SECONDS)
        return "RUNNING"

    def fail() -> str:
        asked.append("far")
        raise ApiUnavailable("503")

    lines = list[str]()
    answers = ServiceAnswers(lines.append)
    calls = {f"vm-{number}": ("near", answer) for number in range(MAX_CALLS)}
    assert answers.ask(calls) == dict.fromkeys(calls, "RUNNING")
    assert answers.ask({"a": ("far", fail)}) == {}
    assert answers.ask({"b": ("far", fail), "c": ("near", lambda: "TERMINATED")}) == {
        "c": "TERMINATED"
    }
    assert asked == ["far"]
    for _ in range(2):
        answers.report_zones()
    answers.silent_zones = {}
    answers.report_zones()
    assert [line.partition(";")[0] for line in lines] == [
        "the Compute API of the zone far does not answer",
        "the Compute API of the zone far answers again",
    ]
