"""The mesh plan: sizes of the mesh axes, parts of the batch, and feasible numbers of devices.

Pure arithmetic without devices, which launchers use to choose a number of hosts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxres.config.schema.model import AnyModel, GptModel, VitModel
from jaxres.config.schema.run_config import MeshSection, TrainSection
from jaxres.faults import ConfigError

AXES = ("data", "fsdp", "tensor")
"""Axes of the mesh in the order of its dims; neighbours along `tensor` are on one host."""
NUM_NAMED = 8
"""Feasible numbers of devices that an error lists; the nearest ones."""


@dataclass(frozen=True)
class BatchPart:
    """Rows of a batch that a device computes at once, together with other devices."""

    rows: slice
    """In the global batch."""
    folds: tuple[int, ...]
    """Numbers folded into the step's PRNG key, one after the other."""


@dataclass(frozen=True)
class MeshPlan:
    """The split of a global batch: its rows = num_turns x rows_per_device x batch_shards."""

    data: int
    fsdp: int
    tensor: int
    microbatches: int
    """Parts of the batch, computed one after the other."""
    rows_per_device: int
    """Rows of a microbatch that a device computes at once."""
    virtual_shards: int | None = None
    """With train.reduction=invariant: parts of the batch, which are split into microbatches."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Devices along each of AXES."""
        return self.data, self.fsdp, self.tensor

    @property
    def batch_shards(self) -> int:
        """Number of parts into which the rows of a batch are split."""
        return self.data * self.fsdp

    @property
    def rows_at_once(self) -> int:
        """Rows of a microbatch over all devices."""
        return self.rows_per_device * self.batch_shards

    @property
    def num_turns(self) -> int:
        """Computations of a device in a step, one after the other."""
        return self.microbatches * ((self.virtual_shards or self.batch_shards) // self.batch_shards)

    def parts(self, num_rows: int) -> list[BatchPart]:
        """Returns the parts of a batch, as the step computes them.

        >>> [part.rows for part in MeshPlan(1, 1, 1, microbatches=2, rows_per_device=3).parts(6)]
        [slice(0, 6, 2), slice(1, 6, 2)]
        """
        each = num_rows // (self.virtual_shards or 1)
        found = list[BatchPart]()
        for shard in range(self.virtual_shards or 1):
            folds = () if self.virtual_shards is None else (shard,)
            for index in range(self.microbatches):
                rows = slice(shard * each + index, (shard + 1) * each, self.microbatches)
                found.append(BatchPart(rows, folds if self.microbatches == 1 else (*folds, index)))
        return found

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Infeasible:
    """The reason why a number of devices is infeasible."""

    reason: str


def plan(
    mesh: MeshSection,
    train: TrainSection,
    model: AnyModel,
    *,
    num_devices: int,
    num_hosts: int = 1,
) -> MeshPlan:
    """Plans how `num_devices` devices, evenly spread over the hosts, share a batch.

    The global batch is always the configured one. If train.max_rows_per_device limits the rows, the
    number of microbatches is the smallest from train.microbatches on that respects the limit.

    Raises:
      ConfigError: a size does not divide; the message names it and lists feasible numbers.
    """
    result = _fit(mesh, train, model, num_devices)
    if isinstance(result, MeshPlan):
        return result
    per_host = num_devices // num_hosts
    where, step = _count(num_devices, "device"), 1
    if num_hosts > 1:
        step = per_host
        where = f"{_count(num_hosts, 'host')} x {_count(per_host, 'device')}"
    fitting = feasible(mesh, train, model, limit=max(64, 8 * num_devices), multiple_of=step)
    raise ConfigError(f"{where}: {result.reason}; feasible: {_nearest(fitting, num_devices)}")


def feasible(
    mesh: MeshSection,
    train: TrainSection,
    model: AnyModel,
    *,
    limit: int,
    multiple_of: int = 1,
) -> tuple[int, ...]:
    """Returns the feasible numbers of devices up to `limit`, as multiples of `multiple_of`.

    >>> from jaxres.config.schema.model import MlpModel
    >>> train = TrainSection(steps=1, global_batch_size=6)
    >>> feasible(MeshSection(), train, MlpModel(), limit=8)
    (1, 2, 3, 6)
    """
    counts = range(multiple_of, limit + 1, multiple_of)
    return tuple(n for n in counts if isinstance(_fit(mesh, train, model, n), MeshPlan))


def largest(
    mesh: MeshSection,
    train: TrainSection,
    model: AnyModel,
    *,
    num_hosts: int,
    devices_per_host: int,
) -> int:
    """Returns the largest feasible number of hosts, at most `num_hosts`.

    Raises:
      ConfigError: no number of hosts is feasible.
    """
    for hosts in range(num_hosts, 0, -1):
        if isinstance(_fit(mesh, train, model, hosts * devices_per_host), MeshPlan):
            return hosts
    all_devices = num_hosts * devices_per_host
    plan(mesh, train, model, num_devices=all_devices, num_hosts=num_hosts)
    raise AssertionError("plan() must have raised: no number of hosts is feasible")


def axis_sizes(mesh: MeshSection, *, num_devices: int) -> tuple[int, int, int]:
    """Returns the size of each of AXES; -1 becomes the number of remaining devices.

    Raises:
      ConfigError: the axes do not multiply to the number of devices.
    """
    sizes = mesh.sizes()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    data, fsdp, tensor = (num_devices // fixed if s == -1 else s for s in sizes.values())
    if data * fsdp * tensor != num_devices or num_devices == 0:
        raise ConfigError(
            f"mesh: {' x '.join(f'{name}={size}' for name, size in sizes.items())} does not make "
            f"{num_devices} device(s). Give axes whose product is {num_devices}; one may be -1 "
            "(all remaining devices)"
        )
    return data, fsdp, tensor


def crosses_hosts(plan: MeshPlan, *, devices_per_host: int) -> str | None:
    """Returns a warning if the tensor axis spans hosts, with the remedy; otherwise None.

    >>> crosses_hosts(MeshPlan(1, 1, 8, 1, 1), devices_per_host=8) is None
    True
    """
    if devices_per_host % plan.tensor == 0:
        return None
    inside = math.gcd(plan.tensor, devices_per_host)
    return (
        f"mesh.tensor={plan.tensor} spans hosts of {_count(devices_per_host, 'device')}: every "
        f"matrix product waits for the network between hosts. Choose mesh.tensor={inside}, and "
        "mesh.fsdp for the rest"
    )


def _fit(
    mesh: MeshSection,
    train: TrainSection,
    model: AnyModel,
    num_devices: int,
) -> MeshPlan | Infeasible:
    try:
        data, fsdp, tensor = axis_sizes(mesh, num_devices=num_devices)
    except ConfigError as error:
        return Infeasible(str(error))
    if isinstance(model, GptModel | VitModel) and tensor not in model.tensor_sizes():
        heads, groups = model.num_heads, getattr(model, "num_kv_heads", None) or model.num_heads
        return Infeasible(
            f"mesh.tensor={tensor} must divide model.num_heads={heads} and "
            f"model.num_kv_heads={groups}: choose mesh.tensor from "
            f"{', '.join(map(str, model.tensor_sizes()))}"
        )
    shards, batch = data * fsdp, train.global_batch_size
    if batch % shards:
        below = batch // shards * shards
        return Infeasible(
            f"train.global_batch_size={batch} can't be split over mesh.data x mesh.fsdp = {shards} "
            f"(a new run: try {f'{below} or ' if below else ''}{below + shards})"
        )
    if train.reduction == "invariant":
        return _fit_invariant(train, data, fsdp, tensor)
    microbatches = _microbatches(train, batch // shards)
    if microbatches is None:
        return Infeasible(
            f"train.microbatches={train.microbatches} does not divide the {batch // shards} rows "
            f"of a device (train.global_batch_size={batch} over mesh.data x mesh.fsdp = {shards}). "
            "Change it, or set train.max_rows_per_device, which then determines the microbatches"
        )
    return MeshPlan(data, fsdp, tensor, microbatches, batch // shards // microbatches)


def _fit_invariant(train: TrainSection, data: int, fsdp: int, tensor: int) -> MeshPlan | Infeasible:
    """Returns the plan with virtual shards, whose rows and microbatches no mesh changes."""
    number, batch = train.virtual_shards, train.global_batch_size
    if number % (data * fsdp):
        return Infeasible(
            f"mesh.data x mesh.fsdp = {data * fsdp} does not divide "
            f"train.virtual_shards={number} (train.reduction=invariant)"
        )
    if tensor != 1:
        return Infeasible(f"mesh.tensor={tensor} must be 1 with train.reduction=invariant")
    rows = batch // number
    microbatches = None if batch % number else _microbatches(train, rows)
    if microbatches is None:
        return Infeasible(
            f"train.virtual_shards={number} x train.microbatches={train.microbatches} does not "
            f"divide train.global_batch_size={batch}"
        )
    return MeshPlan(data, fsdp, tensor, microbatches, rows // microbatches, number)


def _microbatches(train: TrainSection, rows: int) -> int | None:
    """Returns the number of microbatches for a device's rows, or None if no number is feasible."""
    bound = train.max_rows_per_device
    if bound is None:
        return None if rows % train.microbatches else train.microbatches
    least = max(train.microbatches, -(-rows // bound))
    return next((n for n in range(least, rows + 1) if rows % n == 0), None)


def _nearest(counts: tuple[int, ...], num_devices: int) -> str:
    if not counts:
        return "no number of devices with these axes"
    near = sorted(sorted(counts, key=lambda n: abs(n - num_devices))[:NUM_NAMED])
    return f"{', '.join(map(str, near))} {'device' if near == [1] else 'devices'}"


def _count(number: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> _count(1, "host"), _count(5, "host")
    ('1 host', '5 hosts')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
