"""The object that has a job's desired state: its JSON form, and writes that no two launchers make.

Its keys are those of one flat object, as every version since 0.1.0 writes them. The agents read the
object with the code of the job's start, also after a launcher of another version has taken over:
so a field may move to another record of `DesiredState`, and its key stays.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxres.faults import ConfigError, Fenced, StorageUnavailable
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.storage import codec, gcs_objects
from jaxres.storage.path import GcsPath

FORMAT = 2
WRITES = 3
KEYS: Mapping[tuple[str, ...], str] = {
    ("attempt", "number"): "attempt",
    ("attempt", "hosts"): "hosts",
    ("attempt", "draining"): "draining",
    ("attempt", "port"): "port",
    ("attempt", "step_before"): "step_before",
    ("attempt", "since"): "attempt_since",
    ("attempt", "seq_before"): "seq_before",
    ("attempt", "not_before"): "not_before",
    ("beside", "early_for"): "early_for",
    ("beside", "spare_wait", "tries"): "spare_failures",
    ("beside", "spare_wait", "not_before"): "spares_not_before",
    ("beside", "cheaper_wait", "tries"): "cheaper_tries",
    ("beside", "cheaper_wait", "not_before"): "cheaper_not_before",
    ("beside", "grow_after"): "grow_after",
    ("beside", "move_after"): "move_after",
    ("capacity", "placement"): "placement",
    ("capacity", "backoffs"): "backoffs",
    ("capacity", "freed_at"): "freed_at",
    ("capacity", "refill_since"): "refill_since",
    ("failures", "unready"): "unready",
    ("failures", "replacements"): "replacements",
    ("failures", "suspected"): "suspected",
    ("failures", "boot_failure"): "boot_failure",
    ("costs", "spent_dollars"): "spent_dollars",
    ("costs", "vm_seconds"): "vm_seconds",
    ("costs", "spending"): "spending",
    ("costs", "cheaper_by"): "cheaper_by",
    ("costs", "saved_dollars"): "saved_dollars",
    ("costs", "prices"): "prices",
    ("events", "count"): "num_events",
    ("events", "newest"): "events",
    ("events", "conditions"): "conditions",
    ("events", "alert_starts"): "alert_starts",
}
"""Path of each field in a record of `DesiredState` -> its key in the object."""


class StateDamaged(StorageUnavailable):
    """The object is not a desired state."""


def _to_flat(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of the object: fields of records beside those of the state itself."""
    records = {name: fields.pop(name) for name in {path[0] for path in KEYS}}
    for path, key in KEYS.items():
        value: Any = records
        for name in path:
            value = value[name]
        fields[key] = value
    return fields


def _from_flat(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the state, with its records: the inverse of `_to_flat`.

    A key that an older version has not written stays absent, and its field has the default.
    """
    fields = {key: value for key, value in keys.items() if key not in KEYS.values()}
    for name in {path[0] for path in KEYS}:
        fields[name] = {}  # Not of this format, even if a newer version writes such a key.
    for path, key in KEYS.items():
        if key in keys:
            *parents, name = path
            record = fields
            for parent in parents:
                record = record.setdefault(parent, {})
            record[name] = keys[key]
    return fields


def encode_state(desired: DesiredState) -> bytes:
    """Returns the desired state as JSON."""
    fields = _to_flat(codec.encode(desired))
    return json.dumps({codec.FORMAT: FORMAT} | fields, sort_keys=True).encode()


def decode_state(data: bytes, path: GcsPath) -> DesiredState:
    """Parses the output of `encode_state`, of this version or an older one; skips unknown keys.

    Raises:
      ConfigError: it was written in another format.
      StateDamaged: it is not a desired state.
    """
    try:
        keys: dict[str, Any] = json.loads(data)
        codec.require_format(keys, number=FORMAT)
        return codec.decode(DesiredState, _from_flat(keys), ignore_unknown=True)
    except codec.OtherFormat as error:
        raise ConfigError(f"{path}: {error}.") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise StateDamaged(
            f"{path}: is not readable as a desired state ({error}). `launch gce down CONFIG.yaml` "
            "finds the job's VMs by their label and deletes them; `launch gce up CONFIG.yaml` "
            "starts it again. Both move the object aside"
        ) from error


@dataclass
class StateObject:
    """The desired state in the bucket, and its generation when it was read or written last."""

    path: GcsPath
    desired: DesiredState | None = None
    generation: int = field(default=0)
    damage: str = ""
    """Why the object can't be used, at the last `read_valid`; empty: it can, or there is none."""

    def read(self) -> DesiredState | None:
        """Reads the object; None: there is none yet.

        Raises:
          StateDamaged: it is not a desired state.
        """
        found = gcs_objects.read_at(self.path)
        self.desired, self.generation = None, 0 if found is None else found[1]
        if found is not None:
            self.desired = decode_state(found[0], self.path)
        return self.desired

    def read_valid(self) -> DesiredState | None:
        """Reads the object; None: there is none, or it is damaged, see `damage`."""
        try:
            self.damage = ""
            return self.read()
        except StateDamaged as error:
            self.damage = str(error)
            return None

    def set_aside(self) -> GcsPath | None:
        """Moves a damaged object to another name; only the holder of the lease may call this."""
        found = gcs_objects.read_at(self.path)
        if found is None or found[1] != self.generation:
            return None
        aside = gcs_objects.set_aside(self.path, found[0], generation=found[1])
        gcs_objects.delete(self.path)
        self.desired, self.generation, self.damage = None, 0, ""
        return aside

    def write(
        self, desired: DesiredState, *, epoch: int, held: Callable[[], bool] = lambda: True
    ) -> DesiredState:
        """Writes the object unless another launcher has written since the read; the serial grows.

        An object that was deleted, damaged or replaced by an older copy since is written again,
        provided that `held` returns that the lease is held: the first try may have been suspended.

        Raises:
          Fenced: another launcher has written in the meantime.
          StorageUnavailable: the object is lost, and it is unknown whether the lease is held.
        """
        known = max(desired.serial, 0 if self.desired is None else self.desired.serial)
        for _ in range(WRITES):
            if self.desired is not None and self.desired.epoch > epoch:
                break  # It was read after another launcher had taken over.
            new = dataclasses.replace(desired, epoch=epoch, serial=known + 1)
            generation = gcs_objects.write(self.path, encode_state(new), over=self.generation)
            if generation is not None:
                self.desired, self.generation = new, generation
                return new
            current = self._newer_than(known, run_id=desired.id)
            if current is None:
                if not held():
                    raise StorageUnavailable(
                        f"{self.path}: is lost; the lease is renewed before it is written again"
                    )
                continue
            self.desired, known = current, current.serial
            if current.epoch != epoch:
                break  # Else the response to an earlier write of this launcher was lost.
        raise Fenced(
            f"{self.path.parent.parent}: another launcher holds the lease of this run now; "
            "this one stops acting, the training continues."
        )

    def _newer_than(self, serial: int, *, run_id: str) -> DesiredState | None:
        """Reads a state that was written since; None: deleted, damaged or an older copy."""
        found = gcs_objects.read_at(self.path)
        self.generation = 0 if found is None else found[1]
        if found is None:
            return None
        try:
            current = decode_state(found[0], self.path)
        except StateDamaged:
            gcs_objects.set_aside(self.path, found[0], generation=found[1])
            return None
        is_copy = current.id == run_id and current.serial <= serial
        return None if is_copy else current
