"""Trains on rows of which one has a NaN gradient: with jaxres and with stock loops of optax.

    python -m tools.experiments.nan_poison

Exits 1 if a state of jaxres has a number that is not finite, or a plain loop of optax survives.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tools.experiments.delta_size import read
from tools.experiments.training_process import ROOT, TrainingProcess, jaxres, write_result

FOLDER = ROOT / "experiments" / "nan_poison"
ROWS, BATCH, STEPS, WIDTH, RATE = 6400, 64, 100, 32, 1e-2
POISONED = 4321
"""The row of zeros: the norm in the loss has no derivative at 0."""
FRESH = range(10_000, 12_000)
"""Rows that no loop trains on."""
Arrays = dict[str, Any]


class Points:
    """Data source of two classes of points; one row is zero."""

    fingerprint = "two classes of points, one row of zeros, version 1"

    def __init__(self, poisoned: int = POISONED) -> None:
        """Makes row `poisoned` zero; -1: none."""
        self.poisoned = poisoned

    def __len__(self) -> int:
        """Returns the number of rows."""
        return ROWS

    def __getitem__(self, index: int) -> Arrays:
        """Returns a row."""
        label = index % 2
        x = np.random.default_rng(index).normal(0.5 * label, 0.7, 2).astype(np.float32)
        return {"x": x * (index != self.poisoned), "label": np.int32(label)}


def init(key: jax.Array) -> Arrays:
    """Returns the parameters."""
    first, second = jax.random.split(key)
    return {
        "w_DH": jax.random.normal(first, (2, WIDTH)),
        "v_HC": jax.random.normal(second, (WIDTH, 2)) / WIDTH**0.5,
    }


def loss(params: Arrays, batch: Arrays, key: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of each row, and its weight; a zero row has a finite loss."""
    hidden_BH = batch["x"] @ params["w_DH"]
    norm_B1 = jnp.sqrt(jnp.sum(hidden_BH**2, axis=1, keepdims=True))
    logits_BC = (hidden_BH / (norm_B1 + 1.0)) @ params["v_HC"]
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, batch["label"])
    return losses_B, jnp.ones_like(losses_B)


def model(**sizes: Any) -> SimpleNamespace:
    """Returns the model for `model.target`."""
    return SimpleNamespace(init=init, loss=loss)


def rows(indices: Any, *, poisoned: int) -> Arrays:
    """Returns a batch."""
    points = Points(poisoned)
    found = [points[int(index)] for index in indices]
    return {name: np.stack([row[name] for row in found]) for name in ("x", "label")}


def mean_loss(params: Arrays, batch: Arrays) -> jax.Array:
    """Returns the mean loss of a batch."""
    return jnp.mean(loss(params, batch, None)[0])


def stock(tx: optax.GradientTransformation, *, step_of_poison: int) -> dict[str, Any]:
    """Trains with a plain loop of optax; returns the shares of numbers that are not finite."""
    params = init(jax.random.key(0))
    state = tx.init(params)
    order = np.random.default_rng(0).permutation(ROWS)
    (at,) = np.flatnonzero(order == POISONED)
    order[[at, (step_of_poison - 1) * BATCH]] = order[[(step_of_poison - 1) * BATCH, at]]

    @jax.jit
    def train_step(params: Any, state: Any, batch: Arrays) -> Any:
        value, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    found: dict[str, Any] = {}
    for step in range(1, STEPS + 1):
        indices = order[(step - 1) * BATCH : step * BATCH]
        params, state, value = train_step(params, state, rows(indices, poisoned=POISONED))
        if step == step_of_poison:
            found["loss_of_the_poisoned_step"] = float(value)
        if step in (step_of_poison, step_of_poison + 1, STEPS):
            after = step - step_of_poison if step < STEPS else "at the end"
            found[f"weights_lost {after}"] = lost(params)
    return {**found, **fresh_loss(params)}


def lost(tree: Any) -> float:
    """Returns the share of numbers that are not finite."""
    flat = np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in jax.tree.leaves(tree)])
    return float(np.mean(~np.isfinite(flat)))


def fresh_loss(params: Arrays) -> dict[str, float | None]:
    """Returns the loss of rows that were not trained on; None: not finite."""
    value = float(mean_loss(params, rows(FRESH, poisoned=-1)))
    return {"fresh_loss": round(value, 4) if np.isfinite(value) else None}


def with_jaxres(folder: Path, *, poisoned: int) -> dict[str, Any]:
    """Trains with jaxres; returns the skipped steps and the number of non-finite values."""
    run_dir = folder / f"run-{poisoned}"
    own = (f"data.source.args={{poisoned: {poisoned}}}",)
    TrainingProcess(FOLDER / "run.yaml", run_dir=run_dir, overrides=own).finish()
    history = list(map(json.loads, jaxres("history", str(run_dir), "--json").splitlines()))
    states = {int(path.name[:8]): read(path) for path in (run_dir / "checkpoints").iterdir()}
    floats = {
        step: [array for array in state.values() if array.dtype == np.float32]
        for step, state in states.items()
    }
    params = {name: states[STEPS][f"params/{name}/"] for name in ("w_DH", "v_HC")}
    skipped = [row["step"] for row in history if row["skipped"]]
    return {
        "skipped_steps": skipped,
        "loss_of_skipped_steps": [row["loss"] for row in history if row["skipped"]],
        "states": len(states),
        "states_with_a_lost_number": sum(lost(arrays) > 0 for arrays in floats.values()),
        **fresh_loss(params),
    }


def main() -> int:
    """Trains all and writes results/results.json."""
    with tempfile.TemporaryDirectory(prefix="nan-poison-") as folder:
        guarded = with_jaxres(Path(folder), poisoned=POISONED)
        clean = with_jaxres(Path(folder), poisoned=-1)
    (step,) = guarded["skipped_steps"]
    adam = optax.adam(RATE)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adam)
    loops = {
        "optax.adam": stock(adam, step_of_poison=step),
        "clip_by_global_norm, adam": stock(clipped, step_of_poison=step),
        "apply_if_finite(adam, 5)": stock(optax.apply_if_finite(adam, 5), step_of_poison=step),
    }
    plain = loops["optax.adam"]
    result = {
        "claim": "one NaN gradient loses all weights of a plain loop, and none with jaxres",
        "holds": plain["weights_lost at the end"] == 1.0
        and guarded["states_with_a_lost_number"] == 0
        and clean["skipped_steps"] == [],
        "poisoned_step": step,
        "jaxres": guarded,
        "jaxres, without the row": clean,
        "stock": loops,
    }
    write_result(FOLDER / "results" / "results.json", result)
    print(json.dumps(result, indent=2))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
