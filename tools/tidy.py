"""Checks house rules that ruff and pyright can't express; exits 1 and names file and line.

python tools/tidy.py           check every tracked file
python tools/tidy.py --tests   print which test files import each module
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = {"jaxres": 600, "emulators": 600, "tests": 600, "tools": 600, "examples": 80}
MAX_FOLDER_FILES = 20
"""Files of a folder of the package or of the unit tests, `__init__.py` apart."""
MAX_DOC_LINE = 120
"""Length of a line in docs/; a row of a table is one line, and where a link points counts for
nothing: neither can be wrapped."""
LINK_TARGET = re.compile(r"\]\([^)]*\)")
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 8
"""Parameters of a function of the package, `self` apart; more belong together in a dataclass."""
BANNED_NAMES = re.compile(r"(Manager|Helper|Handler|Util|Processor)$|^maybe_|_v\d+$")
TIME = {"time", "monotonic", "sleep", "perf_counter"}
WALL_CLOCK = re.compile(r".*\.wall|(date|datetime)\.(now|utcnow|today)|.*\.st_[amc]time(_ns)?")
"""Expressions that read the wall clock or a time stamp of it."""
WALL_CLOCK_MAY = {
    "jaxres/runlog/run_log.py:RunLog.append": "stamps a record",
    "jaxres/runlog/event_log.py:EventLog.emit": "stamps an event",
    "jaxres/telemetry/tensorboard.py:TensorBoard._put": "stamps a point",
    "jaxres/telemetry/console.py:_TimedLines.write": "stamps a line",
    "jaxres/supervisor/run_metrics.py:_epoch": "stamps what is exported",
    "jaxres/telemetry/recorded_incidents.py:IncidentRecorder.send": "stamps an incident",
    "jaxres/supervisor/run_lock.py:RunLock._fields": "stamps a heartbeat",
    "jaxres/supervisor/run_lock.py:liveness": "for output; a claim compares heartbeats",
    "jaxres/supervisor/attempt_runner.py:_review_slow_hosts.review": "stamps an exclusion",
    "jaxres/supervisor/health/host_health.py:_clock_offset": "finds that the clock was set",
    "jaxres/checkpoint/replica.py:Replica._marker": "stamps the marker of a replica",
    "jaxres/cli/scrub.py:check_step": "stamps the check of a step, for due_steps",
    "jaxres/supervisor/companions/scrub_process.py:ScrubProcess._watch": "hours since a check",
    "jaxres/cli/checkpoints/hosts.py:exclude": "stamps an exclusion",
    "jaxres/supervisor/follower.py:report_fault.write": "stamps a report",
    "jaxres/cli/status.py:read_status": "ages, for output",
    "jaxres/launch/gce/job_start.py:print_line": "stamps output",
    "jaxres/launch/gce/job_start.py:_new_job": "whether a reservation has begun",
    "jaxres/launch/gce/job_start.py:_upload_job": "start of a job: hours, cost",
    "jaxres/launch/gce/controller.py:Controller._wall": "hours and cost; the lease does not use it",
    "jaxres/launch/gce/vm/agent.py:Agent._report_notice": "when a VM will be stopped",
    "jaxres/cli/report.py:_vm_spending": "cost so far, for output",
    "jaxres/launch/gce/status.py:show_status": "hours and cost so far, for output",
    "jaxres/launch/gce/vm/commands.py:cordon": "stamps an exclusion",
    "jaxres/launch/gce/vm/commands.py:request_drain": "stamps an exclusion",
    "jaxres/cli/resume_check.py:_today": "stamps a result",
    "jaxres/estimate/storage_rate.py:of_probe": "stamps a result",
    "jaxres/storage/probe.py:_probe_bucket": "whether leftovers are an hour old",
    "jaxres/operate/chaos/runs.py:_clock_offset": "finds that the clock was set",
    "jaxres/telemetry/alert_sender.py:TargetSender.take": "stamps an incident",
    "jaxres/telemetry/routing_check.py:send": "stamps a test message",
    "jaxres/telemetry/trackers.py:Mlflow.log": "stamps the points of a service",
    "jaxres/telemetry/alert_sender.py:TargetSender._record": "stamps a line",
    "jaxres/telemetry/alert_sender.py:TargetSender._deliver_next": "an hour, over processes",
    "jaxres/supervisor/preemption/notices.py:_upcoming": "time until a time stamp of the server",
    "jaxres/supervisor/preemption/watcher.py:PreemptionWatcher.__enter__": "time until a deadline",
    "jaxres/supervisor/preemption/watcher.py:PreemptionWatcher._dated": "now, for dated notices",
    "jaxres/data/bucket/download_cache.py:_delete_leftovers": "whether leftovers are a day old",
    "jaxres/engine/executable.py:sources": "whether code is younger than the process that runs it",
    "jaxres/engine/executable.py:keep": "which file is the oldest, to be removed",
    "jaxres/train/compiled/compile_cache.py:process_start": "compared with the times of files",
    "jaxres/train/compiled/compile_cache.py:import_times": "compared with the times of files",
    "jaxres/data/sources/source_files.py:list_corpus": "detects a change of a file",
    "jaxres/data/sources/documents.py:check_unchanged": "detects a change of a file",
    "jaxres/data/sources/content_key.py:check_unchanged": "detects a change of a file",
    "jaxres/data/corpus.py:_remove_leftovers": "a day, over several processes",
    "jaxres/data/bucket/block_cache.py:_files_below": "which block any process used last",
}
"""Functions that may read the wall clock, and their purpose: a decision by it fails at a jump."""
ENVIRONMENT = (
    *("__main__.py", "python_api.py", "compile_cache.py", "forkserver.py", "standby.py"),
    *("faulty_worker_hook.py", "jax_coordination.py", "calls.py"),
)
"""Commands, also called from Python; keys of compiled programs; the fork server; what `chaos` asks
of a hook before it is called; a key that a worker has to take out of its environment; calls of a
user's loop."""


