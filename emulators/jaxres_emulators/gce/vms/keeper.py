"""Finds the processes of a VM by their environment and kills them all.

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
MAX_BEGIN_SECONDS, POLL_SECONDS = 5.0, 0.002
"""A new process without environment may be one in the middle of its exec, on a busy machine long.

A process that is older than this has none, as a daemon may."""
KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of include/linux/sched.h."""


def values(name: str) -> dict[str, list[int]]:
    """Returns the processes that have a variable of this name, by its words; daemons too."""
    found: dict[str, list[int]] = {}
    start = f"{name}=".encode()
    unread = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    end = time.monotonic() + MAX_BEGIN_SECONDS
    while True:
        unsure = []
        for pid in unread:
            words = _environ(pid)
            if words == [b""] and _begins(pid):
                unsure.append(pid)
            for word in words:
                if word.startswith(start):
                    found.setdefault(word.decode("utf-8", "replace"), []).append(int(pid))
        if not unsure or time.monotonic() >= end:
            return found
        unread = unsure
        time.sleep(POLL_SECONDS)


def marked(mark: str) -> list[int]:
    """Returns the processes that have a variable of this text; zombies have none."""
    return values(mark.partition("=")[0]).get(mark, [])


def _environ(pid: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:  # It is another user's, or has ended.
        return []


def _begins(pid: str) -> bool:
    """Says whether a process without environment may be one in the middle of its exec."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    state, flags, started = words[0], int(words[6]), int(words[19]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    is_one = state not in (b"Z", b"X") and not flags & KERNEL_THREAD
    return is_one and age < MAX_BEGIN_SECONDS


def send(mark: str, number: int) -> int:
    """Sends a signal to all that bear the mark; returns to how many."""
    sent = 0
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            held = os.pidfd_open(pid)
            try:
                words = _environ(str(pid))  # Again: it may be another process by now.
                if mark.encode() in words:
                    signal.pidfd_send_signal(held, number)
                sent += mark.encode() in words or (words == [b""] and _begins(str(pid)))
            finally:
                os.close(held)
    return sent


def kill(mark: str) -> None:
    """Returns once none is left that bears the mark: some may be born while others die.

    They are stopped first: as in a power failure, none lives to see another one die.
    """
    send(mark, signal.SIGSTOP)
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
