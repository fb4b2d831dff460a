"""Orbax (v0 and v1) and TensorStore alone read every committed step, bit for bit, on any devices.

Arrays of all dtypes, scalars, PRNG keys, and dims that no number of devices divides, written by
the real `Checkpointer`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest

from jaxres.checkpoint.digests.block_digests import dtype_named
from jaxres.checkpoint.state_arrays import array_infos
from jaxres.cluster.host_group import ALONE
from jaxres.faults import ConfigError
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests.promises import stock_arrays
from tests.promises.trainer import ROOT, free_address, run_history
from tests.tiers import campaign
from tests.unit.checkpoint import independent_reader
from tests.unit.checkpoint.read.test_ocdbt import different_keys, values
from tests.waiting import SURE_SECONDS

READER = Path(__file__).with_name("stock_reader.py")
NUMS_DEVICES = {"v0": ("1", "2", "8"), "v1": ("1", "2", "8"), "tensorstore": ("1",)}


def step_dirs(run_dir: RunDir) -> dict[int, Path]:
    return {c.step: run_dir.root / c.path for c in run_history(run_dir).committed}


def start(reader: str, *run_dirs: RunDir) -> subprocess.Popen[bytes]:
    """Starts a process that reads all steps; it has no path to jaxres, and can't import it."""
    folders = [str(folder) for run_dir in run_dirs for folder in step_dirs(run_dir).values()]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(READER), reader, *folders]
    return subprocess.Popen(
        command, cwd="/", env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def assert_reads_the_bits(process: subprocess.Popen[bytes], reader: str, *runs: RunDir) -> None:
    printed, errors = process.communicate(timeout=SURE_SECONDS)
    assert process.returncode == 0, errors.decode()
    found = json.loads(printed)
    steps = [(step, folder) for run_dir in runs for step, folder in step_dirs(run_dir).items()]
    for step, folder in steps:
        assert set(found[str(folder)]) == set(NUMS_DEVICES[reader])
        for num_devices, table in found[str(folder)].items():
            assert table == stock_arrays.table(step), (step, num_devices)


def written(root: Path, num_hosts: int, *nums_devices: int, writer: str = "tensorstore") -> RunDir:
    """Returns a run with steps that real processes have saved."""
    program = [sys.executable, "-m", "tests.promises.stock_arrays"]
    port = free_address().rpartition(":")[2]
    processes = [
        subprocess.Popen(
            [*program, str(host), str(num_hosts), port, str(root), writer, *map(str, nums_devices)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for host in range(num_hosts)
    ]
    outputs = [process.communicate(timeout=SURE_SECONDS)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * num_hosts, "\n".join(outputs)
    assert sorted(step_dirs(RunDir(root))) == sorted(nums_devices), "\n".join(outputs)
    return RunDir(root)


@pytest.mark.slow
def test_stock_orbax_and_tensorstore_read_a_step_of_eight_devices(tmp_path: Path) -> None:
    """Of both writers of `checkpoint.writer`."""
    runs = RunDir(tmp_path / "default"), RunDir(tmp_path / "orbax")
    stock_arrays.save(runs[0], ALONE, [8])
    stock_arrays.save(runs[1], ALONE, [8], "orbax")
    assert [list(step_dirs(run_dir)) for run_dir in runs] == [[8], [8]]
    (by_default,), (by_orbax,) = (step_dirs(run_dir).values() for run_dir in runs)
    assert (by_default / "state/ocdbt.process_0.0").is_dir()
    assert (by_orbax / "state/ocdbt.process_0").is_dir()
    processes = {reader: start(reader, *runs) for reader in NUMS_DEVICES}
    for reader, process in processes.items():
        assert_reads_the_bits(process, reader, *runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_hosts", "nums_devices"),
    [*campaign([(1, (1, 2, 8))]), (2, (4,))],
    ids=["one host", "two hosts"],
)
def test_stock_tools_read_steps_of_any_number_of_devices_and_hosts(
    tmp_path: Path, num_hosts: int, nums_devices: tuple[int, ...]
) -> None:
    """Step N was written on N devices; each is read on 1, 2 and 8, with other shardings."""
    run_dir = written(tmp_path / "run", num_hosts, *nums_devices)
    for folder in step_dirs(run_dir).values():
        written_by: dict[str, int] = {}
        for name, size in files.sizes(folder / "state").items():
            if (part := name.partition("/")[0]).startswith("ocdbt.process_"):
                host = part.rpartition(".")[0]
                written_by[host] = written_by.get(host, 0) + size
        shares = list(written_by.values())
        assert len(shares) == num_hosts
        assert min(shares) > 0.8 * sum(shares) / num_hosts, shares
    for reader in NUMS_DEVICES:
        assert_reads_the_bits(start(reader, run_dir), reader, run_dir)
    independent_reader.checked_digest(run_dir.root)


@pytest.mark.slow
def test_two_hosts_write_the_same_chunks_by_both_writers(tmp_path: Path) -> None:
    """Of arrays that both hosts hold each writes a part, and each part is read back."""
    runs = [written(tmp_path / writer, 2, 4, writer=writer) for writer in stock_arrays.WRITERS]
    folders = [folder for run_dir in runs for folder in step_dirs(run_dir).values()]
    own, by_orbax = (values(folder / "state") for folder in folders)
    for path in ("rows", "scalar"):  # The type has no 0: each describes another value for it.
        key = f"{path}.float8_e8m0fnu/zarr.json".encode()
        assert own.pop(key) != by_orbax.pop(key)
    assert different_keys(own, by_orbax) == []


def test_an_array_without_elements_is_refused_by_name() -> None:
    """Orbax can't store it, so no step with one is ever begun."""
    with pytest.raises(ConfigError, match=r"model/empty of the state has no elements .*\[0, 3\]"):
        array_infos({"model": {"empty": jax.ShapeDtypeStruct((0, 3), jnp.float32)}})


def test_a_typed_prng_key_is_refused_by_name() -> None:
    """The state of an optimizer or module of the user may have one; no step with it is begun."""
    says = r"optimizer/key of the state has the type key<fry>, .*jax\.random\.key_data"
    with pytest.raises(ConfigError, match=says):
        array_infos({"optimizer": {"key": jax.random.key(0)}})


@pytest.mark.parametrize("name", ["int1", "uint1", "uint2", "uint4", "float8_e4m3"])
def test_a_dtype_that_the_format_lacks_is_refused_by_name(name: str) -> None:
    """No step with such an array is begun: TensorStore refuses it in the first save."""
    array = jax.ShapeDtypeStruct((4,), getattr(ml_dtypes, name))
    says = rf"model/packed of the state has the type {name}, .*int8 or uint8.*astype"
    with pytest.raises(ConfigError, match=says):
        array_infos({"model": {"packed": array}})


def test_every_dtype_of_jax_is_stored_or_refused() -> None:
    """A dtype that is new in JAX has to be added to one of the two lists."""
    stored = {*stock_arrays.DTYPES, *stock_arrays.RARE_DTYPES}
    wide = {"int64", "uint64", "float64", "complex128"}
    lacking = {"int1", "uint1", "uint2", "uint4", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"}
    types = [getattr(jnp, name) for name in dir(jnp) if name != "dtype"]
    known = {jnp.dtype(kind).name for kind in types if _is_scalar_type(kind)}
    assert known <= stored | wide | lacking
    for name in stored | wide:
        array_infos({"a": jax.ShapeDtypeStruct((), dtype_named(name))})


def _is_scalar_type(kind: object) -> bool:
    try:
        return isinstance(kind, type(jnp.float32)) and jnp.dtype(kind).kind != "O"
    except TypeError:
        return False
