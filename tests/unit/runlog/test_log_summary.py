"""Promises of the summary of a run log: it changes no answer, and a read is as short as without."""

import dataclasses
import random
from unittest import mock

import pytest

from jaxres.clock import SystemClock
from jaxres.faults import ConfigError, Fenced, StorageUnavailable
from jaxres.runlog import attempt_history, run_log
from jaxres.runlog.log_summary import LogSummary, summarized
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import DROPPED
from jaxres.runlog.run_log import (
    AttemptEnded,
    Commit,
    Prune,
    Quarantine,
    Record,
    Rollback,
    RunLog,
    Skip,
    Start,
    SupervisorEnded,
    file_name,
    fold,
    read_records,
    read_whole,
)
from jaxres.storage import files
from jaxres.supervisor import restart_policy
from tests.tiers import slow_but
from tests.unit.runlog.example_records import CLAIM

EVERY = 128
"""Records that have a summary in these tests: a quarter of what others have."""


def commit_of(step, attempt):
    return Commit(step=step, path=f"checkpoints/{step:08d}-{attempt:04d}", manifest="m", bytes=1)


def start_at(step):
    return Start(step=step, path=None, dataset="d", computation={}, looks_back_steps=20)


def random_log(chance, length):
    """Returns the log of a run with every kind of record, in an order that a run can have."""
    records, attempt, step = [], 0, 0

    def add(body, by=None):
        records.append(Record(len(records) + 1, by or attempt, float(len(records)), body))

    while len(records) < length:
        if not attempt or chance.random() < 0.04:
            if attempt and chance.random() < 0.5:
                end = AttemptEnded(exit=chance.choice([75, 80, 0]), reason="", committed=True)
                add(end)
                if chance.random() < 0.3:
                    add(SupervisorEnded(exit=end.exit, reason=""))
            attempt += 1
            add(dataclasses.replace(CLAIM, attempt=attempt, nonce=str(attempt)))
            step = fold(records).step
            add(start_at(step))
        history, kind = fold(records), chance.random()
        if kind < 0.5:
            step += chance.randint(1, 5)
            add(commit_of(step, attempt))
        elif kind < 0.8 and len(history.committed) > 2:
            dead = chance.sample(history.committed[:-1], chance.randint(1, 2))
            add(Prune(steps=tuple(commit.step for commit in dead)))
        elif kind < 0.83 and history.committed:
            target = chance.choice(history.committed).step
            add(Rollback(onset=target + 1, target=target, rows=((step, step + 2),), reason=""))
            step = target
        elif kind < 0.86 and history.committed:
            damaged = chance.choice(history.committed)
            add(Quarantine(step=damaged.step, path=damaged.path, evidence=""))
        elif kind < 0.88:
            add(Skip(rows=((step, step + 1),), reason=""))
        elif kind < 0.9 and attempt > 1:
            add(commit_of(step + 1, attempt - 1), by=attempt - 1)  # A late one.
    return records


def answers(records):
    """Returns all that a start, a save and `status` derive from a log, but for old paths."""
    kept = run_log.in_force(records)
    attempts = attempt_history.fold(kept, events={}, finished={}, is_alive=False)
    return (
        dataclasses.replace(fold(records), paths=frozenset()),
        restart_policy.load_history(records),
        restart_policy.is_restart(records),
        attempts,
        run_log.last_seq(records),
    )


@pytest.mark.parametrize("seed", slow_but(range(12), *range(4)))
def test_a_summary_changes_no_answer_whatever_follows(seed):
    records = random_log(random.Random(seed), 150)
    for end in range(1, len(records), 7):
        whole, short = records[:end], summarized(records[:end], present=())
        assert answers(short) == answers(whole), end
        for later in range(end, len(records), 11):
            rest = records[end:later]
            assert answers([*short, *rest]) == answers([*whole, *rest]), (end, later)
            again = summarized([*short, *rest], present=())
            assert again == summarized([*whole, *rest], present=()), (end, later)


