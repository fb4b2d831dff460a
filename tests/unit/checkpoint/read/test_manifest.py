import dataclasses
import json

import pytest

from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.manifest import CheckpointDamaged, Manifest
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.runlog.run_log import Commit
from jaxres.storage import checksummed_json

MANIFEST = Manifest(
    step=8,
    attempt=1,
    files={"progress.json": manifests.info_of(b"{}"), "state/d/array": manifests.info_of(b"12345")},
    arrays={"params/w": ArrayInfo("float32", (2, 3)), "step": ArrayInfo("int32", ())},
    digests={"params/w": "3c", "step": "9f"},
    digest="sha256:00",
    versions={"jax": "1"},
    fingerprint={"cpu": "x"},
    trajectory="7a",
)


def commit_of(data):
    digest = manifests.digest_of(data)
    return Commit(step=8, path="", manifest=digest, bytes=0)


@pytest.fixture
def step_dir(tmp_path):
    """A complete step directory; the tests read its manifest and the files' sizes."""
    (tmp_path / "state" / "d").mkdir(parents=True)
    (tmp_path / "progress.json").write_bytes(b"{}")
    (tmp_path / "state" / "d" / "array").write_bytes(b"12345")
    (tmp_path / "MANIFEST.json").write_bytes(MANIFEST.encode())
    return tmp_path


COMMIT = commit_of(MANIFEST.encode())


def refused(step_dir, commit=COMMIT):
    with pytest.raises(CheckpointDamaged) as caught:
        manifests.read(step_dir, commit)
    text = str(caught.value)
    assert text.startswith(f"{step_dir}: step 8 is committed but damaged: ")
    return text.split("damaged: ")[1].split(". Restore")[0]


def test_a_manifest_reads_back_as_it_was_written(step_dir):
    assert manifests.read(step_dir, COMMIT) == MANIFEST
    assert manifests.inventory(step_dir) == {n: info.size for n, info in MANIFEST.files.items()}


def test_a_file_that_is_not_in_the_manifest_is_ignored(step_dir):
    (step_dir / "notes").touch()
    assert manifests.read(step_dir, COMMIT) == MANIFEST


def test_a_missing_file_is_named(step_dir):
    (step_dir / "state" / "d" / "array").unlink()
    assert refused(step_dir) == "state/d/array is missing, the manifest records 5 bytes"


@pytest.mark.parametrize("data", [b"", b"1234", b"123456"])
def test_a_file_of_another_size_is_named(step_dir, data):
    (step_dir / "state" / "d" / "array").write_bytes(data)
    wanted = f"state/d/array has {len(data)} bytes, the manifest records 5 bytes"
    assert refused(step_dir) == wanted


def test_an_absent_manifest_or_directory_is_named(step_dir):
    (step_dir / "MANIFEST.json").unlink()
    assert refused(step_dir) == "MANIFEST.json is missing"
    with pytest.raises(CheckpointDamaged, match=r"MANIFEST\.json is missing"):
        manifests.read(step_dir / "gone", COMMIT)


def test_the_manifest_of_another_save_is_damage(step_dir):
    other = dataclasses.replace(MANIFEST, attempt=2).encode()
    (step_dir / "MANIFEST.json").write_bytes(other)
    assert refused(step_dir) == "MANIFEST.json is not the committed one"


FIELDS = json.loads(MANIFEST.encode())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({k: v for k, v in FIELDS.items() if k != "files"}, "files"),
        (FIELDS | {"color": 1}, "color"),
        ([], "not an object"),
    ],
)
def test_a_committed_manifest_that_this_version_cannot_parse_is_damage(step_dir, fields, why):
    data = checksummed_json.canonical_json(fields)
    (step_dir / "MANIFEST.json").write_bytes(data)
    text = refused(step_dir, commit_of(data))
    assert text.startswith("MANIFEST.json can't be read")
    assert why in text


@pytest.mark.parametrize(
    ("fields", "writer"),
    [
        (FIELDS | {"format": 5}, "a newer version of jaxres"),
        (FIELDS | {"format": 2}, r"a jaxres before 0\.1\.0"),
        ({k: v for k, v in FIELDS.items() if k != "format"}, r"a jaxres before 0\.1\.0"),
    ],
)
def test_a_manifest_of_another_format_is_refused_and_not_called_damaged(step_dir, fields, writer):
    data = checksummed_json.canonical_json(fields)
    (step_dir / "MANIFEST.json").write_bytes(data)
    with pytest.raises(
        ConfigError, match=rf"MANIFEST\.json: .* written by {writer}; .* 3 or 4 only"
    ):
        manifests.read(step_dir, commit_of(data))


def test_an_array_is_shown_as_dtype_and_shape():
    assert [str(info) for info in MANIFEST.arrays.values()] == ["float32[2,3]", "int32[]"]


def test_missing_files_prove_damage_and_a_failing_disk_does_not(tmp_path):
    gone = FileNotFoundError(2, "No such file or directory")
    assert isinstance(manifests.unreadable(tmp_path, 8, gone), CheckpointDamaged)
    failing = OSError(5, "Input/output error")
    assert isinstance(manifests.unreadable(tmp_path, 8, failing), StorageUnavailable)
