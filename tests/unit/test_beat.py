"""Promises of the beat: phases are never lost, steps give way, no line is cut."""

import json
import os
import select
import threading

import pytest

from jaxres.runlog.events import (
    Noted,
    PartCommitted,
    PhaseChanged,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    TrainingStarted,
)
from jaxres.runlog.metrics import MetricsLine
from jaxres.telemetry import heartbeat as beats
from jaxres.telemetry.heartbeat import (
    BeatWriter,
    EnteredPhase,
    FinishedStep,
    Leaving,
    Saved,
    SavesRefused,
    SavesTaken,
    Saving,
    decode,
    encode,
)


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
    """Returns the beats that are in the pipe."""
    data = b""
    while select.select([read_end], [], [], 0)[0]:
        data += os.read(read_end, 1 << 20)
    return [decode(line) for line in data.splitlines()]


def test_what_it_was_told_is_in_the_pipe_when_it_returns(pipe):
    with BeatWriter(pipe[1]) as writer:
        writer.heard(PhaseChanged("train"))
        assert drain(pipe[0]) == [EnteredPhase("train")]
        writer.landed(finished(1))
        assert drain(pipe[0]) == [FinishedStep(1, 0.5)]
        writer.heard(Noted("nobody's progress"))
        assert drain(pipe[0]) == []
        writer.leaving(Leaving(75, "asked", True))
        assert drain(pipe[0]) == [Leaving(75, "asked", True)]


def news(beats):
    return [beat for beat in beats if isinstance(beat, SavesRefused | SavesTaken)]


def test_that_saves_are_refused_is_told_once_for_a_row_and_when_they_are_taken(pipe):
    with BeatWriter(pipe[1]) as writer:
        writer.heard(TrainingStarted(40, "p", ""))
        for step in (48, 56, 64):
            writer.heard(SaveFailed(step, f"full at {step}", 1))
        assert news(drain(pipe[0])) == [SavesRefused(40, "full at 48")]
        for step in (72, 80):
            writer.heard(SaveCommitted(step, "p", 1, 0.5))
        assert news(drain(pipe[0])) == [SavesTaken(72)]
        writer.heard(SaveFailed(88, "full again", 1))
        assert news(drain(pipe[0])) == [SavesRefused(80, "full again")]


def test_a_save_in_flight_is_told_and_how_it_ended(pipe):
    with BeatWriter(pipe[1]) as writer:
        writer.heard(SaveStarted(10, 0.1))
        writer.heard(SaveCommitted(10, "10-0001", 5, 2.5))
        writer.heard(SaveStarted(20, 0.1))
        writer.heard(SaveFailed(20, "full", 1))
        writer.heard(PartCommitted(30, 1.5))
    assert [beat for beat in drain(pipe[0]) if isinstance(beat, Saving | Saved)] == [
        *(Saving(10), Saved(10, 2.5)),
        *(Saving(20), Saved(20, None)),
        Saved(30, 1.5),
    ]


def test_full_pipe_loses_steps_but_no_phase_and_not_the_newest_step(pipe):
    """The door sleeps through five thousand steps and forty phases."""
    with BeatWriter(pipe[1]) as writer:
        for step in range(1, 5001):
            writer.landed(finished(step))
            if step % 125 == 0:
                writer.heard(PhaseChanged(f"phase {step}"))
        assert len(writer._waiting) <= 81
        got = []
        while not got or got[-1] != EnteredPhase("phase 5000"):
            assert select.select([pipe[0]], [], [], 10)[0], got[-3:]
            got += drain(pipe[0])
    phases = [beat.phase for beat in got if isinstance(beat, EnteredPhase)]
    assert phases == [f"phase {step}" for step in range(125, 5001, 125)]
    steps = [beat.step for beat in got if isinstance(beat, FinishedStep)]
    assert steps == sorted(set(steps))
    assert len(steps) < 5000
    before_phases = [steps[-1], got[-2].step]
    assert before_phases == [5000, 5000]


def test_nobody_reading_holds_up_no_training(pipe):
    done = threading.Event()

    def train():
        writer = BeatWriter(pipe[1])
        writer._thread.start()
        os.set_blocking(pipe[1], False)
        for step in range(20_000):
            writer.landed(finished(step))
        done.set()
        drain(pipe[0])
        writer.__exit__()

    thread = threading.Thread(target=train)
    thread.start()
    assert done.wait(30)
    while thread.is_alive():
        drain(pipe[0])
        thread.join(0.01)


def test_no_door_is_no_error():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with BeatWriter(write_end) as writer:
        writer.landed(finished(1))
    os.close(write_end)


@pytest.mark.parametrize("text", ["x", "é", "\U0001f525", "\n", "\x00", "\udcff", '"'])
@pytest.mark.parametrize("length", [0, 100, 2000, 100_000])
def test_no_line_is_longer_than_a_pipe_takes_at_once(text, length):
    line = encode(Leaving(70, text * length, False))
    assert len(line) <= select.PIPE_BUF
    assert line.count(b"\n") == 1
    back = decode(line)
    assert isinstance(back, Leaving)
    assert (text * length).startswith(back.reason)
    assert len(back.reason) >= min(length, 200)


def test_a_short_reason_is_whole():
    leaving = Leaving(80, "why: é\n  and so on", True)
    assert decode(encode(leaving)) == leaving
    assert json.loads(encode(leaving))["beat"] == "Leaving"


def test_a_last_beat_waits_for_a_door_that_sleeps(pipe):
    os.set_blocking(pipe[1], False)
    while select.select([], [pipe[1]], [], 0)[1]:
        os.write(pipe[1], encode(FinishedStep(1, 0.1)))
    leaving = Leaving(70, "bug", False)
    thread = threading.Thread(target=beats.write_now, args=(pipe[1], leaving))
    thread.start()
    got = []
    while leaving not in got:
        assert select.select([pipe[0]], [], [], 10)[0]
        got += drain(pipe[0])
    thread.join()
