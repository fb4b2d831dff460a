"""The part about attention: cuDNN's kernel against XLA's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxres.models.attention import attention_mask
from tools.gpu.runs import Figures, every, sized

REPEATS = 10
MOST_ERROR = 0.05
KERNELS: dict[str, dict[str, Any]] = {
    "xla": {"implementation": "xla"},
    "cudnn": {"implementation": "cudnn"},
    "cudnn causal": {"implementation": "cudnn", "is_causal": True},
}
"""Name -> settings; the mask is causal itself, and with `is_causal` cuDNN leaves out half."""


def attention(folder: Path) -> Iterator[Figures]:
    """Compares cuDNN's attention with XLA's, with the mask of rows of several documents."""
    del folder
    batch, length, heads, size = sized(8, 1), sized(2048, 64), sized(16, 2), sized(128, 32)
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (batch, length, heads, size)
    qkv = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    documents = jnp.arange(length) // (length // 4)
    mask = attention_mask(jnp.broadcast_to(documents, (batch, length)))
    exact = exact_gradient(*(array.astype(jnp.float32) for array in qkv), mask)
    times = dict[str, float]()

    def measured(name: str) -> Figures:
        gradient = _gradient(**KERNELS[name])
        error = _error(gradient(*qkv, mask), exact)
        assert error < MOST_ERROR, f"{name} differs from float32 by {error:.3f}"
        times[name] = _seconds(gradient, [*qkv, mask])
        speedup = times["xla"] / times[name]
        found: Figures = {f"{name} ms": 1e3 * times[name], f"{name} error": error}
        return found if name == "xla" else {**found, f"{name} speedup": speedup}

    names = list(KERNELS) if jax.default_backend() == "gpu" else ["xla"]
    yield from every(**{name: lambda name=name: measured(name) for name in names})


def exact_gradient(*arrays: jax.Array) -> Any:
    """Returns the gradients in float32, without TF32, which has the error of bfloat16 almost."""
    with jax.default_matmul_precision("highest"):
        return _gradient(**KERNELS["xla"])(*arrays)


def _gradient(**settings: Any) -> Callable[..., Any]:
    """Returns the gradients of a loss of query, key, value [B T H C] and mask [B 1 T T]."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        found = jax.nn.dot_product_attention(query, key, value, mask=mask, **settings)
        return jnp.sum(found.astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def _error(found: Any, exact: Any) -> float:
    """Returns the largest difference, relative to the largest value; NaN if there is a NaN."""
    pairs = zip(found, exact, strict=True)
    errors = [jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)) for a, b in pairs]
    return float(jnp.max(jnp.stack(errors)))


def _seconds(function: Callable[..., Any], arguments: list[Any]) -> float:
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
