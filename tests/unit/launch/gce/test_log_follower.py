"""`logs --follow` prints each line of a host once, over uploads, attempts and replaced VMs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageUnavailable, UsageError
from jaxres.launch.gce.log_follower import (
    MAX_UNAVAILABLE_SECONDS,
    LogFollower,
    Output,
    OutputPart,
    find_slot,
    next_output,
    part_after,
)
from jaxres.launch.gce.state.desired_state import DesiredState, HostAddress, JobEnd, VmSpec
from jaxres.launch.gce.state.paths import OUTPUT_START, LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from tests.unit.launch.changed_state import changed

START = DesiredState("jx", "code", "config")
END = JobEnd(ExitCode.DONE, "the last step, 9, is committed", 0.0)


def attempt(number: int, *names: str) -> DesiredState:
    return changed(
        START,
        phase="running",
        attempt=number,
        hosts=tuple(HostAddress(name, "") for name in names),
        vms=tuple(VmSpec(name, "z", 0, 0.0) for name in names),
    )


class Script(SystemClock):
    """A clock whose sleeps run the next part of a scenario."""

    def __init__(self, *parts: object) -> None:
        self.parts, self.now = list(parts), 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        part = self.parts.pop(0)
        assert callable(part)
        part()


class Job:
    """The objects of a job in a bucket."""

    def __init__(self, bucket: str) -> None:
        self.paths = LaunchPaths(GcsPath(bucket, "run"))
        self.state = StateObject(self.paths.desired_state)

    def write(self, desired: DesiredState) -> None:
        self.state.write(desired, epoch=1)

    def upload(self, number: int, name: str, text: str, *, start: int = 0) -> None:
        path = self.paths.output(number, name)
        gcs_objects.write(path, text.encode(), over=None, metadata={OUTPUT_START: str(start)})

    def follow(self, *parts: object, vm: str | None = None) -> tuple[int, str]:
        printed: list[str] = []
        follower = LogFollower(self.paths, clock=Script(*parts), write=printed.append)
        return follower.follow(vm=vm), "".join(printed)


def test_lines_are_printed_once_over_a_replaced_vm_and_a_new_attempt(gcs_bucket: str) -> None:
    job = Job(gcs_bucket)
    job.write(attempt(1, "a", "b"))
    code, printed = job.follow(
        lambda: job.upload(1, "a", "one\ntw"),
        lambda: job.upload(1, "a", "one\ntwo\nthree"),
        lambda: job.upload(1, "b", "of another host\n"),
        lambda: job.write(changed(attempt(1, "a", "b"), phase="placing", hosts=())),
        lambda: (job.upload(1, "a", "one\ntwo\nthree\nsaved\n"), job.write(attempt(2, "c", "b"))),
        lambda: job.upload(2, "c", "four\n"),
        lambda: (
            job.upload(2, "c", "four\nfive\n"),
            job.write(changed(attempt(2, "c", "b"), phase="ended", hosts=(), end=END)),
        ),
    )
    assert code == ExitCode.DONE
    assert printed.splitlines() == [
        "--- attempt 1 on a ---",
        *("one", "two", "three", "saved"),
        "--- attempt 2 on c, which replaces a ---",
        *("four", "five"),
        f"{job.paths.run}: {END.reason}; no VM is left (exit 0 DONE)",
    ]


def test_a_host_is_followed_by_its_slot_and_the_exit_code_is_that_of_the_job(
    gcs_bucket: str,
) -> None:
    job = Job(gcs_bucket)
    job.write(attempt(1, "a", "b"))
    job.upload(2, "c", "two")
    code, printed = job.follow(
        lambda: job.write(attempt(2, "a", "c")),
        lambda: job.write(replace(START, phase="ended", end=replace(END, exit=84))),
        vm="b",
    )
    assert code == 84
    assert "--- attempt 2 on c, which replaces b ---\ntwo\n" in printed, "half a line was left out"


def test_a_slot_that_the_job_trains_without_is_followed_again_once_it_is_back(
    gcs_bucket: str,
) -> None:
    """A job with a range of hosts has fewer in a stockout."""
    job = Job(gcs_bucket)
    job.write(attempt(1, "a", "b"))
    _, printed = job.follow(
        lambda: job.write(attempt(2, "a")),
        lambda: job.upload(1, "b", "the end\n"),
        lambda: (job.upload(3, "c", "again\n"), job.write(attempt(3, "a", "c"))),
        lambda: job.write(replace(START, phase="ended", end=END)),
        vm="b",
    )
    assert printed.splitlines()[:-1] == [
        *("--- attempt 1 on b ---", "the end"),
        *("--- attempt 3 on c, which replaces b ---", "again"),
    ]


def test_half_a_line_at_the_end_of_an_attempt_is_printed(gcs_bucket: str) -> None:
    job = Job(gcs_bucket)
    job.write(attempt(1, "a"))
    _, printed = job.follow(
        lambda: job.upload(1, "a", "one\nkilled in the mid"),
        lambda: job.write(attempt(2, "a")),
        lambda: job.write(replace(START, phase="ended", end=END)),
    )
    assert "one\nkilled in the mid\n--- attempt 2 on a ---\n" in printed, "half a line"


def test_lines_that_were_not_uploaded_are_counted(gcs_bucket: str) -> None:
    job = Job(gcs_bucket)
    job.write(attempt(1, "a"))
    _, printed = job.follow(
        lambda: job.upload(1, "a", "one\n"),
        lambda: job.upload(1, "a", "nine\n", start=100),
        lambda: job.write(replace(START, phase="ended", end=END)),
    )
    assert "one\n--- 96 bytes were not uploaded ---\nnine\n" in printed


@pytest.mark.slow
def test_a_lost_desired_state_is_waited_for_and_not_for_ever(gcs_bucket: str) -> None:
    job = Job(gcs_bucket)
    job.write(attempt(1, "a"))
    gcs_objects.delete(job.paths.desired_state)
    found = job.follow(lambda: job.write(replace(START, phase="ended", end=END)))
    assert found[0] == ExitCode.DONE
    gcs_objects.delete(job.paths.desired_state)
    parts = [lambda: None] * int(MAX_UNAVAILABLE_SECONDS)
    with pytest.raises(StorageUnavailable, match="there is no desired state now"):
        job.follow(*parts)


@pytest.mark.parametrize(
    ("printed", "start", "size", "part"),
    [
        (0, 0, 10, OutputPart(0, 0)),
        (4, 0, 10, OutputPart(4, 0)),
        (14, 10, 10, OutputPart(4, 0)),
        (4, 10, 10, OutputPart(0, 6)),
        (10, 0, 10, OutputPart(10, 0)),
        (30, 0, 10, OutputPart(10, 0)),
    ],
)
def test_the_new_part_of_an_output_begins_where_the_printed_one_ends(
    printed: int, start: int, size: int, part: OutputPart
) -> None:
    assert part_after(printed, start=start, size=size) == part


def test_between_two_attempts_the_last_output_is_followed() -> None:
    idle = changed(attempt(1, "a"), hosts=(), phase="placing")
    assert next_output(Output(1, "a"), idle, 0) == Output(1, "a")
    assert next_output(None, idle, 0) is None
    assert find_slot(idle, "a") == find_slot(idle, None) == 0
    with pytest.raises(UsageError, match="--vm x: the job has no such VM now; it has a"):
        find_slot(idle, "x")
