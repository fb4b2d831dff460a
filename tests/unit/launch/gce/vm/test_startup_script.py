"""Promises of the startup script: it is valid shell, and passes every argument unchanged."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from jaxres.cluster.program_transfer import GIVEN
from jaxres.config.schema.gce import ContainerRuntime, PythonRuntime
from jaxres.launch.gce.state.boot_report import BootReport
from jaxres.launch.gce.vm import instance_spec
from jaxres.storage.path import GcsPath
from tests.unit.launch.gce_config import config
from tests.waiting import SURE_SECONDS, wait_until

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
PROGRAMS = 64 * "e"
"""Secret of the VM for compiled steps, from its metadata."""
RUN = GcsPath("bkt", "runs/it's $(touch owned) `so`; a")
RUNTIMES = {
    "bare": PythonRuntime(python="/opt/my python/bin/python3"),
    "packages": PythonRuntime(packages=("jax[cuda13]==0.10.2", "a b;c", "c'd")),
    "uv": PythonRuntime(python_version="3.12", packages=("jax[cuda13]==0.10.2", "a b;c", "c'd")),
    "docker": ContainerRuntime(image="gcr.io/p/i", install_docker=True),
    "container": ContainerRuntime(image="gcr.io/p/i@sha256:0", flags=("--gpus=all", "-e=A=$B `c`")),
}


def rendered(runtime: Any, *, run: GcsPath = RUN, **gce: Any) -> str:
    loaded = config(runtime=runtime, **gce)
    return instance_spec.startup_script(loaded, run, run / "launch/code/0.tar.gz", 64 * "0")


@pytest.mark.parametrize("kind", RUNTIMES)
def test_the_script_is_valid_shell(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "startup.sh"
    script.write_text(rendered(RUNTIMES[kind].model_dump(mode="json"), env=SPECIAL))
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=SURE_SECONDS)
    shellcheck = (
        Path(sysconfig.get_path("scripts")) / "shellcheck"
    )  # The environment may not be activated.
    found = subprocess.run(
        [shellcheck, script], capture_output=True, text=True, timeout=SURE_SECONDS
    )
    assert found.returncode == 0, found.stdout + found.stderr


def agent_script(script: str, home: Path) -> Path:
    """Runs the part of the script that writes the agent's start script; returns that one."""
    head, _, rest = script.partition("name=$(metadata_value instance/name)\n")
    _, _, writes = rest.partition('mkdir -p "$base/package/work"\n')
    body = writes.partition('-C "$base/package"\n')[2].partition('chmod +x "$base/agent"\n')[0]
    facts = f"name=jx-0000\nnotice=120\nprograms={PROGRAMS}\n"
    command = f'{head}{facts}mkdir -p "$base/package/work"\n{body}chmod +x "$base/agent"\n'
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-c", command], check=True, timeout=SURE_SECONDS, env=env, cwd=home)
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
    found = subprocess.run([agent], check=True, capture_output=True, timeout=SURE_SECONDS, env=env)
    assert not list(tmp_path.rglob("owned")), "a value of the config was executed"
    return found.stdout.decode().split("\0")


@pytest.mark.parametrize("kind", ["bare", "container"])
def test_special_characters_reach_the_agent_unchanged(kind: str, tmp_path: Path) -> None:
    words = agent_output(tmp_path, kind)
    env = dict(word.split("=", 1) for word in words if "=" in word)
    assert {name: env[name] for name in SPECIAL} == SPECIAL
    assert env[GIVEN] == PROGRAMS
    base = f"{tmp_path}/a home/.jaxres-vm"
    assert words[0] == f"{base}/package/work"
    assert env["PYTHONPATH"] == f"{base}/package/code:{base}/package/work"
    at = words.index("jaxres.launch")
    assert words[at : at + 12] == [
        *("jaxres.launch", "agent", "--run", str(RUN), "--name", "jx-0000", "--folder", base),
        *("--notice-seconds", "120", "--max-idle-seconds", "3600"),
    ]
    if kind == "container":
        assert "-e=A=$B `c`" in words
        assert words[words.index("-v") + 1] == f"{base}:{base}"
        assert {w for n, w in itertools.pairwise(words) if n == "-e"} >= {*SPECIAL, GIVEN}


