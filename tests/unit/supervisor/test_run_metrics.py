"""What a supervisor exports: values of what it has received, names as documents list them."""

import dataclasses
import math
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from jaxres.config import RunConfig
from jaxres.config.schema.alert_kinds import Kind
from jaxres.exit_codes import ExitCode
from jaxres.goodput.intervals import BY_LAUNCHER, Activity
from jaxres.runlog.attempt_result import PLANNED_ENDS, AttemptResult, stop_record
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.records import Commit, Record
from jaxres.runlog.supervisor_events import HardwareFaultFound
from jaxres.supervisor.health.health_messages import GpuReading
from jaxres.supervisor.health.host_health import HostReading
from jaxres.supervisor.run_metrics import FAULTS, METRICS, VERDICTS, RunMetrics
from jaxres.telemetry.heartbeat import (
    ExitMessage,
    GuardActed,
    PhaseEntered,
    SaveBegun,
    SaveEnded,
    SpeedChanged,
    StepFinished,
)
from tests.unit.launch import gce_config
from tests.unit.runlog.example_records import CLAIM

ROOT = Path(__file__).parents[3]
SOURCE = {"kind": "text", "path": "x"}
CONFIG = RunConfig.model_validate({"data": {"source": SOURCE}, "train": {"steps": 9}})
COMMIT_AT = "jaxres_last_commit_timestamp_seconds"


class SteppedClock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 50.0

    def monotonic(self):
        return self.now

    def wall(self):
        return 1e9 + self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return SteppedClock()


@pytest.fixture
def metrics(clock):
    return RunMetrics(CONFIG, clock=clock)


def values(metrics, name):
    """Returns the values of a metric by its labels, or its value if it has none."""
    found = {sample.labels: sample.value for sample in metrics.samples() if sample.metric == name}
    return found.get((), found)


def record(seq, attempt, body, time=0.0):
    return Record(seq, attempt, time, body)


def test_every_sample_is_of_a_known_metric_and_has_its_labels(metrics, clock):
    metrics.on_attempt_started(1, num_hosts=1)
    metrics.on_status(StepFinished(1, 0.5, 2.0, 100))
    metrics.on_status(SaveEnded(1, 0.5))
    for sample in metrics.samples():
        assert len(sample.labels) == len(METRICS[sample.metric].labels), sample


def test_a_step_is_exported_with_its_loss_tokens_and_rates(metrics, clock):
    for step in range(1, 5):
        metrics.on_status(StepFinished(step, 0.5, 2.0 / step, 100 * step, step == 3))
    assert values(metrics, "jaxres_step") == 4
    assert values(metrics, "jaxres_target_step") == 9
    assert values(metrics, "jaxres_loss") == 0.5
    assert values(metrics, "jaxres_tokens") == 400
    assert values(metrics, "jaxres_step_seconds") == 0.5
    assert values(metrics, "jaxres_tokens_per_second") == 200
    assert values(metrics, "jaxres_skipped_steps_total") == 1
    assert values(metrics, "jaxres_steps_total") == 4
    assert values(metrics, "jaxres_last_step_timestamp_seconds") == 1e9 + 50


def test_a_rate_is_right_although_messages_of_steps_were_dropped(metrics):
    metrics.on_status(StepFinished(1, 0.5, 1.0, 100))
    metrics.on_status(StepFinished(8, 0.5, 1.0, 800))
    assert values(metrics, "jaxres_tokens_per_second") == 200


def test_a_loss_that_is_not_finite_is_nan(metrics):
    metrics.on_status(StepFinished(1, 0.5, None, 100, True))
    assert math.isnan(values(metrics, "jaxres_loss"))


def test_only_a_committed_save_moves_the_last_commit(metrics, clock):
    assert values(metrics, COMMIT_AT) == {}
    for message, committed in (
        (SaveBegun(4), None),
        (SaveEnded(4, None), None),
        (SaveBegun(6), None),
        (SaveEnded(6, 2.5), 6),
        (SaveBegun(8), 6),
        (SaveEnded(8, None), 6),
    ):
        clock.now += 10
        metrics.on_status(message)
        assert values(metrics, "jaxres_last_commit_step") == (committed or {}), message
    assert values(metrics, COMMIT_AT) == 1e9 + 90
    assert values(metrics, "jaxres_save_seconds") == 2.5
    assert values(metrics, "jaxres_failed_saves_total") == 2


