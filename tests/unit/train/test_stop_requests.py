"""Stop and save requests by signals; in separate processes, because they change the signal mask."""

import subprocess
import sys

import pytest

HEAD = """
import os, signal, sys, time
from jaxres.train.stop_requests import SignalListener
me = os.getpid()
def wait(condition):
    while not condition():
        time.sleep(0.001)
"""


def run(body):
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + body], capture_output=True, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("number", "exit"), [("SIGTERM", "PREEMPTED"), ("SIGINT", "STOPPED"), ("SIGHUP", "PREEMPTED")]
)
def test_under_a_supervisor_a_repeated_stop_is_only_a_flag(number, exit):
    code, out, err = run(
        f"""
with SignalListener(alone=False) as requests:
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


def test_under_a_supervisor_the_exit_signal_is_a_preemption_without_time():
    code, out, err = run(
        """
from jaxres.supervisor.worker_process import LEAVE
with SignalListener(alone=False) as requests:
    assert requests.may_save()
    os.kill(me, LEAVE)
    wait(lambda: requests.requested_stop() is not None)
    print(requests.requested_stop().name, requests.may_save())
"""
    )
    assert (code, out, err) == (0, "PREEMPTED False\n", "")


def test_a_save_is_requested_until_it_is_cleared():
    code, out, err = run(
        """
with SignalListener(alone=False) as requests:
    os.kill(me, signal.SIGUSR2)
    wait(requests.save_requested)
    assert requests.save_requested()
    requests.clear_save_request()
    print(requests.save_requested(), requests.requested_stop())
"""
    )
    assert (code, out, err) == (0, "False None\n", "")


def test_alone_a_stop_before_the_first_step_exits_at_once():
    code, out, err = run(
        """
with SignalListener(alone=True) as requests:
    requests.on_early_exit(lambda exit: print("recorded", exit.name, flush=True))
    os.kill(me, signal.SIGTERM)
    time.sleep(60)
"""
    )
    assert (code, out) == (75, "recorded PREEMPTED\n")
    assert "nothing new to save" in err


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_alone_a_second_stop_exits_at_once(number, code):
    ended, _, err = run(
        f"""
with SignalListener(alone=True) as requests:
    requests.on_step(None)
    os.kill(me, signal.SIGHUP)
    wait(lambda: requests.requested_stop() is not None)
    os.kill(me, signal.SIGHUP)
    os.kill(me, signal.{number})
    time.sleep(60)
"""
    )
    assert ended == code
    assert err.count("saving after the current step") >= 1
    assert "ended at once" in err


def test_a_signal_that_was_blocked_before_is_not_lost():
    code, out, _ = run(
        """
from jaxres.supervisor import signals
signals.block()
os.kill(me, signal.SIGINT)
with SignalListener(alone=False) as requests:
    wait(lambda: requests.requested_stop() is not None)
    print(requests.requested_stop().name)
"""
    )
    assert (code, out) == (0, "STOPPED\n")
