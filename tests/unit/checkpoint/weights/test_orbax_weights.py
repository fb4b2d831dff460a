"""Checkpoints of stock Orbax, of every layout that it has written, are read bit for bit."""

import errno
import functools
import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from flax import nnx
from orbax.checkpoint import v1

from jaxres.checkpoint.weights import orbax_weights
from jaxres.checkpoint.weights.orbax_weights import from_orbax
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.storage import files
from jaxres.storage.path import GcsPath


@functools.cache
def tree():
    return {
        "params": {
            "layers_0": {
                "kernel": jnp.arange(12.0).reshape(4, 3),
                "bias": jnp.ones(3, jnp.bfloat16),
            },
            "list": [jnp.ones(2), jnp.zeros(3)],
        },
        "opt_state": {"mu": jnp.ones(3)},
        "step": 5,
    }


NAMES = {
    "params/layers_0/kernel",
    "params/layers_0/bias",
    "params/list/0",
    "params/list/1",
    "opt_state/mu",
    "step",
}


def _standard(folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree())
    return folder


def _managed(folder):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(7, args=ocp.args.Composite(state=ocp.args.StandardSave(tree())))
    return folder / "7"


def _folders(folder):
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(folder, tree())
    return folder


def _newest(folder):
    v1.save(folder, tree())
    return folder


WRITERS = [_standard, _managed, _folders, _newest]


@pytest.mark.parametrize("write", WRITERS)
def test_a_tree_of_any_layout_is_read(tmp_path, write):
    weights = from_orbax(write(tmp_path / "saved"))
    assert set(weights.tensors) == NAMES
    params = tree()["params"]
    for name, wanted in [
        ("params/layers_0/kernel", params["layers_0"]["kernel"]),
        ("params/layers_0/bias", params["layers_0"]["bias"]),
        ("params/list/1", params["list"][1]),
    ]:
        found = weights.read(name)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == np.asarray(wanted).tobytes()
        assert weights.tensors[name].shape == wanted.shape


@pytest.mark.slow
def test_names_of_an_nnx_state_end_with_the_name_of_the_variable(tmp_path):
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    pure = nnx.to_pure_dict(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.save(tmp_path / "pure", pure)
    for name in ("state", "pure"):
        assert set(from_orbax(tmp_path / name).tensors) == {"kernel", "bias"}


def test_an_array_named_value_among_others_keeps_its_name(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"attention": {"value": jnp.ones(2), "key": jnp.ones(2)}})
    assert set(from_orbax(tmp_path / "a").tensors) == {"attention/value", "attention/key"}


@pytest.mark.parametrize(
    "tree",
    [
        {"a/b": np.ones(2), "a": {"b": np.zeros(2)}},
        {"a": {"b": {"value": np.zeros(2)}}, "a/b": np.ones(2)},
        {"a.b": np.ones(2), "a": {"b": np.zeros(2)}},
    ],
)
def test_two_arrays_of_one_name_are_refused_and_none_is_dropped(tmp_path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", tree)
    with pytest.raises(ConfigError, match=r"two arrays of one name, .*keys \['a"):
        from_orbax(tmp_path / "a")


def test_what_is_no_checkpoint_is_told_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"no checkpoint of Orbax here \(no file _METADATA\)"):
        from_orbax(tmp_path)
    _managed(tmp_path / "manager")
    with pytest.raises(ConfigError, match=r"a folder of steps\. Give one of them, such as .*/7\.$"):
        from_orbax(tmp_path / "manager")
    shutil.move(tmp_path / "manager" / "7", tmp_path / "manager" / "checkpoint_00000007")
    with pytest.raises(ConfigError, match=r"a folder of steps\. .*/checkpoint_00000007\.$"):
        from_orbax(tmp_path / "manager")
    for name in ("params", "other"):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "two" / name, tree())
    with pytest.raises(ConfigError, match="has several trees: other, params"):
        from_orbax(tmp_path / "two")


