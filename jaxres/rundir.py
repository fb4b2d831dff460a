"""The names of things in a run directory; other people's tools rely on them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """Paths below one run directory."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config of the first start."""
        return self.root / "config.yaml"

    @property
    def log(self) -> Path:
        """The folder of the decision log."""
        return self.root / "log"

    @property
    def lock(self) -> Path:
        """What the owner holds a kernel lock on."""
        return self.root / "owner.lock"

    @property
    def owner(self) -> Path:
        """The owner's beat."""
        return self.root / "owner.json"

    @property
    def alerts(self) -> Path:
        """What targets of alerts have been told, by all supervisors one after the other."""
        return self.root / "alerts.jsonl"

    def request(self, name: str) -> Path:
        """A person's request: `stop` or `save`."""
        return self.root / name

    @property
    def checkpoints(self) -> Path:
        """The folder of step directories; which of them count is the log's to say."""
        return self.root / "checkpoints"

    @property
    def pins(self) -> Path:
        """The folder of pins: a file named after a step keeps that step."""
        return self.root / "pins"

    @property
    def exports(self) -> Path:
        """Where parameters are exported to."""
        return self.root / "exports"

    @property
    def compiled(self) -> Path:
        """The folder of compiled steps, by key; made anew where it is missing."""
        return self.root / "compiled"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard's event files, one an attempt."""
        return self.root / "tensorboard"

    @property
    def supervisor_events(self) -> Path:
        """What a supervisor has decided, over all attempts."""
        return self.root / "events-supervisor.jsonl"

    def door_events(self, attempt: int, host: int) -> Path:
        """What one host's door has seen and decided: notices of its machine."""
        return self.attempt(attempt) / f"events-door-host{host:03d}.jsonl"

    def attempt(self, attempt: int) -> Path:
        """The folder of one attempt."""
        return self.root / "attempts" / f"{attempt:04d}"

    def metrics(self, attempt: int) -> Path:
        """One line a step, by the lead host."""
        return self.attempt(attempt) / "metrics.jsonl"

    def sharding(self, attempt: int) -> Path:
        """What lies on every device, by the lead host."""
        return self.attempt(attempt) / "sharding.txt"

    def diagnostics(self, attempt: int) -> Path:
        """What was seen last by an attempt that has diverged."""
        return self.attempt(attempt) / "diagnostics"

    def stacks(self, attempt: int, host: int) -> Path:
        """Stacks of all threads of one host's worker, when a deadline has passed or one asks."""
        return self.attempt(attempt) / f"stacks-host{host:03d}.txt"

    def output(self, attempt: int, host: int) -> Path:
        """What one host's worker, the libraries in it and custom code have printed."""
        return self.attempt(attempt) / f"output-host{host:03d}.txt"

    def traceback(self, attempt: int, host: int) -> Path:
        """The traceback of an exception that one host's worker has not caught."""
        return self.attempt(attempt) / f"traceback-host{host:03d}.txt"

    def events(self, attempt: int, host: int) -> Path:
        """What happened, by one host."""
        return self.attempt(attempt) / f"events-host{host:03d}.jsonl"
