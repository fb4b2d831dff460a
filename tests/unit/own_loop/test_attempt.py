"""`jaxres.attempt` in one process: verdicts before commits, positions, stops, and misuse."""

import json
import math
import os
import re
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxres
from jaxres.clock import SystemClock
from jaxres.engine.state import Progress
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Continue, Fenced, StopRun, UsageError
from jaxres.own_loop import ownership, positions
from jaxres.own_loop.verdicts import StepVerdicts, guards_of, observation
from jaxres.runlog import metrics, run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.run_lock import RunLock
from jaxres.telemetry import heartbeat
from jaxres.telemetry.heartbeat import StepFinished
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import wait_until

train_step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)


def make_state():
    return {"w": jnp.zeros(2**16), "n": jnp.int32(0)}


def loop(folder, last, *, each=lambda attempt, step: None, loss=lambda step: 1.0, **settings):
    """Trains to the last step; position is 10 a step. Returns the exit code of its process."""
    settings = settings or {"save_every_steps": 2}
    try:
        with jaxres.attempt(folder, **settings) as attempt:
            state, position, start = attempt.restore_or(make_state, position=0)
            assert (int(state["n"]), position) == (start, 10 * start)
            for step in attempt.steps(start, last):
                state = train_step(state)
                position += 10
                attempt.finished(step, state, metrics={"loss": loss(step)}, position=position)
                each(attempt, step)
    except SystemExit as end:
        return end.code
    return 0


def committed(folder):
    return jaxres.checkpoints(folder).steps()


def newest(folder):
    return jaxres.checkpoints(folder).restore(make_state())


def end(folder):
    """Returns the newest record of an attempt's end."""
    records = run_log.read_records(RunDir(folder).log)
    return next(r.body for r in reversed(records) if isinstance(r.body, AttemptEnded))


def test_a_loop_ends_with_its_last_step_and_then_has_nothing_to_do(tmp_path):
    for _ in range(2):
        assert loop(tmp_path, 5) == ExitCode.DONE
        assert committed(tmp_path)[-1] == 5
        assert (end(tmp_path).exit, end(tmp_path).committed) == (ExitCode.DONE, True)
    history = run_log.fold(run_log.read_records(RunDir(tmp_path).log))
    lines = metrics.read_history(RunDir(tmp_path), history)
    assert [line.step for line in lines] == [1, 2, 3, 4, 5]


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    saved = {}

    def remember(attempt, step):
        saved[step] = step  # The next step donates the arrays.

    assert loop(tmp_path, 9, each=remember, keep_last=9, save_every_steps=1) == 0
    for step in saved:
        found = jaxres.checkpoints(tmp_path).restore(make_state(), step=step)
        assert np.all(found.tree["w"] == step)
        assert int(found.tree["n"]) == step


class Rows:
    """An iterator with a state, as those of grain; it goes on to change what it has returned."""

    def __init__(self):
        self.state = {"row": 0}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_the_position_is_that_of_the_saved_step(tmp_path):
    rows = Rows()
    with jaxres.attempt(tmp_path, save_every_steps=4) as attempt:
        state, same, start = attempt.restore_or(make_state, position=rows)
        assert same is rows
        for step in attempt.steps(start, 7):
            state = train_step(state)
            rows.state["row"] += 10
            attempt.finished(step, state, metrics={"loss": 1.0}, position=rows)
    reader = jaxres.checkpoints(tmp_path)
    assert [reader.restore(make_state(), step=n).position for n in (4, 7)] == [
        {"row": 40},
        {"row": 70},
    ]
    again = Rows()
    with jaxres.attempt(tmp_path) as attempt:
        _, same, start = attempt.restore_or(make_state, position=again)
        assert (same is again, again.state["row"], start) == (True, 70, 7)
        for _ in attempt.steps(start, 7):
            pass


def test_a_position_of_bytes_comes_back_and_a_missing_one_is_an_error():
    class Bytes:
        state = b"\x00\xff"

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    other = Bytes()
    other.state = b""
    saved = json.loads(json.dumps(positions.position_of(Bytes())))
    assert positions.set_position(other, saved).state == b"\x00\xff"
    with pytest.raises(ConfigError, match="the step was saved without one"):
        positions.set_position(other, None)


def test_under_a_supervisor_the_loop_neither_claims_nor_ends_the_attempt(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path / "run")
    with RunLock(run_dir, clock=SystemClock()) as lock:
        claim, log = attempt_runner.claim_next(lock, lambda history: CLAIM)
        monkeypatch.setenv("JAXRES_RUN_DIR", str(run_dir.root))
        monkeypatch.setenv("JAXRES_ATTEMPT_NUMBER", str(claim.attempt))
        assert loop("elsewhere", 3) == ExitCode.DONE
        assert [type(record.body).__name__ for record in log.records()] == [
            *("Claim", "Start", "Commit", "Commit")
        ]
        assert committed(run_dir.root) == [2, 3]


