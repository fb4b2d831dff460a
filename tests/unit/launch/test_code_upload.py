"""Promises of the packed code: equal folders give equal bytes, and no special file blocks it."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from jaxres.faults import ConfigError
from jaxres.launch import instance_spec


def fill(folder: Path, *, reverse: bool = False) -> Path:
    """Creates a user's folder with the same content in either order of creation."""
    files = {"train.py": "a = 1\n", "pkg/__init__.py": "", "pkg/é.txt": "ü", "run.sh": "#!/bin/sh"}
    for name in sorted(files, reverse=reverse):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[name])
    (folder / "run.sh").chmod(0o755)
    return folder


def work(data: bytes) -> dict[str, tarfile.TarInfo]:
    """Returns the tar members of the user's folder."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {m.name: m for m in tar if m.name.startswith("work/")}


def test_equal_folders_give_equal_bytes(tmp_path: Path) -> None:
    one, other = fill(tmp_path / "one"), fill(tmp_path / "other", reverse=True)
    os.utime(other / "train.py", (1, 1))
    (other / "pkg" / "__pycache__").mkdir()
    (other / "pkg" / "__pycache__" / "x.pyc").write_bytes(b"1")
    (other / ".git").mkdir()
    (other / ".git" / "HEAD").write_text("ref")
    data = instance_spec.pack(one)
    assert instance_spec.pack(other) == data
    members = work(data)
    assert set(members) == {
        f"work/{n}" for n in ("train.py", "pkg/__init__.py", "pkg/é.txt", "run.sh")
    }
    assert members["work/run.sh"].mode == 0o755
    assert members["work/train.py"].mode == 0o644
    (other / "train.py").write_text("a = 2\n")
    assert instance_spec.pack(other) != data


def test_the_packed_code_contains_jaxres_itself(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(instance_spec.pack(None))) as tar:
        names = tar.getnames()
    assert "code/jaxres/launch/vm_agent.py" in names
    assert names == sorted(names)
    assert not [n for n in names if "__pycache__" in n or n.startswith("work/")]


def test_links_pipes_and_devices_neither_block_nor_are_packed(tmp_path: Path) -> None:
    folder = fill(tmp_path / "package")
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "nowhere").symlink_to("/nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "pkg" / "up").symlink_to("..")
    (folder / "link.py").symlink_to("train.py")
    members = work(instance_spec.pack(folder))
    assert set(members) - set(work(instance_spec.pack(fill(tmp_path / "plain")))) == {
        "work/link.py"
    }
    assert members["work/link.py"].isfile(), "what it points at, not the link"


def test_a_folder_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = fill(tmp_path / "package")
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match=r"launch\.gce\.package=.*more than 100 MiB.*code only"):
        instance_spec.pack(folder)


def test_many_files_that_are_too_large_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_spec, "MAX_BYTES", 4 * 2**20)
    folder = fill(tmp_path / "package")
    for n in range(8):
        (folder / f"{n}.bin").write_bytes(bytes(2**20))
    with pytest.raises(ConfigError, match="more than 4 MiB"):
        instance_spec.pack(folder)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        instance_spec.pack(tmp_path / "absent")
    with pytest.raises(ConfigError, match="there is no such folder"):
        instance_spec.pack(Path(__file__))


def test_nothing_of_another_folder_is_packed(tmp_path: Path) -> None:
    folder = fill(tmp_path / "package")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    (folder / "out").symlink_to(tmp_path / "outside")
    assert not [name for name in work(instance_spec.pack(folder)) if "secret" in name]
