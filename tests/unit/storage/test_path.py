"""Paths have one normal form, and a run directory where nothing can be saved is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxres.storage.path import GcsPath, normalized, parse_path, run_root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory and the home folder; `far` is a link to a folder elsewhere."""
    (tmp_path / "disk" / "data").mkdir(parents=True)
    (tmp_path / "far").symlink_to("disk/data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("runs/a", "runs/a"),
        ("./runs//a/", "runs/a"),
        ("runs/../a", "a"),
        ("nowhere/../../{up}/a", "a"),
        ("~/a", "a"),
        ("~/x/../a", "a"),
        ("-a/b", "-a/b"),
        ("far/a", "far/a"),
        ("far/../a", "disk/a"),
        ("far/../data/../../far/a", "far/a"),
        ("a..b/...", "a..b/..."),
        ("no-user~/~a", "no-user~/~a"),
        ("{here}//a/./b", "a/b"),
        ("//{here}/a", "a"),
    ],
)
def test_a_path_has_one_normal_form(here: Path, given: str, normal: str) -> None:
    text = given.format(here=here, up=here.name)
    root = normalized(parse_path(text))
    assert str(root) == f"{here}/{normal}"
    assert normalized(root) == root
    assert os.path.normpath(str(root)) == str(root)


def test_a_relative_path_without_a_current_directory_is_refused(here: Path) -> None:
    gone = here / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert normalized(Path("/a/../b")) == Path("/b")
    with pytest.raises(ValueError, match="the current directory does not exist"):
        normalized(Path("runs/a"))
    os.chdir(here)


@pytest.mark.parametrize(
    "name",
    ["a b", "a ", "ünï-日本", "-a", "~a", "a=b", "a'\"b", "{a}", "a#b", "%20", "$HOME", "a:b"],
)
def test_a_run_directory_may_have_any_other_name(here: Path, name: str) -> None:
    assert run_root(Path(name)) == here / name


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("runs/a[b]", r"'a\[b\]' has one of"),
        ("a]/run", "has one of"),
        ("a*", "has one of"),
        ("what?", "has one of"),
        ("a\\b", "has one of"),
        ("a\nb", r"'a\\nb' has one of"),
        ("a\x7f/b", "control character"),
        ("a\udc80", "not UTF-8"),
        ("/gs/runs/a", "Orbax takes /gs for a bucket"),
        ("a/../../../../../../../../../../s3/a", "Orbax takes /s3 for a bucket"),
        ("a/gs:/b", "Orbax takes the folder gs: for a bucket"),
    ],
)
def test_a_run_directory_that_orbax_takes_for_another_one_is_refused(
    here: Path, path: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        run_root(Path(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["s3://b/a", "gs:/b/a", "GS://b/a", "file:///a", "", "a\0b"])
def test_a_text_that_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a local path or gs://BUCKET/FOLDER"):
        parse_path(text)


@pytest.mark.parametrize("key", ["a/../b", "a//b", "./a", "..", "a/.", "a*b", "a\nb"])
def test_a_name_in_a_bucket_has_no_empty_part_and_no_dots(key: str) -> None:
    with pytest.raises(ValueError, match="must be gs://BUCKET/FOLDER"):
        parse_path(f"gs://bkt/{key}")


def test_a_run_in_a_bucket_has_a_name_that_a_folder_can_have() -> None:
    """Its local files are in one."""
    assert run_root(parse_path(f"gs://bkt/{'n' * 251}")) == GcsPath("bkt", "n" * 251)
    for name in ("n" * 252, "n" * 300, f"{'n' * 200}/{'m' * 60}", "ä" * 130):
        with pytest.raises(ValueError, match=r"have \d+ bytes, at most 255 are possible"):
            run_root(parse_path(f"gs://bkt/{name}"))


def test_a_name_in_a_bucket_is_its_own_normal_form() -> None:
    assert run_root(parse_path("gs://bkt/runs/a/")) == GcsPath("bkt", "runs/a")
