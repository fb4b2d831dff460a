"""Names of the files and folders in a run directory; external tools rely on them."""

import os
from dataclasses import dataclass
from pathlib import Path

from jaxres.faults import UsageError
from jaxres.storage.path import RunPath, is_remote, parse_path, run_root

SCRATCH = Path("~/.cache/jaxres/runs")


LAUNCH_STATE, LAUNCH_EVENTS = "launch/desired_state.json", "launch/events"
"""Files of `launch gce` below the run directory, which `jaxres report` reads."""


@dataclass(frozen=True)
class RunDir:
    """Paths below one run directory.

    Some files of a run in a bucket are on the local disk (`local`): caches that are created again
    if missing, the lock file, and files that libraries and the operating system write.
    """

    root: RunPath

    @property
    def is_remote(self) -> bool:
        """Whether the run directory is in a bucket."""
        return is_remote(self.root)

    @property
    def local(self) -> Path:
        """Folder of the local files; for a run directory on a disk, the run directory itself."""
        if not is_remote(self.root):
            return self.root
        name = str(self.root).partition("//")[2]
        for character, written in (("%", "%25"), ("+", "%2B"), ("/", "+")):
            name = name.replace(character, written)  # Another run has another folder.
        return SCRATCH.expanduser() / name

    @property
    def config(self) -> RunPath:
        """The resolved config of the first start."""
        return self.root / "config.yaml"

    @property
    def log(self) -> RunPath:
        """The folder of the run log."""
        return self.root / "log"

    @property
    def log_summary(self) -> RunPath:
        """The summary of the run log, see log_summary.py."""
        return self.root / "log-summary.json"

    @property
    def lock(self) -> Path:
        """The file that the lock holder locks."""
        return self.local / "owner.lock"

    @property
    def owner(self) -> RunPath:
        """The heartbeat of the lock holder."""
        return self.root / "owner.json"

    @property
    def alerts(self) -> RunPath:
        """The delivery log of alerts, of all supervisors."""
        return self.root / "alerts.jsonl"

    @property
    def secret(self) -> RunPath:
        """The secret by which the supervisors of several hosts authenticate each other."""
        return self.root / "secret"

    def request(self, name: str) -> RunPath:
        """A request file of the user: `stop` or `save`."""
        return self.root / name

    @property
    def checkpoints(self) -> RunPath:
        """The folder of step directories; the run log decides which of them are committed."""
        return self.root / "checkpoints"

    @property
    def pins(self) -> RunPath:
        """The folder of pins: a file named after a step keeps that step."""
        return self.root / "pins"

    @property
    def forgotten_faults(self) -> RunPath:
        """The folder of forgotten faults of hosts: a file named after the claim of an attempt."""
        return self.root / "forgotten-faults"

    @property
    def reported_faults(self) -> RunPath:
        """The folder of faults that hosts report themselves, see faulty_hosts.py."""
        return self.root / "reported-faults"

    @property
    def excluded_hosts(self) -> RunPath:
        """The folder of hosts excluded by hand: a file for each, see faulty_hosts.py."""
        return self.root / "excluded-hosts"

    @property
    def memory_places(self) -> Path:
        """The folder of the places, besides /dev/shm, that have had states in host memory."""
        return self.local / "memory-places"

    def tokenizer(self, name: str) -> RunPath:
        """The folder of a tokenizer's files; its name in the start records has their digest."""
        return self.root / "tokenizers" / name.partition(":")[2]

    @property
    def exports(self) -> Path:
        """The folder of exported parameters."""
        return self.local / "exports"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files; in a bucket, `tensorboard` has copies."""
        return self.local / "tensorboard"

    @property
    def console_log(self) -> Path:
        """Output of host 0 in all attempts; of a run in a bucket, on this machine."""
        return self.local / "console.log"

    @property
    def supervisor_events(self) -> RunPath:
        """Events of the restart loop, for all attempts."""
        return self.root / "events-supervisor.jsonl"

    @property
    def launch_events(self) -> RunPath:
        """Folder of the events of `launch gce`."""
        return self.root / LAUNCH_EVENTS

    @property
    def launch_state(self) -> RunPath:
        """Desired state of `launch gce`, which has its newest events."""
        return self.root / LAUNCH_STATE

    def host_supervisor_events(self, attempt: int, host: int) -> RunPath:
        """Events of one host's supervisor in an attempt, such as preemption notices."""
        return self.attempt(attempt) / f"events-supervisor-host{host:03d}.jsonl"

    @property
    def attempts(self) -> RunPath:
        """The folder of the attempts' folders."""
        return self.root / "attempts"

    def attempt(self, attempt: int) -> RunPath:
        """The folder of one attempt."""
        return self.attempts / f"{attempt:04d}"

    def read_back(self, host: int) -> Path:
        """The folder of the files that a host reads back while it saves to a bucket."""
        return self.local / "read-back" / f"host{host:03d}"

    def local_attempt(self, attempt: int) -> Path:
        """The folder of one attempt's local files."""
        return self.local / "attempts" / f"{attempt:04d}"

    def incidents(self, attempt: int) -> RunPath:
        """Folder of the incidents of supervisors that send no alerts, one file a host."""
        return self.attempt(attempt) / "incidents"

    def metrics(self, attempt: int) -> RunPath:
        """Metrics lines, one per step, written by host 0."""
        return self.attempt(attempt) / "metrics.jsonl"

    def sharding(self, attempt: int) -> RunPath:
        """The sharding report, written by host 0."""
        return self.attempt(attempt) / "sharding.txt"

    def diagnostics(self, attempt: int) -> RunPath:
        """The last batches and values of an attempt that has diverged."""
        return self.attempt(attempt) / "diagnostics"

    def stacks(self, attempt: int, host: int) -> Path:
        """Stacks of all threads of one host's worker, after a passed deadline or on request."""
        return self.local_attempt(attempt) / f"stacks-host{host:03d}.txt"

    def output(self, attempt: int, host: int) -> Path:
        """Output of one host's worker: of jaxres, libraries and custom code."""
        return self.local_attempt(attempt) / f"output-host{host:03d}.txt"

    def older_output(self, attempt: int, host: int) -> Path:
        """Output of a program on one host before that in `output`, whose size is bounded."""
        return self.local_attempt(attempt) / f"output-host{host:03d}-older.txt"

    def loop_lock(self, attempt: int, host: int) -> Path:
        """Lock of the loop (`jaxres.attempt`) in an attempt's program on a host."""
        return self.local_attempt(attempt) / f"loop-host{host:03d}.lock"

    def traceback(self, attempt: int, host: int) -> Path:
        """The traceback of an uncaught exception of one host's worker."""
        return self.local_attempt(attempt) / f"traceback-host{host:03d}.txt"

    def events(self, attempt: int, host: int) -> RunPath:
        """Events of one host's worker."""
        return self.attempt(attempt) / f"events-host{host:03d}.jsonl"


def root_of(path: str | RunPath) -> RunPath:
    """Returns the run directory of a given path. Raises UsageError if it can't be one."""
    try:
        return run_root(parse_path(os.path.expanduser(str(path))))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
