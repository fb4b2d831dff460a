"""Plans of `checkpoints adopt`: which records are written, kept and moved aside; its attempt."""

import dataclasses

import pytest

from jaxres.cli.checkpoints.adopt import Candidate, _commit_of, _newest_attempt, plan_rebuild
from jaxres.clock import SystemClock
from jaxres.faults import ConfigError
from jaxres.runlog import run_log, step_dirs
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import DROPPED
from jaxres.runlog.run_log import AttemptEnded, Commit, Prune, Record, RunLog, file_name
from tests.unit.checkpoint.llama_run import config, random_params, run_of
from tests.unit.runlog.example_records import CLAIM

BODIES = [
    CLAIM,
    Commit(step=8, path="checkpoints/00000008-0001", manifest="sha256:0", bytes=4),
    Commit(step=16, path="checkpoints/00000016-0001", manifest="sha256:1", bytes=4),
]
STEP = Commit(step=24, path="checkpoints/00000024-0001", manifest="sha256:2", bytes=4)


def encoded(bodies, *, first=1):
    records = [Record(seq, 1, 0.0, body) for seq, body in enumerate(bodies, first)]
    return [record.encode() for record in records]


def log_of(*bodies):
    return {file_name(n): data for n, data in enumerate(encoded(bodies), 1)}


COPY = Candidate(step_dirs.parse_name("00000024-0001"), dict(enumerate(encoded(BODIES), 1)))
WHOLE = log_of(*BODIES)


def test_an_empty_log_gets_every_record_of_the_copy_and_the_step():
    plan = plan_rebuild({}, COPY, STEP)
    assert plan.write == WHOLE
    assert plan.commit == STEP
    assert not plan.move_aside


def test_an_older_log_gets_the_records_that_it_lacks():
    plan = plan_rebuild(log_of(*BODIES[:2]), COPY, STEP)
    assert list(plan.write) == [file_name(3)]
    assert plan.num_records == 3


def test_a_damaged_record_is_moved_aside_and_written_again():
    plan = plan_rebuild({**WHOLE, file_name(2): b"{damaged"}, COPY, STEP)
    assert plan.move_aside == (file_name(2),)
    assert plan.write == {file_name(2): WHOLE[file_name(2)]}


def test_records_that_follow_those_of_the_copy_are_kept():
    log = log_of(*BODIES, STEP, Prune(steps=(8,)))
    plan = plan_rebuild({k: v for k, v in log.items() if k != file_name(1)}, COPY, STEP)
    assert list(plan.write) == [file_name(1)]
    assert plan.num_records == 5
    assert plan.commit is None, "the log records the step already"


def test_records_after_a_gap_and_other_files_are_moved_aside():
    late = encoded([AttemptEnded(exit=0, reason="", committed=True)], first=5)[0]
    plan = plan_rebuild({**WHOLE, file_name(5): late, "notes.txt": b"mine"}, COPY, STEP)
    assert plan.move_aside == (file_name(5), "notes.txt")
    assert not plan.write


def test_a_log_of_another_run_is_refused():
    other = log_of(dataclasses.replace(CLAIM, nonce="other"))
    with pytest.raises(ConfigError, match="belong to different runs"):
        plan_rebuild(other, COPY, STEP)


def test_a_log_is_rebuilt_from_a_copy_without_all_records():
    """A long log is copied without what decides nothing; each place is taken all the same."""
    data = encoded(BODIES)
    copy = Candidate(COPY.found, {1: data[0], 3: data[2]})
    stored = {file_name(2): b"{damaged"}
    plan = plan_rebuild(stored, copy, STEP)
    assert plan.write == {**WHOLE, file_name(2): DROPPED}
    assert plan.move_aside == (file_name(2),)
    assert plan.num_records == 3
    kept = plan_rebuild({file_name(2): data[1]}, copy, STEP)
    assert file_name(2) not in kept.write, "a record that is there stays"


@pytest.mark.parametrize("left", ["a record", "a folder", "a step"])
def test_the_number_of_a_lost_attempt_is_never_used_again(tmp_path, left):
    """Its processes may still run: only a larger number fences them, and its folder has its files.

    Attempt 7 is known by one trace only.
    """
    run_dir = RunDir(tmp_path / "run")
    RunLog.claim(run_dir.log, CLAIM, after=[], clock=SystemClock())
    run_dir.attempt(3).mkdir(parents=True)
    (run_dir.checkpoints / "00000016-0002").mkdir(parents=True)
    if left == "a record":
        records = run_log.read_records(run_dir.log)
        claim = dataclasses.replace(CLAIM, attempt=7)
        RunLog.claim(run_dir.log, claim, after=records, clock=SystemClock())
    elif left == "a folder":
        run_dir.attempt(7).mkdir()
    else:
        (run_dir.checkpoints / "00000024-0007").mkdir()
    assert _newest_attempt(run_dir) == 7


@pytest.mark.slow
def test_the_size_of_a_step_is_that_of_the_files_of_its_manifest(tmp_path):
    """Not of what lies beside them, such as a copy that a user has made there."""
    run_dir = run_of(tmp_path / "run", config(), random_params(config().model))
    (commit,) = run_log.fold(run_log.read_records(run_dir.log)).committed
    (run_dir.root / commit.path / "copy").write_bytes(bytes(10**6))
    (found,) = step_dirs.listed(run_dir.checkpoints)
    adopted = _commit_of(run_dir, found)
    assert (adopted.bytes, adopted.manifest) == (commit.bytes, commit.manifest)