def test_a_new_supervisor_knows_the_last_commit_and_all_restarts_from_the_log(metrics):
    again = [dataclasses.replace(CLAIM, attempt=number, nonce=f"{number}") for number in (1, 2, 3)]
    committed = Commit(step=6, path="p", manifest="m", bytes=1)
    unhealthy = stop_record(AttemptResult(ExitCode.UNHEALTHY, "x", committed=False))
    killed_worker = stop_record(AttemptResult(137, "x", committed=False))
    bodies = [again[0], committed, unhealthy, again[1], killed_worker, again[2]]
    attempts = [1, 1, 1, 2, 2, 3]
    records = [
        record(seq, attempt, body, time=100.0 + seq)
        for seq, (attempt, body) in enumerate(zip(attempts, bodies, strict=True), start=1)
    ]
    assert values(metrics, "jaxres_restarts_total") == {}, (
        "an increase from 0 to what is known late"
    )
    for _ in range(2):
        metrics.on_history(records)
        metrics.on_restarts(records)
    restarts = values(metrics, "jaxres_restarts_total")
    assert {cause: count for cause, count in restarts.items() if count} == {
        ("unhealthy",): 1,
        ("signal",): 1,
        ("killed",): 1,
    }
    assert ("preempted",) in restarts, "increase() misses the first one of a series that begins"
    assert values(metrics, COMMIT_AT) == 102.0
    assert values(metrics, "jaxres_last_commit_step") == 6


def test_an_end_that_a_launcher_has_planned_is_no_preemption(metrics):
    again = [dataclasses.replace(CLAIM, attempt=number, nonce=f"{number}") for number in (1, 2, 3)]
    saved = stop_record(AttemptResult(ExitCode.PREEMPTED, "requested by SIGTERM", committed=True))
    bodies = [(1, again[0]), (1, saved), (2, again[1]), (2, saved), (3, again[2])]
    records = [record(seq, *body, time=100.0 + seq) for seq, body in enumerate(bodies, start=1)]
    ends = [
        LaunchEvent(0, "attempt_ended", 102.5, cause="75", planned="drain"),
        LaunchEvent(1, "attempt_ended", 104.5, cause="75"),
        LaunchEvent(2, "attempt_ended", 105.5, cause="75", reason="vm-1: preempted"),
    ]
    metrics.on_restarts(records, ends)
    restarts = values(metrics, "jaxres_restarts_total")
    assert {cause: count for (cause,), count in restarts.items() if count} == {
        "planned_drain": 1,
        "preempted": 2,
    }, "a VM that was lost without a record of the end is a preemption by its launcher"
    assert {f"planned_{why}" for why in PLANNED_ENDS} < {cause for (cause,) in restarts}


def test_steps_that_an_earlier_supervisor_has_reached_are_replayed(metrics, clock):
    metrics.on_history([], reached=2)
    metrics.on_attempt_started(2, num_hosts=1)
    metrics.on_status(PhaseEntered("train"))
    for step in (2, 3):
        clock.now += 1
        metrics.on_status(StepFinished(step, 1.0))
    seconds = values(metrics, "jaxres_goodput_seconds_total")
    assert seconds[("replayed",)] == seconds[("productive",)] == 1
    assert {label for (label,) in seconds} == {*Activity} - {*BY_LAUNCHER}


def test_the_phase_is_down_between_attempts(metrics):
    assert values(metrics, "jaxres_phase") == {("down",): 1}
    metrics.on_attempt_started(1, num_hosts=1)
    metrics.on_status(PhaseEntered("compile"))
    assert values(metrics, "jaxres_phase") == {("compile",): 1}
    metrics.on_status(ExitMessage(0, "done", True))
    metrics.on_attempt_ended(announced=True)
    assert values(metrics, "jaxres_phase") == {("down",): 1}
    assert values(metrics, "jaxres_attempt") == 1


def test_acts_of_guards_are_counted(metrics):
    metrics.on_status(GuardActed(3, "update_skipped"))
    metrics.on_status(SpeedChanged(Kind.STRAGGLER, 0, 1, "slow", 1))
    metrics.on_status(SpeedChanged(Kind.STRAGGLER_RECOVERED, 0, 1, "", 1))
    counts = values(metrics, "jaxres_guard_verdicts_total")
    assert {verdict: count for (verdict,), count in counts.items() if count} == {
        "update_skipped": 1,
        "straggler": 1,
    }


