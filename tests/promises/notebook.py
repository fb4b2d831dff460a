"""A program that calls jaxres's `main` several times, as the cells of a notebook do.

`python -m tests.promises.notebook CALLS ARGUMENT...`: for each of that many calls prints one line,
`CALL n: returned CODE` or `CALL n: KeyboardInterrupt`; ends with 1 if a call has changed signal
handlers, signal mask, wake-up pipe, exception hook or threads. FAULT is set for the first call.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from jaxres.train.__main__ import main
from tests.waiting import SURE_SECONDS

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ours() -> list[threading.Thread]:
    """Returns the threads of jaxres."""
    return [thread for thread in threading.enumerate() if "jaxres" in thread.name]


def join_ours() -> None:
    """Waits for threads that end by themselves: on a busy machine a call may not wait for them."""
    for thread in ours():
        thread.join(SURE_SECONDS)


def state() -> dict[str, Any]:
    """Returns the state of this process that a command must leave unchanged."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "handlers": [str(signal.getsignal(number)) for number in NUMBERS],
        "mask": sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "wakeup": wakeup,
        "hook": str(sys.excepthook),
        "threads": sorted(thread.name for thread in ours()),
    }


def run(calls: int, arguments: list[str]) -> int:
    """Returns 1 if a call has changed the state of this process."""
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()  # It blocks no signal.
    for number in range(1, calls + 1):
        before = state()
        try:
            end = f"returned {int(main(arguments))}"
        except KeyboardInterrupt:
            end = "KeyboardInterrupt"
        os.environ.pop("FAULT", None)
        print(f"CALL {number}: {end}", flush=True)
        join_ours()
        if (after := state()) != before:
            print(json.dumps([before, after], indent=1))
            return 1
    return 0


if __name__ == "__main__":
    code = run(int(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(code)
