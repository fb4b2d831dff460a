"""The part about attention: cuDNN's kernel against XLA's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tools.gpu.runs import NO_GPU, Figures, sized

REPEATS = 10


def attention(folder: Path) -> Figures:
    """Compares cuDNN's attention with XLA's: gradient error in bfloat16, and time."""
    del folder
    batch, length, heads, size = sized(8, 1), sized(2048, 64), sized(16, 2), sized(128, 32)
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (batch, length, heads, size)
    qkv = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    xla = _gradient("xla")
    exact = exact_gradient(*(array.astype(jnp.float32) for array in qkv))
    figures: Figures = {"xla_ms": 1e3 * _seconds(xla, qkv), "xla_error": _error(xla(*qkv), exact)}
    if jax.default_backend() != "gpu":
        return figures | dict.fromkeys(("cudnn_ms", "cudnn_error", "speedup"), NO_GPU)
    cudnn = _gradient("cudnn")
    error, seconds = _error(cudnn(*qkv), exact), _seconds(cudnn, qkv)
    assert error < 0.05, f"cuDNN's attention differs from XLA's in float32 by {error:.3f}"
    speedup = _seconds(xla, qkv) / seconds
    return figures | {"cudnn_ms": 1e3 * seconds, "cudnn_error": error, "speedup": speedup}


def exact_gradient(*qkv: jax.Array) -> Any:
    """Returns the gradients in float32, without TF32, which has the error of bfloat16 almost."""
    with jax.default_matmul_precision("highest"):
        return _gradient("xla")(*qkv)


def _gradient(implementation: Any) -> Callable[..., Any]:
    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        found = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
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
