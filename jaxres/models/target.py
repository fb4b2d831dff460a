"""Calls of the user's functions, named `package.module:name` in the config."""

import contextlib
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from jaxres.faults import ConfigError


def call_target(target: str, arguments: dict[str, Any], *, key: str) -> Any:
    """Imports `package.module:name` and calls it.

    Args:
      target: the function's name.
      arguments: its keyword arguments.
      key: config key of the section with `target` and `args`, for errors.

    Raises:
      ConfigError: it does not exist, is no function, or does not take these arguments. Errors
        inside the module and the function propagate unchanged.
    """
    function = load_target(target, key=key)
    check_call(function, target, (), arguments, key=key)
    return function(**arguments)


def check_call(
    function: Callable[..., Any],
    target: str,
    positional: tuple[str, ...],
    arguments: dict[str, Any],
    *,
    key: str,
) -> None:
    """Raises ConfigError if a target does not take these arguments; `positional` are names."""
    try:
        with contextlib.suppress(ValueError):  # Some functions in C have no signature.
            inspect.signature(function).bind(*positional, **arguments)
    except TypeError as error:
        names = ", ".join([*positional, *arguments])
        raise ConfigError(
            f"{key}.target: {target} can't be called with {names}: {error}. "
            f"Change {key}.args, or let the function take these arguments."
        ) from error


def load_target(target: str, *, key: str) -> Callable[..., Any]:
    """Returns the function `package.module:name`.

    Raises:
      ConfigError: it does not exist, or is no function. Errors inside the module propagate
        unchanged.
    """
    function = _import(target, key)
    if not callable(function):
        raise ConfigError(
            f"{key}.target: {target} is a {type(function).__name__}, not a function. "
            "Name a function."
        )
    return function


def _import(target: str, key: str) -> Any:
    module_name, _, name = target.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module_name}.".startswith(f"{missing}."):
            raise  # The module itself failed to import this one.
        raise ConfigError(
            f"{key}.target: no module {missing} (from {target}). Install the package, or put its "
            "folder on PYTHONPATH."
        ) from error
    if not hasattr(module, name):
        raise ConfigError(
            f"{key}.target: {module_name} ({module.__file__}) has no `{name}`. Define it there, "
            "or name another function after the colon."
        )
    return getattr(module, name)
