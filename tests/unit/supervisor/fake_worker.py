"""A worker without jax: sends heartbeats, obeys signals, ends as its script says. Starts fast.

    fake_worker.py FOLDER HOST NUM_HOSTS SCRIPT --status-fd N

SCRIPT is JSON; a key that is absent means that nothing of that kind happens:
  steps: number of steps to finish before it makes no progress (default: for ever)
  enters: phase that it enters when they are finished
  end: [code, after_steps], announced by a message; `silent`: without the message
  saves: [seconds, saving]: how long a save has taken, and whether another one is in flight
  saves_after: number of steps before these saves (default: none)
  on_stop: [code, seconds]: how it ends, and after how long, when a stop is requested; null: once
    FOLDER/gate exists
  on_loss: "abort" or "word": how it ends when a peer is gone or stopped
  lingers: whether it waits for FOLDER/gate between its exit message and its end
  then: number of the signal that ends it after its exit message
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

LEAVE = signal.SIGRTMIN + 1


class FakeWorker:
    def __init__(self, folder, host, num_hosts, script, status_fd):
        self.folder = folder
        self.host = host
        self.num_hosts = num_hosts
        self.script = script
        self.status_fd = status_fd
        self.requested = set()
        self.met = False

    def run(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, LEAVE):
            signal.signal(number, self.note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        self.write("pid", os.getpid())
        self.send_status("phase_entered", phase="train")
        step = 0
        while True:
            if "saves" in self.script and step == self.script.get("saves_after", 0):
                self.send_saves(*self.script.pop("saves"))
            if step < self.script.get("steps", 1e9):
                step += 1
                tokens = 100 * step
                self.send_status("step_finished", step=step, seconds=0.02, loss=2.5, tokens=tokens)
                self.write("step", step)
                if step == self.script.get("steps") and "enters" in self.script:
                    self.send_status("phase_entered", phase=self.script["enters"])
            if "end" in self.script and step >= self.script["end"][1]:
                self.leave(self.script["end"][0], f"host {self.host}")
            if "on_stop" in self.script and self.requested & {
                signal.SIGTERM,
                signal.SIGINT,
                LEAVE,
            }:
                code, seconds = self.script["on_stop"]
                self.send_status("phase_entered", phase="settle")
                self.wait_for_gate() if seconds is None else time.sleep(seconds)
                self.leave(code, f"stop {self.host}")
            if "on_loss" in self.script and self.has_lost_a_peer():
                time.sleep(0.1)
                if self.script["on_loss"] == "word":
                    self.leave(79, "a peer is gone")
                os.abort()
            time.sleep(0.02)

    def wait_for_gate(self):
        supervisor = os.getppid()
        while not (self.folder / "gate").exists() and os.getppid() == supervisor:
            time.sleep(0.02)

    def send_saves(self, seconds, saving):
        self.send_status("save_started", step=1)
        self.send_status("save_ended", step=1, seconds=seconds)
        if saving:
            self.send_status("save_started", step=2)

    def note(self, number, frame):
        self.requested.add(number)
        self.write(f"signal-{number}", "")

    def write(self, name, word):
        path = self.folder / f"{name}-{self.host}"
        new = path.with_suffix(f".{time.monotonic_ns()}")  # A signal may come while one is handled.
        new.write_text(str(word))
        new.rename(path)

    def send_status(self, kind, **fields):
        os.write(self.status_fd, json.dumps({"message": kind} | fields).encode() + b"\n")

    def leave(self, code, reason):
        if "silent" not in self.script:
            self.send_status("exit", exit=code, reason=reason, committed=code in (0, 75, 76))
        if "lingers" in self.script:
            self.wait_for_gate()
        if "then" in self.script:
            os.kill(os.getpid(), self.script["then"])
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
    FakeWorker(
        Path(words[0]), int(words[1]), int(words[2]), json.loads(words[3]), int(words[5])
    ).run()
