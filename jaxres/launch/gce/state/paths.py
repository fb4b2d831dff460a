"""Paths of the launcher's objects in a run directory."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from jaxres.runlog.paths import LAUNCH_EVENTS, LAUNCH_STATE
from jaxres.storage.path import GcsPath

OUTPUT_START = "start"
"""Metadata of an uploaded output: the byte of the whole output with which it begins."""


@dataclass(frozen=True)
class LaunchPaths:
    """Paths of one run's launcher objects, and the label of the run's VMs."""

    run: GcsPath

    @property
    def root(self) -> GcsPath:
        """Folder that has all of the launcher's objects, except the stop request."""
        return self.run / "launch"

    @property
    def lease(self) -> GcsPath:
        """Lease that lets one launcher act."""
        return self.root / "lease.json"

    @property
    def desired_state(self) -> GcsPath:
        """Desired state of the job."""
        return self.run / LAUNCH_STATE

    @property
    def reports(self) -> GcsPath:
        """Folder of the agents' reports; an object has its VM's name."""
        return self.root / "reports"

    def report(self, name: str) -> GcsPath:
        """Report of the agent on a VM."""
        return self.reports / name

    @property
    def events(self) -> GcsPath:
        """Folder of the launcher's events; the newest ones are in the desired state."""
        return self.run / LAUNCH_EVENTS

    @property
    def boots(self) -> GcsPath:
        """Folder of the startup scripts' reports; an object has its VM's name."""
        return self.root / "boot"

    def serial(self, name: str) -> GcsPath:
        """Serial port output of a VM whose agent never reported."""
        return self.serials / f"{name}.txt"

    @property
    def serials(self) -> GcsPath:
        """Folder of the serial port output of such VMs."""
        return self.root / "serial_output"

    @property
    def codes(self) -> GcsPath:
        """Folder of packed code, by digest."""
        return self.root / "code"

    def code(self, digest: str) -> GcsPath:
        """Packed code with a digest."""
        return self.codes / f"{digest}.tar.gz"

    @property
    def configs(self) -> GcsPath:
        """Folder of resolved configs, by digest."""
        return self.root / "config"

    def config(self, digest: str) -> GcsPath:
        """Resolved config with a digest."""
        return self.configs / f"{digest}.yaml"

    @property
    def outputs(self) -> GcsPath:
        """Folder of the output of training processes, by attempt."""
        return self.root / "output"

    def output(self, attempt: int, name: str) -> GcsPath:
        """End of the output of an attempt's training process on a VM."""
        return self.outputs / f"{attempt:04d}" / f"{name}.txt"

    @property
    def stop(self) -> GcsPath:
        """Request to save, then to end the job."""
        return self.run / "stop"

    @property
    def down(self) -> GcsPath:
        """Request to delete all VMs at once."""
        return self.root / "down"

    @property
    def label(self) -> str:
        """Returns the label of the run's VMs and the prefix of their names: at most 40 characters.

        >>> LaunchPaths(GcsPath("bkt", "runs/My_first")).label
        'jx-my-first-6ae93b'
        """
        name = re.sub("[^a-z0-9]+", "-", self.run.name.lower()).strip("-")[:28].strip("-")
        digest = hashlib.sha256(str(self.run).encode()).hexdigest()[:6]
        return "-".join(part for part in ("jx", name, digest) if part)
