"""Prints the output of one host of a job as it appears in the bucket, over all attempts. No jax.

Agents upload the end of the output of their training process every 20 s. A host is followed by its
slot: if its VM is replaced, the output of the new VM follows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.faults import ConfigError, StorageUnavailable, UsageError, format_exit_message
from jaxres.host import signals
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.paths import OUTPUT_START, LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.storage import gcs_objects
from jaxres.storage.gcs_client import NoBucket

POLL_SECONDS = 2.0
"""Time between two looks at the desired state and the output: two requests."""
MAX_UNAVAILABLE_SECONDS = 600.0
"""Longest time for which the bucket may not answer, or lack the desired state."""


@dataclass(frozen=True)
class Output:
    """The output of one attempt on one VM."""

    attempt: int
    vm: str

    def __str__(self) -> str:
        """Returns a description for a line between two outputs."""
        return f"attempt {self.attempt} on {self.vm}"


def find_slot(desired: DesiredState, vm: str | None) -> int:
    """Returns the slot of a VM of the job; None: host 0.

    Raises:
      UsageError: the job has no such VM now.
    """
    if vm is None:
        return 0
    names = [host.name for host in desired.attempt.hosts] or [spec.name for spec in desired.vms]
    if vm not in names:
        raise UsageError(
            f"--vm {vm}: the job has no such VM now; it has {', '.join(names) or 'none'}"
        )
    return names.index(vm)


def next_output(current: Output | None, desired: DesiredState, slot: int) -> Output | None:
    """Returns the output to follow now: the slot's, in the newest attempt that has the slot."""
    if slot >= len(desired.attempt.hosts):  # No attempt runs, or one with fewer hosts.
        return current
    return Output(desired.attempt.number, desired.attempt.hosts[slot].name)


def describe_change(before: Output | None, after: Output) -> str:
    """Returns the line between two outputs.

    >>> describe_change(Output(1, "jx-0000"), Output(2, "jx-0001"))
    '--- attempt 2 on jx-0001, which replaces jx-0000 ---'
    """
    is_replaced = before is not None and before.vm != after.vm
    why = f", which replaces {before.vm}" if before is not None and is_replaced else ""
    return f"--- {after}{why} ---"


@dataclass(frozen=True)
class OutputPart:
    """The part of an output after the printed part."""

    skip: int
    """Bytes of the uploaded end that are printed already."""
    num_missing: int
    """Bytes that were never uploaded: more was printed between two uploads than one has."""


def part_after(printed: int, *, start: int, size: int) -> OutputPart:
    """Returns which part of an uploaded end of an output is new.

    Args:
      printed: number of bytes of the whole output that are printed.
      start: byte of the whole output with which the uploaded end begins.
      size: size of the uploaded end.
    """
    return OutputPart(min(size, max(0, printed - start)), max(0, start - printed))


class LogFollower:
    """Follows one slot of a job; `follow` returns at the end of the job."""

    def __init__(
        self, paths: LaunchPaths, *, clock: Clock, write: Callable[[str], object] = sys.stdout.write
    ) -> None:
        """Stores the settings; sends no request."""
        self._paths, self._clock, self._write = paths, clock, write
        self._output: Output | None = None
        self._generation, self._printed = 0, 0
        self._failed_at: float | None = None

    def follow(self, *, vm: str | None) -> int:
        """Prints until the job has ended; returns its exit code.

        Raises:
          StorageUnavailable: the bucket has not answered for MAX_UNAVAILABLE_SECONDS.
          StoppedError, PreemptedError: a signal has arrived.
        """
        slot: int | None = None
        while True:
            signals.raise_again()
            try:
                desired = StateObject(self._paths.desired_state).read()
                if desired is None:
                    raise StorageUnavailable(f"{self._paths.run}: there is no desired state now")
                slot = find_slot(desired, vm) if slot is None else slot
                self._print_changes(desired, slot)
                self._failed_at = None
            except NoBucket:
                raise
            except StorageUnavailable as error:
                self._note_failure(error)
            else:
                if desired.phase == "ended" and desired.end is not None:
                    reason = f"{self._paths.run}: {desired.end.reason}; no VM is left"
                    self._print(format_exit_message(desired.end.exit, reason))
                    return desired.end.exit
            self._clock.sleep(POLL_SECONDS)

    def _print_changes(self, desired: DesiredState, slot: int) -> None:
        following = next_output(self._output, desired, slot)
        if following == self._output:
            self._print_new(is_last=desired.phase == "ended")
            return
        self._print_new(is_last=True)
        assert following is not None, desired
        self._print(f"{describe_change(self._output, following)}\n")
        self._output, self._generation, self._printed = following, 0, 0
        self._print_new(is_last=False)

    def _print_new(self, *, is_last: bool) -> None:
        """Prints the whole lines that were uploaded since; with `is_last` also half a line."""
        if self._output is None:
            return
        path = self._paths.output(self._output.attempt, self._output.vm)
        found = gcs_objects.stat(path)
        if found is None or (found.generation == self._generation and not is_last):
            return
        start = int(found.metadata.get(OUTPUT_START, "0"))
        part = part_after(self._printed, start=start, size=found.size)
        if part.skip == found.size:
            self._generation = found.generation
            return
        try:
            data = gcs_objects.read_range(path, found, start=part.skip, stop=found.size)
        except ConfigError:  # It was uploaded again meanwhile.
            return
        if not is_last:
            data = data[: data.rfind(b"\n") + 1]
        if part.num_missing:
            self._print(f"--- {part.num_missing} bytes were not uploaded ---\n")
        self._print(data.decode("utf-8", "replace"))
        if is_last and not data.endswith(b"\n"):
            self._print("\n")
        self._generation = found.generation
        self._printed = start + part.skip + len(data)

    def _note_failure(self, error: StorageUnavailable) -> None:
        now = self._clock.monotonic()
        if self._failed_at is None:
            self._failed_at = now
            self._print(f"--- the bucket does not answer; trying again ({error}) ---\n")
        elif now - self._failed_at > MAX_UNAVAILABLE_SECONDS:
            raise error

    def _print(self, text: str) -> None:
        self._write(text)
        sys.stdout.flush()
