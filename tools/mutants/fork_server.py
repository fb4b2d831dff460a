"""Fork server of the mutants: imports the libraries once, then forks a process for each mutant.

    python tools/mutants/fork_server.py FD MODULE ...

It has imported pytest and third-party modules only: what a mutant may change (`jaxres`,
`emulators`, `tests`, `tools`, `configs`) is imported by the fork, from the mutant's tree. So this
file imports nothing of this repository.

For each order it forks a watcher. The watcher is the subreaper of all that the test starts; it
forks the process that runs pytest, waits for its end or for the limit, kills its descendants, and
replies. The test process writes one line of JSON for each test that fails, and one for each that
does not.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

ORDER_BYTES = 1 << 17
PR_SET_CHILD_SUBREAPER = 36
TRACEBACK_SECONDS = 2.0
"""For the traceback of a test that is ended by its limit."""
PRODUCT = "jaxres/"
"""An assertion of the product is a crash; one of an emulator is part of the test."""


def main(control: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Forks a watcher for every order, until the other end of the socket is closed."""
    for name in modules:
        with suppress(ImportError):  # An optional library.
            importlib.import_module(name)
    _refuse_unforkable_state()
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        data, files, _, _ = socket.recv_fds(control, ORDER_BYTES, 1)
        if not data:
            os._exit(0)
        _reap()
        if not os.fork():
            control.close()
            _watch(json.loads(data), socket.socket(fileno=files[0]))
        os.close(files[0])


def _refuse_unforkable_state() -> None:
    """Raises if an import has started a thread or a JAX backend; neither survives a fork."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    if threading.active_count() > 1 or (bridge and bridge.backends_are_initialized()):
        raise RuntimeError(f"an import has made a JAX backend or a thread: {threading.enumerate()}")


def _reap() -> dict[int, int]:
    """Returns pids and exit codes of the children that have ended."""
    ended = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _watch(order: dict[str, Any], connection: socket.socket) -> NoReturn:
    """Runs the test in a child, ends all that it has started, and replies with its exit code.

    The reply has null where the limit has ended it. If the other end of the connection is closed,
    the test is ended at once.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # So that it is not ignored, and interrupts.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    test = os.fork()
    if not test:
        connection.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        _test(order)
    until = time.monotonic() + order["limit"]
    ended: dict[int, int] = {}
    while test not in ended and time.monotonic() < until and not _has_ended(connection):
        signal.sigtimedwait({signal.SIGCHLD}, 0.2)
        ended |= _reap()
    if test not in ended:
        os.kill(test, signal.SIGABRT)  # Pytest's faulthandler prints where it is.
        signal.sigtimedwait({signal.SIGCHLD}, TRACEBACK_SECONDS)
    _kill_descendants()
    with suppress(OSError):
        connection.send(json.dumps({"code": ended.get(test)}).encode())
    os._exit(0)


def _has_ended(connection: socket.socket) -> bool:
    """Returns whether the other end is closed; it never sends anything."""
    return bool(select.select([connection], [], [], 0)[0])


def _kill_descendants() -> None:
    """Kills all processes below this one, which inherits orphaned processes."""
    while pids := _descendants():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap()


def _descendants() -> set[int]:
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _test(order: dict[str, Any]) -> NoReturn:
    """Runs pytest in the tree and ends this process with its code."""
    os.setsid()
    atexit._clear()  # What is registered so far is for the server to do.
    _enter(Path(order["tree"]), order["env"], log=order["log"])
    reporter = Reporter(Path(order["reports"]), tree=order["tree"], raises=order["raises"])
    code = pytest.main(order["arguments"], plugins=[reporter])
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _enter(tree: Path, env: Mapping[str, str], *, log: str) -> None:
    """Makes this process like one that was started in the tree with this environment."""
    os.chdir(tree)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.path[0] = str(tree)  # It was the folder of this file.
    sys.argv[:] = ["pytest"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.dont_write_bytecode = False
    tempfile.tempdir = None
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


class Reporter:
    """Pytest plugin that writes the outcome of each test, and stops at the first wrong failure.

    A line has the fields test, phase and outcome; that of a failure also by (its class), is_right
    and reason.
    """

    def __init__(self, path: Path, *, tree: str, raises: str | None) -> None:
        self._path, self._tree, self._raises = path, tree, raises
        self._right: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Writes a line for each call, and for each failure before or after it."""
        report = yield
        if not report.failed:
            if report.when == "call" or report.skipped:
                self._write(test=item.nodeid, phase=report.when, outcome=report.outcome)
            return report
        if report.when == "teardown" and item.nodeid in self._right:
            return report  # It follows from the failure of the call.
        error = call.excinfo.value if call.excinfo else None
        is_right = report.when == "call" and is_right_reason(error, self._raises, tree=self._tree)
        if is_right:
            self._right.add(item.nodeid)
        else:
            item.session.shouldstop = "a failure for a wrong reason"
        by = type(error).__name__ if error else "strict xfail"
        self._failed(item.nodeid, str(report.when), by, is_right=is_right, reason=str(error))
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Writes a line for a file that can't be collected."""
        if report.failed:
            reason = str(report.longrepr)
            self._failed(report.nodeid, "collect", "", is_right=False, reason=reason[-1000:])

    def _failed(self, test: str, phase: str, by: str, *, is_right: bool, reason: str) -> None:
        facts = {"test": test, "phase": phase, "outcome": "failed", "by": by}
        self._write(**facts, is_right=is_right, reason=reason[:1000])

    def _write(self, **fields: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(fields) + "\n")


def is_right_reason(error: BaseException | None, raises: str | None, *, tree: str) -> bool:
    """Returns whether a call that ends with this error says that the promise is broken.

    It does by an assertion of the test or by pytest.fail. Any other class, and an assertion within
    the product, must be named: it is a crash, which many wrong changes cause.

    Args:
      error: what has ended the call.
      raises: the name of a class, of the error or a base of it.
      tree: the folder of the mutant's tree.
    """
    if raises in [each.__name__ for each in type(error).__mro__]:
        return True
    is_failure = isinstance(error, AssertionError | pytest.fail.Exception)
    return is_failure and not _is_of_product(error, tree)


def _is_of_product(error: BaseException, tree: str) -> bool:
    """Returns whether the innermost frame in the tree, besides libraries, is one of the product."""
    innermost, trace = "", error.__traceback__
    while trace:
        path = trace.tb_frame.f_code.co_filename
        if path.startswith(f"{tree}/"):
            innermost = path.removeprefix(f"{tree}/")
        trace = trace.tb_next
    return innermost.startswith(PRODUCT)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