def test_damage_is_told_with_the_name(tmp_path):
    saved = _folders(tmp_path / "saved")
    (saved / "opt_state.mu" / ".zarray").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="opt_state/mu can't be read"):
        from_orbax(saved)
    for damaged in (b"{}", b'{"tree_metadata": {}, "tree_metadata": {}}'):
        (saved / "_METADATA").write_bytes(damaged)
        with pytest.raises(ConfigError, match="_METADATA: can't be read"):
            from_orbax(saved)


@pytest.mark.parametrize("write", WRITERS)
def test_a_pipe_in_the_place_of_any_file_is_refused_and_is_not_waited_for(tmp_path, write):
    saved = write(tmp_path / "saved")
    (tree_folder,) = (path.parent for path in saved.rglob("_METADATA"))
    paths = [path for path in tree_folder.rglob("*") if path.is_file()]
    assert any(path.parent.name == "d" or path.name == ".zarray" for path in paths)
    paths.sort(key=lambda path: path.parent.name != "array_metadatas")  # TensorStore reads none.
    for path in paths:
        path.rename(tmp_path / "kept")
        os.mkfifo(path)
        with pytest.raises(ConfigError, match=rf"{path}: .*a pipe, a socket or a device"):
            from_orbax(saved)
        path.unlink()
        (tmp_path / "kept").rename(path)
    assert set(from_orbax(saved).tensors) == NAMES


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_without_end_that_is_read_whole_is_refused(tmp_path, write):
    """TensorStore would ask for a tebibyte of memory, and end the process."""
    saved = write(tmp_path / "saved")
    (tree_folder,) = (path.parent for path in saved.rglob("_METADATA"))
    whole = [p for p in tree_folder.rglob("*") if p.name in orbax_weights.WHOLE]
    chunks = _chunks(tree_folder, "params.layers_0.kernel")
    assert chunks or len(whole) > 1
    sizes = {path: path.stat().st_size for path in [*whole, *chunks]}
    for path, num_bytes in [(p, n) for n in (2**28 + 1, 2**40) for p in sizes]:
        os.truncate(path, num_bytes)
        with pytest.raises(ConfigError, match=rf"{path}: has {num_bytes:,} bytes, at most"):
            from_orbax(saved)
        os.truncate(path, sizes[path])
    assert set(from_orbax(saved).tensors) == NAMES


def _chunks(saved, name):
    """Paths of the chunks of an array that is a folder of its own."""
    described = (".zarray", "zarr.json")
    return [path for path in (saved / name).rglob("*") if path.name not in described]


FAILED_READ = ValueError("UNKNOWN: Error reading [os_error_code='5'] Input/output error")


@pytest.mark.parametrize("error", [FAILED_READ, OSError(errno.EIO, "Input/output error")], ids=repr)
def test_storage_that_fails_is_no_damage(tmp_path, monkeypatch, error):
    saved = _folders(tmp_path / "saved")

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(tensorstore, "open", fails)
    with pytest.raises(StorageUnavailable, match="could not be read"):
        from_orbax(saved)


def _without_chunks(saved):
    for path in _chunks(saved, "params.layers_0.kernel"):
        path.unlink()


def _with_short_chunks(saved):
    for path in _chunks(saved, "params.layers_0.kernel"):
        path.write_bytes(path.read_bytes()[:-4])


def _without_array(saved):
    shutil.rmtree(saved / "params.layers_0.kernel")


@pytest.mark.parametrize("damage", [_without_chunks, _with_short_chunks, _without_array])
def test_chunks_that_are_missing_or_short_are_refused_and_never_zeros(tmp_path, damage):
    saved = _folders(tmp_path / "saved")
    damage(saved)
    with pytest.raises(ConfigError, match=r"params/layers_0/kernel can't be read .*another step"):
        from_orbax(saved).read("params/layers_0/kernel")


def test_a_chunk_that_is_missing_in_a_database_is_refused_too(tmp_path):
    saved = _standard(tmp_path / "saved")
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{saved}/"}}
    store = tensorstore.KvStore.open(spec).result()
    store[b"params.layers_0.kernel/0.0"] = None
    with pytest.raises(ConfigError, match="params/layers_0/kernel can't be read"):
        from_orbax(saved).read("params/layers_0/kernel")