def test_a_commit_of_a_pruned_step_stays_while_its_directory_is_there():
    bodies = [CLAIM, start_at(0), *(commit_of(step, 1) for step in (1, 2, 3, 4))]
    records = [Record(n, 1, 0.0, body) for n, body in enumerate([*bodies, Prune(steps=(2,))], 1)]
    assert commit_of(2, 1).path not in fold(summarized(records, present=())).paths
    assert commit_of(2, 1).path in fold(summarized(records, present={"00000002-0001"})).paths


def test_a_summary_is_small_however_many_steps_were_committed_and_pruned():
    records = [Record(1, 1, 0.0, CLAIM), Record(2, 1, 0.0, start_at(0))]
    for step in range(1, 2000):
        records.append(Record(len(records) + 1, 1, 0.0, commit_of(step, 1)))
        if step > 3:
            records.append(Record(len(records) + 1, 1, 0.0, Prune(steps=(step - 3,))))
    assert len(summarized(records, present=())) < 12


def long_log(run_dir, *, saves, attempt=1):
    """Writes the log of a run with many saves, of which three are kept; returns its writer."""
    claim = dataclasses.replace(CLAIM, attempt=attempt)
    records = read_records(run_dir.log)
    log = RunLog.claim(run_dir.log, claim, after=records, clock=SystemClock())
    before = fold(records).step
    log.append(start_at(before))
    for step in range(before + 1, before + 1 + saves):
        log.append(commit_of(step, attempt))
        if step > 3:
            log.append(Prune(steps=(step - 3,)))
        if step % 25 == 0:
            log.history()
    return log


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run directory whose log has short parts and is not made durable, which takes less time."""
    monkeypatch.setattr("os.fsync", lambda number: None)
    monkeypatch.setattr(run_log, "EVERY", EVERY)
    return RunDir(tmp_path / "run")


def reads_of(action):
    """Returns the number of files that an action has read, and of folders that it has listed."""
    read, listed = files.read, files.list_names
    with (
        mock.patch.object(files, "read", side_effect=read) as reads,
        mock.patch.object(files, "list_names", side_effect=listed) as lists,
    ):
        action()
    return reads.call_count, lists.call_count


def test_a_start_and_a_save_read_as_much_after_many_records_as_after_few(run_dir):
    log, counts = long_log(run_dir, saves=75), []
    for attempt in (2, 3, 4):
        log.history()
        start = reads_of(lambda: read_records(run_dir.log))
        save = reads_of(log.history)
        counts.append((start, save, log.last_seq > 125 * (attempt - 1)))
        log = long_log(run_dir, saves=75, attempt=attempt)
    for (starts, lists), saves, is_long in counts:
        assert is_long
        assert starts <= EVERY + 50 + 3, "the records since the summary, and those of one history"
        assert lists == 0, "a folder is not listed"
        assert saves == (2, 0)


def test_a_reader_finds_what_the_whole_log_says(run_dir):
    log = long_log(run_dir, saves=150)
    log.history()
    assert files.read(run_dir.log_summary) is not None
    whole, short = read_whole(run_dir.log), read_records(run_dir.log)
    assert len(short) < len(whole) == log.last_seq
    assert answers(short) == answers(whole)


def damaged(run_dir):
    data = bytearray(run_dir.log_summary.read_bytes())
    data[len(data) // 2] ^= 1
    run_dir.log_summary.write_bytes(data)


def of_another_log(run_dir):
    summary = LogSummary.decode(run_dir.log_summary.read_bytes())
    other = dataclasses.replace(summary.records[-1], time=1.5)
    records = (*summary.records[:-1], other)
    run_dir.log_summary.write_bytes(LogSummary(records).encode())


def empty(run_dir):
    run_dir.log_summary.write_bytes(LogSummary(()).encode())


@pytest.mark.parametrize("change", [damaged, of_another_log, empty])
def test_a_summary_that_is_damaged_or_of_another_log_is_not_used(run_dir, change):
    long_log(run_dir, saves=100).history()
    whole = read_whole(run_dir.log)
    change(run_dir)
    assert read_records(run_dir.log) == whole


def test_a_log_that_ends_before_its_summary_is_no_shorter_run(run_dir):
    """The run directory was restored from an older copy, but for the summary."""
    log = long_log(run_dir, saves=150)
    log.history()
    for number in range(100, log.last_seq + 1):
        (run_dir.log / file_name(number)).unlink()
    assert run_log.last_seq(read_records(run_dir.log)) == 99
    with pytest.raises(StorageUnavailable, match="records existed, 99 are left"):
        log.history()


@pytest.mark.parametrize("lost", [1, 5])
def test_a_missing_record_after_the_summary_is_an_error(run_dir, lost):
    log = long_log(run_dir, saves=150)
    log.history()
    for step in range(151, 161):
        log.append(commit_of(step, 1))
    through = LogSummary.decode(run_dir.log_summary.read_bytes()).through
    for number in range(through + 1, through + 1 + lost):
        (run_dir.log / file_name(number)).unlink()
    with pytest.raises(ConfigError, match=f"expected record {file_name(through + 1)}"):
        read_records(run_dir.log)


def test_no_attempt_is_claimed_in_a_hole_of_the_log(run_dir):
    log = long_log(run_dir, saves=150)
    log.history()
    records = read_records(run_dir.log)
    before = [record for record in records if record.seq < log.last_seq - 1]
    (run_dir.log / file_name(before[-1].seq + 1)).unlink()
    claim = dataclasses.replace(CLAIM, attempt=2)
    with pytest.raises(ConfigError, match="A record is missing"):
        RunLog.claim(run_dir.log, claim, after=before, clock=SystemClock())


def test_the_end_of_an_attempt_is_written_without_a_look_at_each_of_its_records(run_dir):
    """A supervisor has written nothing since its claim; its worker has written thousands."""
    worker = long_log(run_dir, saves=150)
    worker.history()
    records = read_records(run_dir.log)
    supervisor = RunLog.of_attempt(run_dir.log, records, attempt=1, clock=SystemClock())
    with mock.patch.object(files, "create", side_effect=files.create) as creates:
        end = supervisor.append(AttemptEnded(exit=0, reason="", committed=True))
    assert (end.seq, creates.call_count) == (worker.last_seq + 1, 2)


def test_a_superseded_supervisor_is_fenced_by_a_claim_that_the_summary_has(run_dir):
    worker = long_log(run_dir, saves=75)
    records = read_records(run_dir.log)
    supervisor = RunLog.of_attempt(run_dir.log, records, attempt=1, clock=SystemClock())
    long_log(run_dir, saves=75, attempt=2).history()
    for log in (supervisor, worker):
        with pytest.raises(Fenced, match="attempt 2"):
            log.append(AttemptEnded(exit=0, reason="", committed=True))


def test_no_process_of_a_lost_log_finds_a_place_free(run_dir):
    """The log was rebuilt: the places of records that decided nothing are taken."""
    zombie = long_log(run_dir, saves=25)
    for number in range(15, 38):
        place = run_dir.log / file_name(number)
        place.unlink()
        place.write_bytes(DROPPED)
    late = RunLog(run_dir.log, attempt=1, last_seq=20, clock=SystemClock())
    long_log(run_dir, saves=1, attempt=2)
    with pytest.raises(Fenced, match="attempt 2"):
        late.append(commit_of(900, 1))
    with pytest.raises(Fenced, match="attempt 2"):
        zombie.append(commit_of(900, 1))
    numbers = [record.seq for record in read_whole(run_dir.log)]
    assert not set(numbers) & set(range(15, 38))


def test_hosts_agree_on_a_history_that_the_summary_has_passed(run_dir):
    log = long_log(run_dir, saves=75)
    whole, seen = read_whole(run_dir.log), 30
    log.history()
    assert fold(log.records_through(seen)) == fold(whole[:seen])
    assert run_log.last_seq(log.records_through(log.last_seq)) == log.last_seq


@pytest.mark.slow
def test_a_process_that_runs_for_long_keeps_few_records(run_dir):
    reader = run_log.LogReader(run_dir.log)
    log, most = long_log(run_dir, saves=25), 0
    for attempt in range(2, 10):
        log = long_log(run_dir, saves=50, attempt=attempt)
        log.history()
        most = max(most, len(reader.read()))
    assert most < 3 * EVERY + 25
    assert answers(reader.read()) == answers(read_whole(run_dir.log))
