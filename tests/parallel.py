"""Runs the collected tests in forks of the process that has collected them.

Workers of pytest-xdist import and collect everything once each. Here it is done once, and every
worker inherits it. A worker gets one test at a time: the next one of its file, else the first one
of the next file of its lane, else one of the file in which most are left. `--workers 0` runs all
tests in this process, which a debugger needs.

Tests that wait for processes and sockets have lanes of their own, so that they leave no core idle
and hold up no test that computes.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

from tests.failures import fail

WITH_PROCESSES = ("tests/promises/",)
"""Folders whose tests need a fork server, which each worker starts for itself."""
WAITING = ("tests/unit/supervisor/", "tests/unit/cluster/", "tests/unit/emulators/")
"""Folders whose tests wait for processes and sockets more than they compute."""
LANES = ("processes", "computes", "waits", "processes", "computes", "processes", "processes")
"""What each worker prefers. Two compute, one a core; files with processes go to no other worker."""
NUM_WORKERS = 5
"""More use more processor time for the same tests; the slow ones wait more and have all lanes."""


@dataclass
class Schedule:
    """Which test runs next; pure.

    Attributes:
      files: numbers of the tests that are left, by file, in their order.
      lanes: lane of each file.
    """

    files: dict[str, deque[int]]
    lanes: dict[str, str]
    _taken: dict[int, str] = field(default_factory=dict)
    """File of each worker."""
    _promised: dict[int, int] = field(default_factory=dict)
    """Test that a worker gets next; it keeps the fixtures of the file for it."""

    def take(self, worker: int, lane: str) -> tuple[int, bool] | None:
        """Returns the number of the next test, and whether another one of its file follows it.

        None: no test is left.
        """
        test = self._promised.pop(worker, None)
        if test is None:
            name = self._next_file(lane)
            if name is None:
                return None
            self._taken[worker], test = name, self.files[name].popleft()
        left = self.files[self._taken[worker]]
        if left:
            self._promised[worker] = left.popleft()
        return test, worker in self._promised

    def give_back(self, worker: int) -> None:
        """Puts back what a worker that has died would have run."""
        if (test := self._promised.pop(worker, None)) is not None:
            self.files[self._taken[worker]].appendleft(test)

    def _next_file(self, lane: str) -> str | None:
        left = [name for name, tests in self.files.items() if tests and self._may_take(name, lane)]
        untouched = [name for name in left if name not in self._taken.values()]
        own = [name for name in untouched if self.lanes[name] == lane]
        if own or untouched:
            return (own or untouched)[0]
        return max(left, key=lambda name: len(self.files[name]), default=None)

    def _may_take(self, name: str, lane: str) -> bool:
        return lane == "processes" or self.lanes[name] != "processes"


def schedule(nodeids: Sequence[str]) -> Schedule:
    """Returns the schedule of tests by their node ids."""
    files: dict[str, deque[int]] = {}
    for number, nodeid in enumerate(nodeids):
        files.setdefault(nodeid.partition("::")[0], deque()).append(number)
    return Schedule(files, {name: lane_of(name) for name in files})


def lane_of(name: str) -> str:
    """Returns the lane of a file."""
    if name.startswith(WITH_PROCESSES):
        return "processes"
    return "waits" if name.startswith(WAITING) else "computes"


class Hooks:
    """Hooks of this plugin."""

    def pytest_tests_begin(self, config: pytest.Config) -> None:
        """Is called before the first test, in each process that runs tests.

        What starts threads, as a backend of JAX does, must not happen before: they would be
        missing in the forks.
        """


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Adds the hooks."""
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --workers."""
    parser.addoption(
        "--workers",
        type=int,
        default=NUM_WORKERS,
        metavar="N",
        help="processes that run tests; 0: this process runs them",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """Runs the tests in forks, unless they are few or this process has to run them."""
    option = session.config.option
    number = min(option.workers, len(session.items))
    is_broken = session.testsfailed and not option.continue_on_collection_errors
    if number < 2 or is_broken or option.collectonly or option.usepdb or option.setupplan:
        session.config.hook.pytest_tests_begin(config=session.config)
        return None
    pool = Pool(session, number)
    try:
        pool.run()
    finally:
        pool.end()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


@dataclass
class Worker:
    """A fork that runs tests."""

    number: int
    lane: str
    pid: int
    connection: Connection
    test: int | None = None
    """The test that it runs now."""


class Pool:
    """The workers of a session."""

    def __init__(self, session: pytest.Session, number: int) -> None:
        self._session = session
        self._config = session.config
        self._schedule = schedule([item.nodeid for item in session.items])
        self._workers: list[Worker] = []
        self._num_forked = 0
        session.config._tmp_path_factory.getbasetemp()  # One for all workers.
        bridge = sys.modules.get("jax._src.xla_bridge")
        if bridge is not None and bridge.backends_are_initialized():
            raise pytest.UsageError(
                "a test module has computed with JAX at its import: a fork would lack its threads. "
                "Make its arrays in a fixture or a function"
            )
        for worker in range(number):
            self._fork(LANES[worker % len(LANES)])

    def run(self) -> None:
        """Hands out tests and replays the reports until no test is left."""
        for worker in list(self._workers):
            self._give(worker)
        while self._workers:
            by_connection = {worker.connection: worker for worker in self._workers}
            for connection in wait(list(by_connection)):
                self._hear(by_connection[connection])  # pyright: ignore[reportArgumentType]

    def end(self) -> None:
        """Ends workers that are left after an interrupt or an error."""
        for worker in self._workers:
            worker.connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        for worker in self._workers:
            os.waitpid(worker.pid, 0)

    def _fork(self, lane: str) -> None:
        ours, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # About threads: the collection has started none.
            pid = os.fork()
        if pid == 0:
            ours.close()
            for worker in self._workers:
                worker.connection.close()
            _work(self._session, theirs)
        theirs.close()
        self._workers.append(Worker(self._num_forked, lane, pid, ours))
        self._num_forked += 1

    def _give(self, worker: Worker) -> None:
        is_over = self._session.shouldfail or self._session.shouldstop
        order = None if is_over else self._schedule.take(worker.number, worker.lane)
        worker.test = None if order is None else order[0]
        with contextlib.suppress(BrokenPipeError):  # It has died, which the next recv finds.
            worker.connection.send(order)

    def _hear(self, worker: Worker) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._ended(worker)
            return
        if kind == "finished":
            self._replay(*value)
            self._give(worker)
        else:
            fail(self._config, f"fixtures of worker {worker.number}", value)

    def _replay(self, nodeid: str, location: Any, reports: Sequence[dict[str, Any]]) -> None:
        hook = self._config.hook
        hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
        for data in reports:
            report = hook.pytest_report_from_serializable(config=self._config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def _ended(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.connection.close()
        _, status = os.waitpid(worker.pid, 0)
        if worker.test is not None:
            item = self._session.items[worker.test]
            code = os.waitstatus_to_exitcode(status)
            reason = f"the process of this test has died (exit code {code})"
            fail(self._config, item.nodeid, reason, location=item.location)
            self._config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            self._schedule.give_back(worker.number)
            self._fork(worker.lane)
            self._give(self._workers[-1])


class Sender:
    """Sends what has happened in a test to the process that prints it, in one message."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self._reports: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps a report of the test."""
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        """Sends the reports; the next test is given then."""
        self._connection.send(("finished", (nodeid, location, self._reports)))
        self._reports = []