def test_a_vm_is_powered_off_only_if_its_agent_has_asked_for_it(tmp_path: Path) -> None:
    script = rendered(RUNTIMES["bare"].model_dump(mode="json"))
    assert '\nExecStopPost="$escaped/stopped"\n' in script, "systemd does not run it"
    _, begin, rest = script.partition('cat > "$base/stopped"')
    body, end, _ = rest.partition('chmod +x "$base/stopped"\n')
    program, power_off = tmp_path / "poweroff", tmp_path / "power_off"
    program.write_text('#!/bin/sh\necho called >> "$0.calls"\n')
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "base": str(tmp_path)}
    subprocess.run(["bash", "-c", f"{begin}{body}{end}"], check=True, timeout=SURE_SECONDS, env=env)
    calls = tmp_path / "poweroff.calls"
    subprocess.run([tmp_path / "stopped"], timeout=SURE_SECONDS, env=env)
    assert not calls.exists(), "an agent that crashes powers its VM off"
    power_off.touch()
    for _ in range(2):
        subprocess.run([tmp_path / "stopped"], timeout=SURE_SECONDS, env=env)
    assert calls.read_text() == "called\n"
    assert not power_off.exists()


def test_no_idle_time_is_passed_if_a_vm_may_be_idle_for_ever() -> None:
    fields = RUNTIMES["bare"].model_dump(mode="json")
    assert "--max-idle-seconds 1800" in rendered(fields, idle_minutes=30)
    assert "--max-idle-seconds" not in rendered(fields, idle_minutes=None)


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
    subprocess.run(
        ["bash", "-c", f"{head}fetch || true"], check=True, timeout=SURE_SECONDS, env=env
    )
    assert (tmp_path / "input").read_text() == 'header = "Authorization: Bearer se-cret.1"\n'
    assert "se-cret" not in (tmp_path / "arguments").read_text()
    assert "/storage/v1/b/bkt/o/" in (tmp_path / "arguments").read_text()


CURL = """#!/bin/bash
printf '%s\\n' "$*" >> "$HOME/arguments"
case "$*" in
*token) echo '{"access_token": "se-cret.1"}' ;;
*instance/name) echo vm-1 ;;
*jaxres-num-gpus) echo "${NUM_GPUS:-}" ;;
*instance/preempted) echo "${PREEMPTED:-FALSE}" ;;
*upload*) cat > "$HOME/input"; cat "$HOME/.jaxres-vm/report" >> "$HOME/reports" ;;
*alt=media) cat > /dev/null; tar -czf "$HOME/.jaxres-vm/code.tar.gz" -T /dev/null ;;
*) exit 22 ;;
esac
"""


