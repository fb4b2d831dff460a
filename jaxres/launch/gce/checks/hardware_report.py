"""The table of `launch gce check`: stages of the job, tests of its VMs, bandwidth. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxres.config.errors import one_line
from jaxres.config.gce_machine_types import Published, num_gpus, shape_of
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.state.desired_state import DesiredState, JobEnd
from jaxres.runlog.events import HardwareTested
from jaxres.runlog.launch_events import LaunchEvent

RowState = Literal["ok", "refused", "WARNING", "FAILED"]
LEAST_SHARE = 0.5
"""Least share of the published figure that is no warning. A network plug-in that is not used
costs more than that; another version of NCCL, or jaxres' smaller messages, do not."""
LEAST_MESSAGE_BYTES = 2**28
"""Least message that is judged: at a smaller one the latency decides."""


@dataclass(frozen=True)
class HostTest:
    """The tests of one VM's hardware, which have passed."""

    vm: str
    ended_at: float
    """In seconds since the epoch."""
    tested: HardwareTested


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    stage: str
    state: RowState
    found: str
    seconds: float | None = None


@dataclass(frozen=True)
class Judgement:
    """The measured bandwidth beside the figure of the machine type."""

    is_low: bool
    text: str


def exit_of(end: JobEnd, desired: DesiredState) -> int:
    """Returns the exit code of a check: 82 if the hardware of a VM has failed, else the job's.

    The job itself ends with 84, because it starts no other attempt.
    """
    last = desired.history[-1].code if desired.history else ExitCode.DONE
    is_unhealthy = end.exit == ExitCode.NO_PROGRESS and last == ExitCode.UNHEALTHY
    return ExitCode.UNHEALTHY if is_unhealthy else end.exit


def expected_devices(machine_type: str, env: Mapping[str, str], variables: Sequence[str]) -> str:
    """Returns the number of devices expected on a VM of a machine type, as text.

    Args:
      env: `launch.gce.env`.
      variables: names of `launch.gce.env` that decide which devices the training has.

    >>> expected_devices("a3-highgpu-8g", {}, ["CUDA_VISIBLE_DEVICES"])
    '8 expected'
    """
    count = num_gpus(machine_type)
    if any(name in env for name in variables):
        return "launch.gce.env decides how many"
    return "number of the machine type unknown" if count is None else f"{count} expected"


def rows(
    events: Sequence[LaunchEvent],
    tests: Sequence[HostTest],
    end: JobEnd,
    *,
    machine_type: str,
    expected: str,
    num_hosts: int,
) -> list[Row]:
    """Returns the table; the first stage that was not completed has the reason of the end.

    Args:
      events: events of this job, in the order of time.
      tests: tests of its VMs in the newest attempt.
      end: how the job ended.
      machine_type: machine type of the VMs that were used last; empty: none was created.
      expected: devices of such a VM, see `expected_devices`.
      num_hosts: number of VMs.
    """
    at = {event.kind: event for event in events}  # The newest one of each kind.
    found = [*_refusals(events)]
    stages = [
        _create(at),
        _boot(at, events),
        *_tests(at, tests, expected=expected, num_hosts=num_hosts),
        *_bandwidth(tests, machine_type, num_hosts=num_hosts),
        *_storage(tests),
        _step(at, tests, end),
    ]
    for stage in stages:
        if isinstance(stage, Row):
            found.append(stage)
        elif end.exit == ExitCode.DONE:
            found.append(Row(stage, "WARNING", "its record can't be read"))
        else:  # It was not completed.
            found.append(Row(stage, "FAILED", one_line(end.reason)))
            break
    if "job_ended" in at and "job_ending" in at:
        seconds = at["job_ended"].time - at["job_ending"].time
        found.append(Row("delete the VMs", "ok", "no VM is left", seconds))
    return found


def _refusals(events: Sequence[LaunchEvent]) -> Iterator[Row]:
    newest = {(e.zone, e.cause): e for e in events if e.kind == "request_failed"}
    for (zone, cause), event in newest.items():
        yield Row("create the VMs", "refused", one_line(f"{zone}: {cause}: {event.reason}"))


def _create(at: Mapping[str, LaunchEvent]) -> Row | str:
    stage, created, asked = "create the VMs", at.get("vms_created"), at.get("vms_requested")
    if created is None or asked is None:
        return stage
    names = f"{', '.join(created.vms)} in {created.zone}"
    return Row(stage, "ok", names, created.time - asked.time)


def _boot(at: Mapping[str, LaunchEvent], events: Sequence[LaunchEvent]) -> Row | str:
    """The image, the startup script with its stages, and the agent's first report."""
    stage, started = "boot, driver, Python", at.get("attempt_started")
    created = at.get("vms_created")
    if started is None or created is None:
        return stage
    reports = [e.time for e in events if e.kind == "agent_reported" and e.vms[0] in started.vms]
    seconds = max(reports, default=started.time) - created.time
    return Row(stage, "ok", "all agents report", seconds)


