"""Hosts with a door each: they meet and train, or every one of them says why not, naming the host.

Nothing of JAX is imported before the hosts have met, so that these ends are sure and fast.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from jaxres.faults import Exit
from tests.promises.trainer import FAULTY, Place, Trainer, free_address, line, trajectory

SOON = "hosts.join_seconds=4"
JOIN_SECONDS = 4
SPARE_SECONDS = 10
"""What a start takes on a busy machine, and what a host that failed waits for the others."""


def ended_soon(trainers: list[Trainer], since: float) -> list[int]:
    """Returns the codes; all ends must come within the limit that the config has."""
    codes = [trainer.ended() for trainer in trainers]
    assert time.monotonic() - since < 3 * (JOIN_SECONDS + SPARE_SECONDS)
    return codes


def all_say(trainers: list[Trainer], exit: Exit, *words: str) -> None:
    """Every host ends alike, in one message with these words."""
    since = time.monotonic()
    for trainer in trainers:
        trainer.refused(exit, *words)
    assert time.monotonic() - since < 3 * (JOIN_SECONDS + SPARE_SECONDS)


def test_hosts_with_a_door_each_train_together(place: Place) -> None:
    trainers = place.doors("doors", hosts=2, config=FAULTY)
    assert [trainer.ended() for trainer in trainers] == [0, 0], [t.said() for t in trainers]
    place.launched("launched", hosts=2, config=FAULTY)
    doors, launched = place.run_dir("doors"), place.run_dir("launched")
    assert trajectory(doors) == trajectory(launched)
    assert line(doors).claims[0].num_hosts == 2


def test_a_lead_that_does_not_come_is_named(place: Place) -> None:
    at = free_address()
    alone = place.door("run", SOON, host=1, hosts=2, at=at, config=FAULTY)
    all_say([alone], Exit.PEER_LOST, f"host 0 at {at} did not answer within 4 s")


def test_a_follower_that_does_not_come_is_named(place: Place) -> None:
    at = free_address()
    two = [place.door("run", SOON, host=h, hosts=3, at=at, config=FAULTY) for h in (0, 1)]
    all_say(two, Exit.PEER_LOST, "host 2 of 3 did not come")
    assert line(place.run_dir("run")).attempt == 0, "nothing was claimed"


def test_another_count_of_hosts_is_named(place: Place) -> None:
    at = free_address()
    counts = {0: 2, 1: 3}
    two = [
        place.door("run", SOON, host=h, hosts=n, at=at, config=FAULTY) for h, n in counts.items()
    ]
    all_say(two, Exit.CONFIG, "host 1", "3")


def test_another_trajectory_on_one_host_is_named(place: Place) -> None:
    at = free_address()
    two = [
        place.door("run", SOON, f"run.seed={7 * h}", host=h, hosts=2, at=at, config=FAULTY)
        for h in (0, 1)
    ]
    all_say(two, Exit.CONFIG, "host 1", "run.seed")


def test_other_library_versions_on_one_host_are_named(place: Place, tmp_path: Path) -> None:
    info = tmp_path / "older" / "optax-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 0.0.1\n")
    at = free_address()
    envs: list[dict[str, str]] = [{}, {"PYTHONPATH": str(info.parent)}]
    two = [
        place.door("run", SOON, host=h, hosts=2, at=at, config=FAULTY, env=env)
        for h, env in enumerate(envs)
    ]
    all_say(two, Exit.CONFIG, "host 1", "optax", "0.0.1")


def test_a_run_directory_that_is_not_shared_is_named(place: Place) -> None:
    at = free_address()
    two = [
        place.door(name, SOON, host=h, hosts=2, at=at, config=FAULTY)
        for h, name in enumerate(("here", "there"))
    ]
    all_say(two, Exit.CONFIG, "host 1", "not shared by all hosts")


def test_a_port_that_is_taken_is_named(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        lead = place.door("run", SOON, host=0, hosts=2, at=at, config=FAULTY)
        follower = place.door("run", SOON, host=1, hosts=2, at=at, config=FAULTY)
        all_say([lead], Exit.CONFIG, at)
        all_say([follower], Exit.PEER_LOST, "host 0")


def test_a_host_that_comes_twice_is_refused_and_the_job_goes_on(place: Place) -> None:
    at = free_address()
    words = ("hosts.join_seconds=60",)
    first = place.door("run", *words, host=1, hosts=2, at=at, config=FAULTY)
    lead = place.door("run", *words, host=0, hosts=2, at=at, config=FAULTY)
    lead.attempt = first.attempt = 1
    lead.wait_phase("import")
    late = place.door("run", *words, host=1, hosts=2, at=at, config=FAULTY)
    late.refused(Exit.FENCED, "host 1", f"pid {first.process.pid}")
    assert [lead.ended(), first.ended()] == [0, 0], lead.said() + first.said()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("mesh.fsdp=3",), ("mesh", "2 device")),
        (("train.global_batch_size=5",), ("global_batch_size=5", "feasible")),
    ],
)
def test_what_no_mesh_can_do_is_one_error_on_every_host(
    place: Place, overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    two = place.doors("run", *overrides, hosts=2, config=FAULTY)
    since = time.monotonic()
    for trainer in two:
        trainer.refused(Exit.CONFIG, *words)
    assert time.monotonic() - since < 60
    launched = place.launch("launched", *overrides, hosts=2, config=FAULTY)
    launched.refused(Exit.CONFIG, *words)
