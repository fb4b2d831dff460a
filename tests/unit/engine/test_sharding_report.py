"""The sharding report: bytes per device, and warnings about arrays that are not split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxres import models
from jaxres.config.schema.data import DataSection, TextSource
from jaxres.config.schema.model import GptModel
from jaxres.config.schema.optimizer import AdamwOptimizer
from jaxres.config.schema.run_config import MeshSection, RunConfig, TrainSection
from jaxres.engine import mesh as meshes
from jaxres.engine import optimizer, sharding_report, state
from jaxres.engine.mesh_plan import MeshPlan
from jaxres.engine.sharding_report import Layout, ShardedArray
from jaxres.faults import ConfigError
from jaxres.train.checks import oom_advice

MIB = 2**20


def laid_out(sizes: tuple[int, int, int], *, vocab: int = 64, mesh: Any = None, **keys: Any) -> Any:
    """Returns the layout of a small decoder on a mesh, by default of abstract devices."""
    config = GptModel(**({"num_layers": 2, "d_model": 32, "num_heads": 4} | keys))
    model = models.build(config, vocab_size=vocab, seq_len=16, platform="cpu")
    tx = optimizer.build(AdamwOptimizer(), axes=model.axes)
    mesh = meshes.abstract(MeshPlan(*sizes, 1, 1)) if mesh is None else mesh
    bare = jax.eval_shape(lambda: state.init(model, tx, seed=0))
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        bare,
        state.shardings(bare, model, mesh),
    )
    return sharding_report.of(shapes, model, mesh), shapes


def test_bytes_per_device_equal_those_of_the_arrays_on_it() -> None:
    mesh = meshes.build(MeshSection(fsdp=4, tensor=2), devices=jax.devices())
    laid, shapes = laid_out((1, 4, 2), mesh=mesh)
    placed = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), state.to_plain(shapes)
    )
    held = [
        shard.data.nbytes
        for leaf in jax.tree.leaves(placed)
        for shard in leaf.addressable_shards
        if shard.device == mesh.devices.flat[3]
    ]
    assert laid.device_bytes == sum(held)
    assert laid.global_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(placed))
    assert laid_out((1, 4, 2))[0] == laid, "a mesh without devices lays out otherwise"


def test_the_table_lists_every_array_of_the_state_with_its_split() -> None:
    laid, shapes = laid_out((2, 4, 2))
    paths = [array.path for array in laid.arrays]
    assert len(paths) == len(jax.tree.leaves(shapes))
    by_path = {array.path: array for array in laid.arrays}
    query = by_path["params/blocks/attention/query"]
    assert (query.shape, query.spec) == ((2, 32, 4, 8), "-, fsdp, tensor, -")
    assert query.device_bytes == 2 * 32 * 4 * 8 * 4 // 8
    for moment in ("mu", "nu"):
        twin = by_path[f"opt/{moment}/blocks/attention/query"]
        assert (twin.spec, twin.device_bytes) == (query.spec, query.device_bytes)
    table = laid.table().splitlines()
    assert len(table) == len(paths) + 2
    assert table[-1].endswith("a device, mesh data=2 fsdp=4 tensor=2")


def test_a_dim_that_its_axis_does_not_divide_is_reported_with_the_remedy() -> None:
    laid, _ = laid_out((1, 16, 1), d_model=1000, num_heads=10)
    (warned,) = laid.warnings()
    assert warned.startswith(
        "embed=1000 (model.d_model) is not divisible by mesh.fsdp=16, so arrays"
    )
    assert warned.endswith("choose embed=1008 in a new run, or mesh.fsdp=8")
    assert laid_out((1, 8, 1), d_model=1000, num_heads=10)[0].warnings() == []
    assert laid_out((16, 1, 1), d_model=1000, num_heads=10)[0].warnings() == []


def one_array(held: int, *, dims: tuple[str | None, ...], others: int) -> Layout:
    array = ShardedArray("params/w", dims, (9, 9), "float32", "-", held)
    rest = ShardedArray("params/rest", ("mlp",), (8,), "float32", "fsdp", others)
    return Layout((array, rest), {"data": 1, "fsdp": 8, "tensor": 1})


@pytest.mark.parametrize(
    ("held", "others", "warned"),
    [
        (MIB, 10 * MIB, True),  # 9 % of the state
        (MIB, 100 * MIB, False),
        (65 * MIB, 10_000 * MIB, True),  # under 1 %, but large
    ],
)
def test_only_large_arrays_cause_a_warning(held: int, others: int, warned: bool) -> None:
    named = one_array(held, dims=("embed", None), others=others).warnings()
    assert [text.partition(" is not")[0] for text in named] == ["embed=9 (model.d_model)"] * warned
    unnamed = one_array(held, dims=(None, None), others=others).warnings()
    assert [text.partition(" (")[0] for text in unnamed] == ["params/w"] * warned


def test_a_state_is_rejected_only_if_it_exceeds_the_device_alone() -> None:
    oom_advice.check_state_fits(10, None)
    oom_advice.check_state_fits(10, 10)
    with pytest.raises(ConfigError, match=r"150\.0 MiB of each device, which has 100\.0 MiB.*1\.5"):
        oom_advice.check_state_fits(150 * MIB, 100 * MIB)


def test_the_memory_estimate_of_a_step_includes_donated_arrays_once() -> None:
    stats = SimpleNamespace(
        argument_size_in_bytes=100,
        output_size_in_bytes=90,
        alias_size_in_bytes=80,
        temp_size_in_bytes=7,
    )
    assert sharding_report.step_bytes(SimpleNamespace(memory_analysis=lambda: stats)) == 117
    assert sharding_report.step_bytes(SimpleNamespace(memory_analysis=lambda: None)) is None


def test_a_step_that_may_exceed_memory_is_a_warning_with_settings() -> None:
    train = TrainSection(steps=1, max_rows_per_device=4)
    config = RunConfig(data=DataSection(source=TextSource(path="x")), train=train)
    for step_bytes, limit in ((None, 5), (5, None), (5, 5)):
        assert oom_advice.warn_device_memory(config, step_bytes, limit) is None
    warned = oom_advice.warn_device_memory(config, 6 * MIB, 5 * MIB)
    assert warned is not None
    assert "about 6.0 MiB of each device" in warned
    assert "train.max_rows_per_device=2 (4 now)" in warned
    assert "model.remat=block" in warned


def test_a_host_without_memory_for_a_snapshot_is_reported_with_numbers(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 9 kB\nMemAvailable:   {100 * 1024} kB\n")
    assert oom_advice.warn_host_memory(100 * MIB, 0, meminfo=meminfo) is None
    assert oom_advice.warn_host_memory(50 * MIB, 50 * MIB, meminfo=meminfo) is None
    small = oom_advice.warn_host_memory(60 * MIB, 60 * MIB, meminfo=meminfo)
    assert small is not None
    assert small.startswith("a save takes up to 60.0 MiB of this host's memory until")
    assert "besides 60.0 MiB of state; 100.0 MiB are available" in small
    meminfo.write_text("")
    assert oom_advice.warn_host_memory(1 << 60, 0, meminfo=meminfo) is None
