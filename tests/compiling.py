"""How XLA compiles what a test computes in its own process."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache

OPTION = "jax_disable_most_optimizations"
FLAGS = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
"""XLA's older code generator, which is four times as fast, and one module of LLVM a program."""


def compile_quickly() -> None:
    """XLA compiles fast, not fast code, in a fifth of the time; from here on, in this process.

    The processes that a test starts do not inherit it.
    """
    jax.config.update(OPTION, True)
    if jaxlib.__version__.startswith("0.10."):  # Another may not know them, and would abort.
        before = os.environ.get("XLA_FLAGS")
        os.environ["XLA_FLAGS"] = " ".join([*filter(None, [before]), *FLAGS])
        jax.devices()  # XLA reads them now, and never again.
        del os.environ["XLA_FLAGS"]
        if before is not None:
            os.environ["XLA_FLAGS"] = before


@contextmanager
def quickly_compiled() -> Iterator[None]:
    """XLA compiles fast, not fast code, in a third of the time."""
    before = jax.config.values[OPTION]
    jax.config.update(OPTION, True)
    try:
        yield
    finally:
        jax.config.update(OPTION, before)


def keep_compiled(folder: Path) -> None:
    """Keeps what is compiled from here on in a folder, for all workers and for later runs.

    JAX finds it by the program, the versions and the options. It does not write it atomically: half
    a file is ignored (pyproject.toml), and its program is compiled again.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def processor_digest() -> str:
    """Returns a digest of the processor's features, for which XLA compiles."""
    found = re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return hashlib.sha256((found[0] if found else "").encode()).hexdigest()[:8]


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Compiles everything: what comes from JAX's cache can't be serialized again."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # JAX reads the setting only once.
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