def start(tmp_path: Path, runtime: Any, programs: dict[str, str], **env: str) -> Any:
    """Starts the whole script, with these programs in the place of real ones."""
    folder = tmp_path / "bin"
    folder.mkdir()
    # It reads its input as the real one does: else its writer may get SIGPIPE, and it is retried.
    digest = "#!/bin/bash\ncat > /dev/null\n"
    programs = {"curl": CURL, "sha256sum": digest, "sleep": "#!/bin/bash\n", **programs}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return subprocess.Popen(
        ["bash", "-c", rendered(runtime.model_dump(mode="json"))],
        env={"HOME": str(tmp_path), "PATH": f"{folder}:/usr/bin:/bin", **env},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def reports(tmp_path: Path) -> list[BootReport | None]:
    """Returns the script's reports as the launcher reads them."""
    lines = (tmp_path / "reports").read_text().splitlines()
    found = [json.loads(line)["metadata"] for line in lines if line.startswith("{")]
    return [BootReport.of(metadata) for metadata in found]


def test_an_image_that_is_denied_is_reported_at_once_and_fails_after_three_tries(
    tmp_path: Path,
) -> None:
    docker = "#!/bin/bash\nprintf 'pulling\\ndenied: \"no\" \\\\ \\303\\251 token\\n\\n'; exit 1\n"
    process = start(tmp_path, RUNTIMES["container"], {"docker": docker})
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    assert process.returncode == 1, output
    error = "denied: no   token"
    assert len(reports(tmp_path)) == 5, output[-2000:]
    assert reports(tmp_path) == [
        BootReport("code", "running"),
        BootReport("image", "running"),
        BootReport("image", "retrying", error),
        BootReport("image", "retrying", error),
        BootReport("image", "failed", error),
    ]
    assert "jaxres: the stage image failed (1)" in output
    arguments = (tmp_path / "arguments").read_text()
    assert "uploadType=multipart&name=runs%2Fit%27s" in arguments
    assert "launch%2Fboot%2Fvm-1" in arguments, "the object is not named like the VM"
    assert "se-cret" not in arguments
    assert "Bearer se-cret.1" in (tmp_path / "input").read_text()


def test_packages_that_can_not_be_installed_are_reported(tmp_path: Path) -> None:
    python = "#!/bin/bash\necho 'No module named venv' >&2; exit 3\n"
    process = start(tmp_path, PythonRuntime(packages=("jax",)), {"python3": python})
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    assert process.returncode == 3, output
    assert reports(tmp_path)[-1] == BootReport("packages", "failed", "No module named venv")


@pytest.mark.parametrize("by", ["signal", "preemption"])
def test_a_vm_that_is_stopped_does_not_report_a_failure(tmp_path: Path, by: str) -> None:
    waits = '#!/bin/bash\ntouch "$HOME/waits"; exec /bin/sleep 6000\n'
    fails = '#!/bin/bash\ntouch "$HOME/waits"; exit 1\n'
    programs = {"python3": waits if by == "signal" else fails}
    env = {} if by == "signal" else {"PREEMPTED": "TRUE"}
    process = start(tmp_path, PythonRuntime(packages=("jax",)), programs, **env)
    wait_until((tmp_path / "waits").exists, "start of the script")
    if by == "signal":
        os.killpg(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    assert process.returncode != 0, output
    assert [r and r.state for r in reports(tmp_path)] == ["running", "running"], output


def test_a_python_without_the_modules_is_reported_by_their_names(tmp_path: Path) -> None:
    lacking = f"sys.path = [p for p in sys.path if 'site-packages' not in p]\n{instance_spec.CHECK}"
    found = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys\n{lacking}"],
        capture_output=True,
        timeout=SURE_SECONDS,
    )
    assert found.returncode == 1
    assert b"No module named" in found.stderr or b"lacks the modules: ['jax', " in found.stderr


SMI = """#!/bin/bash
echo "$*" >> "$HOME/asked"
tries=$(wc -l < "$HOME/asked")
if [ "$tries" -le "$LATE" ]; then echo "NVIDIA-SMI has failed"; exit 9; fi
for ((n = 0; n < FOUND; n++)); do echo "GPU $n: NVIDIA L4 (UUID: GPU-$n)"; done
"""
ABSENT = PythonRuntime(python="/opt/nowhere/python3")
BASE_PATH = "/usr/bin:/bin"


@pytest.mark.slow
def test_the_driver_is_awaited_before_the_agent_starts(tmp_path: Path) -> None:
    process = start(tmp_path, ABSENT, {"nvidia-smi": SMI}, NUM_GPUS="2", FOUND="2", LATE="20")
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    assert [(r.stage, r.state) for r in reports(tmp_path) if r][:-1] == [
        ("code", "running"),
        ("driver", "running"),
        ("driver", "retrying"),
        ("python", "running"),
    ], output
    assert (tmp_path / "asked").read_text().split("\n")[0] == "-L"


def test_a_gpu_that_is_missing_is_reported_and_no_agent_starts(tmp_path: Path) -> None:
    process = start(tmp_path, ABSENT, {"nvidia-smi": SMI}, NUM_GPUS="8", FOUND="7", LATE="2")
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    error = "nvidia-smi lists 7 GPUs, the machine type has 8"
    assert reports(tmp_path) == [
        BootReport("code", "running"),
        BootReport("driver", "running"),
        BootReport("driver", "retrying", error),
        BootReport("driver", "failed", error),
    ], output
    assert len((tmp_path / "asked").read_text().split()) == 12, "it was awaited for minutes"


@pytest.mark.slow
def test_a_driver_that_never_answers_is_reported(tmp_path: Path) -> None:
    process = start(tmp_path, ABSENT, {"nvidia-smi": SMI}, NUM_GPUS="1", FOUND="1", LATE="99")
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    error = "NVIDIA's driver does not answer: NVIDIA-SMI has failed"
    assert reports(tmp_path)[-1] == BootReport("driver", "failed", error), output


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvidia-smi", path=BASE_PATH) is not None, reason="it is present")
def test_an_image_without_a_driver_is_named_with_one_that_has_it(tmp_path: Path) -> None:
    process = start(tmp_path, ABSENT, {}, NUM_GPUS="1")
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    report = reports(tmp_path)[-1]
    assert report is not None
    assert report.state == "failed", output
    assert report.error.startswith("nvidia-smi is absent: take an image with NVIDIA's driver, such")
    assert report.error.endswith(instance_spec.DRIVER_IMAGE)


@pytest.mark.skipif(shutil.which("docker", path=BASE_PATH) is not None, reason="it is present")
def test_an_image_without_docker_is_named_with_one_that_has_it(tmp_path: Path) -> None:
    process = start(tmp_path, RUNTIMES["container"], {})
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    report = reports(tmp_path)[-1]
    assert report is not None
    assert (report.stage, report.state) == ("image", "failed"), output
    assert report.error.startswith("docker is absent: take an image with docker and NVIDIA's")
    assert instance_spec.DOCKER_IMAGE in report.error


# curl: the installer of uv is a script that writes a stand-in for uv.
INSTALLER = CURL.replace(
    "*) exit 22 ;;",
    r"""*install-uv*astral.sh/uv/*/install.sh) [ ! -e "$HOME/offline" ] || exit 6
  echo 'mkdir -p "$UV_INSTALL_DIR"; cp "$HOME/bin/uv-stand-in" "$UV_INSTALL_DIR/uv"' \
    > "$HOME/.jaxres-vm/install-uv" ;;
*nvidia.asc*libnvidia-container/gpgkey) touch "$HOME/.jaxres-vm/apt/nvidia.asc" ;;
*) exit 22 ;;""",
)
UV = """#!/bin/bash
printf '%s\\n' "$*" >> "$HOME/calls"
case "$1 $2" in
'venv --quiet')
  mkdir -p "${*: -1}/bin"
  printf '#!/bin/bash\\necho no jax here; exit 1\\n' > "${*: -1}/bin/python"
  chmod +x "${*: -1}/bin/python" ;;
'pip install') [ ! -e "$HOME/no-packages" ] || { echo 'no such package'; exit 1; } ;;
*) exit 7 ;;
esac
"""


def test_python_is_installed_by_uv_where_the_image_has_none(tmp_path: Path) -> None:
    process = start(tmp_path, RUNTIMES["uv"], {"curl": INSTALLER, "uv-stand-in": UV})
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    base = tmp_path / ".jaxres-vm"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"venv --quiet --managed-python --python 3.12 {base}/venv",
        f"pip install --quiet --python {base}/venv/bin/python jax[cuda13]==0.10.2 a b;c c'd",
    ], output
    stages = [report and (report.stage, report.state) for report in reports(tmp_path)]
    assert stages == [
        *((stage, "running") for stage in ("code", "uv", "packages", "python")),
        ("python", "failed"),
    ], output
    assert (base / "venv" / "complete").exists()


