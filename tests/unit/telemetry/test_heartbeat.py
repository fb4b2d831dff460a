"""Heartbeat pipe: phases are never lost, steps may be dropped, no line is truncated."""

import dataclasses
import json
import os
import select
import threading

import pytest

from jaxres.config.schema.alert_kinds import Kind
from jaxres.runlog.events import (
    BadRecordsSkipped,
    CorruptionDetected,
    GuardWarned,
    Noted,
    PartCommitted,
    PhaseChanged,
    RolledBack,
    RunBuilt,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    StragglerFound,
    StragglerRecovered,
    ThroughputDropped,
    ThroughputRecovered,
    TrainingStarted,
    UpdateSkipped,
)
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.skip_causes import SkipCause
from jaxres.telemetry import heartbeat
from jaxres.telemetry.heartbeat import (
    ExitMessage,
    GuardActed,
    PhaseEntered,
    SaveBegun,
    SaveEnded,
    SavesFailing,
    SavesRecovered,
    SpeedChanged,
    StatusWriter,
    StepFinished,
    TrainingReport,
    decode,
    encode,
)
from jaxres.telemetry.incidents import of_training
from jaxres.telemetry.masked_steps import MaskedSteps
from tests.waiting import SURE_SECONDS


def finished(step):
    return MetricsLine(
        seq=1,
        step=step,
        attempt=1,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        tokens=1,
        step_seconds=0.5,
        skipped=False,
        samples="",
    )


@pytest.fixture
def pipe():
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(read_end)
    os.close(write_end)


def drain(read_end):
    """Returns the messages in the pipe."""
    data = b""
    while select.select([read_end], [], [], 0)[0]:
        data += os.read(read_end, 1 << 20)
    return [decode(line) for line in data.splitlines()]


def test_a_message_is_in_the_pipe_when_the_method_returns(pipe):
    with StatusWriter(pipe[1]) as writer:
        writer.on_event(PhaseChanged("train"))
        assert drain(pipe[0]) == [PhaseEntered("train")]
        writer.on_step(finished(1))
        assert drain(pipe[0]) == [StepFinished(1, 0.5, 1.0, 1, False, 1.0)]
        writer.on_event(Noted("no progress"))
        assert drain(pipe[0]) == []
        writer.on_exit(ExitMessage(75, "asked", True))
        assert drain(pipe[0]) == [ExitMessage(75, "asked", True)]


def save_health(messages):
    return [message for message in messages if isinstance(message, SavesFailing | SavesRecovered)]


def test_failing_saves_are_sent_once_per_series_and_recovery_once(pipe):
    with StatusWriter(pipe[1]) as writer:
        writer.on_event(TrainingStarted(40, "p", ""))
        for step in (48, 56, 64):
            writer.on_event(SaveFailed(step, f"full at {step}", 1))
        assert save_health(drain(pipe[0])) == [SavesFailing(40, "full at 48")]
        for step in (72, 80):
            writer.on_event(SaveCommitted(step, "p", 1, 0.5))
        assert save_health(drain(pipe[0])) == [SavesRecovered(72)]
        writer.on_event(SaveFailed(88, "full again", 1))
        assert save_health(drain(pipe[0])) == [SavesFailing(80, "full again")]


def test_a_slow_host_is_sent_and_its_recovery_once_none_is_slow(pipe):
    read, write = pipe
    with StatusWriter(write) as writer:
        writer.on_event(TrainingStarted(40, None, "bitwise"))
        writer.on_event(StragglerFound(50, 1, (3,), 1.3, "device", "hot", 1))
        writer.on_event(ThroughputDropped(60, "steps", 1.3, 1.0, "device", 1, "slow", 1))
        writer.on_event(StragglerRecovered(70, 1, (3,), num_left=1))
        writer.on_event(StragglerRecovered(75, 2, (4,), num_left=0))
        writer.on_event(ThroughputRecovered(80, "steps", 1.0, 1.0, 1, num_left=0))
    news = [message for message in drain(read) if isinstance(message, SpeedChanged)]
    assert news == [
        SpeedChanged(Kind.STRAGGLER, 40, 1, "step 50: hot", 1),
        SpeedChanged(Kind.THROUGHPUT_DROPPED, 40, 1, "step 60: slow", 1),
        SpeedChanged(Kind.STRAGGLER_RECOVERED, 40, 2, "", 75),
        SpeedChanged(Kind.THROUGHPUT_RECOVERED, 40, None, "", 80),
    ]


def test_the_start_and_the_end_of_a_save_are_sent(pipe):
    with StatusWriter(pipe[1]) as writer:
        writer.on_event(SaveStarted(10, 0.1))
        writer.on_event(SaveCommitted(10, "10-0001", 5, 2.5))
        writer.on_event(SaveStarted(20, 0.1))
        writer.on_event(SaveFailed(20, "full", 1))
        writer.on_event(PartCommitted(30, 1.5))
    assert [
        message for message in drain(pipe[0]) if isinstance(message, SaveBegun | SaveEnded)
    ] == [
        *(SaveBegun(10), SaveEnded(10, 2.5)),
        *(SaveBegun(20), SaveEnded(20, None)),
        SaveEnded(30, 1.5),
    ]


