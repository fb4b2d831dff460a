"""Eight virtual CPU devices, set before any test initialises a backend; only loopback traffic."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import pytest
from jaxtyping import install_import_hook

from tests.compiling import compile_quickly, keep_compiled, processor_digest

if TYPE_CHECKING:
    from jaxres_emulators.gcs import GcsServer

# Read at the import of gcsfs; else it queries Google, for minutes, for the type of every bucket.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
# Images of containers set it; without bytecode every process of a test compiles all of jaxres.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What a test starts imports the emulators of this tree, whichever are installed.
EMULATORS = str(Path(__file__).parents[1] / "emulators")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (EMULATORS, os.environ.get("PYTHONPATH"))))
# Ignored under nohup and behind a shell's `&`.
for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
if sys.version_info < (3, 11, 8):
    # CPython 106905: `ast.parse` fails if a finalizer that runs within it raises an error, whose
    # traceback is printed with `ast.parse` to place its carets.
    traceback._extract_caret_anchors_from_line_segment = lambda segment: None
# Every shape annotation of the models is checked in every test; imports of jaxres come after this.
install_import_hook("jaxres.models", "beartype.beartype")


pytest_plugins = ["tests.bytecode", "tests.failures", "tests.parallel"]


def pytest_tests_begin(config: pytest.Config) -> None:
    """In the fast tier XLA compiles for this process fast, not fast code.

    The training processes that a test starts, and the slow tests, are compiled as in production.
    """
    if "not slow" in config.option.markexpr:
        compile_quickly()
    if (cache := getattr(config, "cache", None)) is not None:
        keep_compiled(cache.mkdir(f"xla-{processor_digest()}"))


def pytest_runtest_setup() -> None:
    """Forgets the secrets of the configs that other tests have loaded in this process."""
    from jaxres import secret_values

    secret_values._hidden.clear()


def pytest_collection() -> None:
    """Collects without the garbage collector: what is made then remains.

    A fifth of the collection was spent on it otherwise.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    """Spares the garbage collector the modules and thousands of tests, which all remain.

    JAX collects often; without this a sixth of the processor time of its tests was spent on it.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def gcs_service() -> Iterator[GcsServer]:
    """One emulated service for all tests: libraries read its address only once."""
    from jaxres_emulators.gcs import GcsServer

    with GcsServer(buckets=()) as server:
        os.environ.update(server.env)
        yield server
        assert server.bugs == [], server.bugs[0]


@pytest.fixture
def gcs_server(gcs_service: GcsServer) -> Iterator[GcsServer]:
    """The emulated service, whose faults end with the test that asked for them."""
    yield gcs_service
    gcs_service.faults.clear()


@pytest.fixture
def gcs_bucket(gcs_server: GcsServer) -> str:
    """A bucket for one test."""
    name = f"bucket-{len(gcs_server.objects.buckets)}"
    gcs_server.objects.buckets[name] = []
    return name
