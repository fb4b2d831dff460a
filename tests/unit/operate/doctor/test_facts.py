"""Facts for the checklist of `jaxres doctor`: file systems, restarts, places of buckets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.checks.bucket_setup import Location
from jaxres.operate.doctor import facts as checklist_facts
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, RunLog
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from tests.unit.runlog.example_records import CLAIM

TINY = Path(__file__).parents[4] / "tests" / "promises" / "tiny.yaml"


def load(*, replica: str | None = None) -> RunConfig:
    given = [] if replica is None else [f"checkpoint.replica.path={replica}"]
    return configs.load(TINY, given).config


def test_the_file_system_of_a_path_is_that_of_its_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"a / ext4 rw 0 0\nb {tmp_path}/x nfs4 rw 0 0\nc {tmp_path} xfs rw 0 0\nodd\n"
    )
    (tmp_path / "x").mkdir()
    (tmp_path / "xy").mkdir()
    assert checklist_facts.file_system_of(tmp_path / "x" / "run", mounts) == "nfs4"
    assert checklist_facts.file_system_of(tmp_path / "xy" / "run", mounts) == "xfs"
    assert checklist_facts.file_system_of(Path("/proc"), mounts) == "ext4"
    assert checklist_facts.file_system_of(tmp_path, tmp_path / "none") is None


def attempts(run_dir: RunDir, *ends: AttemptEnded, slots: tuple[int, ...] | None = None) -> str:
    """Evidence of a restart in a log with attempts that have these ends, and one without."""
    records: list[run_log.Record] = []
    for number, end in enumerate([*ends, None], start=1):
        claim = dataclasses.replace(CLAIM, attempt=number, slots=slots)
        log = RunLog.claim(run_dir.log, claim, after=records, clock=SystemClock())
        if end is not None:
            log.append(end)
        records = run_log.read_records(run_dir.log)
    return checklist_facts._restarted_by(run_dir)


def test_a_restart_is_an_attempt_of_a_launcher_or_after_a_failure(tmp_path: Path) -> None:
    failed = AttemptEnded(exit=80, reason="hung", committed=False)
    stopped = AttemptEnded(exit=ExitCode.STOPPED, reason="Ctrl-C", committed=True)
    runs = (RunDir(tmp_path / name) for name in "abcd")
    assert checklist_facts._restarted_by(next(runs)) == ""
    assert attempts(next(runs), stopped) == "", "a person has started it again"
    assert attempts(next(runs), failed) == "attempt 2 followed one that had failed"
    assert attempts(next(runs), slots=(0,)) == "attempt 1 has a launcher that restarts it"


def test_the_regions_of_two_buckets_are_asked_for(gcs_server: GcsServer, gcs_bucket: str) -> None:
    other = f"{gcs_bucket}-other"
    gcs_server.objects.buckets[other] = []
    where = {"location": "EUROPE-WEST4", "locationType": "region"}
    gcs_server.objects.facts |= {gcs_bucket: where | {"location": "US-CENTRAL1"}, other: where}
    run_dir = RunDir(GcsPath(gcs_bucket, "run"))
    config = load(replica=f"gs://{other}/run")
    assert checklist_facts._bucket_places(config, run_dir) == {
        gcs_bucket: Location("us-central1", "region"),
        other: Location("europe-west4", "region"),
    }
    assert checklist_facts._bucket_places(load(), run_dir) == {}
    gone = load(replica=f"gs://{gcs_bucket}-gone/run")
    assert checklist_facts._bucket_places(gone, run_dir)[f"{gcs_bucket}-gone"] is None