RETIRED = re.compile(
    r"\b(whoever|nobody|somebody|anew|heed(?:s|ed|ing)?|be had|for want of|own word|farewell"
    r"|in vain|mend(?:s|ed|ing)?|buried|bury|doomed|lookout|watchman|zygote|the story|doors?)\b",
    re.IGNORECASE,
)
"""Private words of earlier versions; docs/ARCHITECTURE.md has the field's terms."""
UNNAMED = re.compile(r"Returns (those|what|that|the same|how)\b")
"""Beginning of a docstring that does not name the result: `the number of rows`, not `how many`."""
PROSE = ("*.py", "*.md", "*.yaml", "*.toml", "*.c", ".ci/run", "tools/check")
MAY_BE_OLD = "tools/tidy.py"
OLD_NAME = re.compile(r"`[^`]*`")
"""A name in CHANGELOG.md, which lists the names that a version has changed."""
HOME = re.compile(r"Home of: ([a-z_, ]+)")


def main(arguments: list[str]) -> int:
    """Checks every tracked file, or prints the table of tests."""
    if arguments == ["--tests"]:
        sys.stdout.writelines(f"{line}\n" for line in _tests_by_module())
        return 0
    problems = [problem for path in _tracked("*.py") for problem in _check(path)]
    problems += [problem for path in _tracked(*PROSE) for problem in _retired_words(path)]
    problems += [problem for path in _tracked("docs/*.md") for problem in _long_lines(path)]
    problems += [*_crowded_folders(), *_classes_of_one_name()]
    problems += [*_homes_of_faults(), *_faults_of_homes()]
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


def _tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", *patterns]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    return [Path(name) for name in listed.stdout.splitlines() if Path(name).exists()]


def _retired_words(path: Path) -> Iterator[str]:
    if str(path) == MAY_BE_OLD:
        return
    text = path.read_text()
    if path.name == "CHANGELOG.md":
        text = OLD_NAME.sub("", text)
    for number, line in enumerate(text.splitlines(), start=1):
        for word in RETIRED.findall(line):
            yield f"{path}:{number}: '{word}' is retired: use the field's (docs/ARCHITECTURE.md)"


def _long_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a page that are too long."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        length = len(LINK_TARGET.sub("]", line))
        if length > MAX_DOC_LINE and not line.lstrip().startswith("|"):
            yield f"{path}:{number}: {length} characters, at most {MAX_DOC_LINE}: wrap the line"


def _check(path: Path) -> Iterator[str]:
    text = path.read_text()
    limit = MAX_FILE_LINES[path.parts[0]]
    if (lines := len(text.splitlines())) > limit:
        yield f"{path}: {lines} lines, at most {limit}: split it by responsibility"
    if path.name in ("utils.py", "helpers.py", "common.py"):
        yield f"{path}: name it after its content"
    production = path.parts[0] == "jaxres"  # The emulators have the machine's time.
    tree = ast.parse(text)
    for node in ast.walk(tree):
        yield from _check_node(path, node, production=production)
        yield from _check_docstring(path, node)
    if production:
        yield from _check_wall_clock(path, tree)


