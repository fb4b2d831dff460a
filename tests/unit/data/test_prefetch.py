import contextlib
import threading
import time
import traceback

import numpy as np
import pytest

from jaxres.data import Batch, DataThreadDied, DataTimeout, Prefetch
from jaxres.exit_codes import ExitCode
from tests.waiting import SURE_SECONDS, wait_until


def numbered(cursor):
    ids = np.arange(cursor, cursor + 3)
    return Batch(arrays={"x": ids * 10}, ids=ids, cursor=cursor, next_cursor=cursor + 3)


def prefetch(batch_at, *, depth=2, timeout_seconds=SURE_SECONDS, **kwargs):
    return Prefetch(batch_at, depth=depth, timeout_seconds=timeout_seconds, **kwargs)


def test_every_get_returns_the_batch_at_its_cursor():
    with prefetch(numbered) as batches:
        for cursor in (0, 3, 6, 9, 3, 6, 100, 1, 4, 4, 7):
            batch = batches.get(cursor)
            assert (batch.cursor, batch.ids.tolist()) == (cursor, [cursor, cursor + 1, cursor + 2])


def test_the_buffer_is_refilled_to_its_depth_once_half_of_it_is_used():
    computed = []

    def recording(cursor):
        computed.append(cursor)
        return numbered(cursor)

    with prefetch(recording, depth=3) as batches:
        assert computed == []
        batches.get(0)
        wait_until(lambda: len(computed) >= 3)
        time.sleep(0.05)
        # The buffer may have been full before the first batch was taken, or not.
        assert computed in ([0, 3, 6], [0, 3, 6, 9])
        batches.get(3)
        batches.get(6)
        wait_until(lambda: len(computed) >= 5)
        time.sleep(0.05)
    assert computed in ([0, 3, 6, 9, 12], [0, 3, 6, 9, 12, 15])


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 8])
def test_at_least_half_of_the_depth_is_always_ready_or_being_computed(depth):
    computed = []

    def recording(cursor):
        computed.append(cursor)
        return numbered(cursor)

    with prefetch(recording, depth=depth) as batches:
        for step in range(40):
            batches.get(3 * step)
            wait_until(lambda s=step: len(computed) - s - 1 >= max(1, depth // 2))
            assert len(computed) - step - 1 <= depth + 1


def test_place_runs_in_the_background_thread():
    def place(batch):
        return threading.current_thread().name, batch.cursor

    with prefetch(numbered, place=place) as batches:
        assert [batches.get(c) for c in (0, 3)] == [("jaxres-prefetch", 0), ("jaxres-prefetch", 3)]


def failing(cursor):
    if cursor == 6:
        raise LookupError("row 7 is broken")
    return numbered(cursor)


def test_an_error_is_raised_at_its_batch_and_on_every_later_get():
    with prefetch(failing, depth=4) as batches:
        assert batches.get(0).cursor == 0
        time.sleep(0.05)  # The thread has reached the failing batch.
        assert batches.get(3).cursor == 3
        depths = []
        for cursor in (6, 6, 0):
            with pytest.raises(LookupError, match="row 7") as caught:
                batches.get(cursor)
            frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert frames[-1] == "failing"
            depths.append(len(frames))
        assert len(set(depths)) == 1


def test_an_error_ahead_is_discarded_when_another_cursor_is_requested():
    with prefetch(failing, depth=4) as batches:
        batches.get(0)
        time.sleep(0.05)
        for cursor in (9, 12, 15):
            assert batches.get(cursor).cursor == cursor


def test_an_error_of_place_is_raised_too():
    def place(batch):
        raise MemoryError("device")

    with prefetch(numbered, place=place) as batches, pytest.raises(MemoryError, match="device"):
        batches.get(0)


def test_get_and_close_return_in_time_if_the_thread_hangs():
    release = threading.Event()

    def hanging(cursor):
        if cursor == 3:
            release.wait(2 * SURE_SECONDS)
        return numbered(cursor)

    begin = time.monotonic()
    with prefetch(hanging, timeout_seconds=SURE_SECONDS) as batches:
        batches.get(0)
        batches._timeout_seconds = 0.2  # Only batch 3 does not come.
        with pytest.raises(DataTimeout, match=r"cursor 3 did not come within 0\.2 s") as caught:
            batches.get(3)
        assert caught.value.exit_code == ExitCode.HUNG
    assert time.monotonic() - begin < SURE_SECONDS, "it has waited for the thread"
    release.set()


def test_a_late_batch_is_still_the_requested_one():
    release = threading.Event()

    def slow(cursor):
        release.wait(SURE_SECONDS)
        return numbered(cursor)

    with prefetch(slow, timeout_seconds=0.05) as batches:
        for cursor in (0, 50):
            with pytest.raises(DataTimeout):
                batches.get(cursor)
        release.set()

        def has_come():
            with contextlib.suppress(DataTimeout):
                return batches.get(50).cursor == 50
            return False

        wait_until(has_come, "batch")


@pytest.mark.parametrize("ends_badly", [False, True])
def test_a_result_that_is_no_longer_requested_is_not_served(ends_badly):
    started, release = threading.Event(), threading.Event()

    def slow_at_three(cursor):
        if cursor == 3:
            started.set()
            release.wait(SURE_SECONDS)
            if ends_badly:
                raise LookupError("row 3 is broken")
        return numbered(cursor)

    with prefetch(slow_at_three) as batches:
        batches.get(0)
        assert started.wait(SURE_SECONDS)
        timer = threading.Timer(0.1, release.set)  # While the get below waits.
        timer.start()
        assert batches.get(50).cursor == 50
        assert batches.get(53).cursor == 53
        timer.join(SURE_SECONDS)


def test_an_ended_thread_is_an_error():
    with prefetch(numbered) as batches:
        batches._closed = True
        with batches._changed:
            batches._changed.notify_all()
        batches._thread.join(SURE_SECONDS)
        batches._closed = False
        with pytest.raises(DataThreadDied, match="cursor 0"):
            batches.get(0)


def test_a_closed_prefetch_serves_nothing_and_leaves_no_thread():
    with prefetch(numbered) as batches:
        batches.get(0)
    batches.close()
    assert "jaxres-prefetch" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="closed"):
        batches.get(3)
