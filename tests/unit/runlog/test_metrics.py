import dataclasses
import json
import math
import struct

import numpy as np
import pytest

from jaxres.runlog import run_log
from jaxres.runlog.metrics import MetricsLine, MetricsLog, read_history, surviving_metrics
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Record, Start
from tests.unit.runlog.example_records import CLAIM

LINE = MetricsLine(
    seq=2,
    step=1,
    attempt=1,
    loss=0.1,
    grad_norm=1 / 3,
    learning_rate=1e-300,
    tokens=1536,
    step_seconds=0.25,
    skipped=False,
    samples="00ff",
)


def lines(seq, steps, *, loss=1.0):
    return [dataclasses.replace(LINE, seq=seq, step=step, loss=loss) for step in steps]


def log_of(*bodies):
    return run_log.fold([Record(seq, 1, 0.0, body) for seq, body in enumerate(bodies, start=1)])


def claim(attempt):
    return dataclasses.replace(CLAIM, attempt=attempt)


def start(step):
    path = f"checkpoints/{step}" if step else None
    return Start(step=step, path=path, dataset="d", computation={})


def commit(step):
    return Commit(step=step, path="", manifest="", bytes=0)


def steps_and_segments(found):
    return [(line.step, line.seq) for line in found]


def written(run_dir, *found, attempt=1):
    with MetricsLog(run_dir.metrics(attempt)) as log:
        for line in found:
            log.append(line)
        log.sync()


@pytest.mark.slow
def test_floats_read_back_bit_for_bit(tmp_path):
    run_dir, random = RunDir(tmp_path), np.random.default_rng(0)
    doubles = np.frombuffer(random.bytes(8 * 2000), "<f8")
    singles = [x for x in np.frombuffer(random.bytes(4 * 2000), "<f4") if np.isfinite(x)]
    floats = [x for x in map(float, [*doubles, *singles, 5e-324, -0.0]) if math.isfinite(x)]
    assert len(floats) > 3000
    many = [dataclasses.replace(LINE, step=step, loss=x) for step, x in enumerate(floats, start=1)]
    written(run_dir, *many)
    found = read_history(run_dir, log_of(claim(1), start(0)))
    assert [struct.pack("<d", line.loss) for line in found] == [
        struct.pack("<d", x) for x in floats
    ]


def test_a_line_reads_back_as_it_was_written(tmp_path):
    written(RunDir(tmp_path), LINE)
    assert read_history(RunDir(tmp_path), log_of(claim(1), start(0))) == [LINE]


def test_lines_that_wait_are_those_of_their_own_steps(tmp_path):
    run_dir, appended = RunDir(tmp_path), lines(2, range(1, 30))
    with MetricsLog(run_dir.metrics(1)) as log:
        with log._lines._changed:  # The thread that formats them waits.
            for line in appended:
                log.append(line)
        log.flush()
        assert read_history(run_dir, log_of(claim(1), start(0))) == appended


def test_a_number_that_is_not_finite_is_null(tmp_path):
    bad = dataclasses.replace(LINE, loss=math.nan, grad_norm=math.inf, learning_rate=-math.inf)
    written(RunDir(tmp_path), bad)
    (found,) = read_history(RunDir(tmp_path), log_of(claim(1), start(0)))
    assert (found.loss, found.grad_norm, found.learning_rate) == (None, None, None)
    json.loads(RunDir(tmp_path).metrics(1).read_text(), parse_constant=lambda constant: 1 / 0)


def test_partial_line_of_a_killed_process_is_skipped_and_no_other_is_lost(tmp_path):
    run_dir = RunDir(tmp_path)
    written(run_dir, *lines(2, [1, 2]))
    path = run_dir.metrics(1)
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        written(run_dir, *lines(2, [3]))
        found = read_history(run_dir, log_of(claim(1), start(0)))
        assert [line.step for line in found] == [1, 3], whole[:cut]


def test_lines_above_the_restored_step_are_dropped_at_the_next_start():
    line = log_of(claim(1), start(0), commit(8), claim(2), start(8))
    found = surviving_metrics(line, lines(2, range(1, 12)) + lines(5, [9, 10]))
    assert steps_and_segments(found) == [(s, 2) for s in range(1, 9)] + [(9, 5), (10, 5)]


def test_lines_above_the_last_commit_are_valid_until_the_next_start():
    line = log_of(claim(1), start(0), commit(8), claim(2))
    found = surviving_metrics(line, lines(2, range(1, 12)))
    assert [m.step for m in found] == list(range(1, 12))


def test_start_at_step_0_discards_the_earlier_history():
    line = log_of(claim(1), start(0), claim(2), start(0))
    found = surviving_metrics(line, lines(2, range(1, 6)) + lines(4, [1, 2]))
    assert steps_and_segments(found) == [(1, 4), (2, 4)]


def test_history_follows_many_starts_each_at_its_own_step():
    line = log_of(
        *(claim(1), start(0), commit(4), commit(8)),
        *(claim(2), start(8), commit(12)),
        *(claim(3), start(12)),
    )
    metrics = lines(2, range(1, 11)) + lines(6, range(9, 16)) + lines(9, [13])
    assert steps_and_segments(surviving_metrics(line, metrics)) == [
        *((s, 2) for s in range(1, 9)),
        *((s, 6) for s in range(9, 13)),
        (13, 9),
    ]


def test_lines_of_an_unknown_segment_are_ignored():
    assert surviving_metrics(log_of(claim(1), start(0)), lines(7, [1])) == []


def test_history_is_read_from_the_folders_of_all_attempts(tmp_path):
    run_dir = RunDir(tmp_path)
    written(run_dir, *lines(2, range(1, 7)), attempt=1)
    written(run_dir, *lines(6, [5]), attempt=3)
    line = log_of(claim(1), start(0), commit(4), claim(2), claim(3), start(4))
    assert steps_and_segments(read_history(run_dir, line)) == [
        *((s, 2) for s in range(1, 5)),
        (5, 6),
    ]
