"""The emulated bucket, which kills a process at a chosen write request of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from jaxres_emulators.gcs.faults import RequestFault
from jaxres_emulators.gcs.server import GcsRequest, GcsResponse, GcsServer

WRITES = ("POST", "PUT", "PATCH", "DELETE")
NAME_BYTES = 2000
"""A multipart upload has the object's name in its first bytes."""


@dataclass
class Order:
    """A kill at the n-th write request of a run."""

    run: str
    """Part of the names of its objects."""
    count: int
    is_after: bool
    """Whether the request has its effect before the kill; else it has none."""
    kill: Callable[[], object]


class KillingServer(GcsServer):
    """Serves the bucket; the orders of all runs are in `orders`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.orders: dict[str, Order] = {}
        self._counting = threading.Lock()

    def __enter__(self) -> KillingServer:
        super().__enter__()
        return self

    def answer(self, request: GcsRequest, fault: RequestFault | None) -> GcsResponse:
        """Answers a request; the order that it completes kills after its effect, or prevents it."""
        order = self._due(request)
        if order is not None and not order.is_after:
            order.kill()
            return GcsResponse(503)
        response = super().answer(request, fault)
        if order is not None:
            order.kill()
        return response

    def _due(self, request: GcsRequest) -> Order | None:
        if request.method not in WRITES or not self.orders:
            return None
        query = " ".join(request.query.values())
        text = unquote(f"{request.path} {query}") + request.body[:NAME_BYTES].decode("latin-1")
        with self._counting:
            for run, order in self.orders.items():
                if f"/{run}/" in text:
                    order.count -= 1
                    if order.count == 0:
                        return self.orders.pop(run)
                    return None
        return None
