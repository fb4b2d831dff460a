"""Parts about the compiled train step: its memory, and settings that change it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxres import config as configs
from jaxres import data
from jaxres.engine import mesh as meshes
from jaxres.engine import schedule, sharding_report
from jaxres.train.compiled import assemble, jitted_steps
from jaxres.train.components import Components
from tools.gpu.runs import NO_GPU, REHEARSED, Figures, every, quickstart, seconds, sized

MODEL = (
    *("model.num_layers=12", "model.d_model=768", "model.num_heads=12", "data.seq_len=1024"),
    *("train.global_batch_size=16", "model.compute_dtype=bfloat16"),
)
TINY = ("data.seq_len=32", "train.global_batch_size=4", "model.compute_dtype=bfloat16")
VARIANTS = {
    "plain": (),
    "float16": ("model.compute_dtype=float16",),
    "microbatches": ("train.microbatches=4",),
    "no_donation": (),
    "selective": ("model.remat=selective",),
    "block": ("model.remat=block",),
    "one_loop": ("model.scan_layers=true",),
    "xla_attention": ("model.attention=xla",),
    "float32": ("model.compute_dtype=float32",),
    "plain_again": (),
}
"""Name -> overrides; a rehearsal takes the first ones. `plain_again` shows the noise."""
MIB = 2**20


def _assembled(folder: Path, *overrides: str) -> Components:
    """Returns the components of a small run on this machine's devices."""
    own = TINY if REHEARSED else MODEL
    arguments = quickstart(folder, *own, *overrides, f"run.dir={folder / 'run'}")
    config = configs.load(Path(arguments[0]), arguments[1:]).config
    dataset = data.open_dataset(config.data)
    plan, mesh, _ = assemble.devices_here(config)
    return assemble.components(
        config, dataset, plan=plan, mesh=mesh, platform=jax.default_backend()
    )


def _batch(parts: Components) -> dict[str, jax.Array]:
    rows = parts.dataset.train.rows(np.arange(parts.rows_per_batch))
    return meshes.place_batch(parts.mesh, meshes.pack(rows))


def _step_seconds(parts: Components, step: Any) -> float:
    """Returns the median time of a step after two that are not counted."""
    state, batch, taken = parts.init(), _batch(parts), []
    rate = schedule.rate_arrays(parts.config.optimizer.learning_rate, parts.mesh)(1.0)

    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch, None, rate)
        jax.block_until_ready((state, metrics))

    for _ in range(2 + sized(20, 3)):
        taken.append(seconds(run))
    return statistics.median(taken[2:])


def memory(folder: Path) -> Iterator[Figures]:
    """Yields doctor's estimates, XLA's analysis, and the device's peak memory."""
    parts = _assembled(folder)
    state = sharding_report.of(parts.shapes, parts.model, parts.mesh).device_bytes
    before = _peak()
    step = jitted_steps.traced_step(parts).lower().compile()
    estimate, found = sharding_report.step_bytes(step), step.memory_analysis()
    assert estimate is not None
    yield {
        "doctor_state_MiB": state / MIB,
        "doctor_step_MiB": estimate / MIB,
        "arguments_MiB": found.argument_size_in_bytes / MIB,
        "temporary_MiB": found.temp_size_in_bytes / MIB,
        "aliased_MiB": found.alias_size_in_bytes / MIB,
        "code_MiB": found.generated_code_size_in_bytes / MIB,
        "doctor_state_over_arguments": state / found.argument_size_in_bytes,
    }
    compiled = _peak()
    _step_seconds(parts, step)
    peak = _peak()
    if before is None or compiled is None or peak is None:
        names = ("peak_before_MiB", "peak_compiled_MiB", "peak_MiB", "peak_over_doctor")
        yield dict.fromkeys(names, NO_GPU)
        return
    yield {
        "peak_before_MiB": before / MIB,
        "peak_compiled_MiB": compiled / MIB,
        "peak_MiB": peak / MIB,
        "peak_over_doctor": peak / estimate,
    }


def _peak() -> int | None:
    """Returns the most bytes of the device that were in use; None on a CPU."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform == "gpu" else None
    return stats["peak_bytes_in_use"] if stats else None


def variants(folder: Path) -> Iterator[Figures]:
    """Yields tokens per second and memory of a step with other settings, over the plain one."""
    plain: dict[str, float] = {}

    def measured(name: str) -> Figures:
        parts = _assembled(folder, *VARIANTS[name])
        step = jitted_steps.traced_step(parts, donates=name != "no_donation").lower().compile()
        needed = sharding_report.step_bytes(step)
        assert needed is not None
        rate = parts.tokens_per_step / _step_seconds(parts, step)
        if name == "plain":
            plain.update(rate=rate, needed=needed)
            return {"plain tokens_per_s": rate, "plain MiB": needed / MIB}
        speed, memory_ratio = rate / plain["rate"], needed / plain["needed"]
        return {f"{name} tokens_per_s ratio": speed, f"{name} memory ratio": memory_ratio}

    names = list(VARIANTS)[: sized(len(VARIANTS), 4)]
    yield from every(**{name: lambda name=name: measured(name) for name in names})
