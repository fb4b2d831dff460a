"""Rows of the campaign's runs; a worker that opens them takes an order to be killed, if any.

An order is a file, so that each kills one worker of one attempt, however often the supervisor
restarts it. Imported by the training process only.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import jax

from tests.promises import faulty
from tests.promises.points import sitecustomize

ORDERS = "JAXRES_CAMPAIGN_ORDERS"
"""Environment variable: the folder with the file `order`, which is renamed to `taken`."""


def rows() -> faulty.TokenRows:
    """Returns the rows; host 0's worker is killed at the operation that an order names."""
    folder = os.environ.get(ORDERS)
    if folder is not None and jax.process_index() == 0:
        with contextlib.suppress(FileNotFoundError):
            os.rename(Path(folder, "order"), Path(folder, "taken"))
            sitecustomize.arm(Path(folder, "taken").read_text())
    return faulty.rows()
