"""Trees of the user come back in their structure, or a leaf is named before anything is written."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxres
from jaxres.faults import ConfigError
from jaxres.own_loop import trees


class Net(nnx.Module):
    """Layers, a list, batch statistics, and a key of dropout."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Pair(NamedTuple):
    first: jax.Array
    rest: list


@jax.tree_util.register_pytree_with_keys_class
class Twice:
    """A node whose two children have equal names."""

    def __init__(self, a, b):
        self.children = (a, b)

    def tree_flatten_with_keys(self):
        keys = (jax.tree_util.DictKey(1), jax.tree_util.DictKey("1"))
        return tuple(zip(keys, self.children, strict=True)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def mixed(seed):
    """Returns a tree with every kind of leaf, whose values depend on the seed."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("x",))
    return {
        "numpy": np.arange(5, dtype=">f8") * seed,
        "numpy scalar": np.float32(seed),
        "numbers": [3 * seed, 0.1 * seed, bool(seed % 2)],
        "sharded": jax.device_put(jnp.arange(16.0) * seed, NamedSharding(mesh, PartitionSpec("x"))),
        "elsewhere": jax.device_put(jnp.ones(3, jnp.bfloat16) * seed, jax.devices()[5]),
        "weak": jnp.full((3,), 0.5 * seed),
        "key": jax.random.key(seed, impl="rbg"),
        "named": Pair(jnp.ones(2) * seed, [None, jnp.int8(seed)]),
        "optax": optax.adamw(1e-3).init({"w": jnp.ones(2) * seed}),
    }


def net(seed):
    model = Net(nnx.Rngs(seed))
    return nnx.split((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))[1]


def assert_same(tree, wanted):
    """Compares structure, kinds of leaves, dtypes, places and bits."""
    assert jax.tree.structure(tree) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array):
            assert (a.dtype, a.sharding, a.committed) == (b.dtype, b.sharding, b.committed)
            if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            assert a.weak_type == b.weak_type
        assert np.asarray(a).tobytes() == np.asarray(b).astype(np.asarray(a).dtype).tobytes()


@pytest.mark.parametrize("make", [mixed, pytest.param(net, marks=pytest.mark.slow)])
def test_a_tree_comes_back_in_its_structure_and_kinds_of_leaves(tmp_path, make):
    with jaxres.checkpoints(tmp_path) as saves:
        saves.save(1, make(3))
        saves.wait()
        assert_same(saves.restore(make(4)).tree, make(3))


def test_a_shape_without_a_sharding_is_wanted_on_the_default_device(tmp_path):
    with jaxres.checkpoints(tmp_path) as saves:
        saves.save(1, {"w": jnp.arange(3.0), "key": jax.random.key(3)})
        saves.wait()
        like = jax.eval_shape(lambda: {"w": jnp.zeros(3), "key": jax.random.key(0)})
        tree = saves.restore(like).tree
    assert not tree["w"].committed
    assert tree["w"].tolist() == [0, 1, 2]
    assert tree["key"] == jax.random.key(3)


def donated():
    array = jnp.ones(2)
    array.delete()
    return array


BAD = {
    "text": (lambda: {"a": {"b": "text"}}, "the leaf a/b: a str, which can't be stored"),
    "object": (
        lambda: [np.asarray([object()])],
        "the leaf 0: a numpy.ndarray, of items that can't be",
    ),
    "function": (
        lambda: {"a": Pair(jnp.ones(1), [len])},
        "the leaf a/rest/0: a builtin_function_or",
    ),
    "large": (lambda: {"a": 2**63}, "the leaf a: a int, of more than 64 bits"),
    "donated": (
        lambda: {"a": donated()},
        "the leaf a: a .*ArrayImpl, which was donated before the call",
    ),
    "slash": (lambda: {"a/b": jnp.ones(1)}, "the leaf a/b: has no name, or a slash in it"),
    "leaf": (lambda: jnp.ones(1), "the leaf of the tree: has no name"),
    "empty": (lambda: {"a": None}, "the tree has no arrays"),
    "twice": (
        lambda: {"x": Twice(jnp.ones(1), jnp.ones(1))},
        "two leaves of the tree have one path",
    ),
    "dot": (lambda: {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}, "would be stored as one"),
    "no elements": (lambda: {"a": jnp.ones((0, 2))}, "the array a of the state has no elements"),
    "type": (lambda: {"a": jnp.ones(2, jnp.uint4)}, "the array a of the state has the type uint4"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_leaf_that_cant_be_stored_is_named_before_anything_is_written(tmp_path, name):
    made, message = BAD[name]
    tree = made()
    with jaxres.checkpoints(tmp_path) as saves:
        with pytest.raises(ConfigError, match=message):
            saves.save(1, tree)
        assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("position", "what"),
    [
        ({"a": (1, 2)}, "position.a: a tuple is no JSON"),
        ({"a": [0, float("nan")]}, r"position.a\[1\]: nan is no JSON"),
        ({1: 2}, "position: the key 1 is no JSON"),
        (b"bytes", "position: a bytes is no JSON"),
        ({"a": np.int64(3)}, "position.a: a int64 is no JSON"),
    ],
)
def test_a_position_that_json_would_change_is_refused(position, what):
    with pytest.raises(ConfigError, match=what):
        trees.require_json(position)
