"""A model of one bias whose every step takes a fixed time, however busy the machine is.

The time is slept in a callback of the device: for jaxres it is training, not waiting for data.
With HOLD, a file with a number, no process makes more steps than that number.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NUM_ROWS, VOCAB = 2000, 64
STEPS = itertools.count(1)


def _may_go_on(count: int) -> bool:
    return "HOLD" not in os.environ or count <= int(Path(os.environ["HOLD"]).read_text())


def _sleep(nats: Any) -> Any:
    count = next(STEPS)
    while not _may_go_on(count):
        time.sleep(0.05)
    time.sleep(float(os.environ["STEP_SECONDS"]))
    return np.zeros_like(nats)


class TokenRows:
    """Rows of tokens that follow from their numbers."""

    vocab_size = VOCAB
    fingerprint = "paced"

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Any:
        time.sleep(float(os.environ.get("ROW_SECONDS", "0")))
        return np.random.default_rng(index).integers(0, VOCAB, 17)


def rows() -> TokenRows:
    """Returns the dataset."""
    return TokenRows()


def model(*, vocab_size: int, seq_len: int, table_size: int = 0) -> SimpleNamespace:
    """Returns the model: a bias a token, and a table of numbers that only make the state larger."""

    def init(key: jax.Array) -> dict[str, Any]:
        params = {"bias_V": 0.01 * jax.random.normal(key, (vocab_size,))}
        return params | ({"table": jax.random.normal(key, (table_size,))} if table_size else {})

    def loss(params: dict[str, Any], batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        log_probs_V = jax.nn.log_softmax(params["bias_V"])
        weights_BT = batch["weights_BT"]
        nats_B = -jnp.sum(log_probs_V[batch["targets_BT"]] * weights_BT, axis=1)
        seen = jax.lax.stop_gradient(nats_B)
        slept_B = jax.pure_callback(_sleep, jax.ShapeDtypeStruct(seen.shape, seen.dtype), seen)
        return nats_B + jax.lax.stop_gradient(slept_B), jnp.sum(weights_BT, axis=1)

    return SimpleNamespace(init=init, loss=loss)
