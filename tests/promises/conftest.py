"""Fixtures: a folder for each test's runs, and shared caches of corpora and compiled steps."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from jaxres_emulators.gcs import GcsServer
from tests.promises.cloud import Cloud
from tests.promises.trainer import FAULTY, LOOP, MLP, NNX, Workspace
from tests.sharing import made_once
from tests.tiers import campaign_but


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared = os.environ.get(
        "JAXRES_TEST_CACHES"
    )  # Shared by many short test runs, such as those of the mutants.
    if shared:
        return Path(shared)
    return tmp_path_factory.getbasetemp() / "caches"


@pytest.fixture
def workspace(tmp_path: Path, caches: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path, caches)
    yield workspace
    workspace.end_all()


@pytest.fixture
def bucket(
    tmp_path: Path,
    caches: Path,
    gcs_bucket: str,
    gcs_server: GcsServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Workspace]:
    """A workspace in a bucket that accepts one write per second of a name."""
    monkeypatch.setenv("HOME", str(tmp_path))  # Such a run stores some files there.
    monkeypatch.setattr(gcs_server.objects, "refuses_too_often", True)
    workspace = Workspace(tmp_path, caches, bucket=GcsPath(gcs_bucket, "runs"))
    yield workspace
    workspace.end_all()


@pytest.fixture(params=campaign_but(["local", "bucket"], "local"))
def any_workspace(request: pytest.FixtureRequest) -> Workspace:
    """A workspace on a disk, and one in a bucket."""
    return request.getfixturevalue({"local": "workspace"}.get(request.param, request.param))


Make = Callable[[Workspace, str], object]


@pytest.fixture(scope="session")
def shared_run(
    tmp_path_factory: pytest.TempPathFactory, caches: Path
) -> Callable[[str, Make], RunDir]:
    """Returns a run that all test processes share; the first test that uses it creates it."""

    def run_dir(name: str, make: Make) -> RunDir:
        root = made_once(tmp_path_factory, name, lambda root: make(Workspace(root, caches), name))
        return Workspace(root, caches).run_dir(name)

    return run_dir


@pytest.fixture(scope="session")
def unbroken(shared_run: Callable[[str, Make], RunDir]) -> RunDir:
    """A run of the MLP from start to end; read or copy it, do not change it."""
    return shared_run("unbroken", lambda workspace, name: workspace.finish(name, *MLP))


@pytest.fixture(scope="session")
def tiny(shared_run: Callable[[str, Make], RunDir]) -> RunDir:
    """A run of the TINY decoder from start to end; read or copy it, do not change it."""
    return shared_run("tiny", lambda workspace, name: workspace.finish(name))


@pytest.fixture(scope="session")
def killed(shared_run: Callable[[str, Make], RunDir]) -> RunDir:
    """The run of the MLP, killed between its first commits and its end; copy it before use."""

    def make(workspace: Workspace, name: str) -> None:
        trainer = workspace.start(name, *MLP, held_after=70)
        trainer.wait_commit(60)
        trainer.wait_compiled_steps_stored()
        trainer.kill()
        assert trainer.wait_exit() == -9, trainer.printed()

    return shared_run("killed", make)


@pytest.fixture(scope="session")
def fault_free(shared_run: Callable[[str, Make], RunDir]) -> RunDir:
    """A FAULTY run without faults; read it, do not change it."""
    return shared_run("fault-free", lambda workspace, name: workspace.finish(name, config=FAULTY))


@pytest.fixture(scope="session")
def fault_free_pair(shared_run: Callable[[str, Make], RunDir]) -> RunDir:
    """A FAULTY run on two hosts without faults; read it, do not change it."""
    return shared_run(
        "fault-free-pair", lambda workspace, name: workspace.launched(name, hosts=2, config=FAULTY)
    )


@pytest.fixture(scope="session")
def unbroken_loop(shared_run: Callable[[str, Make], RunDir]) -> RunDir:
    """A LOOP from start to end on one host; read it, do not change it."""
    return shared_run("loop", lambda workspace, name: workspace.finish(name, config=LOOP))


@pytest.fixture(scope="session")
def unbroken_nnx(shared_run: Callable[[str, Make], RunDir]) -> RunDir:
    """The example NNX from start to end; read it, do not change it."""
    return shared_run("nnx", lambda workspace, name: workspace.finish(name, config=NNX))


@pytest.fixture
def cloud(tmp_path: Path, caches: Path, gcs_server: GcsServer, gcs_bucket: str) -> Iterator[Cloud]:
    """A cloud with processes as VMs and a separate bucket."""
    where = {"location": "US-CENTRAL1", "locationType": "region"}
    gcs_server.objects.facts[gcs_bucket] = where
    env = {"PYTHONUNBUFFERED": "1", "JAXRES_PLATFORM": "cpu", **gcs_server.env}
    with GceEmulator(speed=10, env=env) as gce:
        run = GcsPath(gcs_bucket, "run")
        cloud = Cloud(gce, gcs_server, run, tmp_path, caches, {**gcs_server.env, **gce.env})
        try:
            yield cloud
        finally:
            cloud.end_all()
        assert gce.bugs == [], gce.bugs[0]
    assert gce.pids() == []


@pytest.fixture
def simulated_cloud(
    tmp_path: Path, caches: Path, gcs_server: GcsServer, gcs_bucket: str
) -> Iterator[Cloud]:
    """A cloud whose VMs have no processes: no attempt ever starts."""
    gcs_server.objects.facts[gcs_bucket] = {"location": "US-CENTRAL1", "locationType": "region"}
    with GceEmulator(speed=30, is_simulated=True) as gce:
        run = GcsPath(gcs_bucket, "run")
        cloud = Cloud(gce, gcs_server, run, tmp_path, caches, {**gcs_server.env, **gce.env})
        try:
            yield cloud
        finally:
            cloud.end_all()
        assert gce.bugs == [], gce.bugs[0]
