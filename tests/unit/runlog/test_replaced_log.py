"""A process of a run writes no record where another run, or an older copy, was put meanwhile."""

import dataclasses
import shutil

import pytest

from jaxres.clock import SystemClock
from jaxres.faults import Fenced, StorageUnavailable
from jaxres.runlog import run_log
from jaxres.runlog.run_log import Prune, RunLog
from tests.unit.runlog.example_records import CLAIM


def test_a_log_in_whose_place_another_run_or_an_older_copy_was_put_gets_no_record(tmp_path):
    folder, clock = tmp_path / "run" / "log", SystemClock()
    log = RunLog.claim(folder, CLAIM, after=[], clock=clock)
    shutil.copytree(tmp_path / "run", tmp_path / "older")
    end = Prune(steps=(1,))
    log.append(end)
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "older").rename(tmp_path / "run")
    with pytest.raises(StorageUnavailable, match=r"00000002\.json: existed a moment ago"):
        log.append(end)
    assert [path.name for path in folder.iterdir()] == ["00000001.json"]
    shutil.rmtree(tmp_path / "run")
    other = RunLog.claim(folder, dataclasses.replace(CLAIM, nonce="x"), after=[], clock=clock)
    other.append(end)
    reader = RunLog.of_attempt(
        folder, run_log.read_records(tmp_path / "away" / "log"), attempt=1, clock=clock
    )
    for writer in (log, reader):
        with pytest.raises(Fenced, match="another run is in the place of"):
            writer.append(end)
    assert sorted(path.name for path in folder.iterdir()) == ["00000001.json", "00000002.json"]