def _check_node(path: Path, node: ast.AST, *, production: bool) -> Iterator[str]:
    where = f"{path}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if BANNED_NAMES.search(node.name):
            yield f"{where}: {node.name}: a name without meaning"
        length = (node.end_lineno or 0) - node.lineno + 1
        if not isinstance(node, ast.ClassDef) and length > MAX_FUNCTION_LINES:
            yield f"{where}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
    if not production:
        return
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if is_function and (number := _num_parameters(node)) > MAX_PARAMETERS:
        yield f"{where}: {node.name} has {number} parameters, at most {MAX_PARAMETERS}"
    arguments = node.args if isinstance(node, ast.Call) else []
    if any(isinstance(a, ast.Starred) and isinstance(a.value, ast.Tuple) for a in arguments):
        yield f"{where}: a splat of a literal tuple: write its arguments, with keywords"
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        name = f"{node.value.id}.{node.attr}"
        if node.value.id == "time" and node.attr in TIME and path.name != "clock.py":
            yield f"{where}: {name}: time only through jaxres/clock.py"
        if name in ("os.environ", "os.getenv") and path.name not in ENVIRONMENT:
            yield f"{where}: {name}: environment variables only in {', '.join(ENVIRONMENT)}"
    if isinstance(node, ast.ExceptHandler) and node.type is None:
        yield f"{where}: bare except"


def _check_docstring(path: Path, node: ast.AST) -> Iterator[str]:
    """Yields the docstring of a node if its first line does not name the result."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
        return
    if (found := UNNAMED.match(ast.get_docstring(node) or "")) is not None:
        where = f"{path}:{node.body[0].lineno}"
        yield f"{where}: '{found[0]} ...': name the result, such as 'Returns the number of'"


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    own = len(names) - (names[:1] in (["self"], ["cls"]))
    return own + len(given.kwonlyargs) + (given.vararg is not None) + (given.kwarg is not None)


def _check_wall_clock(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yields functions that read the wall clock and may not, and listed ones that don't."""
    found = dict(_wall_clock_readers(tree, within=""))
    may = {name.partition(":")[2] for name in WALL_CLOCK_MAY if name.startswith(f"{path}:")}
    for name in found.keys() - may:
        yield (
            f"{path}:{found[name]}: {name or 'the module'} reads the wall clock, which jumps: "
            "decide by clock.monotonic(), or add its purpose to WALL_CLOCK_MAY"
        )
    for name in may - found.keys():
        yield f"{path}: {name} no longer reads the wall clock: remove it from WALL_CLOCK_MAY"


def _wall_clock_readers(node: ast.AST, *, within: str) -> Iterator[tuple[str, int]]:
    """Yields the function and the line of every read."""
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}.{child.name}".lstrip(".")
        if isinstance(child, ast.Attribute) and WALL_CLOCK.fullmatch(ast.unparse(child)):
            yield within, child.lineno
        yield from _wall_clock_readers(child, within=name)


def _classes_of_one_name() -> Iterator[str]:
    """Yields names that several classes of the package have."""
    places: dict[str, list[str]] = {}
    for path in _tracked("jaxres/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{found[-1]}: class {name} exists already, at {found[0]}: name what differs"


def _crowded_folders() -> Iterator[str]:
    """Yields folders of the package and of the unit tests that have too many files."""
    paths = _tracked("jaxres/*.py", "tests/unit/*.py")
    numbers = Counter(path.parent for path in paths if path.name != "__init__.py")
    for folder, number in sorted(numbers.items()):
        if number > MAX_FOLDER_FILES:
            yield (
                f"{folder}: {number} files, at most {MAX_FOLDER_FILES}: give those that serve one "
                "purpose a folder (docs/adr/0101-a-folder-has-at-most-twenty-files.md)"
            )


def _homes_of_faults() -> Iterator[str]:
    """Yields faults whose module's docstring does not claim them."""
    sys.path.insert(0, str(Path.cwd()))
    from jaxres import faults

    for fault in faults.ALL:
        home = Path("jaxres", fault.module)
        if fault.name not in _homes(home):
            yield f"{home}: faults.py has it as the home of {fault.name}, this file disagrees"


def _faults_of_homes() -> Iterator[str]:
    """Yields modules that claim a fault of another module, or an unknown one."""
    from jaxres import faults

    homes = {fault.name: Path("jaxres", fault.module) for fault in faults.ALL}
    for path in _tracked("jaxres/*.py"):
        for name in _homes(path):
            if homes.get(name) != path:
                yield f"{path}: claims fault {name}; its home in faults.py is {homes.get(name)}"


def _homes(path: Path) -> set[str]:
    """Returns the faults that a module's docstring claims."""
    if not path.is_file():
        return set()
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = [name for names in HOME.findall(docstring) for name in re.split(r",|and", names)]
    return {name.strip() for name in found if name.strip()}


def _tests_by_module() -> Iterator[str]:
    """Yields one line per module: the test files that import it."""
    tests: dict[str, set[str]] = {}
    for path in _tracked("tests/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxres"):
                for alias in node.names:
                    for module in (node.module or "", f"{node.module}.{alias.name}"):
                        tests.setdefault(module, set()).add(str(path))
    for path in _tracked("jaxres/*.py", "emulators/*.py"):
        if path.name != "__init__.py":
            module = ".".join(path.with_suffix("").parts).removeprefix("emulators.")
            found = ", ".join(sorted(tests.get(module, ())))
            yield f"{path}: {found or 'none; see tests/promises'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
