import threading
import time

import pytest

from jaxres.faults import StorageUnavailable
from jaxres.storage.timeouts import CallTimeout, call_with_timeout, write_with_timeout
from tests.waiting import SURE_SECONDS


def raising(error):
    def call():
        raise error

    return call


def test_result_or_exception_of_the_call_is_passed_on():
    assert call_with_timeout(lambda: 7, seconds=SURE_SECONDS) == 7
    assert call_with_timeout(lambda: None, seconds=SURE_SECONDS) is None
    for error in (StorageUnavailable("full"), SystemExit(3)):
        with pytest.raises(type(error)) as raised:
            call_with_timeout(raising(error), seconds=SURE_SECONDS)
        assert raised.value is error


def test_hung_call_is_abandoned():
    resumed, began = threading.Event(), time.monotonic()
    with pytest.raises(CallTimeout, match="storage has not answered"):
        call_with_timeout(lambda: resumed.wait(2 * SURE_SECONDS), seconds=0.05)
    assert time.monotonic() - began < SURE_SECONDS
    resumed.set()


def test_refused_or_hung_write_prints_a_message_and_only_a_hung_one_returns_false():
    resumed, messages = threading.Event(), []
    settings = {"what": "the end could not be recorded", "report": messages.append}
    assert write_with_timeout(lambda: None, seconds=SURE_SECONDS, **settings)
    assert messages == []
    for error in (StorageUnavailable("full"), OSError("gone")):
        assert write_with_timeout(raising(error), seconds=SURE_SECONDS, **settings)
    assert not write_with_timeout(lambda: resumed.wait(2 * SURE_SECONDS), seconds=0.05, **settings)
    resumed.set()
    reasons = ("full", "gone", "storage has not answered for 0.05 s")
    assert messages == [f"the end could not be recorded: {reason}" for reason in reasons]
    with pytest.raises(ZeroDivisionError):
        write_with_timeout(lambda: 1 / 0, seconds=SURE_SECONDS, **settings)
