"""Stop and save requests by signals; in separate processes, because they change the signal mask."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.supervisor import run_dir_watcher
from jaxres.train.stop_requests import InlineSignals
from tests.waiting import SURE_SECONDS

HEAD = """
import os, signal, sys, time
from jaxres.train.stop_requests import InlineSignals, worker_signals
me = os.getpid()
def wait(condition):
    while not condition():
        time.sleep(0.001)
"""


def run(body):
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + body],
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("number", "exit"), [("SIGTERM", "PREEMPTED"), ("SIGINT", "STOPPED"), ("SIGHUP", "PREEMPTED")]
)
def test_under_a_supervisor_a_repeated_stop_is_only_a_flag(number, exit):
    code, out, err = run(
        f"""
with worker_signals() as requests:
    assert requests.requested_stop() is None
    for _ in range(3):
        os.kill(me, signal.{number})
    wait(lambda: requests.requested_stop() is not None)
    os.kill(me, signal.SIGTERM)
    os.kill(me, signal.SIGUSR2)
    wait(requests.save_requested)
    print(requests.requested_stop().name)
"""
    )
    assert (code, out, err) == (0, f"{exit}\n", "")


@pytest.mark.slow
def test_under_a_supervisor_the_exit_signal_is_a_preemption_without_time():
    code, out, err = run(
        """
from jaxres.supervisor.process.spawn import LEAVE
with worker_signals() as requests:
    assert requests.may_save()
    os.kill(me, LEAVE)
    wait(lambda: requests.requested_stop() is not None)
    print(requests.requested_stop().name, requests.may_save())
"""
    )
    assert (code, out, err) == (0, "PREEMPTED False\n", "")


@pytest.mark.slow
def test_a_save_is_requested_until_it_is_cleared():
    code, out, err = run(
        """
with worker_signals() as requests:
    os.kill(me, signal.SIGUSR2)
    wait(requests.save_requested)
    assert requests.save_requested()
    requests.clear_save_request()
    print(requests.save_requested(), requests.requested_stop())
"""
    )
    assert (code, out, err) == (0, "False None\n", "")


@pytest.mark.slow
def test_the_command_exits_at_once_at_a_stop_before_the_first_step():
    code, out, err = run(
        """
with InlineSignals(is_command=True) as received:
    received.on_attempt(sys.stderr, lambda exit: print("recorded", exit.name, flush=True))
    os.kill(me, signal.SIGTERM)
    time.sleep(6000)
"""
    )
    assert (code, out) == (75, "recorded PREEMPTED\n")
    assert "nothing new to save" in err


@pytest.mark.slow
def test_a_stop_while_the_attempt_is_claimed_is_recorded_before_the_command_exits():
    code, out, err = run(
        """
with InlineSignals(is_command=True) as received:
    os.kill(me, signal.SIGINT)
    wait(lambda: received.requests.requested_stop() is not None)
    received.on_attempt(sys.stderr, lambda exit: print("recorded", exit.name, flush=True))
    time.sleep(6000)
"""
    )
    assert (code, out) == (76, "recorded STOPPED\n")
    assert "nothing new to save" in err


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_the_command_exits_at_once_at_a_second_stop(number, code):
    ended, _, err = run(
        f"""
with InlineSignals(is_command=True) as received:
    received.requests.step = 1
    os.kill(me, signal.SIGHUP)
    wait(lambda: received.requests.requested_stop() is not None)
    os.kill(me, signal.SIGHUP)
    os.kill(me, signal.{number})
    time.sleep(6000)
"""
    )
    assert ended == code
    assert err.count("saving after the current step") >= 1
    assert "ended at once" in err


NOTEBOOK = """
import threading
threading.Thread(target=time.sleep, args=(6000,), daemon=True).start()  # It blocks no signal.
read_end, write_end = os.pipe()
os.set_blocking(write_end, False)
signal.set_wakeup_fd(write_end)
signal.signal(signal.SIGUSR2, lambda *_: None)
def state():
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = [signal.getsignal(number) for number in numbers]
    return fd, mask, handlers, threading.enumerate(), len(os.listdir("/proc/self/fd"))
