"""Hosts with a supervisor each complete the rendezvous, or all name the host that prevents it.

JAX is imported only after the rendezvous, so these exits are reliable and fast.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from tests.promises.trainer import (
    FAULTY,
    TrainingProcess,
    Workspace,
    free_address,
    run_history,
    trajectory,
)

SOON = "hosts.join_seconds=4"
LATER = "hosts.join_seconds=20"
"""For hosts that must meet before: a slow machine starts them in that time."""
PATIENT = "hosts.join_seconds=1200"
"""No test waits for so long: an error ends the wait."""
SECRET = {"JAXRES_SECRET": "0123456789abcdef0123456789abcdef"}


def assert_all_exit(trainers: list[TrainingProcess], exit: ExitCode, *texts: str) -> None:
    """Asserts that every host exits with this code and one message with these texts."""
    for trainer in trainers:
        trainer.assert_fails(exit, *texts)


@pytest.mark.campaign
def test_hosts_with_a_supervisor_each_train_together(workspace: Workspace) -> None:
    trainers = workspace.start_hosts("supervisors", hosts=2, config=FAULTY)
    assert [trainer.wait_exit() for trainer in trainers] == [0, 0], [t.printed() for t in trainers]
    workspace.launched("launched", hosts=2, config=FAULTY)
    supervisors, launched = workspace.run_dir("supervisors"), workspace.run_dir("launched")
    assert trajectory(supervisors) == trajectory(launched)
    assert run_history(supervisors).claims[0].num_hosts == 2


@pytest.mark.slow
def test_a_missing_host_0_is_named(workspace: Workspace) -> None:
    at = free_address()
    alone = workspace.start_host("run", SOON, host=1, hosts=2, at=at, config=FAULTY)
    assert_all_exit([alone], ExitCode.PEER_LOST, f"host 0 at {at} did not answer within 4 s")


@pytest.mark.slow
def test_a_missing_follower_is_named(workspace: Workspace) -> None:
    at = free_address()
    two = [
        workspace.start_host("run", LATER, host=h, hosts=3, at=at, config=FAULTY) for h in (0, 1)
    ]
    assert_all_exit(two, ExitCode.PEER_LOST, "host 2 of 3 did not connect")
    assert run_history(workspace.run_dir("run")).attempt == 0, "nothing was claimed"


def test_a_different_number_of_hosts_is_named(workspace: Workspace) -> None:
    at = free_address()
    counts = {0: 2, 1: 3}
    two = [
        workspace.start_host("run", PATIENT, host=h, hosts=n, at=at, config=FAULTY)
        for h, n in counts.items()
    ]
    assert_all_exit(two, ExitCode.CONFIG, "host 1", "3")


@pytest.mark.slow
def test_another_trajectory_on_one_host_is_named(workspace: Workspace) -> None:
    at = free_address()
    two = [
        workspace.start_host(
            "run", PATIENT, f"run.seed={7 * h}", host=h, hosts=2, at=at, config=FAULTY
        )
        for h in (0, 1)
    ]
    assert_all_exit(two, ExitCode.CONFIG, "host 1", "run.seed")


@pytest.mark.slow
def test_other_library_versions_on_one_host_are_named(workspace: Workspace, tmp_path: Path) -> None:
    info = tmp_path / "older" / "optax-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 0.0.1\n")
    at = free_address()
    envs: list[dict[str, str]] = [{}, {"PYTHONPATH": str(info.parent)}]
    two = [
        workspace.start_host("run", PATIENT, host=h, hosts=2, at=at, config=FAULTY, env=env)
        for h, env in enumerate(envs)
    ]
    assert_all_exit(two, ExitCode.CONFIG, "host 1", "optax", "0.0.1")


@pytest.mark.slow
def test_an_unshared_run_directory_is_named(workspace: Workspace) -> None:
    at = free_address()
    lead, follower = [
        workspace.start_host(name, LATER, host=h, hosts=2, at=at, config=FAULTY)
        for h, name in enumerate(("here", "there"))
    ]
    secrets = [str(workspace.run_dir(name).secret) for name in ("here", "there")]
    assert_all_exit([follower], ExitCode.CONFIG, at, "not shared by all hosts", secrets[1])
    texts = (
        "host 1 of 2 did not connect",
        "different secrets",
        "same shared directory",
        secrets[0],
    )
    assert_all_exit([lead], ExitCode.PEER_LOST, *texts)


def test_an_unshared_run_directory_is_named_if_the_secret_is_given(workspace: Workspace) -> None:
    at = free_address()
    two = [
        workspace.start_host(name, LATER, host=h, hosts=2, at=at, config=FAULTY, env=SECRET)
        for h, name in enumerate(("here", "there"))
    ]
    assert_all_exit(two, ExitCode.CONFIG, "host 1", "not shared by all hosts")
    for name in ("here", "there"):
        assert not workspace.run_dir(name).secret.exists()


def test_a_secret_that_others_can_read_is_rejected(workspace: Workspace) -> None:
    path = workspace.run_dir("run").secret
    path.parent.mkdir()
    path.write_text(64 * "0" + "\n")
    path.chmod(0o644)
    alone = workspace.start_host("run", SOON, host=1, hosts=2, at=free_address(), config=FAULTY)
    assert_all_exit([alone], ExitCode.CONFIG, f"chmod 600 {path}")


@pytest.mark.slow
def test_a_port_in_use_is_named(workspace: Workspace) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        lead = workspace.start_host("run", SOON, host=0, hosts=2, at=at, config=FAULTY)
        follower = workspace.start_host("run", SOON, host=1, hosts=2, at=at, config=FAULTY)
        assert_all_exit([lead], ExitCode.CONFIG, at)
        assert_all_exit([follower], ExitCode.PEER_LOST, "host 0")


@pytest.mark.slow
def test_a_duplicate_host_is_rejected_and_the_job_continues(workspace: Workspace) -> None:
    at = free_address()
    arguments = ("hosts.join_seconds=1200",)
    first = workspace.start_host("run", *arguments, host=1, hosts=2, at=at, config=FAULTY)
    lead = workspace.start_host("run", *arguments, host=0, hosts=2, at=at, config=FAULTY)
    lead.attempt = first.attempt = 1
    lead.wait_phase("import")
    late = workspace.start_host("run", *arguments, host=1, hosts=2, at=at, config=FAULTY)
    late.assert_fails(ExitCode.FENCED, "host 1", f"pid {first.process.pid}")
    assert [lead.wait_exit(), first.wait_exit()] == [0, 0], lead.printed() + first.printed()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (("mesh.fsdp=3",), ("mesh", "2 device")),
        (("train.global_batch_size=5",), ("global_batch_size=5", "feasible")),
    ],
)
def test_an_impossible_mesh_is_one_error_on_every_host(
    workspace: Workspace, overrides: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    two = workspace.start_hosts("run", *overrides, PATIENT, hosts=2, config=FAULTY)
    for trainer in two:
        trainer.assert_fails(ExitCode.CONFIG, *texts)
    launched = workspace.launch("launched", *overrides, hosts=2, config=FAULTY)
    launched.assert_fails(ExitCode.CONFIG, *texts)