def test_no_save_commits_before_the_verdict_on_its_step(tmp_path):
    """Steps 2 and 4 are saved; the verdict on 4 comes with step 6, and never."""
    seen = {}

    def look(attempt, step):
        if step == 3:  # Two steps later, the verdict on 1 is there, and no save waits for it.
            seen[3] = committed(tmp_path)
        if step == 4:
            wait_until(lambda: committed(tmp_path) == [2])
        if step == 5:
            attempt._saver._saver.submit(lambda: None)  # The thread that saves is not idle.
            seen[5] = committed(tmp_path)
            raise ValueError("the program fails")

    def judged(step):
        return float("nan") if step == 4 else 1.0

    with pytest.raises(ValueError, match="the program fails"):
        loop(tmp_path, 9, each=look, loss=judged)
    assert seen == {3: [], 5: [2]}
    assert committed(tmp_path) == [2]


@pytest.mark.parametrize("bad", [6, 9, 10])
def test_a_loss_that_is_not_finite_ends_the_run_and_is_never_committed(tmp_path, capfd, bad):
    code = loop(tmp_path, 10, loss=lambda step: float("nan") if step >= bad else 1.0)
    assert code == ExitCode.DIVERGED
    assert committed(tmp_path)[-1] == (bad - 1) // 2 * 2
    assert f"step {bad}: loss nan is not finite" in capfd.readouterr().err
    assert end(tmp_path).exit == ExitCode.DIVERGED
    assert loop(tmp_path, 10) == ExitCode.DONE


def test_a_step_with_a_bad_verdict_is_refused_in_the_thread_that_saves():
    verdicts = StepVerdicts(guards_of("off"))
    for step in (1, 2, 3):
        verdicts.expect(step)
    assert verdicts.judge(observation(1, loss=1.0, grad_norm=None)) == Continue()
    verdict = verdicts.judge(observation(2, loss=math.inf, grad_norm=None))
    assert isinstance(verdict, StopRun)
    verdicts.end()
    assert verdicts.judged(Progress(step=1)) == Progress(step=1, guards={"finite": {}})
    assert verdicts.judged(Progress(step=2)) is None
    assert verdicts.judged(Progress(step=3)) is None, "it was not judged before the end"


def spike(step):
    return 50.0 if step > 300 else 1.0 + 0.01 * (step % 7)


@pytest.mark.slow
def test_a_spike_stops_the_run_before_its_onset_or_warns(tmp_path, capfd):
    """Step 304 is saved before the fifth high loss in a row, at step 305, withdraws it."""

    def wait(attempt, step):
        if step == 306:  # Its verdict on 304 is good.
            wait_until(lambda: 304 in committed(tmp_path / "a"))

    settings = {"save_every_steps": 76, "keep_last": 9}
    code = loop(tmp_path / "a", 320, each=wait, loss=spike, on_spike="stop", **settings)
    assert code == ExitCode.DIVERGED
    assert committed(tmp_path / "a") == [76, 152, 228]
    assert loop(tmp_path / "b", 320, loss=spike, **settings) == ExitCode.DONE
    assert committed(tmp_path / "b") == [76, 152, 228, 304, 320]
    assert "WARNING" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, ExitCode.PREEMPTED), (signal.SIGINT, ExitCode.STOPPED)]
)
def test_a_stop_saves_the_step_and_exits_with_its_code(tmp_path, capfd, number, code):
    def send(attempt, step):
        if step == 3:
            os.kill(os.getpid(), number)
            wait_until(lambda: attempt._requests.requested_stop() is not None)

    before = signal.getsignal(number)
    assert loop(tmp_path, 9, each=send, save_every_steps=100) == code
    assert signal.getsignal(number) == before
    assert committed(tmp_path) == [4]
    assert f"(exit {code.value} {code.name})" in capfd.readouterr().err
    assert (end(tmp_path).exit, end(tmp_path).committed) == (code, True)
    assert newest(tmp_path).position == 40
    assert loop(tmp_path, 9) == ExitCode.DONE


def test_a_stop_file_ends_the_loop_and_is_moved_away(tmp_path):
    def request(attempt, step):
        if step == 2:
            (tmp_path / "stop").touch()
            wait_until(lambda: attempt._requests.requested_stop() is not None)

    assert loop(tmp_path, 9, each=request) == ExitCode.STOPPED
    assert committed(tmp_path)[-1] == 3
    assert not (tmp_path / "stop").exists()


def test_the_heartbeat_follows_steps_that_are_computed(tmp_path, monkeypatch):
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    monkeypatch.setenv("JAXRES_STATUS_FD", str(write_end))
    steps = {}

    def look(attempt, step):
        lines = os.read(read_end, 2**16).splitlines() if step > 2 else []
        sent = [heartbeat.decode(line) for line in lines]
        steps[step] = [message.step for message in sent if isinstance(message, StepFinished)]

    assert loop(tmp_path, 4, each=look) == 0
    assert steps == {1: [], 2: [], 3: [1], 4: [2]}
    (message,) = [json.loads(line) for line in os.read(read_end, 2**16).splitlines()][-1:]
    assert (message["message"], message["exit"]) == ("exit", 0)