def _work(session: pytest.Session, connection: Connection) -> NoReturn:
    """Runs the tests that come over the connection, then ends this process."""
    atexit._clear()  # What is registered so far is for the parent to do.
    code = 0
    terminal = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")
    try:
        _capture_apart(session.config)
        _run_all(session, connection)
    except (KeyboardInterrupt, BrokenPipeError, EOFError):
        code = 130
    except BaseException:  # noqa: BLE001 - the parent only sees that this process has ended.
        traceback.print_exc(file=terminal)
        code = 1
    finally:
        terminal.flush()
        atexit._run_exitfuncs()
        os._exit(code)


parents: list[Any] = []
"""The parent's capture, in a worker: closing its files is for the parent to do."""


def _capture_apart(config: pytest.Config) -> None:
    """Gives this worker its own capture of output, and leaves the terminal to the parent."""
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture: Any = plugins.getplugin("capturemanager")
    if capture.is_globally_capturing():
        parents.append(capture._global_capturing)
        capture._global_capturing = None
        capture.start_global_capturing()


def _run_all(session: pytest.Session, connection: Connection) -> None:
    session.config.pluginmanager.register(Sender(session.config, connection))
    session.config.hook.pytest_tests_begin(config=session.config)
    try:
        while (order := connection.recv()) is not None:
            number, is_followed = order
            item = session.items[number]
            # Fixtures of the module stay for the next test of it, those of the session to the end.
            keep: Any = item.getparent(pytest.Module) if is_followed else session
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=keep)
    finally:
        try:
            session._setupstate.teardown_exact(None)
        except Exception as error:  # noqa: BLE001 - whatever a fixture raises is reported.
            connection.send(("error", f"{type(error).__name__}: {error}"))
