"""The part about saves: their cost to training, and the GB/s of copies, restores, digests."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint.digests.content_digest import array_digest
from jaxres.checkpoint.write.orbax_writer import HASH_THREADS
from tools.bench import checkpoint as bench
from tools.gpu.runs import Figures, every, seconds, sized

Make = Callable[[], Any]
NO_PINNED = "not measured: JAX has no pinned_host memory on this device"


def saves(folder: Path) -> Iterator[Figures]:
    """Yields how long a save holds up training, and GB/s, for the state of a 124M model."""
    make = bench.make_state(layers=sized(12, 1), width=sized(768, 48))
    host = [np.array(leaf) for leaf in jax.tree.leaves(make())]
    size = sum(array.nbytes for array in host)
    yield {"state_GB": size / 1e9}
    copies: dict[str, float] = {}
    yield from every(
        copies=lambda: _copies(make, copies),
        held_up=lambda: _held_up(folder, make, copies),
        beside=lambda: _beside(folder, make),
        restores=lambda: _restores(folder, make, size),
        digests=lambda: _digests(host, size),
    )


def _rounds() -> range:
    """Returns the rounds; the first is not counted."""
    return range(sized(3, 2))


def _copies(make: Make, found: dict[str, float]) -> Figures:
    """Times copies of the state to the host: pageable memory, and memory that is pinned."""
    ways: dict[str, Callable[[Any], object]] = {
        "pageable": jax.device_get,
        "async": lambda state: jax.block_until_ready(_fetched(state)),
    }
    if "pinned_host" in {kind.kind for kind in jax.devices()[0].addressable_memories()}:
        ways["pinned"] = lambda state: jax.block_until_ready(jax.device_put(state, _pinned(state)))
        ways["pinned_as_numpy"] = lambda state: jax.device_get(
            jax.block_until_ready(jax.device_put(state, _pinned(state)))
        )
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in _rounds():
        for name, way in ways.items():
            fresh = jax.block_until_ready(bench.step(make()))  # JAX keeps a copy of a fetched one.
            taken[name].append(seconds(lambda way=way, state=fresh: way(state)))
    medians = {name: statistics.median(rounds[1:]) for name, rounds in taken.items()}
    found |= {name: medians[name] for name in ("pageable", "pinned") if name in medians}
    figures: Figures = {f"copy_{name}_ms": 1e3 * median for name, median in medians.items()}
    return figures if "pinned" in ways else {**figures, "copy_pinned_ms": NO_PINNED}


def _fetched(state: Any) -> Any:
    """Begins all copies to the host before it waits for one."""
    for array in jax.tree.leaves(state):
        array.copy_to_host_async()
    return jax.device_get(state)


def _pinned(state: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), state)


def _held_up(folder: Path, make: Make, copies: dict[str, float]) -> Figures:
    """Times the call of a save and the step after it, which waits for its donated arrays."""
    for name in ("copy", "device", "stock"):
        (folder / name).mkdir()
    ways = {name: bench.ours(folder / name, name) for name in ("copy", "device")}
    ways["stock"] = bench.orbax(folder / "stock", ocp.Context())
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    idle = []
    for _ in _rounds():
        for name, way in ways.items():
            times[name].append(way.times(make))
        state = jax.block_until_ready(bench.step(make()))
        idle.append(seconds(lambda s=state: jax.block_until_ready(bench.step(s))))
    step = statistics.median(idle[1:])
    figures: Figures = {"step_alone_ms": 1e3 * step}
    whole = {name: statistics.median(row[2] for row in rows[1:]) for name, rows in times.items()}
    for name, rows in times.items():
        held = statistics.median(call + after for call, after, _ in rows[1:]) - step
        figures |= {f"{name} held_up_ms": 1e3 * held, f"{name} save_s": whole[name]}
        for kind, copied in copies.items():
            figures[f"{name} held_up_over_{kind}_copy"] = held / copied
    return figures | {"save_over_stock_orbax": whole["copy"] / whole["stock"]}


def _beside(folder: Path, make: Make) -> Figures:
    """Compares steps of matrix products during a save with such steps before it."""
    (folder / "beside").mkdir()
    saving = bench.ours(folder / "beside", "copy")
    ratios = [saving.beside_steps(make, sized(4096, bench.SIDE))[1] for _ in _rounds()]
    return {"step_beside_save_ratio": statistics.median(ratios[1:])}


def _restores(folder: Path, make: Make, size: int) -> Figures:
    rows = bench.restores(folder, make, rounds=len(_rounds()) - 1)
    names = ("restore_unverified", "restore_verified", "verify_without_jax")
    medians = [statistics.median(row[i] for row in rows) for i in range(len(names))]
    return {
        f"{name}_GB_per_s": size / taken / 1e9 for name, taken in zip(names, medians, strict=True)
    }


def _digests(host: list[np.ndarray], size: int) -> Figures:
    """Times the digest of a state that is in host memory, with one thread and as in a save."""

    def digest(threads: int) -> float:
        with ThreadPoolExecutor(threads) as pool:
            return seconds(lambda: list(pool.map(lambda a: array_digest("path", a), host)))

    figures: Figures = {}
    for threads in (1, HASH_THREADS):
        taken = statistics.median(digest(threads) for _ in _rounds())
        figures[f"digest_GB_per_s_{threads}_threads"] = size / taken / 1e9
    return figures | {"digest_on_device": "not measured: jaxres computes no digest on the device"}
