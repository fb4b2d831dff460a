"""A stop signal counts, whatever the code does in which it raises its exception."""

import subprocess
import sys

import pytest

from tests.waiting import SURE_SECONDS

BODY = """
import os, signal, sys
from jaxres.supervisor import attempt_runner
from jaxres.host import signals

def wrapped():
    try:
        signal.raise_signal(signal.SIGTERM)
    except Exception as error:
        raise ValueError("a schema can't be built") from error

def caught():
    try:
        signal.raise_signal(signal.SIGTERM)
    except Exception:
        pass
    with signals.wakeup_fd() as wakeup:
        return int(signals.drain(wakeup) == bytes([signal.SIGTERM]))

def ignored():
    with signals.wakeup_fd() as wakeup:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.raise_signal(number)
        return 7 if signals.drain(wakeup) == b"" else 1

def fails_after_it_ended():
    assert caught() == 1
    raise RuntimeError("an error of its own")

if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.exit(attempt_runner.run_with_exit_code(globals()[sys.argv[1]]))
"""


def run(name: str) -> tuple[int, str]:
    words = [sys.executable, "-c", BODY, name]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=SURE_SECONDS)
    return ended.returncode, ended.stderr


@pytest.mark.slow
def test_a_stop_in_code_that_raises_another_error_is_a_stop():
    code, printed = run("wrapped")
    assert printed.startswith("SIGTERM before the run had begun"), printed
    assert code == 75


@pytest.mark.slow
def test_a_stop_in_code_that_catches_it_reaches_the_supervisor_of_the_run():
    assert run("caught") == (1, "")


@pytest.mark.slow
def test_an_error_after_a_stop_that_was_handled_is_a_bug():
    code, printed = run("fails_after_it_ended")
    assert "RuntimeError: an error of its own" in printed
    assert code == 70


@pytest.mark.slow
def test_signals_that_the_shell_has_set_to_be_ignored_stay_ignored():
    """Ctrl-C at a command in the foreground reaches those in the background too."""
    assert run("ignored") == (7, "")
