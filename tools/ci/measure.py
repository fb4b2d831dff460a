"""Plugin of pytest: processor and wall seconds of every test, its processes included.

    JAXRES_TEST_SECONDS=FILE python -m pytest -p tools.ci.measure ...

Each process that runs tests moves to a control group of its own, which its children inherit, also
those that it no longer knows; without the right to make one, only children that it has waited for
are counted. FILE gets a line of JSON per test.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

OUTPUT = "JAXRES_TEST_SECONDS"
GROUPS = Path("/sys/fs/cgroup/cpuacct")
_group: dict[int, Path | None] = {}
"""Control group of this process, by its pid: a fork needs its own."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Writes what a test has used, its set-up and tear-down included."""
    started, used = time.monotonic(), _processor_seconds()
    result = yield
    line = {
        "test": item.nodeid,
        "wall": round(time.monotonic() - started, 3),
        "processor": round(_processor_seconds() - used, 3),
        "slow": item.get_closest_marker("slow") is not None,
    }
    with Path(os.environ[OUTPUT]).open("a") as output:
        output.write(json.dumps(line) + "\n")
    return result


def _processor_seconds() -> float:
    pid = os.getpid()
    if pid not in _group:
        _group[pid] = _own_group()
    group = _group[pid]
    if group is not None:
        return int((group / "cpuacct.usage").read_text()) / 1e9
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _own_group() -> Path | None:
    group = GROUPS / f"jaxres-tests-{os.getpid()}"
    with suppress(OSError):
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        return group
    return None
