import select
import signal
import threading

import pytest

from jaxres.storage.threads import SYNCHRONOUS, WatcherThreads, spawn_thread
from tests.waiting import SURE_SECONDS


@pytest.mark.parametrize("blocks_signals", [True, False])
def test_thread_blocks_signals_unless_it_inherits_the_mask(blocks_signals):
    masks = []

    def read_mask():
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    thread = spawn_thread("look", read_mask, daemon=True, blocks_signals=blocks_signals)
    thread.join(SURE_SECONDS)
    assert (thread.name, thread.daemon) == ("jaxres-look", True)
    unblockable = {signal.SIGKILL, signal.SIGSTOP}
    all_but_faults = signal.valid_signals() - SYNCHRONOUS - unblockable
    assert masks == [all_but_faults if blocks_signals else before]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_items_of_watcher_threads_wake_a_select_loop_and_arrive_in_order():
    watchers = WatcherThreads[int]()
    assert select.select([watchers.wakeup], [], [], 0)[0] == []
    watchers.start("count", lambda: [watchers.put(number) for number in range(100_000)])
    taken = []
    while len(taken) < 100_000:
        assert select.select([watchers.wakeup], [], [], SURE_SECONDS)[0]
        taken += watchers.take()
    assert taken == list(range(100_000))
    assert watchers.close(seconds=SURE_SECONDS)


def test_hung_watcher_thread_is_abandoned_with_its_pipe():
    watchers, resumed = WatcherThreads[str](), threading.Event()

    def hang():
        assert resumed.wait(SURE_SECONDS)
        watchers.put("late")

    watchers.start("hang", hang)
    assert not watchers.close(seconds=0.05)
    assert watchers.closed.is_set()
    resumed.set()
    assert select.select([watchers.wakeup], [], [], SURE_SECONDS)[0]
    assert watchers.take() == ["late"]
    assert watchers.close(seconds=SURE_SECONDS)
