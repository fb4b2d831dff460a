"""How XLA compiles what a test computes in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

OPTION = "jax_disable_most_optimizations"


@contextmanager
def quickly_compiled() -> Iterator[None]:
    """XLA compiles fast, not fast code, in a third of the time."""
    before = jax.config.values[OPTION]
    jax.config.update(OPTION, True)
    try:
        yield
    finally:
        jax.config.update(OPTION, before)
