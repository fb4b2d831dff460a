"""Plugin of pytest: processor and wall seconds of every test, its processes included.

    JAXRES_TEST_LINES=FILE python -m pytest -p tools.ci.measure ...

FILE gets a line of JSON per test. Each process that runs tests moves to a control group of its own,
which its children inherit, also those that it no longer knows; without the right to make one, only
children that it has waited for are counted. While a campaign runs, it also tells the recorder of
`executed.py` which test runs. With JAXRES_TEST_RESUME=1 no test is run again that FILE has as
passed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tools.ci.results import lines

LINES, RESUME = "JAXRES_TEST_LINES", "JAXRES_TEST_RESUME"
GROUPS = Path("/sys/fs/cgroup/cpuacct")
_group: dict[int, Path | None] = {}
"""Control group of this process, by its pid: a fork needs its own."""
_outcomes: dict[str, str] = {}
"""The worst outcome of the phases of a test in this process."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Writes what a test has used, its set-up and tear-down included."""
    recorder: Any = sys.modules.get("tools_recorder")
    if recorder is not None:
        recorder.begin(item.nodeid)
    started, used = time.monotonic(), _processor_seconds()
    result = yield
    line = {
        "test": item.nodeid,
        "outcome": _outcomes.pop(item.nodeid, "failed"),
        "wall": round(time.monotonic() - started, 3),
        "processor": round(_processor_seconds() - used, 3),
        "tier": tier(item),
    }
    with Path(os.environ[LINES]).open("a") as output:
        output.write(json.dumps(line) + "\n")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remembers how a test ends."""
    if _outcomes.get(report.nodeid) != "failed" and (
        report.outcome != "passed" or report.when == "call"
    ):
        _outcomes[report.nodeid] = report.outcome


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves only tests that have not passed yet, if this run resumes an interrupted one."""
    if RESUME in os.environ:
        passed = {
            line["test"] for line in lines(Path(os.environ[LINES])) if line["outcome"] != "failed"
        }
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


def tier(item: pytest.Item) -> str:
    """Returns which tier a test is in."""
    marked = [name for name in ("gpu", "campaign", "slow") if item.get_closest_marker(name)]
    return marked[0] if marked else "fast"


def _processor_seconds() -> float:
    pid = os.getpid()
    if pid not in _group:
        _group[pid] = _own_group()
    group = _group[pid]
    if group is not None:
        return int((group / "cpuacct.usage").read_text()) / 1e9
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _own_group() -> Path | None:
    group = GROUPS / f"jaxres-tests-{os.getpid()}"
    with suppress(OSError):
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        return group
    return None


def pytest_sessionfinish() -> None:
    """Removes the control groups of processes that have ended."""
    for group in GROUPS.glob("jaxres-tests-*"):
        with suppress(OSError):
            group.rmdir()
