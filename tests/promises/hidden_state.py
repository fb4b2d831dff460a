"""User code with state outside the training state, for `jaxres resume-check`.

Only training processes import it.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.promises import faulty


def restart_model(*, file: str, vocab_size: int, seq_len: int) -> SimpleNamespace:
    """The FAULTY model with a constant in its loss: how many processes have built it so far."""
    model = faulty.model(vocab_size=vocab_size, seq_len=seq_len)
    with Path(file).open("a+") as counter:
        counter.write("x")
        counter.flush()
        starts = counter.tell()

    def loss(params: dict[str, Any], batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        nats_B, weight_B = model.loss(params, batch, key)
        return nats_B * (1 + 0.01 * starts), weight_B

    return SimpleNamespace(init=model.init, loss=loss)


class ShuffledRows(faulty.TokenRows):
    """The FAULTY rows in an order that no seed determines."""

    fingerprint = "shuffled"

    def __init__(self) -> None:
        self._order = list(range(faulty.HELDOUT_FROM))
        random.shuffle(self._order)

    def __getitem__(self, index: int) -> Any:
        index = self._order[index] if index < faulty.HELDOUT_FROM else index
        return np.random.default_rng(index).integers(0, faulty.VOCAB, 17)


def shuffled_rows() -> ShuffledRows:
    return ShuffledRows()


def counted_model(*, vocab_size: int, seq_len: int) -> SimpleNamespace:
    """The FAULTY model with a loss that a counter of the process's calls scales, step by step."""
    model = faulty.model(vocab_size=vocab_size, seq_len=seq_len)
    calls = itertools.count()

    def loss(params: dict[str, Any], batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        nats_B, weight_B = model.loss(params, batch, key)
        scale = jax.pure_callback(
            lambda: np.float32(1 + 0.01 * next(calls)), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return nats_B * scale, weight_B

    return SimpleNamespace(init=model.init, loss=loss)
