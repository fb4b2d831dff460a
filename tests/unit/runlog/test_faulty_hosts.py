"""Tests of which hosts are known to be faulty, from the records of a run log."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres.cluster.host_identity import HostIdentity
from jaxres.faults import ConfigError
from jaxres.runlog import faulty_hosts
from jaxres.runlog.faulty_hosts import FaultyHost, matching
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, Body, Claim, HostFault, Record
from jaxres.storage import files
from jaxres.storage.checksummed_json import encode_checksummed


def claim(attempt: int) -> Claim:
    return Claim(
        attempt=attempt,
        host="a",
        pid=1,
        boot_id="",
        nonce=f"nonce{attempt}",
        coordinator=None,
        num_hosts=2,
        threads=1,
        versions={},
        fingerprint={},
        trajectory="",
    )


def records(*bodies: tuple[int, Body], times: dict[int, float] | None = None) -> list[Record]:
    """Returns the records of these attempts; the time of each is its number unless given."""
    return [
        Record(seq, attempt, (times or {}).get(seq, float(seq)), body)
        for seq, (attempt, body) in enumerate(bodies, start=1)
    ]


def fault(host: str = "b", **fields: object) -> HostFault:
    return HostFault(host=host, reason="Xid 79", **fields)  # type: ignore[arg-type]


def names(found: tuple[FaultyHost, ...]) -> list[tuple[str, int]]:
    return [(host.name, host.count) for host in found]


def test_the_same_fault_twice_is_one_host_and_its_first_time_is_kept_by_the_order_of_records():
    log = records(
        *((1, claim(1)), (1, fault()), (1, AttemptEnded(exit=82, reason="", committed=False))),
        *((2, claim(2)), (2, fault("c")), (3, claim(3)), (3, fault())),
        times={2: 5000.0, 7: 10.0},  # The clock has jumped back.
    )
    found = faulty_hosts.faulty_hosts(log)
    assert names(found) == [("b", 2), ("c", 1)]
    assert (found[0].since, found[0].attempt, found[0].nonces) == (5000.0, 3, ("nonce1", "nonce3"))


def test_a_fault_that_is_recorded_twice_in_an_attempt_counts_once():
    found = faulty_hosts.faulty_hosts(records((1, claim(1)), (1, fault()), (1, fault())))
    assert names(found) == [("b", 1)]


def test_a_fault_recorded_by_a_fenced_process_does_not_count():
    late = records((1, claim(1)), (2, claim(2)), (1, fault()))
    assert faulty_hosts.faulty_hosts(late) == ()
    in_time = records((1, claim(1)), (1, fault()), (2, claim(2)))
    assert names(faulty_hosts.faulty_hosts(in_time)) == [("b", 1)]


def test_a_fault_after_the_forgotten_ones_counts_again():
    log = records((1, claim(1)), (1, fault()), (2, claim(2)), (2, fault()))
    assert faulty_hosts.faulty_hosts(log, forgotten=["nonce1", "nonce2"]) == ()
    found = faulty_hosts.faulty_hosts(log, forgotten=["nonce1"])
    assert [(host.count, host.attempt) for host in found] == [(1, 2)]


def test_a_host_that_is_repaired_takes_no_other_host_of_the_same_attempt_with_it(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    log = records((1, claim(1)), (1, fault("b")), (1, fault("c")), (2, claim(2)), (2, fault("b")))
    found = faulty_hosts.read(run_dir, log)
    assert names(found) == [("b", 2), ("c", 1)]
    faulty_hosts.forget(run_dir, found[0])
    assert names(faulty_hosts.read(run_dir, log)) == [("c", 1)], "c was not repaired"
    faulty_hosts.forget(run_dir, found[1])
    assert faulty_hosts.read(run_dir, log) == ()


def test_an_exclusion_that_can_not_be_understood_excludes_no_host(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    faulty_hosts.exclude(run_dir, "b", slot=None, reason="slow", now=1.0)
    for name, fields in {"later": {"rack": "r7", "time": 2.0}, "odd": {"time": True}}.items():
        data = encode_checksummed({"format": 1, **fields})
        files.create(run_dir.excluded_hosts / name, data)
    told = list[str]()
    assert names(faulty_hosts.read(run_dir, [], warn=told.append)) == [("b", 0)]
    paths = [line.partition(": ")[0] for line in told]
    assert paths == [str(run_dir.excluded_hosts / name) for name in ("later", "odd")]
    with pytest.raises(ConfigError, match="later: can't be understood"):
        faulty_hosts.read(run_dir, [])


def test_a_machine_is_known_by_its_name_or_its_physical_host():
    vm = fault("vm-3", instance="17", physical_host="/block/sub/host")
    found = faulty_hosts.faulty_hosts(records((1, claim(1)), (1, vm), (1, fault("node", slot=1))))
    known = {
        HostIdentity("vm-3", "17"): True,
        HostIdentity("vm-3"): True,
        HostIdentity("vm-3", "18"): False,  # A new VM of the same name.
        HostIdentity("vm-4", "19", "/block/sub/host"): True,
        HostIdentity("vm-4", "19", "/block/sub/other"): False,
        HostIdentity("vm-4"): False,
        HostIdentity("node"): True,
        HostIdentity(): False,
    }
    assert {identity: bool(matching(found, identity)) for identity in known} == known
    assert [host.name for host in matching(found, HostIdentity("node"))] == ["node:1"]


def test_forgotten_faults_are_files_named_after_claims_and_others_are_ignored(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    log = records((1, claim(1)), (1, fault()))
    files.make_dir(run_dir.forgotten_faults)
    (tmp_path / "forgotten-faults" / "README").write_text("anything")
    (host,) = faulty_hosts.read(run_dir, log)
    assert str(host) == "b (failed once since 1970-01-01 00:00 UTC; in attempt 1: Xid 79)"
    faulty_hosts.forget(run_dir, host)
    faulty_hosts.forget(run_dir, host)
    assert faulty_hosts.read(run_dir, log) == ()


def test_a_fault_that_only_its_host_has_reported_counts_and_one_that_is_recorded_too_counts_once(
    tmp_path: Path,
):
    run_dir, log = RunDir(tmp_path), records((1, claim(1)), (1, fault("b")), (2, claim(2)))
    for host, name in ((1, "b"), (2, "c")):
        faulty_hosts.report(run_dir, fault(name), claim=claim(1), host=host, now=9.0)
    faulty_hosts.report(run_dir, fault("d"), claim=claim(7), host=1, now=9.0)
    told = list[str]()
    files.create(run_dir.reported_faults / "nonce1-3", b"{}")
    found = faulty_hosts.read(run_dir, log, warn=told.append)
    assert names(found) == [("b", 1), ("c", 1)], "another run's report, or a damaged one, counts"
    assert (found[1].attempt, found[1].since, found[1].reason) == (1, 9.0, "Xid 79")
    faulty_hosts.forget(run_dir, found[0])
    assert names(faulty_hosts.read(run_dir, log, warn=told.append)) == [("c", 1)]
    faulty_hosts.forget(run_dir, found[1])
    assert faulty_hosts.read(run_dir, log, warn=told.append) == ()
    faulty_hosts.report(run_dir, fault("c"), claim=claim(2), host=2, now=10.0)
    assert names(faulty_hosts.read(run_dir, log, warn=told.append)) == [("c", 1)], (
        "a fault after it counts again"
    )