def leave(attempt, step):
    if step == 2:
        raise SystemExit(0)


def test_an_exit_before_the_last_step_is_not_done(tmp_path, capfd):
    assert loop(tmp_path, 5, each=leave) == ExitCode.BUG
    assert "ended at step 2 of 5 without a stop" in capfd.readouterr().err
    assert end(tmp_path).exit == ExitCode.BUG


def not_finished(attempt):
    for _ in attempt.steps(attempt.restore_or(make_state)[2], 3):
        pass


def wrong_step(attempt):
    for step in attempt.steps(attempt.restore_or(make_state)[2], 3):
        attempt.finished(step + 1, make_state())


def other_start(attempt):
    attempt.restore_or(make_state)
    attempt.steps(7, 9)


def no_start(attempt):
    attempt.steps(0, 3)


def second(attempt):
    with jaxres.attempt("elsewhere"):
        pass


def vector(attempt):
    for step in attempt.steps(attempt.restore_or(make_state)[2], 3):
        attempt.finished(step, make_state(), metrics={"loss": jnp.ones(2)})


def tuple_position(attempt):
    for step in attempt.steps(attempt.restore_or(make_state)[2], 1):
        attempt.finished(step, make_state(), position=(1, 2))


MISUSES = {
    not_finished: "attempt.finished was not called for step 1",
    wrong_step: "attempt.finished(2): the loop computes step 1",
    other_start: "the loop begins once, after step 0",
    no_start: "call attempt.restore_or first",
    second: "this process has an attempt already",
    vector: "the metric loss is no number (shape [2]",
    tuple_position: "position: a tuple is no JSON",
    lambda attempt: None: "has ended without its loop of steps",
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_a_clear_error_and_the_next_attempt_works(tmp_path, capfd, misuse):
    with pytest.raises(SystemExit) as ended, jaxres.attempt(tmp_path) as attempt:
        misuse(attempt)
    assert MISUSES[misuse] in capfd.readouterr().err
    assert ended.value.code in (ExitCode.USAGE, ExitCode.CONFIG, ExitCode.BUG)
    assert end(tmp_path).exit == ended.value.code
    assert loop(tmp_path, 2) == 0


def test_a_thread_and_several_hosts_without_a_supervisor_are_refused(tmp_path, monkeypatch):
    errors = []

    def enter():
        with pytest.raises(UsageError, match="only the main thread"), jaxres.attempt(tmp_path):
            pass
        errors.append("refused")

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert errors == ["refused"]
    monkeypatch.setenv("JAXRES_NUM_HOSTS", "2")
    with pytest.raises(UsageError, match="JAXRES_NUM_HOSTS=2, and no supervisor"):
        jaxres.attempt(tmp_path)


def test_a_second_process_of_a_supervised_attempt_is_kept_out(tmp_path):
    with ownership._only_process(RunDir(tmp_path), 1, 0):
        other = ownership._only_process(RunDir(tmp_path), 1, 0)
        with pytest.raises(Fenced, match="another process"):
            other.__enter__()


def other_state(attempt):
    for step in attempt.steps(attempt.restore_or(make_state)[2], 1):
        attempt.finished(step, make_state() | {"w": jnp.zeros(3), "more": jnp.ones(1)})


def test_a_state_that_a_restart_could_not_restore_is_refused_at_its_first_save(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended, jaxres.attempt(tmp_path) as attempt:
        other_state(attempt)
    printed = capfd.readouterr().err
    assert ended.value.code == ExitCode.CONFIG
    assert re.search(r"w: float32\[3\], make_state returns float32\[65536\]", printed)
    assert re.search(r"more: float32\[1\], make_state returns none", printed)
    assert committed(tmp_path) == []


def test_a_number_that_the_step_makes_an_array_of_is_restored_as_a_number(tmp_path):
    """As `step` of Flax's TrainState."""

    def begin():
        return {"step": 0, "rate": 0.5}

    for last in (2, 4):
        with jaxres.attempt(tmp_path) as attempt:
            state, _, start = attempt.restore_or(begin)
            assert state == {"step": start, "rate": 0.5 + start}
            assert isinstance(state["step"], int)
            for step in attempt.steps(start, last):
                state = train_step(state)
                attempt.finished(step, state)


def test_other_shapes_at_a_restart_are_refused_by_name(tmp_path):
    assert loop(tmp_path, 2) == 0
    with pytest.raises(SystemExit) as ended, jaxres.attempt(tmp_path) as attempt:
        attempt.restore_or(lambda: make_state() | {"w": jnp.zeros(3)})
    assert ended.value.code == ExitCode.CONFIG
    assert isinstance(ended.value.__cause__, ConfigError)
    assert "w: float32" in str(ended.value.__cause__)


def test_saves_by_epochs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not know the epochs of a loop of one's own"):
        jaxres.attempt(tmp_path, when={"kind": "epochs"})
