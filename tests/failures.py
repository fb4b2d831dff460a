"""What a failing test leaves for its reader: how it ended, the ends of its processes' logs, and the
command that repeats it alone. A process that is left at the end of the tests is a failure, too.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

LOGS = (".txt", ".log", ".out", ".err")
NUM_LOGS, LOG_LINES, LOG_BYTES = 6, 15, 16384
REASON_LINES = 12
MOST_EXPLAINED = 10
TITLE = "last lines of "
SESSION = "JAXRES_TEST_SESSION"
"""Environment variable of all processes of a session, by which those that are left are found."""
SURE_SECONDS = 60.0
"""How long a process may take to notice that its parent is gone, however busy the machine."""


def pytest_configure() -> None:
    """Marks what this session starts."""
    os.environ[SESSION] = f"{os.getpid()}-{time.time_ns()}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the last lines of the logs in the test's folder to the report of a failure."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and isinstance(folder, Path):
        for path in _logs(folder):
            name = f"{TITLE}{path.relative_to(folder)}"
            report.sections.append((name, "\n".join(_last_lines(path))))
    return report


def _logs(folder: Path) -> list[Path]:
    """Returns the logs that were written last, oldest first."""
    found: list[tuple[float, Path]] = []
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.suffix in LOGS and path.is_file() and path.stat().st_size:
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)[-NUM_LOGS:]]


def _last_lines(path: Path) -> list[str]:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    return []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    """Prints, after all else, each failure with what its reader needs."""
    yield
    failed = [
        report
        for outcome in ("failed", "error")
        for report in terminalreporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport)
    ]
    if failed:
        terminalreporter.section("each failure, its logs, and how to repeat it")
    for report in failed[:MOST_EXPLAINED]:
        terminalreporter.write_line("\n".join(explanation(report)))
    if len(failed) > MOST_EXPLAINED:
        terminalreporter.write_line(f"... and {len(failed) - MOST_EXPLAINED} more")


def explanation(report: pytest.TestReport) -> list[str]:
    """Returns the lines that explain a failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = (
        str(report.longrepr) if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
    )
    lines = [
        f"{report.nodeid} ({report.when})",
        *(f"  {line}" for line in reason.splitlines()[:12]),
    ]
    for title, text in report.sections:
        if title.startswith(TITLE):
            lines += [f"  {title}:", *(f"    {line}" for line in text.splitlines())]
    seed = os.environ.get("PYTHONHASHSEED")
    before = f"PYTHONHASHSEED={seed} " if seed else ""
    if "::" not in report.nodeid:
        return [*lines, ""]
    command = f"{sys.executable} -m pytest --workers 0 -m '' {shlex.quote(report.nodeid)}"
    return [*lines, f"  to repeat it: {before}{command}", ""]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Ends what the tests have left, each as a failure."""
    result = yield
    if (forks := sys.modules.get("tests.promises.forks")) is not None:
        forks.end()  # The fork server of tests that this process has run itself.
    if not session.config.option.collectonly:
        for pid, command in left_behind(os.environ[SESSION]).items():
            reason = f"process {pid} was left behind: {command}"
            fail(session.config, f"no process is left behind ({pid})", reason)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return result


def left_behind(mark: str) -> dict[int, str]:
    """Returns the processes with a mark in their environment that do not end by themselves."""
    until = time.monotonic() + SURE_SECONDS
    while (found := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def _marked(mark: str) -> dict[int, str]:
    """Returns the command lines of the processes with the mark, without this one."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            if f"{SESSION}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace").strip()[:200]
    return found


def fail(
    config: pytest.Config,
    nodeid: str,
    reason: str,
    *,
    location: tuple[str, int | None, str] | None = None,
) -> None:
    """Reports a failure that no test has raised.

    Args:
      config: pytest's.
      nodeid: the test, or what has failed in its place.
      reason: what its reader sees.
      location: the test's; None: it is no test.
    """
    report = pytest.TestReport(
        nodeid=nodeid,
        location=location or (nodeid, None, nodeid),
        keywords={},
        outcome="failed",
        longrepr=reason,
        when="call" if location else "teardown",
    )
    config.hook.pytest_runtest_logreport(report=report)
