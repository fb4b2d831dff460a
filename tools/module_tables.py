"""Tables of docs/ that are made from the code, such as folders, modules, defaults of `jaxres plan`.

A page has each table between `<!-- generated: NAME -->` and `<!-- end -->`; `tools/golden.py`
writes and compares them. The text of a folder or module is the first line of its docstring.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxres.cluster import detect
from jaxres.estimate.assumptions import ASSUMPTIONS
from jaxres.launch.gce.decide import reconcile
from jaxres.operate.chaos import coverage
from jaxres.supervisor import run_metrics
from tools.gpu import results as gpu_results

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxres"
PAGES = (
    "ARCHITECTURE.md",
    "benchmarks.md",
    "gce-reference.md",
    "many-hosts.md",
    "planning.md",
    "prove.md",
    "watch.md",
)
DOCSTRING = re.compile(r'r?"""(\S[^\n]*?)(?:\n|""")')
PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Returns each page that has generated parts, as it should be.

    Raises:
        ValueError: a page has no generated part, or one of an unknown name.
    """
    paths = [ROOT / "docs" / name for name in PAGES]
    return {path: with_parts(path.read_text(), where=path.name) for path in paths}


def with_parts(text: str, *, where: str) -> str:
    """Returns the text of a page with its generated parts as the code has them."""
    names = [name for _, name, _ in PART.findall(text)]
    unknown = sorted(set(names) - set(PARTS))
    if unknown or not names:
        expected = ", ".join(sorted(PARTS))
        found = ", ".join(unknown) or "no generated part"
        raise ValueError(f"docs/{where} has {found}; known parts: {expected}")
    return PART.sub(lambda match: match[1] + PARTS[match[2]]() + match[3], text)


def first_line(path: Path) -> str:
    """Returns the first line of a module's docstring.

    Raises:
        ValueError: the module has no docstring.
    """
    found = DOCSTRING.match(path.read_text())
    if found is None:
        raise ValueError(f"{path}: a module needs a docstring, whose first line is in docs/")
    return found[1].replace("|", r"\|")


def folders() -> str:
    """Returns the table of folders, in the order of the layers of `.importlinter`."""
    rows = ["| folder | what it is |", "|---|---|"]
    rows += [
        f"| `{folder.relative_to(ROOT)}/` | {first_line(folder / '__init__.py')} |"
        for folder in _folders()
    ]
    return "\n".join(rows)


def modules() -> str:
    """Returns the table of modules, folder by folder."""
    rows = ["| module | what it does |", "|---|---|"]
    rows += [
        f"| `{path.relative_to(ROOT)}` | {first_line(path)} |"
        for folder in _folders()
        for path in sorted(folder.glob("*.py"))
        if path.name != "__init__.py"
    ]
    return "\n".join(rows)


def assumptions() -> str:
    """Returns the table of the defaults of `jaxres plan`."""
    rows = ["| flag | default | source |", "|---|---|---|"]
    rows += [f"| `{a.flag}` | {a.value:,.10g} {a.unit} | {a.source} |" for a in ASSUMPTIONS]
    return "\n".join(rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "assumptions": assumptions,
    "covered-faults": lambda: coverage.table().rstrip("\n"),
    "folders": folders,
    "gpu-results": gpu_results.committed_table,
    "launch-stages": reconcile.table,
    "metrics": run_metrics.table,
    "modules": modules,
    "places": lambda: detect.table().rstrip("\n"),
}


def _folders() -> list[Path]:
    """Returns the package and its folders, each below those that may import it."""
    found = [path.parent for path in PACKAGE.rglob("__init__.py")]
    order = _layers()
    return sorted(found, key=lambda folder: _place(folder.relative_to(PACKAGE), order))


def _place(folder: Path, order: list[str]) -> tuple[int, str]:
    if not folder.parts:
        return -1, ""
    return order.index(folder.parts[0]), folder.as_posix()


def _layers() -> list[str]:
    """Returns the layers from the top down; those on one line are side by side."""
    rules = configparser.ConfigParser()
    rules.read(ROOT / ".importlinter")
    return re.findall(r"\w+", rules["importlinter:contract:layers"]["layers"])