def test_chunks_that_an_older_orbax_left_out_are_zeros_as_in_orbax_and_the_run_says_so(tmp_path):
    saved = _folders(tmp_path / "saved")
    _without_chunks(saved)
    metadata = json.loads((saved / "_METADATA").read_bytes())
    del metadata["store_array_data_equal_to_fill_value"]
    (saved / "_METADATA").write_text(json.dumps(metadata))
    weights = from_orbax(saved)
    assert not weights.read("params/layers_0/kernel").any()
    assert weights.where == f"{saved} (chunks that are missing in it are read as zeros)"


def _change_times(place, *, commit):
    """Writes the times of a step as Orbax has them before it commits it, or after."""
    times = {"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": commit}
    (place / "_CHECKPOINT_METADATA").write_text(json.dumps(times))


@pytest.mark.parametrize("write", WRITERS)
def test_a_step_that_orbax_has_not_renamed_is_refused(tmp_path, write):
    saved = write(tmp_path / "saved")
    for number in ("", "-1700000000"):
        unfinished = shutil.copytree(saved, tmp_path / f"9.orbax-checkpoint-tmp{number}")
        (tmp_path / f"link{number}").symlink_to(unfinished)
        for given in (unfinished, tmp_path / f"link{number}"):
            with pytest.raises(ConfigError, match=r"Orbax has not finished .*Give a finished step"):
                from_orbax(given)


@pytest.mark.parametrize("write", WRITERS)
def test_a_step_without_the_time_of_its_commit_is_refused(tmp_path, write):
    saved = write(tmp_path / "saved")
    trees = [path.parent for path in saved.rglob("_METADATA")]
    _change_times(saved, commit=None)
    for mark in saved.rglob("commit_success.txt"):
        mark.unlink()
    for given in (saved, *trees):
        with pytest.raises(ConfigError, match="_CHECKPOINT_METADATA has no time of a commit"):
            from_orbax(given)
    _change_times(saved, commit=2)
    assert set(from_orbax(saved).tensors) == NAMES, "on a disk commit_success.txt may be missing"
    (saved / "_CHECKPOINT_METADATA").write_bytes(b'{"init')
    with pytest.raises(ConfigError, match=r"_CHECKPOINT_METADATA: can't be read .*another step"):
        from_orbax(saved)


def test_a_tree_that_is_left_over_from_a_killed_save_is_not_taken_for_the_one_of_a_step(tmp_path):
    saved = _managed(tmp_path / "saved")
    shutil.copytree(saved / "state", saved / "state.orbax-checkpoint-tmp-1")
    assert set(from_orbax(saved).tensors) == NAMES
    shutil.rmtree(saved / "state")
    with pytest.raises(ConfigError, match="Orbax has not finished"):
        from_orbax(saved)


def _copy_to_bucket(saved: Path, to: GcsPath, *, without: str):
    for path in saved.rglob("*"):
        if path.is_file() and path.name != without:
            files.create(to / path.relative_to(saved).as_posix(), path.read_bytes())


@pytest.mark.parametrize("write", [_standard, _managed, _newest])
def test_a_step_in_a_bucket_without_commit_success_is_refused(tmp_path, gcs_bucket, write):
    saved = write(tmp_path / "saved")
    whole, begun = GcsPath(gcs_bucket, "whole/7"), GcsPath(gcs_bucket, "begun/7")
    _copy_to_bucket(saved, whole, without="")
    _copy_to_bucket(saved, begun, without="commit_success.txt")
    weights = from_orbax(whole)
    assert set(weights.tensors) == NAMES
    wanted = np.asarray(tree()["params"]["layers_0"]["kernel"])
    assert weights.read("params/layers_0/kernel").tobytes() == wanted.tobytes()
    with pytest.raises(ConfigError, match=r"begun/7.* in a bucket has commit_success\.txt"):
        from_orbax(begun)
