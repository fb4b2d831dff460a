"""Promises of the startup script: it is valid shell, and passes every argument unchanged."""

from __future__ import annotations

import itertools
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from jaxres.config.schema_gce import ContainerRuntime, PythonRuntime
from jaxres.launch import instance_spec
from jaxres.storage.path import GcsPath
from tests.unit.launch.gce_config import config

SPECIAL = {
    "PLAIN": "1",
    "SPACES": "  two  words ",
    "QUOTES": """it's "so" """,
    "DOLLARS": "$HOME ${HOME} $(id) $$",
    "TICKS": "`id` \\ \\\\ \\n !",
    "LINES": "first\nAGENT\nsecond",
    "MARKS": "@COMMAND@ @RUN@ @PREPARE@ @EXPORTS@",
    "SIGNS": "a;b&c|d>e<f*g?h[i]~#%é",
    "EMPTY": "",
}
RUN = GcsPath("bkt", "runs/it's $(touch owned) `so`; a")
RUNTIMES = {
    "bare": PythonRuntime(python="/opt/my python/bin/python3"),
    "packages": PythonRuntime(packages=("jax[cuda13]==0.10.2", "a b;c", "c'd")),
    "container": ContainerRuntime(image="gcr.io/p/i@sha256:0", flags=("--gpus=all", "-e=A=$B `c`")),
}


def rendered(runtime: Any, *, run: GcsPath = RUN, **gce: Any) -> str:
    section = config(runtime=runtime, **gce).launch.gce
    assert section is not None
    return instance_spec.startup_script(section, run, run / "launch/code/0.tar.gz", 64 * "0")


@pytest.mark.parametrize("kind", RUNTIMES)
def test_the_script_is_valid_shell(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "startup.sh"
    script.write_text(rendered(RUNTIMES[kind].model_dump(mode="json"), env=SPECIAL))
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    shellcheck = (
        Path(sysconfig.get_path("scripts")) / "shellcheck"
    )  # The environment may not be activated.
    found = subprocess.run([shellcheck, script], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr


def agent_script(script: str, home: Path) -> Path:
    """Runs the part of the script that writes the agent's start script; returns that one."""
    head, _, rest = script.partition("name=$(metadata_value instance/name)\n")
    _, _, writes = rest.partition('mkdir -p "$base/package/work"\n')
    body = writes.partition('-C "$base/package"\n')[2].partition('chmod +x "$base/agent"\n')[0]
    facts = "name=jx-0000\nnotice=120\n"
    command = f'{head}{facts}mkdir -p "$base/package/work"\n{body}chmod +x "$base/agent"\n'
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-c", command], check=True, timeout=10, env=env, cwd=home)
    return home / ".jaxres-vm" / "agent"


def agent_output(tmp_path: Path, kind: str) -> list[str]:
    """Returns the arguments and the environment of the agent's interpreter."""
    home = tmp_path / "a home"
    home.mkdir()
    show = tmp_path / "bin" / "docker"
    show.parent.mkdir()
    show.write_text('#!/bin/bash\nprintf "%s\\0" "$PWD" "$@"\nenv -0\n')
    show.chmod(0o755)
    fields = RUNTIMES[kind].model_dump(mode="json")
    agent = agent_script(
        rendered(fields | ({"python": str(show)} if kind == "bare" else {}), env=SPECIAL), home
    )
    env = {"PATH": f"{show.parent}:/usr/bin:/bin"}
    found = subprocess.run([agent], check=True, capture_output=True, timeout=10, env=env)
    assert not list(tmp_path.rglob("owned")), "a value of the config was executed"
    return found.stdout.decode().split("\0")


@pytest.mark.parametrize("kind", ["bare", "container"])
def test_special_characters_reach_the_agent_unchanged(kind: str, tmp_path: Path) -> None:
    words = agent_output(tmp_path, kind)
    env = dict(word.split("=", 1) for word in words if "=" in word)
    assert {name: env[name] for name in SPECIAL} == SPECIAL
    base = f"{tmp_path}/a home/.jaxres-vm"
    assert words[0] == f"{base}/package/work"
    assert env["PYTHONPATH"] == f"{base}/package/code:{base}/package/work"
    at = words.index("jaxres.launch")
    assert words[at : at + 10] == [
        *("jaxres.launch", "agent", "--run", str(RUN), "--name", "jx-0000", "--folder", base),
        *("--notice-seconds", "120"),
    ]
    if kind == "container":
        assert "-e=A=$B `c`" in words
        assert words[words.index("-v") + 1] == f"{base}:{base}"
        assert {w for n, w in itertools.pairwise(words) if n == "-e"} >= set(SPECIAL)


def test_equal_configs_give_equal_scripts() -> None:
    script = rendered(RUNTIMES["bare"].model_dump(mode="json"), env=SPECIAL)
    again = dict(reversed(SPECIAL.items()))
    assert rendered(RUNTIMES["bare"].model_dump(mode="json"), env=again) == script


@pytest.mark.parametrize("name", ["A B", "A=B", "1A", "A;B", "$A", "", "A\n", "É"])
def test_an_invalid_name_of_a_variable_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="env"):
        config(env={name: "1"})


def test_the_token_of_a_vm_is_on_no_command_line(tmp_path: Path) -> None:
    """curl is a script here that records its arguments and its standard input."""
    script = rendered(RUNTIMES["bare"].model_dump(mode="json"))
    head, _, _ = script.partition("name=$(metadata_value instance/name)\n")
    fake = tmp_path / "curl"
    fake.write_text(
        '#!/bin/bash\nprintf \'%s\\n\' "$*" >> "$HOME/arguments"\n'
        'case "$*" in *token) echo \'{"access_token": "se-cret.1"}\' ;;\n'
        '*) cat > "$HOME/input" ;; esac\n'
    )
    fake.chmod(0o755)
    env = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", f"{head}fetch || true"], check=True, timeout=10, env=env)
    assert (tmp_path / "input").read_text() == 'header = "Authorization: Bearer se-cret.1"\n'
    assert "se-cret" not in (tmp_path / "arguments").read_text()
    assert "/storage/v1/b/bkt/o/" in (tmp_path / "arguments").read_text()