def test_an_installation_that_fails_is_tried_again_and_named(tmp_path: Path) -> None:
    (tmp_path / "no-packages").touch()
    process = start(tmp_path, RUNTIMES["uv"], {"curl": INSTALLER, "uv-stand-in": UV})
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    found = [report for report in reports(tmp_path) if report and report.stage == "packages"]
    error = "no such package"
    assert [report.state for report in found] == ["running", *["retrying"] * 4, "failed"], output
    assert found[-1] == BootReport("packages", "failed", error)
    assert not (tmp_path / ".jaxres-vm" / "venv" / "complete").exists()


APT = """#!/bin/bash
printf 'apt-get %s\\n' "$*" >> "$HOME/calls"
case "$*" in
*'install -y docker.io') cp "$HOME/bin/docker-stand-in" "$HOME/bin/docker" ;;
*'install -y nvidia-container-toolkit')
  grep -q 'stable/deb/amd64 /$' "$HOME/.jaxres-vm/apt/nvidia.list" || exit 8
  printf '#!/bin/bash\\necho "nvidia-ctk $*" >> "$HOME/calls"\\n' > "$HOME/bin/nvidia-ctk"
  chmod +x "$HOME/bin/nvidia-ctk" ;;
*update) ;;
*) exit 7 ;;
esac
"""


