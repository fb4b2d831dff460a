"""Training: the command (`__main__`), the worker process, the components, the training loop.

The package itself can be called, as `jaxres.train(...)`; see python_api.py.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `jaxres.python_api.train`."""
        return importlib.import_module("jaxres.python_api").train(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
