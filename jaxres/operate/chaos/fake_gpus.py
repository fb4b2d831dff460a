"""A fake of NVIDIA's library for one run: the health guard of its supervisor reads a GPU in it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jaxres.operate.chaos.short_runs import Runner
from jaxres.supervisor.health.health_messages import is_visible
from jaxres.supervisor.health.health_watcher import may_use_gpus

if TYPE_CHECKING:
    from jaxres_emulators.nvml import FakeNvml

PATH = "LD_LIBRARY_PATH"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def why_not(env: Mapping[str, str]) -> str:
    """Returns why a run with this environment can't have one; empty: it can.

    >>> why_not({"JAX_PLATFORMS": "cpu"})
    'the health guard reads no GPU with JAX_PLATFORMS=cpu'
    """
    named = [f"{name}={env[name]}" for name in ("JAX_PLATFORMS", VISIBLE) if name in env]
    if not may_use_gpus(env) or not is_visible(0, "", env.get(VISIBLE)):
        return f"the health guard reads no GPU with {' '.join(named)}"
    if importlib.util.find_spec("pynvml") is None:
        return "nvidia-ml-py is not installed (the extra `hardware`)"
    from jaxres_emulators.nvml import COMPILERS, compiler

    if compiler() is None:
        return f"there is no C compiler ({', '.join(COMPILERS)}) for the fake of NVIDIA's library"
    return ""


@contextlib.contextmanager
def fake_gpus(runner: Runner, name: str) -> Iterator[tuple[Runner, FakeNvml]]:
    """Yields a runner whose commands find one healthy GPU, and the state of that GPU."""
    from jaxres_emulators.nvml import FakeNvml

    gpus = FakeNvml(runner.folder / f"{name}-nvml")
    env = {**runner.env, **gpus.env}
    if before := runner.env.get(PATH):
        env[PATH] += f":{before}"
    with_gpus = dataclasses.replace(runner, env=env)
    try:
        yield with_gpus, gpus
    finally:
        with_gpus.stop()