@pytest.mark.skipif(shutil.which("docker", path=BASE_PATH) is not None, reason="it is present")
def test_docker_is_installed_where_the_image_has_none(tmp_path: Path) -> None:
    programs = {
        "curl": INSTALLER,
        "apt-get": APT,
        "docker-stand-in": DOCKER,
        "dpkg": "#!/bin/bash\necho amd64\n",
        "systemctl": '#!/bin/bash\necho "systemctl $*" >> "$HOME/calls"\n',
    }
    process = start(tmp_path, RUNTIMES["docker"], programs)
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    calls = (tmp_path / "calls").read_text().partition("\nrun ")[0].splitlines()
    parts = f"Dir::Etc::sourceparts={tmp_path}/.jaxres-vm/apt"
    assert [call.rpartition("User=root ")[2] for call in calls] == [
        "update",
        "install -y docker.io",
        f"-o {parts} update",
        f"-o {parts} install -y nvidia-container-toolkit",
        "nvidia-ctk runtime configure --runtime=docker",
        "systemctl restart docker",
        "login --username oauth2accesstoken --password-stdin https://gcr.io",
        "pull gcr.io/p/i",
    ], output
    stages = [report.stage for report in reports(tmp_path) if report and report.state == "running"]
    assert stages[:3] == ["code", "docker", "image"]


DOCKER = """#!/bin/bash
printf '%s\\n' "$*" >> "$HOME/calls"
case "$1" in
login) cat > "$HOME/password"; mkdir -p "$DOCKER_CONFIG"; touch "$DOCKER_CONFIG/config.json" ;;
pull) [ ! -e "$DOCKER_CONFIG/config.json" ] || echo yes > "$HOME/had_login" ;;
*) exit 7 ;;
esac
"""


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("us-central1-docker.pkg.dev/p/r/i:1", "us-central1-docker.pkg.dev"),
        ("eu.gcr.io/p/i", "eu.gcr.io"),
        ("ghcr.io/p/i", None),
    ],
)
def test_registries_of_google_get_the_token_of_the_vm_and_no_others(
    tmp_path: Path, image: str, registry: str | None
) -> None:
    runtime = ContainerRuntime(image=image)
    process = start(tmp_path, runtime, {"docker": DOCKER})
    output = process.communicate(timeout=SURE_SECONDS)[0].decode()
    login = f"login --username oauth2accesstoken --password-stdin https://{registry}"
    calls = (tmp_path / "calls").read_text().partition("\nrun ")[0].splitlines()
    assert calls == [*([] if registry is None else [login]), f"pull {image}"], output
    assert (tmp_path / "had_login").exists() == (registry is not None)
    if registry is not None:
        assert (tmp_path / "password").read_text() == "se-cret.1\n"
    assert not (tmp_path / ".jaxres-vm" / "docker").exists(), "the token stays on the disk"
    assert "se-cret" not in output


@pytest.mark.parametrize("kind", RUNTIMES)
def test_no_connection_of_the_script_is_awaited_for_minutes(kind: str) -> None:
    script = rendered(RUNTIMES[kind].model_dump(mode="json")).replace("\\\n", " ")
    calls = re.findall(r"\bcurl -.*", script)
    assert len(calls) == (5 if kind in ("uv", "docker") else 4)
    limits = ("--connect-timeout 5 ", "--max-time 2 ")
    assert [call for call in calls if not any(limit in call for limit in limits)] == []
