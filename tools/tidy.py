"""House rules as a check: what ruff and pyright can't say. Exits 1 and names file and line."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = {"jaxres": 600, "tests": 600, "tools": 600}
MAX_FUNCTION_LINES = 60
BANNED_NAMES = re.compile(r"(Manager|Helper|Handler|Util|Processor)$|^maybe_|_v\d+$")
TIME = {"time", "monotonic", "sleep", "perf_counter"}
WALL_CLOCK = re.compile(r".*\.wall|(date|datetime)\.(now|utcnow|today)|.*\.st_[amc]time(_ns)?")
"""By which the wall clock, or what it has stamped, is read."""
WALL_CLOCK_MAY = {
    "jaxres/runlog/run_log.py:RunLog.append": "stamps a record",
    "jaxres/runlog/event_log.py:EventLog.emit": "stamps an event",
    "jaxres/telemetry/tensorboard.py:TensorBoard._put": "stamps a point",
    "jaxres/supervisor/run_lock.py:Owner._words": "stamps a beat",
    "jaxres/supervisor/run_lock.py:is_alive": "for people; who claims looks whether the beat moves",
    "jaxres/cli/status.py:look": "ages, for people",
    "jaxres/launch/gce.py:say": "stamps a line, for people",
    "jaxres/launch/gce.py:_ship": "the beginning of a job that outlives machines: hours and money",
    "jaxres/launch/controller.py:Leader._wall": "the same: a successor counts on; the lease does not",
    "jaxres/launch/gce_status.py:show": "hours and money so far, for people",
    "jaxres/telemetry/alert_sender.py:Outlet.take": "stamps an incident",
    "jaxres/telemetry/alert_sender.py:Outlet._put_down": "stamps a line",
    "jaxres/telemetry/alert_sender.py:Outlet._deliver_next": "an hour over processes; a jump lets more out",
    "jaxres/supervisor/preemption.py:_upcoming": "how long until a time that the server tells",
    "jaxres/supervisor/preemption_watcher.py:Watchman._dated": "the same: now, beside the awake clock",
    "jaxres/data/download_cache.py:_delete_leftovers": "whether what a killed copy has left is a day old",
    "jaxres/engine/executable.py:sources": "whether code is younger than the process that runs it",
    "jaxres/engine/executable.py:keep": "which of the files is the oldest, to be removed",
    "jaxres/train/compile_cache.py:_began": "when the process began, against the times of files",
    "jaxres/data/text.py:_list_file": "tells one state of a file from another",
    "jaxres/data/text.py:_read": "tells one state of a file from another",
    "jaxres/data/text.py:_remove_leftovers": "a day over processes; what is written is younger",
}
"""Functions that may read the wall clock, and what for: whoever decides by it falls for a jump."""
ENVIRONMENT = ("__main__.py", "programs.py", "zygote.py")
"""The doors; what a compiled program depends on; a process that takes another's place."""


def main() -> int:
    """Checks every tracked Python file."""
    problems = [problem for path in _tracked() for problem in _check(path)]
    problems += _todo_faults()
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py"], check=True, capture_output=True, text=True)
    return [Path(name) for name in listed.stdout.splitlines() if Path(name).exists()]


def _check(path: Path) -> Iterator[str]:
    text = path.read_text()
    limit = MAX_FILE_LINES[path.parts[0]]
    if (lines := len(text.splitlines())) > limit:
        yield f"{path}: {lines} lines, at most {limit}: split it by responsibility"
    if path.name in ("utils.py", "helpers.py", "common.py"):
        yield f"{path}: call it by what it holds"
    production = path.parts[0] == "jaxres"
    tree = ast.parse(text)
    for node in ast.walk(tree):
        yield from _check_node(path, node, production=production)
    if production:
        yield from _check_wall_clock(path, tree)


def _check_node(path: Path, node: ast.AST, *, production: bool) -> Iterator[str]:
    where = f"{path}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if BANNED_NAMES.search(node.name):
            yield f"{where}: {node.name}: a name that says nothing"
        length = (node.end_lineno or 0) - node.lineno + 1
        if not isinstance(node, ast.ClassDef) and length > MAX_FUNCTION_LINES:
            yield f"{where}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
    if not production:
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        name = f"{node.value.id}.{node.attr}"
        if node.value.id == "time" and node.attr in TIME and path.name != "clock.py":
            yield f"{where}: {name}: time only through jaxres/clock.py"
        if name in ("os.environ", "os.getenv") and path.name not in ENVIRONMENT:
            yield f"{where}: {name}: environment variables only in {', '.join(ENVIRONMENT)}"
    if isinstance(node, ast.ExceptHandler) and node.type is None:
        yield f"{where}: bare except"


def _check_wall_clock(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yields functions that read the wall clock and may not, and those that may and don't."""
    found = dict(_wall_clock_readers(tree, within=""))
    may = {name.partition(":")[2] for name in WALL_CLOCK_MAY if name.startswith(f"{path}:")}
    for name in found.keys() - may:
        yield (
            f"{path}:{found[name]}: {name or 'the module'} reads the wall clock, which jumps: "
            "decide by clock.monotonic(), or say in WALL_CLOCK_MAY what else it is for"
        )
    for name in may - found.keys():
        yield f"{path}: {name} does not read the wall clock any more: take it out of WALL_CLOCK_MAY"


def _wall_clock_readers(node: ast.AST, *, within: str) -> Iterator[tuple[str, int]]:
    """Yields the function and the line of every reading."""
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}.{child.name}".lstrip(".")
        if isinstance(child, ast.Attribute) and WALL_CLOCK.fullmatch(ast.unparse(child)):
            yield within, child.lineno
        yield from _wall_clock_readers(child, within=name)


def _todo_faults() -> Iterator[str]:
    """Yields faults called done whose home does not say so."""
    sys.path.insert(0, str(Path.cwd()))
    from jaxres import faults

    for fault in faults.ALL:
        home = Path("jaxres", fault.home)
        says = home.exists() and home.is_file() and f"Home of: {fault.name}" in home.read_text()
        if fault.done != says:
            done = "done" if fault.done else "not done"
            yield f"{home}: fault {fault.name} is {done} in faults.py, this file disagrees"


if __name__ == "__main__":
    sys.exit(main())
