"""The mesh plan: the global batch never changes, and infeasible sizes are reported."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from jaxres.config.schema.model import GptModel, MlpModel
from jaxres.config.schema.run_config import MeshSection, TrainSection
from jaxres.engine import mesh_plan, step
from jaxres.engine.mesh_plan import MeshPlan
from jaxres.faults import ConfigError

MLP = MlpModel()


def train(batch: int = 24, *, parts: int = 1, bound: int | None = None) -> TrainSection:
    return TrainSection(
        steps=1, global_batch_size=batch, microbatches=parts, max_rows_per_device=bound
    )


def plans() -> list[tuple[TrainSection, MeshPlan]]:
    """Returns every plan of small numbers."""
    found = []
    sizes = [MeshSection(fsdp=f, tensor=t) for f in (1, 2, 3) for t in (1, 2)]
    sizes += [MeshSection(fsdp=-1), MeshSection(tensor=-1), MeshSection(data=2, fsdp=-1)]
    for mesh, batch, parts, bound in itertools.product(
        sizes, (1, 4, 6, 24), (1, 2, 3), (None, 1, 2, 5)
    ):
        section = train(batch, parts=parts, bound=bound)
        for count in mesh_plan.feasible(mesh, section, MLP, limit=16):
            found.append((section, mesh_plan.plan(mesh, section, MLP, num_devices=count)))
            assert found[-1][1].num_devices == count
    return found


def test_every_plan_computes_the_whole_global_batch_within_its_bounds() -> None:
    found = plans()
    assert len(found) > 500
    for section, plan in found:
        rows = plan.microbatches * plan.rows_per_device * plan.batch_shards
        assert rows == section.global_batch_size
        assert plan.microbatches >= section.microbatches
        bound = section.max_rows_per_device
        if bound is None:
            assert plan.microbatches == section.microbatches
            continue
        assert plan.rows_per_device <= bound
        rows_of_a_device = section.global_batch_size // plan.batch_shards
        fewer = [
            parts
            for parts in range(section.microbatches, plan.microbatches)
            if rows_of_a_device % parts == 0 and rows_of_a_device // parts <= bound
        ]
        assert fewer == [], "there was a plan with fewer microbatches"


@pytest.mark.parametrize("bound", [None, 1, 2, 5])
def test_with_the_invariant_reduction_a_device_computes_the_same_shapes_on_any_mesh(
    bound: int | None,
) -> None:
    section = train(48, bound=bound).model_copy(update={"reduction": "invariant"})
    counts = mesh_plan.feasible(MeshSection(), section, MLP, limit=64)
    assert counts == (1, 2, 4, 8)
    found = [mesh_plan.plan(MeshSection(), section, MLP, num_devices=n) for n in counts]
    shapes = {(plan.virtual_shards, plan.microbatches, plan.rows_per_device) for plan in found}
    assert shapes == {(8, {None: 1, 1: 6, 2: 3, 5: 2}[bound], {None: 6, 1: 1, 2: 2, 5: 3}[bound])}
    for count, plan in zip(counts, found, strict=True):
        assert plan.num_turns * plan.rows_per_device * count == 48
        rows = [row for part in plan.parts(48) for row in range(*part.rows.indices(48))]
        assert sorted(rows) == list(range(48))
        assert len({part.folds for part in plan.parts(48)}) == len(plan.parts(48))
    with pytest.raises(ConfigError, match=r"must be 1 with train\.reduction"):
        mesh_plan.plan(MeshSection(tensor=2), section, MLP, num_devices=2)


@pytest.mark.slow
def test_every_row_is_computed_once_and_by_the_device_that_holds_it() -> None:
    for section, plan in {(s.global_batch_size, p): (s, p) for s, p in plans()}.values():
        batch, shards = section.global_batch_size, plan.batch_shards
        parts = np.asarray(step._split(np.arange(batch), plan.microbatches))  # type: ignore
        assert parts.shape == (plan.microbatches, batch // plan.microbatches)
        # Device d computes the d-th part of each microbatch, and has the d-th part of the batch.
        by_device = parts.reshape(plan.microbatches, shards, plan.rows_per_device).swapaxes(0, 1)
        held = np.arange(batch).reshape(shards, -1)
        assert np.array_equal(np.sort(by_device.reshape(shards, -1), axis=1), held)


def test_feasible_numbers_of_devices_are_those_that_divide() -> None:
    for limit in (7, 30):
        expected = tuple(n for n in range(1, limit + 1) if 24 % n == 0)
        assert mesh_plan.feasible(MeshSection(), train(), MLP, limit=limit) == expected
    # Of 24 devices with fsdp=2, tensor=2 each batch shard has two devices.
    counts = mesh_plan.feasible(MeshSection(fsdp=2, tensor=2), train(), MLP, limit=100)
    assert counts == (4, 8, 12, 16, 24, 48)
    assert mesh_plan.feasible(MeshSection(data=2, fsdp=2), train(), MLP, limit=100) == (4,)


def test_the_largest_feasible_number_of_hosts_is_found() -> None:
    for hosts, per_host in itertools.product(range(1, 10), (1, 2, 3, 8)):
        counts = mesh_plan.feasible(MeshSection(), train(), MLP, limit=80)
        fitting = [n for n in range(1, hosts + 1) if n * per_host in counts]
        found = mesh_plan.largest(
            MeshSection(), train(), MLP, num_hosts=hosts, devices_per_host=per_host
        )
        assert found == max(fitting)
    with pytest.raises(ConfigError, match=r"^2 hosts x 5 devices: .*feasible: no number"):
        mesh_plan.largest(MeshSection(), train(), MLP, num_hosts=2, devices_per_host=5)


@pytest.mark.parametrize(
    ("mesh", "section", "devices", "hosts", "message"),
    [
        (
            MeshSection(),
            train(),
            5,
            5,
            "5 hosts x 1 device: train.global_batch_size=24 can't be split over mesh.data x "
            "mesh.fsdp = 5 (a new run: try 20 or 25); "
            "feasible: 1, 2, 3, 4, 6, 8, 12, 24 devices",
        ),
        (MeshSection(), train(), 40, 5, "feasible: 8, 24 devices"),
        (MeshSection(), train(), 1000, 1, "feasible: 1, 2, 3, 4, 6, 8, 12, 24 devices"),
        (
            MeshSection(data=3),
            train(),
            4,
            1,
            "4 devices: mesh: data=3 x fsdp=1 x tensor=1 does not make 4 device(s)",
        ),
        (MeshSection(tensor=3), train(), 4, 1, "feasible: 3, 6, 9, 12, 18, 24, 36 devices"),
        (
            MeshSection(),
            train(parts=2),
            8,
            1,
            "train.microbatches=2 does not divide the 3 rows of a device",
        ),
        (MeshSection(), train(), 0, 1, "does not make 0 device(s)"),
    ],
)
def test_an_infeasible_size_is_reported_with_feasible_ones(
    mesh: MeshSection, section: TrainSection, devices: int, hosts: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        mesh_plan.plan(mesh, section, MLP, num_devices=devices, num_hosts=hosts)
    assert message in str(caught.value)


def test_heads_that_the_tensor_axis_does_not_divide_are_rejected_by_name() -> None:
    model = GptModel(num_heads=12, num_kv_heads=4)
    with pytest.raises(ConfigError) as caught:
        mesh_plan.plan(MeshSection(tensor=-1), train(), model, num_devices=8)
    message = "mesh.tensor=8 must divide model.num_heads=12 and model.num_kv_heads=4"
    assert f"{message}: choose mesh.tensor from 1, 2, 4; feasible: 1, 2, 4 devices" in str(
        caught.value
    )
    for tensor in range(1, 13):
        fits = 12 % tensor == 0 and 4 % tensor == 0
        assert (tensor in model.tensor_sizes()) == fits


def test_gradient_accumulation_adapts_to_the_available_devices() -> None:
    section = train(64, bound=4)
    parts = {
        n: mesh_plan.plan(MeshSection(), section, MLP, num_devices=n).microbatches
        for n in (16, 8, 4, 2, 1)
    }
    assert parts == {16: 1, 8: 2, 4: 4, 2: 8, 1: 16}


def test_a_tensor_axis_that_spans_hosts_is_reported_with_the_remedy() -> None:
    for tensor, per_host in itertools.product(range(1, 20), range(1, 10)):
        warning = mesh_plan.crosses_hosts(MeshPlan(1, 1, tensor, 1, 1), devices_per_host=per_host)
        hosts = np.arange(math.lcm(tensor, per_host)) // per_host
        groups = hosts.reshape(-1, tensor)
        crosses = bool((groups != groups[:, :1]).any())
        assert (warning is not None) == crosses
        if warning is not None:
            inside = math.gcd(tensor, per_host)
            assert f"Choose mesh.tensor={inside}," in warning
            assert mesh_plan.crosses_hosts(
                MeshPlan(1, 1, inside, 1, 1), devices_per_host=per_host
            ) is (None)
