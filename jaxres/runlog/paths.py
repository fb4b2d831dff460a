"""The names of things in a run directory; other people's tools rely on them."""

from dataclasses import dataclass
from pathlib import Path

from jaxres.storage.path import Place

SCRATCH = Path("~/.cache/jaxres/runs")


@dataclass(frozen=True)
class RunDir:
    """Paths below one run directory.

    Of a run in a bucket some lie on the machine all the same (`local`): what is made anew where it
    is missing, what the kernel locks, and what libraries and the operating system write to.
    """

    root: Place

    @property
    def local(self) -> Path:
        """What of it lies on this machine: a run directory on a disk is all there."""
        if isinstance(self.root, Path):
            return self.root
        return SCRATCH.expanduser() / str(self.root).partition("//")[2].replace("/", "+")

    @property
    def config(self) -> Place:
        """The resolved config of the first start."""
        return self.root / "config.yaml"

    @property
    def log(self) -> Place:
        """The folder of the decision log."""
        return self.root / "log"

    @property
    def lock(self) -> Path:
        """What the owner holds a kernel lock on."""
        return self.local / "owner.lock"

    @property
    def owner(self) -> Place:
        """The owner's beat."""
        return self.root / "owner.json"

    @property
    def alerts(self) -> Place:
        """What targets of alerts have been told, by all supervisors one after the other."""
        return self.root / "alerts.jsonl"

    def request(self, name: str) -> Place:
        """A person's request: `stop` or `save`."""
        return self.root / name

    @property
    def checkpoints(self) -> Place:
        """The folder of step directories; which of them count is the log's to say."""
        return self.root / "checkpoints"

    @property
    def pins(self) -> Place:
        """The folder of pins: a file named after a step keeps that step."""
        return self.root / "pins"

    @property
    def exports(self) -> Path:
        """Where parameters are exported to."""
        return self.local / "exports"

    @property
    def compiled(self) -> Path:
        """The folder of compiled steps, by key; made anew where it is missing."""
        return self.local / "compiled"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files, one an attempt."""
        return self.local / "tensorboard"

    @property
    def supervisor_events(self) -> Place:
        """What a supervisor has decided, over all attempts."""
        return self.root / "events-supervisor.jsonl"

    def door_events(self, attempt: int, host: int) -> Place:
        """What one host's door has seen and decided: notices of its machine."""
        return self.attempt(attempt) / f"events-door-host{host:03d}.jsonl"

    def attempt(self, attempt: int) -> Place:
        """The folder of one attempt."""
        return self.root / "attempts" / f"{attempt:04d}"

    def local_attempt(self, attempt: int) -> Path:
        """The folder of what one attempt leaves on this machine."""
        return self.local / "attempts" / f"{attempt:04d}"

    def metrics(self, attempt: int) -> Place:
        """One line a step, by the lead host."""
        return self.attempt(attempt) / "metrics.jsonl"

    def sharding(self, attempt: int) -> Place:
        """What lies on every device, by the lead host."""
        return self.attempt(attempt) / "sharding.txt"

    def diagnostics(self, attempt: int) -> Place:
        """What was seen last by an attempt that has diverged."""
        return self.attempt(attempt) / "diagnostics"

    def stacks(self, attempt: int, host: int) -> Path:
        """Stacks of all threads of one host's worker, when a deadline has passed or one asks."""
        return self.local_attempt(attempt) / f"stacks-host{host:03d}.txt"

    def output(self, attempt: int, host: int) -> Path:
        """What one host's worker, the libraries in it and custom code have printed."""
        return self.local_attempt(attempt) / f"output-host{host:03d}.txt"

    def traceback(self, attempt: int, host: int) -> Path:
        """The traceback of an exception that one host's worker has not caught."""
        return self.local_attempt(attempt) / f"traceback-host{host:03d}.txt"

    def events(self, attempt: int, host: int) -> Place:
        """What happened, by one host."""
        return self.attempt(attempt) / f"events-host{host:03d}.jsonl"
