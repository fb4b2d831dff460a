"""Orbax's asynchronous saves as this project uses them, with typed errors.

Every save has a response of its own, which is asked for its result: without that a failed save
would be raised by the next one, which then saves nothing.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, NoReturn

from orbax.checkpoint import v1 as ocp

from jaxres import storage
from jaxres.checkpoint import manifest as manifests
from jaxres.faults import StorageUnavailable

Tree = dict[str, Any]


def context(*, timeout_seconds: float) -> ocp.Context:
    """Returns the settings of every save and load; from now on Orbax logs nothing."""
    settings = ocp.Context()
    settings.array.saving.use_compression = False
    settings.array.saving.use_replica_parallel = False
    settings.async_options.timeout_secs = math.ceil(timeout_seconds)
    logging.getLogger("absl").addFilter(_tells_more_than_orbax)
    return settings


def _tells_more_than_orbax(record: logging.LogRecord) -> bool:
    """Drops what Orbax logs: of every failed save several tracebacks, beside the error it raises.

    For the rest of the process, because its threads may log after the save has failed.
    """
    return "orbax" not in record.pathname


def begin(state: Tree, step_dir: Path, context: ocp.Context) -> Any:
    """Returns Orbax's response to a save that it has begun."""
    with context, storage.typed_errors(step_dir):
        try:
            return ocp.save_async(str(step_dir), state, checkpointable_name=manifests.ARRAYS)
        except ValueError as error:
            _raise_typed(error, step_dir)


def is_over(response: Any) -> bool:
    """Says whether Orbax has ended a save, either way."""
    try:
        response.result(timeout=0)
    except TimeoutError:
        return False
    except (OSError, ValueError, RuntimeError):
        return True
    return True


def settle(response: Any, step_dir: Path, *, timeout: float) -> None:
    """Waits until Orbax has written a step; raises StorageUnavailable if storage refused."""
    try:
        response.result(timeout=timeout)
    except (OSError, ValueError, RuntimeError, TimeoutError) as error:
        _raise_typed(error, step_dir)


def _raise_typed(error: Exception, step_dir: Path) -> NoReturn:
    if not (isinstance(error, OSError) or manifests.is_storage_fault(error)):
        raise error
    raise StorageUnavailable(
        f"{step_dir}: could not be saved ({error}). Nothing committed is lost. Free some space or "
        "mend the storage."
    ) from error