def test_a_full_pipe_drops_steps_but_no_phase_and_not_the_newest_step(pipe):
    """The supervisor does not read during 5000 steps and 40 phases."""
    with StatusWriter(pipe[1]) as writer:
        for step in range(1, 5001):
            writer.on_step(finished(step))
            if step % 125 == 0:
                writer.on_event(PhaseChanged(f"phase {step}"))
        assert len(writer._waiting) <= 81
        received = []
        while not received or received[-1] != PhaseEntered("phase 5000"):
            assert select.select([pipe[0]], [], [], SURE_SECONDS)[0], received[-3:]
            received += drain(pipe[0])
    phases = [message.phase for message in received if isinstance(message, PhaseEntered)]
    assert phases == [f"phase {step}" for step in range(125, 5001, 125)]
    steps = [message.step for message in received if isinstance(message, StepFinished)]
    assert steps == sorted(set(steps))
    assert len(steps) < 5000
    before_phases = [steps[-1], received[-2].step]
    assert before_phases == [5000, 5000]


def test_training_does_not_wait_for_a_reader(pipe):
    done = threading.Event()

    def train():
        writer = StatusWriter(pipe[1])
        writer._thread.start()
        os.set_blocking(pipe[1], False)
        for step in range(20_000):
            writer.on_step(finished(step))
        done.set()
        writer.__exit__()

    thread = threading.Thread(target=train)
    thread.start()
    assert done.wait(SURE_SECONDS)
    while thread.is_alive():
        drain(pipe[0])
        thread.join(0.01)


def test_a_closed_pipe_is_no_error():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with StatusWriter(write_end) as writer:
        writer.on_step(finished(1))
    os.close(write_end)


@pytest.mark.parametrize("text", ["x", "é", "\U0001f525", "\n", "\x00", "\udcff", '"'])
@pytest.mark.parametrize("length", [0, 100, 2000, 100_000])
def test_no_line_is_longer_than_an_atomic_pipe_write(text, length):
    line = encode(ExitMessage(70, text * length, False))
    assert len(line) <= select.PIPE_BUF
    assert line.count(b"\n") == 1
    decoded = decode(line)
    assert isinstance(decoded, ExitMessage)
    assert (text * length).startswith(decoded.reason)
    assert len(decoded.reason) >= min(length, 200)


def test_a_short_reason_is_not_truncated():
    exit_message = ExitMessage(80, "why: é\n  and so on", True)
    assert decode(encode(exit_message)) == exit_message
    assert json.loads(encode(exit_message))["message"] == "exit"


def test_the_last_message_waits_for_a_supervisor_that_does_not_read(pipe):
    os.set_blocking(pipe[1], False)
    while select.select([], [pipe[1]], [], 0)[1]:
        os.write(pipe[1], encode(StepFinished(1, 0.1)))
    exit_message = ExitMessage(70, "bug", False)
    thread = threading.Thread(target=heartbeat.write_now, args=(pipe[1], exit_message))
    thread.start()
    received = []
    while exit_message not in received:
        assert select.select([pipe[0]], [], [], SURE_SECONDS)[0]
        received += drain(pipe[0])
    thread.join()


def test_each_act_of_a_guard_is_a_message_that_names_it(pipe):
    with StatusWriter(pipe[1]) as writer:
        writer.on_event(UpdateSkipped(1, 1.0, 1.0, 9.0, (), 0, ()))
        writer.on_event(GuardWarned(2, "slow"))
        writer.on_event(RolledBack(3, 0, (0, 1), "spike"))
        writer.on_event(BadRecordsSkipped(((0, 1),), 4, "bad"))
        writer.on_event(CorruptionDetected(5, (0,), (0,), "bits"))
    acted = [message for message in drain(pipe[0]) if isinstance(message, GuardActed)]
    assert acted == [
        GuardActed(1, "update_skipped"),
        GuardActed(2, "warned"),
        GuardActed(3, "rolled_back"),
        GuardActed(4, "records_skipped"),
        GuardActed(5, "corruption"),
    ]


def test_one_masked_spike_of_the_norm_is_told_with_its_norm_and_more_in_the_window_are_not(pipe):
    masked = MaskedSteps(10, window_steps=100)
    spike = UpdateSkipped(7, 2.5, 12.25, 9.5, (), 0, (), cause=SkipCause.NORM_SPIKE)
    with StatusWriter(pipe[1], masked=masked) as writer:
        writer.on_event(spike)
        writer.on_event(dataclasses.replace(spike, step=8))
        writer.on_event(dataclasses.replace(spike, step=9, cause=SkipCause.NONFINITE_LOSS))
    reason = "step 7: norm 12.25, 9.5 standard deviations above its mean"
    told = [message for message in drain(pipe[0]) if isinstance(message, TrainingReport)]
    assert told == [TrainingReport(Kind.NORM_SPIKE, 0, reason, 1)]
    assert of_training(told[0], run="r", attempt=1).kind is Kind.NORM_SPIKE


def test_the_time_of_a_step_at_the_peak_of_known_devices_is_sent_with_each_step(pipe):
    built = RunBuilt(
        model="gpt",
        params=1,
        rows=9,
        tokens_per_epoch=9,
        steps=9,
        tokens_per_step=1000,
        flops_per_token=989e9,
        devices="8 x NVIDIA H100 80GB HBM3",
        state_bytes_per_device=9,
    )
    with StatusWriter(pipe[1]) as writer:
        writer.on_event(built)
        writer.on_step(finished(1))
        writer.on_event(dataclasses.replace(built, devices="2 x cpu"))
        writer.on_step(finished(2))
    assert [message.peak_seconds for message in drain(pipe[0])] == [0.125, None]


def test_a_loss_that_json_has_no_number_for_is_sent_as_unknown(pipe):
    with StatusWriter(pipe[1]) as writer:
        writer.on_step(dataclasses.replace(finished(1), loss=float("nan")))
    assert drain(pipe[0]) == [StepFinished(1, 0.5, None, 1, grad_norm=1.0)]
