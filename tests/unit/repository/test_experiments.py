"""Experiments are documented, have committed results, and stay outside the package."""

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXPERIMENTS = ROOT / "experiments"
PROGRAMS = ROOT / "tools" / "experiments"
CAMPAIGN = EXPERIMENTS / "campaign"
"""What tools/campaign has recorded, in slices: no result of one command."""
FOLDERS = sorted({path.parent for path in EXPERIMENTS.glob("*/README.md")} - {CAMPAIGN})
HEADINGS = ["Question", "Command", "Result", "Date", "Machine", "Limits"]


def _imported(path: Path) -> set[str]:
    """Returns the top-level packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found}


def test_there_are_experiments():
    assert {"resume_at_step_56", "save_interval"} <= {folder.name for folder in FOLDERS}


def test_the_package_does_not_import_experiments():
    sources = sorted((ROOT / "jaxres").rglob("*.py"))
    assert "jax" in _imported(ROOT / "jaxres/engine/step.py")
    named = [path for path in sources if "tools" in path.read_text()]
    assert [path for path in named if "tools" in _imported(path)] == []


def test_experiments_do_not_import_the_package():
    assert [path for path in PROGRAMS.rglob("*.py") if "jaxres" in _imported(path)] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_experiment_has_all_its_parts(folder):
    text = (folder / "README.md").read_text()
    headings = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert headings == HEADINGS
    assert f"python -m tools.experiments.{folder.name}" in text
    assert (PROGRAMS / f"{folder.name}.py").is_file()
    assert f"({folder.name}/README.md)" in (EXPERIMENTS / "README.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_experiment_has_results_of_the_date_and_machine_in_its_readme(folder):
    text = (folder / "README.md").read_text()
    results = sorted((folder / "results").glob("*.json"))
    assert results
    for path in results:
        result = json.loads(path.read_text())
        assert result["date"] in text
        assert f"{result['machine']['cpu_cores']} CPU cores" in text
        assert f"jax {result['machine']['jax']}" in text
        assert isinstance(result["holds"], bool)
        assert f"**Claim**, fixed in the script: {result['claim']}." in " ".join(text.split())
        assert f"results/{path.name}" in text
