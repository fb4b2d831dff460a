"""Draws tokens that continue a prompt, one by one.

Shape suffixes: B rows, T position, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxres.faults import ConfigError
from jaxres.models.interface import Decoder, Model, Params

NO_TOKEN = -1
"""Drawn where the largest logit is NaN or infinite."""
CACHE_BLOCK = 64
"""Caches are made for a multiple of so many positions, so that few programs are compiled."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits; the same seed and prompt give the same tokens."""

    seed: int = 0
    """Seed of the random numbers; its last 32 bits count."""
    temperature: float = 0.8
    """Divisor of the logits; 0: always the most probable token."""
    top_k: int | None = None
    """Draws only from so many most probable tokens."""
    top_p: float | None = None
    """Draws only from the most probable tokens with this sum of probabilities. (1904.09751)"""


def draw(
    logits_BV: Float[Array, "B V"], key: Key[Array, ""], sampling: Sampling
) -> Int[Array, " B"]:
    """Draws a token of each row, or NO_TOKEN; the seed of `sampling` is not read."""
    drawn_B = _draw(logits_BV, key, sampling)
    return jnp.where(jnp.isfinite(logits_BV.max(-1)), drawn_B, NO_TOKEN)


def _draw(
    logits_BV: Float[Array, "B V"], key: Key[Array, ""], sampling: Sampling
) -> Int[Array, " B"]:
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        least_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if sampling.top_p is not None:
        ordered_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        shares_BV = jax.nn.softmax(ordered_BV)
        above_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV  # The share of more probable ones.
        kept_BV = jnp.where(above_BV < sampling.top_p, ordered_BV, jnp.inf)
        logits_BV = jnp.where(logits_BV < kept_BV.min(-1, keepdims=True), -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV)


def _key(seed: int, index: Any) -> Key[Array, ""]:
    return jax.random.fold_in(jax.random.key(seed), index)


def generate(
    model: Model,
    params: Params,
    prompt: Sequence[int],
    *,
    count: int,
    seq_len: int,
    sampling: Sampling,
    num_rows: int = 1,
) -> Iterator[np.ndarray]:
    """Yields `count` tokens of each row, as [B], that continue the same prompt.

    With the model's decoder all earlier positions are seen; without it the last `seq_len` ones.
    Raises ConfigError if logits are NaN or infinite.
    """
    assert model.logits is not None
    assert prompt, "at least one token"
    if model.decoder is None:
        rows = [
            by_window(model.logits, params, prompt, count=count, seq_len=seq_len, sampling=one_row)
            for one_row in (replace(sampling, seed=sampling.seed + n) for n in range(num_rows))
        ]
        for _ in range(count):
            yield _checked(np.array([next(row, NO_TOKEN) for row in rows]))
        return
    yield from _by_cache(model.decoder, params, prompt, count, num_rows, sampling)


def _checked(tokens_B: np.ndarray) -> np.ndarray:
    if (tokens_B == NO_TOKEN).any():
        raise ConfigError(
            "the model's logits are NaN or infinite, so no token can be drawn. Take another step "
            "(--step N)."
        )
    return tokens_B


def _by_cache(
    decoder: Decoder,
    params: Params,
    prompt: Sequence[int],
    count: int,
    num_rows: int,
    sampling: Sampling,
) -> Iterator[np.ndarray]:
    num_positions, most = len(prompt) + count, decoder.max_positions
    if most is not None and num_positions > most:
        raise ConfigError(
            f"{len(prompt)} tokens of the prompt and {count} new ones are {num_positions} "
            f"positions; the model has {most}. Shorten one of them."
        )
    length = -(-num_positions // CACHE_BLOCK) * CACHE_BLOCK

    compiled = _step(decoder, replace(sampling, seed=0))
    tokens_BT = np.broadcast_to(np.asarray(prompt, np.int32), (num_rows, len(prompt)))
    cache, start = decoder.cache(num_rows, length), 0
    for index in range(count):
        key = _key(sampling.seed, index)
        tokens_B, cache = compiled(params, tokens_BT, cache, np.int32(start), key)
        yield (found := _checked(np.asarray(tokens_B)))
        start += tokens_BT.shape[1]
        tokens_BT = found.astype(np.int32)[:, None]


@functools.lru_cache(maxsize=8)
def _step(decoder: Decoder, sampling: Sampling) -> Any:
    """Returns the compiled step, so that the next text needs no compilation."""

    def step(
        params: Params, tokens_BT: Array, cache: Any, start: Array, key: Array
    ) -> tuple[Array, Any]:
        logits_BTV, cache = decoder.decode(params, tokens_BT, cache, start)
        return draw(logits_BTV[:, -1], key, sampling), cache

    return jax.jit(step, donate_argnums=2)


def by_window(
    logits: Callable[[Params, Array], Array],
    params: Params,
    prompt: Sequence[int],
    *,
    count: int,
    seq_len: int,
    sampling: Sampling,
    out_sharding: Any = None,
) -> Iterator[int]:
    """Yields tokens of one row, each computed from the last `seq_len` ones.

    Ends early where no token can be drawn, because logits are NaN or infinite.
    """

    def step(params: Params, window_1T: Array, last: Array, index: Array) -> Array:
        # The key is made here: on several hosts no array of one host may enter.
        key = _key(sampling.seed, index)
        return draw(logits(params, window_1T)[:, last], key, sampling)[0]

    compiled = jax.jit(step, out_shardings=out_sharding)
    tokens = list(prompt)
    for index in range(count):
        recent = tokens[-seq_len:]
        window_1T = np.zeros((1, seq_len), np.int32)
        window_1T[0, : len(recent)] = recent
        last = np.int32(len(recent) - 1)
        token = int(compiled(params, window_1T, last, np.int32(index)))
        if token == NO_TOKEN:
            return
        tokens.append(token)
        yield token
