"""One place for each test's runs; the caches of corpora and compiled steps are shared by all."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxres.runlog.paths import RunDir
from jaxres.storage.path import BucketPath
from tests.emulators.gce import GceEmulator
from tests.emulators.gcs import GcsServer
from tests.promises.cloud import Cloud
from tests.promises.trainer import FAULTY, MLP, Place


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared = os.environ.get("JAXRES_TEST_CACHES")  # Of many runs of a few tests, as the mutants'.
    if shared:
        return Path(shared)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("caches")
    return tmp_path_factory.getbasetemp().parent / "caches"


@pytest.fixture
def place(tmp_path: Path, caches: Path) -> Iterator[Place]:
    place = Place(tmp_path, caches)
    yield place
    place.end_all()


@pytest.fixture
def bucket(
    tmp_path: Path,
    caches: Path,
    gcs_bucket: str,
    gcs_server: GcsServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    """A place whose run directories are in a bucket that takes one write a second of a name."""
    monkeypatch.setenv("HOME", str(tmp_path))  # Some of such a run lies there.
    monkeypatch.setattr(gcs_server.objects, "refuses_too_often", True)
    place = Place(tmp_path, caches, bucket=BucketPath(gcs_bucket, "runs"))
    yield place
    place.end_all()


@pytest.fixture(params=["local", "bucket"])
def anywhere(request: pytest.FixtureRequest) -> Place:
    """A place on a disk, and one in a bucket."""
    return request.getfixturevalue({"local": "place"}.get(request.param, request.param))


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """A run of the MLP from start to end; only to be looked at, or copied."""
    place = Place(tmp_path_factory.mktemp("unbroken"), caches)
    place.finish("unbroken", *MLP)
    return place.run_dir("unbroken")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """A run of the TINY decoder from start to end; only to be looked at, or copied."""
    place = Place(tmp_path_factory.mktemp("tiny"), caches)
    place.finish("tiny")
    return place.run_dir("tiny")


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """The same run, killed between its first commits and its end; only to be copied."""
    place = Place(tmp_path_factory.mktemp("killed"), caches)
    trainer = place.start("killed", *MLP)
    trainer.wait_commit(60)
    trainer.wait_kept()
    trainer.kill()
    assert trainer.ended() == -9, trainer.said()
    return trainer.run_dir


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """A FAULTY run in which nothing went wrong; only to be looked at."""
    place = Place(tmp_path_factory.mktemp("calm"), caches)
    place.finish("calm", config=FAULTY)
    return place.run_dir("calm")


@pytest.fixture(scope="session")
def calm_pair(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> RunDir:
    """A FAULTY run on two hosts in which nothing went wrong; only to be looked at."""
    place = Place(tmp_path_factory.mktemp("calm"), caches)
    place.launched("calm", hosts=2, config=FAULTY)
    return place.run_dir("calm")


@pytest.fixture
def cloud(tmp_path: Path, caches: Path, gcs_server: GcsServer, gcs_bucket: str) -> Iterator[Cloud]:
    """VMs that are processes, and a bucket of the test's own."""
    where = {"location": "US-CENTRAL1", "locationType": "region"}
    gcs_server.objects.facts[gcs_bucket] = where
    env = {"PYTHONUNBUFFERED": "1", **gcs_server.env}
    with GceEmulator(speed=10, env=env) as gce:
        run = BucketPath(gcs_bucket, "run")
        cloud = Cloud(gce, gcs_server, run, tmp_path, caches, {**gcs_server.env, **gce.env})
        try:
            yield cloud
        finally:
            cloud.end_all()
        assert gce.bugs == [], gce.bugs[0]
    assert gce.pids() == []
