"""Records which functions of this repository each test executes, in all of its processes.

While a campaign runs, a `.pth` file of the environment calls `start` in every process of it. Each
function then begins with a look at its flag; the first call for a test writes a line, so
that a SIGKILL loses nothing. A process belongs to the test in `PYTEST_CURRENT_TEST`, or else to the
test of its nearest ancestor that runs tests.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("jaxres", "jaxres_emulators", "tools")
HIT, RAN = "__jaxres_hit__", "__jaxres_ran__"
"""What the inserted statement finds in builtins: a function, and the flags of all functions."""
CURRENT = "PYTEST_CURRENT_TEST"
MOST_FUNCTIONS = 1 << 15
ANCESTORS = 16
"""A process of a test has fewer."""


class Recorder:
    """Writes `TEST<tab>FILE:FIRST-LAST` lines into a file of each process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags = bytearray(MOST_FUNCTIONS)
        self.functions: list[str] = []

    def number(self, function: str) -> int:
        """Returns the number of a function, which is named by its file and lines."""
        self.functions.append(function)
        return len(self.functions) - 1

    def hit(self, number: int) -> None:
        """Records that a function runs; keeps no file open, since processes count theirs."""
        self.flags[number] = 1
        with suppress(OSError):
            path = self.folder / str(os.getpid())
            output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(output, f"{self._test()}\t{self.functions[number]}\n".encode())
            finally:
                os.close(output)

    def begin(self, test: str) -> None:
        """Begins with a test, in the process that runs it."""
        (self.folder / f"test-{os.getpid()}").write_text(test)
        self.forget()

    def forget(self) -> None:
        """Forgets what has run: another test, or a fork, begins."""
        self.flags[:] = bytes(MOST_FUNCTIONS)

    def _test(self) -> str:
        if CURRENT in os.environ:
            return os.environ[CURRENT].rpartition(" (")[0]
        pid = os.getpid()
        for _ in range(ANCESTORS):
            with suppress(OSError):
                return (self.folder / f"test-{pid}").read_text()
            with suppress(OSError, ValueError):
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return ""


class _Finder(MetaPathFinder):
    """Loads modules with the flags in their functions."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module of PACKAGES; None for all others."""
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path, self._recorder)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, recorder: Recorder) -> None:
        super().__init__(fullname, path)
        self._recorder = recorder

    def get_code(self, fullname: str) -> Any:
        """Compiles each time: the numbers of functions differ from process to process."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        """Returns the code with a statement at the start of each function."""
        tree = with_flags(ast.parse(data, str(path)), str(path), number=self._recorder.number)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


def with_flags(tree: ast.Module, path: str, *, number: Callable[[str], int]) -> ast.Module:
    """Returns the module with `RAN[number] or HIT(number)` at the start of each function."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        has_docstring = ast.get_docstring(node, clean=False) is not None
        first = node.body[0]
        own = number(f"{path}:{node.lineno}-{node.end_lineno}")
        statement = ast.parse(f"{RAN}[{own}] or {HIT}({own})").body[0]
        for part in ast.walk(statement):
            ast.copy_location(part, first)
        node.body.insert(1 if has_docstring else 0, statement)
    return tree


def start(folder: str) -> None:
    """Records from now on, in this process and in its forks."""
    recorder = Recorder(Path(folder))
    setattr(builtins, HIT, recorder.hit)
    setattr(builtins, RAN, recorder.flags)
    sys.meta_path.insert(0, _Finder(recorder))
    os.register_at_fork(after_in_child=recorder.forget)
    sys.modules["tools_recorder"] = recorder  # pyright: ignore[reportArgumentType]


def pth(folder: Path) -> str:
    """Returns the text of the `.pth` file: one line that Python executes at its start."""
    root = Path(__file__).resolve().parents[2]
    parts = (
        "import sys",
        f"sys.path.append({str(root)!r})",
        "import tools.ci.executed as executed",
        f"executed.start({str(folder)!r})",
        "sys.path.pop()",
    )
    return "; ".join(parts) + "\n"


def read(folder: Path, *, root: Path) -> dict[str, set[str]]:
    """Returns the functions that each test has executed, `jaxres/FILE:FIRST-LAST`.

    Args:
      folder: where the processes have written.
      root: the checkout; functions elsewhere, such as in copies of it, are left out.
    """
    found: dict[str, set[str]] = {}
    for path in folder.iterdir():
        if not path.name.isdigit():
            continue
        for line in path.read_text(errors="replace").splitlines():
            test, _, function = line.partition("\t")
            if function.startswith(f"{root}/"):
                found.setdefault(test, set()).add(function.removeprefix(f"{root}/"))
    return found
