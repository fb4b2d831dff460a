"""Parts about compiled programs: attention, and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxres import config as configs
from jaxres import data
from jaxres.train import build, jitted_steps
from tools.gpu.runs import NO_GPU, quickstart, sized

Figures = dict[str, object]
REPEATS = 10


def attention(folder: Path) -> Figures:
    """Compares cuDNN's attention with XLA's: gradient error in bfloat16, and time."""
    del folder
    batch, length, heads, size = sized(8, 1), sized(2048, 64), sized(16, 2), sized(128, 32)
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (batch, length, heads, size)
    qkv = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    xla = _gradient("xla")
    exact = _gradient("xla")(*(array.astype(jnp.float32) for array in qkv))
    figures: Figures = {"xla_ms": 1e3 * _seconds(xla, qkv), "xla_error": _error(xla(*qkv), exact)}
    if jax.default_backend() != "gpu":
        return figures | dict.fromkeys(("cudnn_ms", "cudnn_error", "speedup"), NO_GPU)
    cudnn = _gradient("cudnn")
    error, seconds = _error(cudnn(*qkv), exact), _seconds(cudnn, qkv)
    assert error < 0.05, f"cuDNN's attention differs from XLA's in float32 by {error:.3f}"
    speedup = _seconds(xla, qkv) / seconds
    return figures | {"cudnn_ms": 1e3 * seconds, "cudnn_error": error, "speedup": speedup}


def _gradient(implementation: Any) -> Callable[..., Any]:
    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        found = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
        return jnp.sum(found.astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def _error(found: Any, exact: Any) -> float:
    """Returns the largest difference, relative to the largest value."""
    pairs = zip(found, exact, strict=True)
    return max(
        float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b))) for a, b in pairs
    )


def _seconds(function: Callable[..., Any], arguments: list[Any]) -> float:
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def memory(folder: Path) -> Figures:
    """Compares XLA's estimate for the train step with what the device has used at most."""
    overrides = quickstart(folder, f"run.dir={folder / 'run'}")
    config = configs.load(Path(overrides[0]), overrides[1:]).config
    dataset = data.open_dataset(config.data)
    plan, mesh, _ = build.devices_here(config)
    parts = build.assemble(config, dataset, plan=plan, mesh=mesh, platform=jax.default_backend())
    step = jitted_steps.traced_step(parts).lower().compile()
    found = step.memory_analysis()
    estimate = (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )
    figures: Figures = {"estimate_MiB": estimate / 2**20}
    device = jax.devices()[0]
    if device.platform != "gpu":
        return figures | {"peak_MiB": NO_GPU}
    arguments, _ = step.args_info
    made = jax.tree.map(lambda a: jax.device_put(jnp.zeros(a.shape, a.dtype)), arguments)
    jax.block_until_ready(step(*made))
    peak = (device.memory_stats() or {})["peak_bytes_in_use"]
    return figures | {"peak_MiB": peak / 2**20, "peak_over_estimate": peak / estimate}
