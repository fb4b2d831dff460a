"""Checkpoints of stock Orbax, of every layout that it has written, are read bit for bit."""

import functools

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint import v1

from jaxres.checkpoint.orbax_weights import from_orbax
from jaxres.faults import ConfigError


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


def test_what_is_no_checkpoint_is_told_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"no checkpoint of Orbax here \(no file _METADATA\)"):
        from_orbax(tmp_path)
    _managed(tmp_path / "manager")
    with pytest.raises(ConfigError, match=r"a folder of steps\. Give one of them, such as .*/7\.$"):
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
    (saved / "_METADATA").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="_METADATA: can't be read"):
        from_orbax(saved)
