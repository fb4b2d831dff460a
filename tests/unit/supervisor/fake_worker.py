"""A worker without jax: beats, obeys signals, and ends as its part says. Plain Python, starts fast.

    fake_worker.py FOLDER HOST NUM_HOSTS PART --status-fd N

PART is JSON; a key that is absent means that nothing of that kind happens:
  steps: steps to make before it stands still (default: for ever)
  enters: phase that it enters when it has made them
  end: [code, after_steps], said before it is done; `silent`: the end is not said
  saves: [seconds, saving]: how long a save has taken, and whether another one is in flight
  on_stop: [code, seconds]: how it ends, and after how long, when asked to stop
  on_loss: "abort" or "word": how it ends when a peer is gone or stopped
  lingers: seconds between its word and its end
  then: signal number that ends it once it has said its word
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

LEAVE = signal.SIGRTMIN + 1


class Worker:
    def __init__(self, folder, host, num_hosts, part, status_fd):
        self.folder = folder
        self.host = host
        self.num_hosts = num_hosts
        self.part = part
        self.status_fd = status_fd
        self.asked = set()
        self.met = False

    def run(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, LEAVE):
            signal.signal(number, self.note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        self.write("pid", os.getpid())
        self.send_status("phase_entered", phase="train")
        if "saves" in self.part:
            seconds, saving = self.part["saves"]
            self.send_status("save_started", step=1)
            self.send_status("save_ended", step=1, seconds=seconds)
            if saving:
                self.send_status("save_started", step=2)
        step = 0
        while True:
            if step < self.part.get("steps", 1e9):
                step += 1
                self.send_status("step_finished", step=step, seconds=0.02)
                self.write("step", step)
                if step == self.part.get("steps") and "enters" in self.part:
                    self.send_status("phase_entered", phase=self.part["enters"])
            if "end" in self.part and step >= self.part["end"][1]:
                self.leave(self.part["end"][0], f"part {self.host}")
            if "on_stop" in self.part and self.asked & {signal.SIGTERM, signal.SIGINT, LEAVE}:
                code, seconds = self.part["on_stop"]
                self.send_status("phase_entered", phase="settle")
                time.sleep(seconds)
                self.leave(code, f"stop {self.host}")
            if "on_loss" in self.part and self.has_lost_a_peer():
                time.sleep(0.1)
                if self.part["on_loss"] == "word":
                    self.leave(79, "a peer is gone")
                os.abort()
            time.sleep(0.02)

    def note(self, number, frame):
        self.asked.add(number)
        self.write(f"signal-{number}", "")

    def write(self, name, word):
        path = self.folder / f"{name}-{self.host}"
        new = path.with_suffix(f".{time.monotonic_ns()}")  # A signal may come while one is handled.
        new.write_text(str(word))
        new.rename(path)

    def send_status(self, kind, **fields):
        os.write(self.status_fd, json.dumps({"message": kind} | fields).encode() + b"\n")

    def leave(self, code, reason):
        if "silent" not in self.part:
            self.send_status("exit", exit=code, reason=reason, committed=code in (0, 75, 76))
        time.sleep(self.part.get("lingers", 0))
        if "then" in self.part:
            os.kill(os.getpid(), self.part["then"])
        os._exit(code)

    def has_lost_a_peer(self):
        """Once all have met: whether one is gone, stopped, or a zombie."""
        pids = [self.folder / f"pid-{peer}" for peer in range(self.num_hosts)]
        self.met = self.met or all(path.exists() for path in pids)
        if not self.met:
            return False
        try:
            stats = [Path(f"/proc/{path.read_text()}/stat").read_text() for path in pids]
        except OSError:
            return True
        return any(stat.rpartition(")")[2].split()[0] in "ZXtT" for stat in stats)


if __name__ == "__main__":
    words = sys.argv[1:]
    Worker(Path(words[0]), int(words[1]), int(words[2]), json.loads(words[3]), int(words[5])).run()
