"""Observers receive every event and every completed step, in the order of the list."""

import contextlib
import dataclasses
import inspect
import io
import os
import types

import pytest

from jaxres.clock import SystemClock
from jaxres.cluster.host_group import HostRank, SingleHost
from jaxres.config.schema.checkpoint import SecondsWhen, StepsWhen
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.event_log import EventLog, read_events, read_json_lines
from jaxres.runlog.events import Noted, RunEnded
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog
from jaxres.telemetry import heartbeat
from jaxres.telemetry.alert_sender import Alerts
from jaxres.telemetry.console import Console
from jaxres.telemetry.heartbeat import ExitMessage, StatusWriter, StepFinished
from jaxres.telemetry.observers import Observer, Observers
from jaxres.telemetry.tensorboard import TensorBoard
from jaxres.train import build, save_scheduler, session, worker
from jaxres.train.save_scheduler import SaveScheduler
from jaxres.train.stop_requests import StopRequests
from tests.unit.runlog.example_records import CLAIM

LINE = MetricsLine(
    seq=1, step=1, attempt=1, loss=2.5, grad_norm=1.0, learning_rate=0.1, tokens=64,
    step_seconds=0.5, skipped=False, samples="00",
)  # fmt: skip


class Recording:
    """An observer that appends what it receives to a list; several may share one list."""

    def __init__(self, received=None, *, name=""):
        self.received = [] if received is None else received
        self._name = (name,) if name else ()

    def on_event(self, event):
        self.received.append((*self._name, event))

    def on_step(self, line):
        self.received.append((*self._name, line.step))


class Raising:
    def on_event(self, event):
        raise OSError("event")

    def on_step(self, line):
        raise OSError("step")


def test_a_custom_observer_receives_each_event_and_step_in_order(tmp_path):
    own = Recording()
    observers = Observers([own])
    with EventLog(tmp_path / "e", clock=SystemClock(), listeners=[observers.on_event]) as log:
        for step in (1, 2):
            log.emit(Noted(f"before {step}"))
            observers.on_step(dataclasses.replace(LINE, step=step))
        log.emit(Noted("end"))
    assert own.received == [(Noted("before 1"),), (1,), (Noted("before 2"),), (2,), (Noted("end"),)]


def test_observers_receive_in_the_order_of_the_list_also_those_appended_later():
    received = []
    observers = Observers([Recording(received, name="a"), Recording(received, name="b")])
    observers.on_step(LINE)
    observers.append(Recording(received, name="c"))
    observers.on_event(Noted("x"))
    observers.on_step(LINE)
    assert received == [
        *[("a", 1), ("b", 1)],
        *[("a", Noted("x")), ("b", Noted("x")), ("c", Noted("x"))],
        *[("a", 1), ("b", 1), ("c", 1)],
    ]


def test_an_exception_of_an_observer_reaches_the_emitter_after_the_event_is_written(tmp_path):
    first, last = Recording(), Recording()
    observers = Observers([first, Raising(), last])
    with EventLog(tmp_path / "e", clock=SystemClock(), listeners=[observers.on_event]) as log:
        with pytest.raises(OSError, match="event"):
            log.emit(Noted("x"))
        with pytest.raises(OSError, match="step"):
            observers.on_step(LINE)
    assert (first.received, last.received) == ([(Noted("x"),), (1,)], [])
    assert [event["message"] for event in read_events(tmp_path / "e")] == ["x"]


def test_an_event_that_an_observer_emits_reaches_all_of_them(tmp_path):
    class Answering(Recording):
        def on_event(self, event):
            super().on_event(event)
            if event == Noted("question"):
                log.emit(Noted("answer"))

    first, answering = Recording(), Answering()
    observers = Observers([first, answering])
    with EventLog(tmp_path / "e", clock=SystemClock(), listeners=[observers.on_event]) as log:
        log.emit(Noted("question"))
    assert first.received == answering.received == [(Noted("question"),), (Noted("answer"),)]


