"""Hook of `jaxres chaos run`: a worker whose device computes wrongly, is out of memory, or is slow.

What a hook raises is a warning, and its time is none of a step. So this one plants faults into
functions of its process: a wrong product when it is imported, before the tests of the hardware, and
the others into the training loop, on request (`fault_request.py`). Only the runs of some scenarios
have it; without their request or variable it changes nothing.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxres.clock import SystemClock
from jaxres.storage.path import RunPath, is_path
from jaxres.train import loop
from jaxres.train.chaos_hooks import fault_request
from jaxres.train.chaos_hooks.fault_request import WRONG_PRODUCT
from jaxres.train.checks import preflight

TOO_MANY = 1 << 46
"""Numbers of an array that no device has room for."""
_dispatch = loop.dispatch


class FaultContext(Protocol):
    """The part of a hook's context that this one needs."""

    @property
    def run_dir(self) -> object:
        """The run directory."""
        ...

    @property
    def host(self) -> int:
        """Number of this host."""
        ...


def plant(context: FaultContext) -> None:
    """Lets each later step of this worker meet the fault that is requested; a hook."""
    run_dir, host = context.run_dir, context.host
    assert is_path(run_dir), run_dir

    def dispatch(run: Any, in_flight: Any, state: Any, inputs: Any, *, step: int) -> Any:
        meet_fault(run_dir, host=host, step=step)
        return _dispatch(run, in_flight, state, inputs, step=step)

    loop.dispatch = dispatch


def meet_fault(run_dir: RunPath, *, host: int, step: int) -> None:
    """Causes a host's requested fault in each step after the request's."""
    request = fault_request.read(run_dir, host=host)
    if request is None or step <= request.step:
        return
    if request.kind == "exhaust":
        text = f"an array of {TOO_MANY} numbers for step {step}"
        fault_request.answer(run_dir, request, text, host=host)
        jnp.zeros((TOO_MANY,), jnp.float32).block_until_ready()
    if request.kind == "sleep":
        text = f"{request.seconds:.3g} s longer for each step from {request.step + 1} on"
        fault_request.answer(run_dir, request, text, host=host)
        SystemClock().sleep(request.seconds)


def plant_wrong_product(host: int) -> None:
    """From now on products on a host's first device, as the tests compute them, are wrong."""
    real = preflight.product

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        is_here = jax.process_index() == host and a.devices() == {jax.local_devices()[0]}
        return real(a, b).at[7, 9].add(1) if is_here else real(a, b)

    preflight.product = product


if WRONG_PRODUCT in os.environ:
    plant_wrong_product(int(os.environ[WRONG_PRODUCT]))
