"""Commands of the pages about clusters that are not those of jaxres: their shell, and their names.

The commands of jaxres itself are parsed by tests/unit/repository/test_docs.py.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from jaxres.launch.k8s import command as k8s
from jaxres.launch.k8s.manifest import ClusterOptions

ROOT = Path(__file__).parents[4]
SHELLCHECK = Path(sysconfig.get_path("scripts")) / "shellcheck"
PAGES = ("schedulers", "many-hosts")
OPTIONS = ClusterOptions(image="i", name="NAME", grace_seconds=180)


def blocks(page: str) -> list[str]:
    """Returns the shell of a page."""
    text = (ROOT / f"docs/{page}.md").read_text()
    found = re.findall(r"^ *```bash\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [re.sub(r"RUN_DIR|NAME|NODE", "x", block) for block in found]


@pytest.mark.parametrize("page", PAGES)
def test_shellcheck_finds_nothing_in_the_commands_of_a_page(page):
    assert blocks(page)
    for block in blocks(page):
        done = subprocess.run(
            [SHELLCHECK, "--shell=bash", "-"], input=block, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}"


def kubectl_commands() -> list[list[str]]:
    text = (ROOT / "docs/schedulers.md").read_text()
    found = re.findall(r"`(kubectl [^`\n]+)`|^ *(kubectl .+)$", text, re.MULTILINE)
    return [(inline or line).split() for inline, line in found]


def test_commands_of_kubectl_name_what_the_manifest_has():
    commands = kubectl_commands()
    assert {verb for _, verb, *_ in commands} == {"apply", "get", "logs", "delete", "cordon"}
    for _, verb, *words in commands:
        if verb in ("get", "delete"):
            assert words[0] in ("jobset", "job")
        if "-l" in words:
            assert words[words.index("-l") + 1] == k8s._selector(OPTIONS)


def test_arguments_of_the_image_s_build_are_those_of_the_dockerfile():
    known = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    for path in (ROOT / "docs/schedulers.md", ROOT / "Dockerfile"):
        asked = re.findall(r"--build-arg (\w+)=", path.read_text())
        assert asked
        assert set(asked) <= known
