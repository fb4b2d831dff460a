"""Runs tests in forks of the fork server of the mutants."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

SERVER = Path(__file__).parent / "fork_server.py"
READY_SECONDS = 300.0
MODULES = (
    *("beartype", "jax", "jax.numpy", "jaxtyping", "flax", "flax.nnx", "flax.linen", "optax"),
    *("optax.contrib", "orbax.checkpoint", "tensorstore", "numpy", "ml_dtypes", "xxhash", "yaml"),
    *("pydantic", "rich.console", "rich.progress", "rich.table", "plotext", "PIL.Image"),
    *("tokenizers", "zstandard", "safetensors.numpy", "prometheus_client"),
    *("google.cloud.storage", "google.cloud.compute_v1", "gcsfs", "tensorboardX"),
    *("jax.experimental.compilation_cache.compilation_cache", "jax.experimental.multihost_utils"),
    *("jax.experimental.serialize_executable", "concurrent.futures.process", "http.server"),
    *("multiprocessing.connection", "asyncio", "unittest.mock", "email.message"),
)
"""Modules that most tests import, besides the modules that a mutant may change."""
AT_IMPORT = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
"""Variables that tests/conftest.py sets, and that an import of a library reads."""
NOT_INHERITED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")


class ForkServer:
    """The process from which each test process is forked; it ends with this process.

    Attributes:
      is_closed: whether `close` was called.
    """

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.is_closed = False
        command = [sys.executable, str(SERVER), str(theirs.fileno()), *modules]
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd="/",
                env=environment() | AT_IMPORT,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # An interrupt of the terminal is for this process.
            )
        self._control.settimeout(READY_SECONDS)
        if self._control.recv(64) != b"ready":
            raise RuntimeError("the fork server has ended")

    def run(self, order: Mapping[str, Any]) -> int | None:
        """Runs pytest in a fork; returns its exit code.

        None: the limit has ended it, or `close`. Thread-safe.

        Args:
          order: tree, arguments (of pytest), env, limit (seconds), raises, and the paths of the
            files reports and log.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs, self._lock:
                if self.is_closed:
                    return None
                socket.send_fds(self._control, [json.dumps(order).encode()], [theirs.fileno()])
                self._open.add(ours)
            try:
                reply = ours.recv(64)
            finally:
                with self._lock:
                    self._open.discard(ours)
        return json.loads(reply)["code"] if reply else None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the tests that run, and the server."""
        with self._lock:
            self.is_closed = True
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
        self._control.close()
        self._process.wait()


SURE_SECONDS = "120"


def environment() -> dict[str, str]:
    """Returns the environment of this process without variables that control Python and pytest.

    Many mutants show only as a wait without an end, so the waits of tests are shorter.
    """
    kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return kept | {"JAXRES_TEST_SURE_SECONDS": SURE_SECONDS}
