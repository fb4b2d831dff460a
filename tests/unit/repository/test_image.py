"""Dockerfile, its versions, and examples for clusters: linted and compared; no image is built."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from jaxres.launch.k8s import manifest as k8s_manifest
from tests.emulators import kubernetes
from tests.waiting import SURE_SECONDS

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(sysconfig.get_path("scripts"))
TEXT = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n", " ", re.sub("^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
    if line.strip()
]


def arguments(name: str) -> list[str]:
    """Returns the arguments of every instruction of a name."""
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


def test_hadolint_finds_nothing():
    command = [SCRIPTS / "hadolint", ROOT / "Dockerfile"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SURE_SECONDS)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_base_image_has_docker_s_default_name():
    bases = [rest.partition("=")[2] for rest in arguments("ARG") if rest.startswith("BASE=")]
    assert arguments("FROM") == ["${BASE}"]
    assert [re.fullmatch(r"[a-z]+(/[a-z]+)?:[\w.-]+", base) is not None for base in bases] == [True]


def test_the_image_does_not_run_as_root_and_its_group_is_that_of_a_claim():
    assert arguments("USER") == [f"1000:{k8s_manifest.GROUP}"]
    assert any(f"groupadd --gid {k8s_manifest.GROUP} " in run for run in arguments("RUN"))


def test_process_1_is_the_supervisor_and_no_shell():
    (entry,) = arguments("ENTRYPOINT")
    assert json.loads(entry) == ["python", "-m", "jaxres.train"]


def test_what_is_copied_exists_and_is_sent_to_the_builder():
    ignored, *kept = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    sent = {line.removeprefix("!") for line in kept if line.startswith("!")}
    copied = {source for rest in arguments("COPY") for source in rest.split()[:-1]}
    assert ignored == "*"
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_every_dependency_has_one_version_that_the_project_allows():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (default,) = [rest.partition("=")[2] for rest in arguments("ARG") if "EXTRAS" in rest]
    wanted = [*project["dependencies"]]
    for extra in {*default.split(","), "gcs", "data", "tensorboard", "hardware"}:
        wanted += extras[extra]
    needed = [Requirement(text) for text in wanted]
    for requirement in needed:
        name = requirement.name.lower().replace("_", "-")
        if name != "jaxres":
            assert requirement.specifier.contains(pins[name]), requirement


def test_the_examples_for_kubernetes_are_accepted_by_the_types():
    for kind in ("jobset", "job"):
        text = (ROOT / f"examples/k8s/{kind}.yaml").read_text()
        for manifest in yaml.safe_load_all(text):
            kubernetes.check(manifest)


def test_the_example_for_slurm_is_that_of_its_page_and_valid_shell():
    path = ROOT / "examples/slurm.sbatch"
    assert f"```bash\n{path.read_text()}```" in (ROOT / "docs/schedulers.md").read_text()
    command = [SCRIPTS / "shellcheck", path]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SURE_SECONDS)
    assert found.returncode == 0, found.stdout + found.stderr
