"""The wheel, built from the sdist, trains a built-in config where there is no checkout."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.promises.trainer import ROOT
from tests.waiting import SURE_SECONDS

SOURCES = ("jaxres", "emulators", "configs", "pyproject.toml", "README.md", "LICENSE")
SMALL = (
    *("train.steps=3", "model.kind=mlp", "telemetry.sample_tokens=0", "evaluation.batches=1"),
    "data.source.path={stdlib}/json",
)
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, {!r})(sys.argv[1]))"


def _run(*command: str | Path, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clean_env() -> dict[str, str]:
    """Returns an environment that does not lead to the checkout."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAXRES", "PYTHON", "PIP_", "VIRTUAL_ENV", "COV"))
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, clean_env: dict[str, str]) -> Path:
    """Returns the wheel that is built from the sdist, as `python -m build` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    source, unpacked = folder / "source", folder / "unpacked"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=left_out)
        else:
            shutil.copy(ROOT / name, source / name)
    output = [sys.executable, "-c", BUILD.format("build_sdist"), folder]
    sdist = folder / _run(*output, cwd=source, env=clean_env).splitlines()[-1]
    with tarfile.open(sdist) as tar:
        if hasattr(tarfile, "data_filter"):  # Not in Python 3.11.2.
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(unpacked)
    output = [sys.executable, "-c", BUILD.format("build_wheel"), folder]
    root = unpacked / sdist.name.removesuffix(".tar.gz")
    return folder / _run(*output, cwd=root, env=clean_env).splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, clean_env: dict[str, str]) -> Path:
    """Returns the commands' folder of an environment with the wheel and this one's libraries."""
    folder = wheel.parent / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    _run(*pip, wheel, cwd=wheel.parent, env=clean_env)
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    (own,) = _run(python, "-c", asked, cwd=wheel.parent, env=clean_env).splitlines()
    # Lines of a path file come after the environment's own folder, and no path file of theirs is
    # read, such as that of an editable jaxres.
    libraries = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(own) / "libraries.pth").write_text("".join(f"{path}\n" for path in libraries))
    return python.parent


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    wanted = {
        str(Path(folder, name).relative_to(ROOT))
        for folder, _, names in os.walk(ROOT / "jaxres", followlinks=True)
        for name in names
        if "__pycache__" not in folder
    }
    assert {"jaxres/py.typed", "jaxres/config/builtin/quickstart.yaml"} <= wanted
    assert "jaxres/config/builtin/gce/a4-highgpu.yaml" in wanted
    with zipfile.ZipFile(wheel) as file:
        found = {name for name in file.namelist() if ".dist-info/" not in name}
        (metadata,) = [name for name in file.namelist() if name.endswith("/METADATA")]
        facts = email.message_from_bytes(file.read(metadata))
    assert found == wanted
    assert [name for name in found if "emulators/" in name] == []
    assert facts["License-File"] == "LICENSE"
    documented = re.findall(r"`\.\[(\w+)\]`", (ROOT / "docs/getting-started.md").read_text())
    assert sorted(facts.get_all("Provides-Extra", [])) == sorted(documented)


@pytest.mark.slow
def test_the_emulators_have_a_wheel_of_their_own_with_every_file(
    tmp_path: Path, clean_env: dict[str, str]
) -> None:
    source = tmp_path / "emulators"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "emulators", source, ignore=left_out)
    package = source / "jaxres_emulators"
    wanted = {str(path.relative_to(source)) for path in package.rglob("*") if path.is_file()}
    assert {"jaxres_emulators/nvml/fake_nvml.c", "jaxres_emulators/gcs/__main__.py"} <= wanted
    output = [sys.executable, "-c", BUILD.format("build_wheel"), tmp_path]
    wheel = tmp_path / _run(*output, cwd=source, env=clean_env).splitlines()[-1]
    with zipfile.ZipFile(wheel) as file:
        found = {name for name in file.namelist() if ".dist-info/" not in name}
    assert found == wanted


@pytest.mark.slow
def test_a_built_in_config_trains_without_a_checkout(
    installed: Path, clean_env: dict[str, str], tmp_path: Path, caches: Path
) -> None:
    empty, env = tmp_path / "empty", {**clean_env, "HOME": str(tmp_path)}
    empty.mkdir()
    where = _run(installed / "python", "-c", "import jaxres; print(jaxres)", cwd=empty, env=env)
    assert f"{installed.parent}/" in where, "the checkout was imported, not the wheel"
    assert _run(installed / "jaxres", "--version", cwd=empty, env=env).startswith("jaxres 0.")
    kept = (f"data.cache_dir={caches}", f"compilation.cache_dir={caches / 'xla'}")
    doctor = _run(installed / "jaxres", "doctor", "quickstart", *SMALL, *kept, cwd=empty, env=env)
    assert "pass  config" in doctor, doctor
    module = (installed / "python", "-m", "jaxres.train")
    _run(*module, "quickstart", *SMALL, *kept, cwd=empty, env=env)
    (run_dir,) = (empty / "runs").iterdir()
    assert run_dir.name.startswith("quickstart-")
    listed = _run(
        *(installed / "jaxres", "checkpoints", "list", run_dir, "--json"), cwd=empty, env=env
    )
    assert [json.loads(line)["step"] for line in listed.splitlines()] == [3]
