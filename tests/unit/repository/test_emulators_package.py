"""The emulators are a package of their own: installed by its path, and needed by few commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxres.cli import chaos
from jaxres.exit_codes import ExitCode
from jaxres.operate.chaos.scenarios import ALL
from tests.waiting import SURE_SECONDS

ROOT = Path(__file__).parents[3]
NAME, PACKAGE = "jaxres-emulators", "jaxres_emulators"
EMULATED = frozenset(
    {
        *("storage-outage", "bucket-flip", "slow-storage"),
        *("partition", "peer-lost", "slow-network"),
        *("vm-lost", "stockout", "launcher-kill", "launch-state-lost", "unhealthy-device"),
    }
)
"""Scenarios with a bucket, several supervisors, VMs or a fake GPU."""
WITHOUT = """
import sys
sys.modules["jaxres_emulators"] = None  # An import of it fails now, as where it is not installed.
from jaxres.cli import chaos
for name in sys.argv[3:]:
    code = chaos.main(["run", sys.argv[1], name, "--hosts", "2", "--to", sys.argv[2]], env={})
    print(name, int(code), file=sys.stderr)
"""


def requirements() -> dict[str, list[str]]:
    """Returns the requirements of every file that has some."""
    found = {}
    for path in (ROOT / "pyproject.toml", ROOT / "emulators" / "pyproject.toml"):
        facts = tomllib.loads(path.read_text())
        extras = facts["project"].get("optional-dependencies", {}).values()
        lists = (facts["build-system"]["requires"], facts["project"]["dependencies"], *extras)
        found[str(path.relative_to(ROOT))] = [one for each in lists for one in each]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found["constraints.txt"] = [line for line in lines if line.strip() and line[0] != "#"]
    return found


def test_no_requirement_names_the_emulators():
    named = {
        path: {canonicalize_name(Requirement(one).name) for one in each}
        for path, each in requirements().items()
    }
    assert "jax" in named["pyproject.toml"]
    assert "google-crc32c" in named["emulators/pyproject.toml"]
    assert [path for path, names in named.items() if NAME in names] == []
    assert "jaxres" not in named["emulators/pyproject.toml"]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".ci/run", "tools/versions"])
def test_what_installs_the_tests_installs_the_emulators_by_their_path(name):
    lines = (ROOT / name).read_text().splitlines()
    installs = [line for line in lines if re.search(r"install .*'\.\[(test|dev)\]'", line)]
    assert installs
    assert [line for line in installs if not re.search(r" -e \./emulators( |$)", line)] == []


def test_the_packages_of_jaxres_are_none_of_the_emulators(tmp_path):
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    include = facts["packages"]["find"]["include"]
    for folder in ("jaxres/cli", f"{PACKAGE}/gcs"):  # Side by side, as after a move.
        for each in (Path(folder), Path(folder).parent):
            (tmp_path / each).mkdir(parents=True, exist_ok=True)
            (tmp_path / each / "__init__.py").touch()
    assert sorted(setuptools.find_packages(str(tmp_path), include=include)) == [
        "jaxres",
        "jaxres.cli",
    ]
    found = setuptools.find_packages(str(ROOT), include=include)
    assert "jaxres.operate.chaos" in found
    assert [each for each in found if "emulators" in each] == []


def test_a_process_of_a_test_imports_the_emulators_of_this_tree():
    code = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
        check=True,
    )
    assert found.stdout.strip() == str(ROOT / "emulators" / PACKAGE / "__init__.py")


def test_the_emulated_scenarios_are_those_that_start_an_emulator():
    assert {one.name for one in ALL if one.is_emulated} == EMULATED


@pytest.mark.parametrize("name", ["storage-outage", "partition", "vm-lost", "unhealthy-device"])
def test_a_scenario_without_its_emulator_says_how_to_install_it(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    words = ["run", str(ROOT / "tests/promises/tiny.yaml"), name, "--to", str(tmp_path / "runs")]
    assert chaos.main([*words, "--hosts", "2"], env={}) == ExitCode.USAGE
    assert f"{name}: not applicable: {PACKAGE} is not installed" in (err := capsys.readouterr().err)
    assert "`pip install ./emulators` in a clone of jaxres" in err
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_no_scenario_imports_the_emulators_before_it_is_refused(tmp_path):
    config, runs = ROOT / "tests/promises/tiny.yaml", tmp_path / "runs"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(config), str(runs), *sorted(EMULATED)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    for name in EMULATED:
        assert f"\n{name} {int(ExitCode.USAGE)}\n" in done.stderr
        assert f"{name}: not applicable: {PACKAGE} is not installed" in done.stderr
    assert done.stdout == ""
    assert list(runs.iterdir()) == []
