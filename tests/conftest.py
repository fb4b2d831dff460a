"""Eight virtual CPU devices, set before any test initialises a backend; only loopback traffic."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import pytest
from jaxtyping import install_import_hook

from tests.compiling import compile_quickly, keep_compiled, processor_digest

if TYPE_CHECKING:
    from jaxres.testing.gcs import GcsServer

# Read at the import of gcsfs; else it queries Google, for minutes, for the type of every bucket.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
# Images of containers set it; without bytecode every process of a test compiles all of jaxres.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
for number in (signal.SIGHUP, signal.SIGINT):  # Ignored under nohup and behind a shell's `&`.
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Every shape annotation of the models is checked in every test; imports of jaxres come after this.
install_import_hook("jaxres.models", "beartype.beartype")


WAITING = (
    "tests/promises/",
    "tests/unit/supervisor/",
    "tests/unit/cluster/",
    "tests/unit/emulators/",
)
"""Folders whose tests wait for processes and sockets more than they compute."""


def pytest_configure(config: pytest.Config) -> None:
    """In the five-minute tier XLA compiles for this process fast, not fast code.

    The training processes that a test starts, and the slow tests, are compiled as in production.
    """
    if "not slow" in config.option.markexpr:
        compile_quickly()
    if (cache := getattr(config, "cache", None)) is not None:
        keep_compiled(cache.mkdir(f"xla-{processor_digest()}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collects without the garbage collector: what is made then remains.

    Each worker spends a fifth of its collection on it otherwise.
    """
    gc.disable()
    try:
        _share_rewriting(session)
        return (yield)
    finally:
        gc.enable()


def _share_rewriting(session: pytest.Session) -> None:
    """Shares the rewriting of assertions among the workers of a run of all tests.

    In a fresh checkout every worker would rewrite every test module, which takes as long as the
    rest of the collection. Each first imports other modules than its neighbours, so that it finds
    theirs rewritten. What can't be imported, the collection reports.
    """
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    modules = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = int(worker["workerid"].removeprefix("gw"))
    for module in modules[first :: worker["workercount"]]:
        name = ".".join(module.relative_to(config.rootpath).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts with the tests that wait: they overlap with those that compute."""
    items.sort(key=lambda item: not item.nodeid.startswith(WAITING))


def pytest_collection_finish() -> None:
    """Spares the garbage collector the modules and thousands of tests, which all remain.

    JAX collects often; without this a sixth of the processor time of its tests was spent on it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """One emulated service for all tests: libraries read its address only once."""
    from jaxres.testing.gcs import GcsServer

    with GcsServer(buckets=()) as server:
        os.environ.update(server.env)
        yield server
        assert server.bugs == [], server.bugs[0]


@pytest.fixture
def gcs_bucket(gcs_server: GcsServer) -> Iterator[str]:
    """A bucket for one test."""
    name = f"bucket-{len(gcs_server.objects.buckets)}"
    gcs_server.objects.buckets[name] = []
    yield name
    gcs_server.faults.clear()
