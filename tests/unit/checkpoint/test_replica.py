"""A replica of one run: several replicators in turn, and one that was killed."""

import json
import os
import shutil
from pathlib import Path

import pytest

from jaxres.checkpoint.read.manifest import MANIFEST, digest_of
from jaxres.checkpoint.read.verify import verify_step
from jaxres.checkpoint.replica import Replica
from jaxres.checkpoint.throttle import BandwidthLimit
from jaxres.clock import SystemClock
from jaxres.faults import ConfigError, Unrestorable
from jaxres.runlog import replica_files
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import FORMAT, RECORDS, Commit, Quarantine, Start, file_name
from jaxres.runlog.run_log import fold, read_records
from jaxres.storage.checksummed_json import canonical_json, decode_checksummed, encode_checksummed


def replicator(source, to):
    clock = SystemClock()
    return Replica(source, to, limit=BandwidthLimit(None, clock=clock), clock=clock)


@pytest.mark.slow
def test_a_replicator_goes_on_after_another_one_of_the_same_run(attempt, tmp_path):
    """Such as the command by hand, beside the replicator of the supervisor."""
    to = RunDir(tmp_path / "replica")
    to.root.mkdir()  # As its run lock does.
    attempt.save(8, 16)
    first = replicator(attempt.run_dir, to)
    assert first.update().step == 16
    attempt.save(24)
    assert replicator(attempt.run_dir, to).update().step == 24
    attempt.save(32)
    assert first.update().step == 32, "it takes the other one for a run"
    assert read_records(to.log) == read_records(attempt.run_dir.log)
    committed = fold(read_records(to.log)).committed
    assert [commit.step for commit in committed] == [24, 32]
    for commit in committed:
        assert verify_step((to.root / commit.path).absolute(), commit).problems == ()


@pytest.mark.parametrize("lost", ["the manifest", "a file", "a part of a file"])
def test_a_step_that_has_lost_files_in_the_replica_is_copied_again(attempt, tmp_path, lost):
    """Its log says that the step is there; the source may be gone before anything reads it."""
    to = RunDir(tmp_path / "replica")
    to.root.mkdir()
    attempt.save(8, 16)
    replicator(attempt.run_dir, to).update()
    commit = fold(read_records(to.log)).newest
    step_dir = (to.root / commit.path).absolute()
    if lost == "the manifest":
        (step_dir / MANIFEST).unlink()
    else:
        found = filter(Path.is_file, (step_dir / "state").rglob("*"))
        largest = max(found, key=lambda path: path.stat().st_size)
        largest.unlink() if lost == "a file" else os.truncate(largest, 100)
    assert verify_step(step_dir, commit).problems
    assert replicator(attempt.run_dir, to).update().copied == [16]
    assert verify_step(step_dir, commit).problems == ()


def test_a_step_that_is_quarantined_in_the_source_keeps_its_bytes_in_the_replica(attempt, tmp_path):
    """It may be valid there, and is evidence where not: only a prune deletes bytes."""
    to = RunDir(tmp_path / "replica")
    to.root.mkdir()
    attempt.save(8, 16)
    replicator(attempt.run_dir, to).update()
    commit = attempt.log.history().newest
    attempt.log.append(Quarantine(step=16, path=commit.path, evidence="a bit was flipped"))
    update = replicator(attempt.run_dir, to).update()
    assert (update.step, update.pruned) == (8, [])
    assert verify_step((to.root / commit.path).absolute(), commit).problems == ()


def test_lines_whose_copy_was_killed_at_any_byte_are_those_of_the_source(attempt, tmp_path):
    """A kill right after the partial line was deleted leaves whole lines, as some cases have."""
    to = RunDir(tmp_path / "replica")
    to.root.mkdir()
    attempt.save(8)
    lines, copied = attempt.run_dir.metrics(1), to.metrics(1)
    lines.parent.mkdir(parents=True, exist_ok=True)
    lines.write_bytes(b'{"step": 7}\n')
    replicator(attempt.run_dir, to).update()
    before = copied.stat().st_size
    lines.write_bytes(b'{"step": 7}\n{"step": 8}\n{"step": 9}\n{"ste')
    whole = b'{"step": 7}\n{"step": 8}\n{"step": 9}\n'
    for size in range(before, len(whole) + 1):
        copied.write_bytes(whole[:size])
        replicator(attempt.run_dir, to).update()
        assert copied.read_bytes() == whole


@pytest.fixture
def to(tmp_path):
    """A replica's folder, as its run lock has made it."""
    (tmp_path / "replica").mkdir()
    return RunDir(tmp_path / "replica")


def test_a_run_that_is_older_than_its_replica_is_not_trained(attempt, to, tmp_path):
    """As after a restore from a backup: the steps in between would be repeated, and diverge."""
    attempt.save(8)
    shutil.copytree(attempt.run_dir.log, tmp_path / "backup")
    attempt.save(16)
    records = read_records(attempt.run_dir.log)
    replica_files.refuse_older_run(attempt.run_dir, to.root, records)  # There is no replica yet.
    replicator(attempt.run_dir, to).update()
    replica_files.refuse_older_run(attempt.run_dir, to.root, records)
    for older in (read_records(tmp_path / "backup"), []):
        with pytest.raises(Unrestorable, match=rf"newer: it has step 16 .*run\.dir={to.root} "):
            replica_files.refuse_older_run(attempt.run_dir, to.root, older)
    replica_files.refuse_older_run(RunDir(tmp_path / "new"), to.root, [])
    (to.root / replica_files.MARKER).write_text("damaged")
    replica_files.refuse_older_run(attempt.run_dir, to.root, [])


