"""Files of a program are on the VMs where its command finds them, or the job is refused."""

from pathlib import Path

import pytest

from jaxres.config import load
from jaxres.faults import ConfigError
from jaxres.launch.gce.job_start import require_packed
from jaxres.launch.gce.vm import code_package


@pytest.mark.parametrize("cwd", [".", "scripts"])
def test_a_program_in_the_package_is_found_on_the_vms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cwd: str
):
    _program(tmp_path, monkeypatch, cwd)
    config = load(Path("x.yaml")).config
    require_packed(config, code_package.list_files(Path()))


@pytest.mark.parametrize("package", [None, "other", "scripts"])
def test_a_program_that_the_vms_lack_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str | None
):
    _program(tmp_path, monkeypatch, "scripts")
    Path("other").mkdir()
    config = load(Path("x.yaml")).config
    packed = code_package.list_files(None if package is None else Path(package))
    with pytest.raises(ConfigError, match=r"main\.py is not on the VMs"):
        require_packed(config, packed)


def _program(folder: Path, monkeypatch: pytest.MonkeyPatch, cwd: str) -> None:
    monkeypatch.chdir(folder)
    Path(cwd).mkdir(exist_ok=True)
    (Path(cwd) / "main.py").touch()
    text = f"program: {{command: [python, main.py], files: [main.py], cwd: {cwd}}}"
    Path("x.yaml").write_text(text)
