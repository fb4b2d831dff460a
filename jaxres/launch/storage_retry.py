"""Repeats calls that storage or a scheduler has not answered, within the budget of a run.

The processes that restart the training of a job use it between two attempts: an outage of minutes
must not end a job of days.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from jaxres.config.schema.supervision import RestartSection
from jaxres.faults import StorageUnavailable
from jaxres.supervisor.attempt import print_message
from jaxres.supervisor.restart_policy import MAX_STORAGE_BACKOFF_SECONDS

T = TypeVar("T")


def with_retries(
    call: Callable[[], T], limits: RestartSection, *, wait: Callable[[float], bool], what: str
) -> T | None:
    """Returns the result of a call; None: this process was told to end while it waited.

    Args:
      call: reads or submits; it is called again after a StorageUnavailable.
      limits: `max_storage_attempts`, and the first wait, which doubles.
      wait: waits some seconds; returns True at once if this process is told to end.
      what: what has failed, for messages, such as "the run log can't be read".

    Raises:
      StorageUnavailable: no call has been answered.
    """
    for times in range(limits.max_storage_attempts):
        try:
            return call()
        except StorageUnavailable as error:
            seconds = limits.storage_backoff_seconds * 2.0 ** min(times, 60)
            print_message(f"{what}: {error}")
            if wait(min(seconds, max(limits.storage_backoff_seconds, MAX_STORAGE_BACKOFF_SECONDS))):
                return None
    return call()