@pytest.mark.parametrize(
    "component",
    [StopRequests, StatusWriter, Console, TensorBoard, SaveScheduler, Alerts, Observers],
)
def test_every_observer_has_the_methods_of_the_protocol(component):
    # Pyright checks the types where the package passes each component to Observers.
    for method in ("on_event", "on_step"):
        expected = inspect.signature(getattr(Observer, method)).parameters
        assert list(inspect.signature(getattr(component, method)).parameters) == list(expected)


def context(root, observers, *, host=0):
    """Returns an attempt's context, as far as these components use it."""
    peers = SingleHost()
    peers.member = HostRank(host, 2 if host else 1)
    return types.SimpleNamespace(
        run_dir=RunDir(root),
        log=types.SimpleNamespace(attempt=1, records=list),
        emit=observers.on_event,
        clock=SystemClock(),
        observers=observers,
        peers=peers,
    )


def test_observers_receive_a_step_before_its_metrics_line_is_written(tmp_path):
    path = RunDir(tmp_path).metrics(1)
    path.parent.mkdir(parents=True)

    class Reading(Recording):
        def on_step(self, line):
            flush()
            self.received.append((line.step, len(read_json_lines(path))))

    reading = Reading()
    with contextlib.ExitStack() as stack:
        on_step, _, flush = build._metrics(context(tmp_path, Observers([reading])), stack)
        for step in (1, 2):
            on_step(dataclasses.replace(LINE, step=step))
            flush()
            assert len(read_json_lines(path)) == step
    assert reading.received == [(1, 0), (2, 1)]


def test_the_save_scheduler_is_appended_on_host_0_if_saves_are_time_based(tmp_path):
    own = Recording()
    observers = Observers([own])
    for when, host in [(StepsWhen(every_steps=5), 0), (SecondsWhen(every_seconds=60), 1)]:
        is_due = save_scheduler.attach(when, context(tmp_path, observers, host=host))
        assert not is_due()
        assert observers._observers == (own,)
    save_scheduler.attach(SecondsWhen(every_seconds=60), context(tmp_path, observers))
    assert [type(observer) for observer in observers._observers] == [Recording, SaveScheduler]


def test_the_supervisor_has_the_heartbeat_before_a_later_observer_receives_the_step(
    tmp_path, monkeypatch
):
    reading, writing = os.pipe()
    own = Recording()

    class Late(Recording):
        def on_step(self, line):
            self.received.append(
                [heartbeat.decode(line) for line in os.read(reading, 9999).splitlines()]
            )

    late = Late()

    def run_session(config, attempt_context, stack, *, member):
        attempt_context.observers.append(own)
        attempt_context.observers.append(late)
        attempt_context.emit(Noted("built"))
        attempt_context.observers.on_step(LINE)
        return session.SessionResult(
            AttemptResult(0, "done", committed=True), 1, "", attempt_context.peers
        )

    monkeypatch.setattr(session, "run_session", run_session)
    run_dir = RunDir(tmp_path)
    run_dir.attempt(1).mkdir(parents=True)
    config = types.SimpleNamespace(telemetry=types.SimpleNamespace(log_every_seconds=10.0))
    requests, shown = StopRequests(), io.StringIO()
    with StatusWriter(writing) as status_writer:
        worker.run_worker(
            config,
            run_dir,
            RunLog(run_dir.log, attempt=1, last_seq=0, clock=SystemClock()),
            CLAIM,
            requests=requests,
            status_writer=status_writer,
            terminal=shown,
        )
    assert own.received[:2] == [(Noted("built"),), (1,)]
    assert [type(event) for (event,) in own.received[2:]] == [RunEnded]
    assert late.received[1][-1] == StepFinished(1, 0.5, 2.5, 64, grad_norm=1.0)
    assert requests.has_stepped
    assert "built" in shown.getvalue()
    assert heartbeat.decode(os.read(reading, 9999).splitlines()[-1]) == ExitMessage(0, "done", True)
