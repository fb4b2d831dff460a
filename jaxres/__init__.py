"""jaxres: a trainer for JAX and Flax models that resumes bit for bit after any failure.

From Python: `train`, `Run`, `load_model`, `runs` and `branch` (docs/getting-started.md); for a
training loop of your own `attempt` and `checkpoints` (docs/own-loop.md). Importing this package
imports neither jax nor any part of jaxres; the first use of one of these names does.
"""

from __future__ import annotations

import importlib
from typing import Any

NAMES = ("LoadedModel", "Run", "branch", "load_model", "runs", "train")
"""Names of python_api.py; for type checkers __init__.pyi has them."""
OWN_LOOP = ("attempt", "checkpoints")
"""Names of own_loop/calls.py."""
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    if name == "train":  # The package of this name can be called.
        return importlib.import_module("jaxres.train")
    if name in OWN_LOOP:
        return getattr(importlib.import_module("jaxres.own_loop.calls"), name)
    if name in NAMES:
        return getattr(importlib.import_module("jaxres.python_api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
