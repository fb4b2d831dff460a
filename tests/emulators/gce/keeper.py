"""Finds the processes of a VM by their environment, and ends them; sees to it that nothing is left.

As a program (`python -I -S keeper.py MARK FOLDER`) it waits for its standard input to end, which it
does when the emulator ends, however that comes about; then it kills whatever bears the mark.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

MOST_ROUNDS = 200
ROUND_SECONDS = 0.02


def marked(mark: str) -> list[int]:
    """Returns the processes that have a variable of this text, daemons too; zombies have none."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _bears(name, mark)]


def _bears(pid: str, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark.encode() in file.read().split(b"\0")
    except OSError:  # It is another user's, or has ended.
        return False


def send(mark: str, number: int) -> int:
    """Sends a signal to all that bear the mark, returns how many they were."""
    sent = 0
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            held = os.pidfd_open(pid)
            try:
                if _bears(str(pid), mark):  # It may be another process by now.
                    signal.pidfd_send_signal(held, number)
                    sent += 1
            finally:
                os.close(held)
    return sent


def kill(mark: str) -> None:
    """Returns once none is left that bears the mark: some may be born while others die."""
    for _ in range(MOST_ROUNDS):
        if not send(mark, signal.SIGKILL):
            return
        time.sleep(ROUND_SECONDS)
    raise RuntimeError(f"{marked(mark)}: can't be killed")


def main() -> None:
    mark, folder = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    is_told = sys.stdin.buffer.read(1)
    kill(mark)
    if not is_told:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
