"""Exponential moving average of the trained parameters, for evaluation and export."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxres.models.interface import Params


def init(trained: Params, decay: float | None) -> Params | None:
    """Returns the average before the first step, in arrays of its own; None without a decay."""
    return None if decay is None else jax.tree.map(jnp.copy, trained)


def update(average: Any, trained: Params, decay: float | None) -> Params | None:
    """Returns decay * average + (1 - decay) * parameters. (arXiv 1803.05407)

    >>> update({"w": 1.0}, {"w": 2.0}, 0.75)
    {'w': 1.25}
    """
    if decay is None:
        return None
    return jax.tree.map(lambda a, p: decay * a + (1.0 - decay) * p, average, trained)