OUTSIDE = ("../victim", "checkpoints/../../victim", "{tmp}/victim", "checkpoints//victim", "")
"""Names in the files of a foreign run; joined to a folder they leave it, or are none."""


def planted(attempt, tmp_path):
    """Returns the contents of all files but those of the run and of its replica."""
    own = (attempt.run_dir.root, tmp_path / "replica")
    files = (path for path in tmp_path.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if not any(o in path.parents for o in own)}


def rewritten(path, change):
    """Changes the fields of a file with a checksum, and gives it the right checksum."""
    fields = decode_checksummed(path.read_bytes(), number=FORMAT)
    change(fields)
    path.write_bytes(encode_checksummed(fields))


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize(
    ("kind", "field"),
    [("commit", "path"), ("start", "path"), ("start", "tokenizer"), ("claim", "nonce")],
)
def test_no_name_in_a_record_of_the_log_leads_out_of_a_run(
    attempt, to, tmp_path, kind, field, name
):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / MANIFEST).write_text("kept")
    name = name.format(tmp=tmp_path)
    attempt.log.append(Start(step=0, path=None, dataset="d", computation={}))
    attempt.save(8)
    log = attempt.run_dir.log
    (record,) = [r for r in read_records(log) if RECORDS.tag(type(r.body)) == kind]
    value = f"huggingface:{name}" if field == "tokenizer" else name
    rewritten(log / file_name(record.seq), lambda fields: fields.update({field: value}))
    if value == "huggingface:":
        return  # It has no files.
    before = planted(attempt, tmp_path)
    with pytest.raises(ConfigError, match=rf"{file_name(record.seq)}: not a record .*the name"):
        read_records(log)
    with pytest.raises(ConfigError, match="the name"):
        replicator(attempt.run_dir, to).update()
    assert planted(attempt, tmp_path) == before


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_in_a_manifest_leads_out_of_its_step(attempt, to, tmp_path, name):
    """Its digest in the record is right: all files of the run are foreign."""
    name = name.format(tmp=tmp_path)
    commit = attempt.save(8)
    (tmp_path / "victim").write_text("own")
    manifest = attempt.run_dir.root / commit.path / MANIFEST
    fields = json.loads(manifest.read_bytes())
    fields["files"][name] = fields["files"]["progress.json"]
    manifest.write_bytes(canonical_json(fields))
    (record,) = [r for r in read_records(attempt.run_dir.log) if isinstance(r.body, Commit)]
    digest = digest_of(manifest.read_bytes())
    rewritten(
        attempt.run_dir.log / file_name(record.seq), lambda fields: fields.update(manifest=digest)
    )
    before = planted(attempt, tmp_path)
    damaged = replicator(attempt.run_dir, to).update().damaged
    assert "can't be read (the name" in damaged[8]
    assert planted(attempt, tmp_path) == before


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_in_an_update_of_a_replica_leads_out_of_it(attempt, to, tmp_path, name):
    """A start in the replica finishes what a killed replicator has left."""
    name = name.format(tmp=tmp_path)
    (tmp_path / "victim").mkdir()
    attempt.save(8)
    replicator(attempt.run_dir, to).update()
    update = {"format": replica_files.FORMAT, "manifests": {name: "own"}, "records": {}}
    (to.root / replica_files.UPDATE).write_bytes(encode_checksummed(update))
    before = planted(attempt, tmp_path)
    with pytest.raises(Unrestorable, match=r"can't be read \(the name"):
        replica_files.prepare_start(to)
    assert planted(attempt, tmp_path) == before


def test_a_copied_config_with_a_secret_is_for_its_owner_only(attempt, to):
    """That of an earlier version was copied with the permissions that the umask leaves."""
    attempt.save(8)
    own, copied = attempt.run_dir.config, to.config
    for text, mode in (
        ("model: {args: {n: 1}}\n", 0o644),
        ("model: {args: {api_key: x}}\n", 0o600),
    ):
        own.write_text(text)
        before = os.umask(0o022)
        try:
            replicator(attempt.run_dir, to).update()
            assert (copied.read_text(), copied.stat().st_mode & 0o777) == (text, mode)
        finally:
            os.umask(before)
    copied.chmod(0o644)
    replicator(attempt.run_dir, to).update()
    assert copied.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("name", ["config.yaml", "attempts/0001/metrics.jsonl", "excluded-hosts"])
def test_no_file_that_a_link_of_a_given_run_leads_to_is_copied(attempt, to, tmp_path, name):
    attempt.save(8)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret").write_text("secret: hunter2\n")
    path = attempt.run_dir.root / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(elsewhere if name == "excluded-hosts" else elsewhere / "secret")
    with pytest.raises(ConfigError, match=rf"{name}.*is, through a link, .*not copied"):
        replicator(attempt.run_dir, to).update()
    copied = [file.read_bytes() for file in to.root.rglob("*") if file.is_file()]
    assert not any(b"hunter2" in data for data in copied)
