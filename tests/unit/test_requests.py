"""Promises of the requests' flags, in a process of their own: they change the signal mask."""

import subprocess
import sys

import pytest

HEAD = """
import os, signal, sys, time
from jaxres.train.stop_requests import Requests
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
def test_behind_a_door_a_stop_is_a_flag_however_often_it_comes(number, exit):
    code, out, err = run(
        f"""
with Requests(alone=False) as requests:
    assert requests.stop_asked() is None
    for _ in range(3):
        os.kill(me, signal.{number})
    wait(lambda: requests.stop_asked() is not None)
    os.kill(me, signal.SIGTERM)
    os.kill(me, signal.SIGUSR2)
    wait(requests.save_asked)
    print(requests.stop_asked().name)
"""
    )
    assert (code, out, err) == (0, f"{exit}\n", "")


def test_behind_a_door_an_order_to_leave_is_a_preemption_without_time():
    code, out, err = run(
        """
from jaxres.supervisor.worker_process import LEAVE
with Requests(alone=False) as requests:
    assert requests.has_time()
    os.kill(me, LEAVE)
    wait(lambda: requests.stop_asked() is not None)
    print(requests.stop_asked().name, requests.has_time())
"""
    )
    assert (code, out, err) == (0, "PREEMPTED False\n", "")


def test_save_is_asked_until_it_is_taken():
    code, out, err = run(
        """
with Requests(alone=False) as requests:
    os.kill(me, signal.SIGUSR2)
    wait(requests.save_asked)
    assert requests.save_asked()
    requests.save_taken()
    print(requests.save_asked(), requests.stop_asked())
"""
    )
    assert (code, out, err) == (0, "False None\n", "")


def test_alone_a_stop_before_the_first_step_ends_at_once():
    code, out, err = run(
        """
with Requests(alone=True) as requests:
    requests.before_early_end(lambda exit: print("put down", exit.name, flush=True))
    os.kill(me, signal.SIGTERM)
    time.sleep(60)
"""
    )
    assert (code, out) == (75, "put down PREEMPTED\n")
    assert "nothing new to save" in err


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_alone_the_second_ends_at_once(number, code):
    ended, _, err = run(
        f"""
with Requests(alone=True) as requests:
    requests.stepped()
    os.kill(me, signal.SIGHUP)
    wait(lambda: requests.stop_asked() is not None)
    os.kill(me, signal.SIGHUP)
    os.kill(me, signal.{number})
    time.sleep(60)
"""
    )
    assert ended == code
    assert err.count("saving after the present step") >= 1
    assert "ended at once" in err


def test_a_signal_that_was_held_before_is_not_lost():
    code, out, _ = run(
        """
from jaxres.supervise import signals
signals.hold()
os.kill(me, signal.SIGINT)
with Requests(alone=False) as requests:
    wait(lambda: requests.stop_asked() is not None)
    print(requests.stop_asked().name)
"""
    )
    assert (code, out) == (0, "STOPPED\n")