def test_every_verdict_and_kind_of_fault_is_exported_before_the_first():
    assert {*get_args(get_type_hints(GuardActed)["verdict"])} < {*VERDICTS}
    code = "".join(
        (ROOT / "jaxres/supervisor/health" / name).read_text()
        for name in ("gpu_health.py", "host_health.py", "health_watcher.py")
    )
    kinds = set(re.findall(r'Finding\(\s*"(\w+)"', code))
    kinds |= set(re.findall(r'= \("(\w+)", (?:f?"|text)', code))
    assert kinds, "the pattern finds nothing"
    assert kinds <= {*FAULTS}


def test_a_fault_and_readings_of_the_machine_are_exported(metrics):
    fault = HardwareFaultFound(1, 0, "ecc", "GPU 0", "x", "leave", 0, 1)
    metrics.on_fault(fault)
    assert values(metrics, "jaxres_hardware_faults_total")[("ecc",)] == 1

    class Watcher:
        def gpu_values(self):
            reading = GpuReading("GPU 0", {"temperature_C": 71, "power_mW": 300500}, {}, False)
            slowed = {"clocks_event_reasons": 0x40, "ecc_uncorrected_volatile": 3}
            return {"GPU 0": reading.values, "GPU 1": slowed}

        def host_reading(self):
            return HostReading(at=0, used_bytes=1, left_bytes=7, disk_free_bytes=None)

    metrics.health = Watcher()
    assert values(metrics, "jaxres_gpu_temperature_celsius") == {("GPU 0",): 71}
    assert values(metrics, "jaxres_gpu_power_watts") == {("GPU 0",): 300.5}
    assert values(metrics, "jaxres_gpu_clocks_slowed") == {("GPU 1",): 1}
    assert values(metrics, "jaxres_gpu_ecc_uncorrected_errors_total") == {("GPU 1",): 3}
    assert values(metrics, "jaxres_memory_available_bytes") == 7
    assert values(metrics, "jaxres_disk_free_bytes") == {}, "unknown is no number"


COUNTED = {
    "ecc_corrected_volatile": 500,
    "pcie_replays": 6,
    "nvlink_errors": 7,
    "utilization_percent": 97,
    "memory_used_bytes": 60,
    "memory_peak_bytes": 70,
    "memory_total_bytes": 80,
}


def test_counters_utilization_and_memory_of_each_gpu_are_exported(metrics):
    class Watcher:
        def gpu_values(self):
            return {"GPU 2": COUNTED}

        def host_reading(self):
            return None

    metrics.health = Watcher()
    found = {s.metric: s.value for s in metrics.samples() if s.labels == ("GPU 2",)}
    assert found == {
        "jaxres_gpu_ecc_corrected_errors_total": 500,
        "jaxres_gpu_pcie_replays_total": 6,
        "jaxres_gpu_nvlink_errors_total": 7,
        "jaxres_gpu_utilization_ratio": 0.97,
        "jaxres_gpu_memory_used_bytes": 60,
        "jaxres_gpu_memory_peak_bytes": 70,
        "jaxres_gpu_memory_total_bytes": 80,
    }


def test_the_gradient_norm_and_the_utilization_by_the_model_are_those_of_the_steps(metrics):
    metrics.on_status(StepFinished(1, 0.5, 2.0, 100, grad_norm=1.5, peak_seconds=0.2))
    assert values(metrics, "jaxres_grad_norm") == 1.5
    assert values(metrics, "jaxres_mfu_ratio") == 0.4
    metrics.on_status(StepFinished(2, 0.5, 2.0, 200))
    assert math.isnan(values(metrics, "jaxres_grad_norm"))
    assert values(metrics, "jaxres_mfu_ratio") == {}, "of an unknown device"


def test_a_job_with_fewer_hosts_than_it_should_have_is_seen(metrics, clock):
    assert values(metrics, "jaxres_hosts") == {}, "no attempt has started"
    elastic = RunMetrics(gce_config.config(num_hosts="2..4"), clock=clock)
    for found, target in ((metrics, 3), (elastic, 4)):
        found.on_attempt_started(1, num_hosts=3)
        found.on_attempt_started(2, num_hosts=2)
        assert values(found, "jaxres_hosts") == 2
        assert values(found, "jaxres_target_hosts") == target


def test_the_spend_grows_by_the_price_of_a_host(clock):
    metrics = RunMetrics(gce_config.config(), clock=clock)
    clock.now += 3600 / gce_config.OPTION["dollars_per_hour"]
    assert values(metrics, "jaxres_spend_dollars_total") == pytest.approx(1.0)
    assert values(RunMetrics(CONFIG, clock=clock), "jaxres_spend_dollars_total") == {}


def test_names_follow_the_conventions():
    for name, metric in METRICS.items():
        assert name.endswith("_total") == (metric.kind == "counter"), name
