"""How many flipped bits are found, by the number of steps between the flip and the comparison.

    python tools/bench/flips.py [--flips 1000]

Trains a small decoder with AdamW on three devices (on CPU: virtual ones), flips one random bit of
one device's parameters or moments, goes on, and compares the copies after some of the next steps.
Rounding can make copies equal again, if the lowest bits of a number have changed.

Also counts the flips after which the copy of another device is still that of the run without the
flip: only then a replay of the steps shows which of two different copies is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from typing import Any

import jax
import numpy as np

from jaxres import models
from jaxres.config.schema.model import GptModel
from jaxres.config.schema.optimizer import AdamwOptimizer, ConstantSchedule
from jaxres.config.schema.run_config import MeshSection
from jaxres.config.schema.training import GuardsSection
from jaxres.engine import mesh as meshes
from jaxres.engine import optimizer, replica_fingerprint
from jaxres.engine import schedule as schedules
from jaxres.engine import state as states
from jaxres.engine import step as steps

DEVICES, ROWS, LENGTH, VOCAB = 3, 6, 8, 64
MODEL = GptModel(num_layers=1, d_model=16, num_heads=2, compute_dtype="float32")
WARMUP, AFTER = 100, (0, 1, 2, 5, 10, 20, 50)
"""Steps before the flip; steps between it and a comparison."""


def rows(seed: int) -> dict[str, np.ndarray]:
    """Returns one batch of random tokens."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    return {
        "tokens_BT": tokens[:, :-1],
        "targets_BT": tokens[:, 1:],
        "segment_ids_BT": np.ones((ROWS, LENGTH), np.int32),
        "positions_BT": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "weights_BT": np.ones((ROWS, LENGTH), np.float32),
    }


def flipped(array: jax.Array, *, device: int, bit: int) -> jax.Array:
    """Returns an array with one flipped bit in one device's copy."""
    pieces = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        pieces.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def programs(mesh: Any) -> tuple[Any, Any, Any]:
    """Returns the state before the first step, the compiled step and the fingerprints."""
    keep = meshes.pin_batch_dim(mesh)
    model = models.build(
        MODEL, vocab_size=VOCAB, seq_len=LENGTH, platform=jax.default_backend(), keep_rows=keep
    )
    tx = optimizer.build(AdamwOptimizer(), axes=model.axes)
    rate = schedules.learning_rate(ConstantSchedule(), peak=3e-3, total_steps=1000)
    step = steps.make_train_step(
        model,
        tx,
        rate,
        steps.StepSettings(clip_norm=1.0, microbatches=1, spikes=GuardsSection().spikes),
    )
    shardings = states.shardings(
        jax.eval_shape(lambda: states.init(model, tx, seed=0)), model, mesh
    )
    state = jax.jit(lambda: states.init(model, tx, seed=0), out_shardings=shardings)()
    results = (shardings, meshes.replicated(mesh))
    batch = meshes.place_batch(mesh, rows(0))
    compiled = jax.jit(step, out_shardings=results).lower(state, batch).compile()
    return state, compiled, jax.jit(replica_fingerprint.make(state, mesh)).lower(state).compile()


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = meshes.build(MeshSection(), devices=jax.devices()[:DEVICES])
    state, step, fingerprints = programs(mesh)
    copies = replica_fingerprint.Copies.of(state, mesh)
    batches = [meshes.place_batch(mesh, rows(seed)) for seed in range(AFTER[-1])]
    for number in range(WARMUP):
        state, metrics = step(state, batches[number % len(batches)])
        np.asarray(metrics)  # With many steps in flight, virtual devices wait for each other.
    assert copies.suspects(np.asarray(fingerprints(state))) == (), "a false alarm"
    leaves, tree = jax.tree.flatten(state)
    clean, again = dict[int, np.ndarray](), state
    for number in range(AFTER[-1] + 1):
        clean[number] = np.asarray(fingerprints(again))
        if number < AFTER[-1]:
            again, metrics = step(again, batches[number])
            np.asarray(metrics)
    chance, found, lost = random.Random(1), Counter[int](), Counter[int]()
    replayable = Counter[int]()
    for _ in range(options.flips):
        (at,) = chance.choices(range(len(leaves)), [leaf.nbytes for leaf in leaves])
        device, bit = chance.randrange(DEVICES), chance.randrange(8 * leaves[at].nbytes)
        spoilt = list(leaves)
        spoilt[at] = flipped(leaves[at], device=device, bit=bit)
        after = jax.tree.unflatten(tree, spoilt)
        for number in range(AFTER[-1] + 1):
            if number in AFTER:
                values, other = np.asarray(fingerprints(after)), (device + 1) % DEVICES
                suspects = copies.suspects(values)
                replayable[number] += suspects == (device,) and bool(
                    (values[other] == clean[number][other]).all()
                )
                found[number] += suspects == (device,)
                if number == AFTER[-1] and not suspects:
                    lost[bit % 32] += 1
            if number < AFTER[-1]:
                after, metrics = step(after, batches[number])
                np.asarray(metrics)
    for number in AFTER:
        print(
            f"compared {number} steps after the flip: {found[number]} of {options.flips} found, "
            f"{replayable[number]} with the other copies as without the flip"
        )
    print(
        f"not found after {AFTER[-1]} steps, by bit (0: the lowest): {dict(sorted(lost.items()))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