before = state()
"""


@pytest.mark.slow
def test_in_a_notebook_a_stop_is_a_flag_and_a_second_one_an_interrupt_and_all_is_restored():
    code, out, err = run(
        NOTEBOOK
        + """
try:
    with InlineSignals(is_command=False) as received:
        received.allow_interrupts()
        received.requests.step = 1
        os.kill(me, signal.SIGINT)
        wait(lambda: received.requests.requested_stop() is not None)
        print(received.requests.requested_stop().name)
        os.kill(me, signal.SIGINT)
        time.sleep(6000)
except KeyboardInterrupt:
    print("interrupted")
assert state() == before, (state(), before)
signal.signal(signal.SIGINT, lambda *_: print("handled"))
os.kill(me, signal.SIGINT)
"""
    )
    assert (code, out) == (0, "STOPPED\ninterrupted\nhandled\n"), err
    assert "saving after the current step" in err


def test_without_a_supervisor_the_files_of_an_operator_are_requests(capsys):
    received = InlineSignals(is_command=False)
    received.on_watcher_event(run_dir_watcher.SaveRequested())
    assert (received.requests.save_requested(), received.requests.requested_stop()) == (True, None)
    received.requests.step = 7
    received.on_watcher_event(run_dir_watcher.StopRequested(Path("run/stop")))
    assert received.requests.requested_stop() == ExitCode.STOPPED
    assert "run/stop: stopping after the current step, with exit 76" in capsys.readouterr().err


@pytest.mark.slow
def test_in_a_notebook_no_import_is_interrupted():
    code, out, err = run(
        NOTEBOOK
        + """
with InlineSignals(is_command=False) as received:
    received.on_attempt(sys.stderr, lambda exit: None)
    for _ in range(3):
        os.kill(me, signal.SIGINT)
        time.sleep(0.01)
    print("imported")
    received.allow_interrupts()
    try:
        os.kill(me, signal.SIGINT)
        time.sleep(6000)
    except KeyboardInterrupt:
        print("interrupted")
"""
    )
    assert (code, out) == (0, "imported\ninterrupted\n"), err


@pytest.mark.slow
def test_in_a_notebook_a_stop_before_the_first_step_exits_nothing():
    code, out, err = run(
        NOTEBOOK
        + """
with InlineSignals(is_command=False) as received:
    received.on_attempt(sys.stderr, lambda exit: print("recorded"))
    os.kill(me, signal.SIGTERM)
    wait(lambda: received.requests.requested_stop() is not None)
    print(received.requests.requested_stop().name)
"""
    )
    assert (code, out) == (0, "PREEMPTED\n"), err
    assert "stopping before the first step" in err


@pytest.mark.slow
def test_without_a_supervisor_the_stacks_of_all_threads_are_written_on_request(tmp_path):
    code, _, err = run(
        NOTEBOOK
        + f"""
stacks = open({str(tmp_path / "stacks")!r}, "a")
with InlineSignals(is_command=False) as received:
    received.on_attempt(stacks, lambda exit: None)
    os.kill(me, signal.SIGUSR1)
    wait(lambda: "Current thread" in open(stacks.name).read())
    os.kill(me, signal.SIGUSR2)
    wait(received.requests.save_requested)
"""
    )
    assert code == 0, err
    assert (tmp_path / "stacks").read_text().count("Thread 0x") >= 2


@pytest.mark.slow
def test_a_signal_that_was_blocked_before_is_not_lost():
    code, out, _ = run(
        """
from jaxres.host import signals
signals.block()
os.kill(me, signal.SIGINT)
with worker_signals() as requests:
    wait(lambda: requests.requested_stop() is not None)
    print(requests.requested_stop().name)
"""
    )
    assert (code, out) == (0, "STOPPED\n")