def _tests(
    at: Mapping[str, LaunchEvent], tests: Sequence[HostTest], *, expected: str, num_hosts: int
) -> Iterator[Row | str]:
    started = at.get("attempt_started")
    if tests and started is not None:
        begun = min(test.ended_at - test.tested.seconds for test in tests)
        found = f"JAX finds {tests[0].tested.num_devices} devices on {num_hosts} VMs"
        yield Row("connect, start JAX", "ok", found, begun - started.time)
    for test in tests:
        one = test.tested
        found = f"{test.vm}: {one.devices} x {one.device_kind} ({expected}); "
        found += f"hardware.preflight={one.extent} passed ({len(one.results)} tests)"
        yield Row("test the hardware", "ok", found, one.seconds)
    if len(tests) < num_hosts:
        yield "test the hardware" if tests else "connect, devices, tests"


def _bandwidth(tests: Sequence[HostTest], machine_type: str, *, num_hosts: int) -> Iterator[Row]:
    measured = [t.tested for t in tests if t.tested.bus_bytes_per_second is not None]
    if not measured:
        return
    slowest = min(measured, key=lambda tested: tested.bus_bytes_per_second or 0.0)
    assert slowest.bus_bytes_per_second is not None, slowest
    shape = shape_of(machine_type)
    judged = judge_bandwidth(
        slowest.bus_bytes_per_second,
        None if shape is None else shape.two_vms,
        num_hosts=num_hosts,
        message_bytes=slowest.message_bytes,
    )
    stage = f"sum over {slowest.num_devices} devices"
    yield Row(stage, "WARNING" if judged.is_low else "ok", judged.text)


def slowest_rates(tests: Sequence[HostTest]) -> tuple[float, float] | None:
    """Returns bytes/s to and from the bucket, of the slowest VM; None: none has measured it."""
    writes = [rate for t in tests if (rate := t.tested.write_bytes_per_second) is not None]
    reads = [rate for t in tests if (rate := t.tested.read_bytes_per_second) is not None]
    return (min(writes), min(reads)) if writes and reads else None


def _storage(tests: Sequence[HostTest]) -> Iterator[Row]:
    if (rates := slowest_rates(tests)) is not None:
        write, read = (f"{rate / 1e6:,.0f} MB/s" for rate in rates)
        found = f"{write} written, {read} read by a VM; `doctor` and `plan` use it"
        yield Row("write, read the bucket", "ok", found)


def judge_bandwidth(
    bus_bytes_per_second: float,
    published: Published | None,
    *,
    num_hosts: int,
    message_bytes: int,
) -> Judgement:
    """Compares the bus bandwidth of a sum over all devices of a job with the published figure.

    Args:
      bus_bytes_per_second: the measured one.
      published: the figure of the machine type, over several VMs; None: there is none.
      num_hosts: number of VMs; the links within one VM have no figure.
      message_bytes: what each device has added.

    >>> mega = Published(181.9, "all_gather, X")
    >>> judge_bandwidth(90e9, mega, num_hosts=2, message_bytes=2**30).is_low
    True
    """
    measured = f"{bus_bytes_per_second / 1e9:,.1f} GB/s bus bandwidth"
    if num_hosts < 2:
        return Judgement(False, f"{measured}, within one VM: not judged")
    if published is None:
        return Judgement(False, f"{measured}; no published figure of this machine type: not judged")
    expected = f"{published.gb_per_second:,.1f} GB/s expected ({published.source})"
    if message_bytes < LEAST_MESSAGE_BYTES:
        size = f"{message_bytes / 2**20:,.0f} MiB a device"
        return Judgement(False, f"{measured} by {size}, {expected}: too small to be judged")
    share = bus_bytes_per_second / 1e9 / published.gb_per_second
    if share < LEAST_SHARE:
        return Judgement(
            True,
            f"{measured}, {expected}: {share:.2f} of it, below {LEAST_SHARE}. Is the NCCL plug-in "
            "of the machine type used? See launch.gce.env and configs/gce/",
        )
    return Judgement(False, f"{measured}, {expected}: {share:.2f} of it")


def _step(at: Mapping[str, LaunchEvent], tests: Sequence[HostTest], end: JobEnd) -> Row | str:
    stage, ended = "train a step, save it", at.get("attempt_ended")
    if end.exit != ExitCode.DONE or ended is None:
        return stage
    last = max((test.ended_at for test in tests), default=ended.time)
    return Row(stage, "ok", "committed in the bucket", (ended.since or ended.time) - last)


def table(found: Sequence[Row]) -> list[str]:
    """Returns the lines of the table.

    >>> table([Row("create the VMs", "ok", "jx-0 in us-central1-a", 12.3)])[1]
    'create the VMs          ok            12  jx-0 in us-central1-a'
    """
    lines = [f"{'stage':<23} {'result':<8} {'seconds':>7}  what was found"]
    for row in found:
        seconds = "" if row.seconds is None else f"{max(0.0, row.seconds):.0f}"
        lines.append(f"{row.stage:<23} {row.state:<8} {seconds:>7}  {row.found}")
    return lines
