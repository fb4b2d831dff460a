"""Names of step directories, and complete steps that the log does not record."""

import dataclasses
import json

import pytest

from jaxres.faults import Unrestorable
from jaxres.runlog import step_dirs
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Dropped, Record
from jaxres.runlog.run_log import Commit, RunHistory, fold
from jaxres.runlog.step_dirs import StepDir, step_name
from tests.unit.runlog.example_records import CLAIM


def make(run_dir, name, *, size=4):
    """Makes a step directory; its manifest records that its one file has `size` bytes."""
    (run_dir.checkpoints / name).mkdir(parents=True)
    (run_dir.checkpoints / name / "data").write_bytes(b"1234")
    manifest = json.dumps({"files": {"data": {"size": size}}})
    (run_dir.checkpoints / name / "MANIFEST.json").write_text(manifest)


def found(*names):
    return [step_dirs.parse_name(name) for name in names]


def test_names_contain_step_and_attempt_and_sort_by_step():
    assert step_name(12, attempt=3) == "00000012-0003"
    assert step_name(123456789, attempt=12345) == "123456789-12345"


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("00000012-0003", (12, 3)),
        ("00000012-0003-2", (12, 3)),
        ("123456789-12345", (123456789, 12345)),
        ("00000012-0003.orbax-checkpoint-tmp", (12, 3)),
        ("00000012-0003.orbax-checkpoint-tmp-17", (12, 3)),
        ("00000012-0003.backup", None),
        ("00000012-0003.orbax-checkpoint-tmp.backup", None),
        ("00000012", None),
        ("12-3", None),
        ("00000012-0003 ", None),
        ("00000012-0003\n", None),
    ],
)
def test_only_names_that_a_save_produces_are_step_directories(name, parsed):
    assert step_dirs.parse_name(name) == (parsed and StepDir(name, *parsed))


def test_a_step_is_complete_if_all_files_of_its_manifest_are_there(tmp_path):
    run_dir = RunDir(tmp_path)
    make(run_dir, "00000008-0001")
    make(run_dir, "00000016-0001", size=5)
    make(run_dir, "00000024-0001")
    (run_dir.checkpoints / "00000024-0001" / "MANIFEST.json").unlink()
    make(run_dir, "00000032-0001")
    (run_dir.checkpoints / "00000032-0001" / "MANIFEST.json").write_text("{damaged")
    complete = step_dirs.unrecorded(run_dir, RunHistory())
    assert complete == found("00000008-0001", "00000032-0001"), "who knows what the last one was?"


@pytest.mark.parametrize(
    ("attempts", "complete", "unexplained"),
    [
        (1, [], []),
        (1, ["00000008-0001"], []),  # A save that was killed before its record.
        (2, ["00000008-0001", "00000016-0002"], []),  # One such save in each attempt.
        (2, ["00000008-0001", "00000016-0001"], ["00000008-0001", "00000016-0001"]),
        (1, ["00000008-0001", "00000016-0002"], ["00000016-0002"]),  # A later attempt's.
        (0, ["00000008-0001"], ["00000008-0001"]),
    ],
)
def test_killed_saves_explain_one_complete_step_of_each_known_attempt(
    attempts, complete, unexplained
):
    claims = tuple(dataclasses.replace(CLAIM, attempt=n + 1) for n in range(attempts))
    history = RunHistory(claims=claims)
    assert step_dirs.unexplained(history, found(*complete)) == found(*unexplained)


def test_the_error_names_the_steps_the_log_and_the_remedy(tmp_path):
    run_dir = RunDir(tmp_path)
    for step in range(8):
        make(run_dir, step_name(step, attempt=1))
    with pytest.raises(Unrestorable) as caught:
        step_dirs.require_complete_log(run_dir, RunHistory())
    assert "00000000-0001, 00000001-0001" in str(caught.value)
    assert "and 3 more" in str(caught.value)
    assert f"{run_dir.log} is empty or missing" in str(caught.value)
    assert f"jaxres checkpoints adopt {run_dir.root}" in str(caught.value)


def require_same_log(run_dir, records):
    step_dirs.require_same_log(run_dir, fold(records), records)


def test_a_log_is_compared_with_its_copy_in_the_newest_committed_step(tmp_path):
    run_dir = RunDir(tmp_path)
    commit = Commit(step=8, path="checkpoints/00000008-0001", manifest="sha256:0", bytes=1)
    records = [Record(1, 1, 0.0, CLAIM), Record(2, 1, 1.0, commit)]
    require_same_log(run_dir, records)  # An earlier version has saved no copy.
    path = run_dir.root / commit.path / step_dirs.LOG_COPY
    path.parent.mkdir(parents=True)
    path.write_bytes(records[0].encode() + b"\n")
    require_same_log(run_dir, records)
    other = Record(1, 1, 0.0, dataclasses.replace(CLAIM, nonce="of another copy"))
    with pytest.raises(Unrestorable, match=r"log/00000001\.json: is not the record that step 8"):
        require_same_log(run_dir, [other, records[1]])
    require_same_log(run_dir, [Record(1, 1, 0.0, Dropped()), records[1]])
    path.write_bytes(b"{damaged\n")
    require_same_log(run_dir, [other, records[1]])  # The restore finds the damage.
