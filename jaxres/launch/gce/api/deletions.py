"""Requests deletions of VMs and instance groups; a refused one holds up no other. No jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from jaxres.clock import Clock
from jaxres.launch.gce.api.compute import ApiRefused, Compute
from jaxres.launch.gce.state.desired_state import InstanceGroup


@dataclass
class Deletions:
    """The deletions that a launcher has requested, each by itself."""

    compute: Compute
    console: Callable[[str], None]
    """Prints why a deletion is refused, once."""
    clock: Clock
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Why the deletion of a VM or a group was refused last, by its name."""
    _requested_at: dict[str, float] = field(default_factory=dict[str, float])

    def is_due(self, vm: str, *, every_seconds: float) -> bool:
        """Returns whether the deletion of a VM is to be requested, for the first time or again."""
        before = self._requested_at.get(vm, -inf)
        return self.clock.monotonic() - before >= every_seconds

    def request(self, vm: str, zone: str, group: InstanceGroup | None = None) -> bool:
        """Requests the deletion of a VM, in its group if any; returns whether it is accepted.

        Raises:
          ApiUnavailable: the service does not answer; the VM is due later, after the others.
        """
        self._requested_at[vm] = self.clock.monotonic()
        is_accepted = self._request(vm, lambda: self.compute.delete(vm, zone, group))
        if is_accepted:
            self.refused.pop(vm, None)
        return is_accepted

    def request_group(self, group: InstanceGroup) -> bool:
        """Advances the deletion of a group with its VMs, as `request` does for one VM."""
        call = self.compute.resize_requests.delete
        return self._request(f"the instance group {group.name}", lambda: call(group))

    def _request(self, name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except ApiRefused as error:
            if self.refused.get(name) != str(error):
                self.console(f"{name}: its deletion is refused; trying again ({error})")
            self.refused[name] = str(error)
            return False
        return True
