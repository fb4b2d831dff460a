"""The names of a launcher's things in a run directory."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from jaxres.storage.path import BucketPath


@dataclass(frozen=True)
class Places:
    """Paths below one run directory."""

    run: BucketPath

    @property
    def root(self) -> BucketPath:
        """The folder of all of it."""
        return self.run / "launch"

    @property
    def lease(self) -> BucketPath:
        """Who may act."""
        return self.root / "lease.json"

    @property
    def intent(self) -> BucketPath:
        """What is meant to be."""
        return self.root / "intent.json"

    @property
    def reports(self) -> BucketPath:
        """The folder of the agents' reports, by VM."""
        return self.root / "reports"

    def report(self, name: str) -> BucketPath:
        """One agent's report."""
        return self.reports / name

    @property
    def codes(self) -> BucketPath:
        """The folder of packed code, by digest."""
        return self.root / "code"

    def code(self, digest: str) -> BucketPath:
        """Packed code."""
        return self.codes / f"{digest}.tar.gz"

    @property
    def configs(self) -> BucketPath:
        """The folder of resolved configs, by digest."""
        return self.root / "config"

    def config(self, digest: str) -> BucketPath:
        """A resolved config."""
        return self.configs / f"{digest}.yaml"

    @property
    def compiled(self) -> BucketPath:
        """The folder of compiled steps, by key."""
        return self.root / "compiled"

    @property
    def outputs(self) -> BucketPath:
        """The folder of what parts have printed, by attempt."""
        return self.root / "output"

    def output(self, attempt: int, name: str) -> BucketPath:
        """The end of what a VM's part in an attempt has printed."""
        return self.outputs / f"{attempt:04d}" / f"{name}.txt"

    @property
    def stop(self) -> BucketPath:
        """A person's request: save, then end."""
        return self.run / "stop"

    @property
    def down(self) -> BucketPath:
        """A person's request: delete all VMs at once."""
        return self.root / "down"

    @property
    def label(self) -> str:
        """What all VMs of the run have in common: at most 40 signs of a VM's name.

        >>> Places(BucketPath("bkt", "runs/My_first")).label
        'jx-my-first-6ae93b'
        """
        words = re.sub("[^a-z0-9]+", "-", self.run.name.lower()).strip("-")[:28].strip("-")
        digest = hashlib.sha256(str(self.run).encode()).hexdigest()[:6]
        return "-".join(part for part in ("jx", words, digest) if part)
