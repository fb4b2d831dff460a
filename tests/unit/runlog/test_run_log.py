import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from jaxres.data import positions_at
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Fenced, StorageUnavailable, Unrestorable
from jaxres.runlog import run_log
from jaxres.runlog.records import RECORDS, Branch, Rollback, Skip, Start, SupervisorEnded
from jaxres.runlog.run_log import AttemptEnded, Commit, HostFault, Prune, Quarantine, Record, RunLog
from jaxres.storage import files
from jaxres.storage.checksummed_json import canonical_json, encode_checksummed
from jaxres.storage.local_store import LocalStore
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS

GOLDEN = Path(__file__).parents[2] / "golden" / "log" / "plain"


@dataclasses.dataclass
class StoppedClock:
    now: float = 0.0

    def wall(self):
        return self.now

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


COMMIT = Commit(step=8, path="checkpoints/x", manifest="sha256:0", bytes=3)
BODIES = [
    CLAIM,
    dataclasses.replace(CLAIM, slots=(0, 2)),
    Start(step=8, path="checkpoints/x", dataset="d", computation={"mesh": "data=1"}),
    Start(step=0, path=None, dataset="d", computation={}, looks_back_steps=0),
    COMMIT,
    Skip(rows=((0, 24), (48, 72)), reason='a "spike" — ü'),
    Rollback(
        onset=23,
        target=20,
        rows=((528, 600),),
        reason="high losses",
        rate_factor=0.5,
        rate_steps=9,
    ),
    Prune(steps=(1, 2)),
    Quarantine(step=3, path="checkpoints/y", evidence="w has another digest"),
    Branch(path="gs://bucket/run", step=8, manifest="sha256:0", dataset="d", tokenizer="bytes"),
    AttemptEnded(exit=74, reason="disk\nfull", committed=False),
    HostFault(host="node17", reason="Xid 79", slot=1, instance="123", physical_host="/a/b/c"),
    HostFault(host="node17", reason="Xid 79"),
    AttemptEnded(exit=137, reason="killed", committed=False, culprit=1),
    SupervisorEnded(exit=84, reason="5 attempts"),
]


def claimed(folder, *, attempt=1, nonce="n"):
    claim = dataclasses.replace(CLAIM, attempt=attempt, nonce=nonce)
    return RunLog.claim(
        folder, claim, after=run_log.read_records(folder), clock=StoppedClock(attempt)
    )


def record(seq, body, *, attempt=1):
    return Record(seq, attempt, 0.5, body)


def folded(*bodies):
    return run_log.fold([record(seq, body) for seq, body in enumerate(bodies, start=1)])


def test_value_has_one_canonical_text():
    text = canonical_json({"b": [1.5, None, True], "a": "é"})
    assert text == '{"a":"é","b":[1.5,null,true]}'.encode()
    assert canonical_json({"a": "é", "b": (1.5, None, True)}) == text


def test_log_that_is_being_deleted_is_storage_unavailable(tmp_path):
    folder = tmp_path / "log"
    log = claimed(folder)
    log.append(COMMIT)
    (folder / "00000001.json").unlink()
    with pytest.raises(StorageUnavailable, match="2 records existed, 1 are left"):
        log.history()
    with pytest.raises(StorageUnavailable, match="the claim of attempt 1 is missing"):
        run_log.claim_of([], attempt=1, folder=folder)


def test_log_that_disappears_while_it_is_read_is_storage_unavailable(tmp_path, monkeypatch):
    folder = tmp_path / "log"
    log, lists = claimed(folder), files.list_names

    def list_and_lose(path, **after):
        return lists(path.rename(tmp_path / "away"), **after)

    with monkeypatch.context() as losing:
        losing.setattr(files, "list_names", list_and_lose)
        with pytest.raises(StorageUnavailable, match="existed a moment ago"):
            log.history()
    with pytest.raises(StorageUnavailable, match="1 records existed, 0 are left"):
        log.history()
    (tmp_path / "away").rename(folder)
    assert log.history().attempt == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_that_json_cannot_represent_is_refused(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": value})


def test_rollback_removes_later_commits_and_rows_from_the_history():
    commits = [dataclasses.replace(COMMIT, step=step) for step in (10, 20, 24)]
    back = Rollback(onset=23, target=20, rows=((528, 600),), reason="")
    history = folded(CLAIM, *commits, back)
    assert [commit.step for commit in history.committed] == [10, 20]
    assert history.skips == ((528, 600),)
    again = dataclasses.replace(COMMIT, step=24, path="checkpoints/other")
    assert folded(CLAIM, *commits, back, again).newest == again, (
        "commits after the rollback are valid"
    )


def test_rollback_over_skipped_rows_is_merged_into_one_range():
    old = Rollback(onset=23, target=20, rows=((528, 600),), reason="")
    wider = dataclasses.replace(old, onset=22, rows=((504, 700),))
    history = folded(CLAIM, Skip(rows=((510, 511), (800, 801)), reason=""), old, wider)
    assert history.skips == ((504, 700), (800, 801))
    assert history.num_skips == 1
    assert positions_at(500, 6, skips=history.skips).tolist() == [500, 501, 502, 503, 700, 701]


def test_a_branch_keeps_the_lower_rates_of_rollbacks_before_its_step():
    rollback = Rollback(onset=23, target=20, rows=(), reason="", rate_factor=0.5, rate_steps=4)
    origin = folded(CLAIM, rollback, dataclasses.replace(rollback, onset=25, rate_factor=0.25))
    assert origin.lower_rates(before_seq=2) == []
    assert origin.lower_rates(before_seq=3) == [(23, 0.5, 4)]
    rates = tuple(origin.lower_rates())
    begun = Branch(path="o", step=24, manifest="m", dataset="d", lower_rates=rates)
    again = folded(CLAIM, begun)
    assert [again.rate_factor(step) for step in (22, 23, 25, 27, 29)] == [1, 0.5, 0.125, 0.25, 1]
    assert again.lower_rates() == list(rates), "a branch of a branch has them too"


def test_rollbacks_lower_the_rate_from_their_onset_and_overlapping_ones_multiply():
    first = Rollback(onset=23, target=20, rows=(), reason="", rate_factor=0.5, rate_steps=4)
    history = folded(CLAIM, first, dataclasses.replace(first, onset=25, rate_factor=0.25))
    found = {step: history.rate_factor(step) for step in range(22, 30)}
    assert found == {22: 1, 23: 0.5, 24: 0.5, 25: 0.125, 26: 0.125, 27: 0.25, 28: 0.25, 29: 1}
    plain = Rollback(onset=23, target=20, rows=(), reason="")
    assert folded(CLAIM, plain).rate_factor(23) == 1
    assert b"rate" not in record(3, plain).encode(), "default values are not written"


def test_commit_is_known_good_once_no_rollback_can_reach_it():
    commits = [dataclasses.replace(COMMIT, step=step) for step in (10, 20, 30)]
    start = Start(step=0, path=None, dataset="d", computation={})
    assert folded(CLAIM, start, *commits).verified_through is None, "unknown"
    wide, narrow = (dataclasses.replace(start, looks_back_steps=n) for n in (25, 8))
    assert folded(CLAIM, wide, *commits[:2]).verified_through == 0
    assert folded(CLAIM, wide, *commits).verified_through == 5
    assert folded(CLAIM, narrow, *commits).verified_through == 22
    assert folded(CLAIM, wide, *commits[:2], narrow, commits[2]).verified_through == 22
    back = Rollback(onset=29, target=20, rows=(), reason="")
    assert folded(CLAIM, narrow, *commits, back).verified_through == 12, (
        "only valid commits are considered"
    )


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_record_reads_back_as_it_was_written(body):
    written = record(3, body)
    found = Record.decode(written.encode(), path=Path("00000003.json"))
    assert found == written
    assert found.encode() == written.encode()


def test_every_kind_of_record_is_tested():
    assert {type(body) for body in BODIES} == set(RECORDS.kinds.values())


GOOD = json.loads(record(1, COMMIT).encode())
FIELDS = {name: value for name, value in GOOD.items() if name != "digest"}


def read_one(tmp_path, data):
    (tmp_path / "00000001.json").write_bytes(data)
    return run_log.read_records(tmp_path)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b'{"seq":1', "Expecting"),
        (b"\xff\xfeA", "truncated data"),
        (b"[]", "not an object"),
        (b"3", "not an object"),
        (json.dumps(GOOD | {"step": 7}).encode(), "its digest does not match"),
        (json.dumps(GOOD | {"color": 3}).encode(), "its digest does not match"),
        (json.dumps(GOOD | {"digest": "00"}).encode(), "its digest does not match"),
    ],
)
def test_damaged_record_is_refused_by_name_and_the_run_does_not_start_again(tmp_path, data, why):
    with pytest.raises(Unrestorable) as caught:
        read_one(tmp_path, data)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / '00000001.json'}: this record of the run's log is damaged")
    assert why in text
    assert "does not start again from step 0. Restore the file from a copy" in text


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({**FIELDS, "kind": "color"}, "color"),
        ({**FIELDS, "color": 3}, "color"),
        ({k: v for k, v in FIELDS.items() if k != "path"}, "path"),
        ({k: v for k, v in FIELDS.items() if k != "time"}, "time"),
        ({**FIELDS, "seq": 2}, "its number is 2"),
    ],
)
def test_unreadable_record_is_refused_by_name(tmp_path, fields, why):
    with pytest.raises(ConfigError) as caught:
        read_one(tmp_path, encode_checksummed(fields))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / '00000001.json'}: not a record that this version")
    assert why in text
    assert text.endswith("Nothing was changed.")


@pytest.mark.slow
def test_no_flipped_bit_of_a_record_is_accepted(tmp_path):
    """Each flipped bit is refused, or does not change the record."""
    data = record(1, COMMIT).encode()
    refused = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            (found,) = read_one(tmp_path, bytes(flipped))
        except (Unrestorable, ConfigError):
            refused += 1
        else:
            assert found == record(1, COMMIT), bit
    assert refused > 7 * len(data)


OLDER = {name: value for name, value in FIELDS.items() if name != "format"}


@pytest.mark.parametrize(
    ("data", "format", "writer"),
    [
        (canonical_json(OLDER), 1, r"a jaxres before 0\.1\.0"),
        (encode_checksummed(OLDER), 1, r"a jaxres before 0\.1\.0"),
        (encode_checksummed(FIELDS | {"format": 3, "color": 1}), 3, "a newer version of jaxres"),
    ],
)
def test_record_of_another_format_is_refused_and_its_writer_is_named(
    tmp_path, data, format, writer
):
    wanted = rf"00000001\.json: .* format {format}, written by {writer}; .* format 2 only"
    with pytest.raises(ConfigError, match=wanted):
        read_one(tmp_path, data)


def test_record_without_a_digest_is_damaged(tmp_path):
    with pytest.raises(Unrestorable, match="it has no digest"):
        read_one(tmp_path, canonical_json(FIELDS))


@pytest.mark.parametrize("lost", ["00000001.json", "00000004.json"])
def test_gap_in_the_log_is_an_error(tmp_path, lost):
    for path in GOLDEN.iterdir():
        if path.name != lost:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=f"expected record {lost} here"):
        run_log.read_records(tmp_path)


def test_unknown_file_in_the_log_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"notes\.txt: expected record 00000001\.json"):
        run_log.read_records(tmp_path)


def test_missing_folder_is_an_empty_log(tmp_path):
    assert run_log.read_records(tmp_path / "log") == []
    history = run_log.fold([])
    assert (history.attempt, history.step, history.newest, history.dataset) == (0, 0, None, None)


def test_golden_log_gives_the_same_history():
    records = run_log.read_records(GOLDEN)
    assert [r.encode() for r in records] == [p.read_bytes() for p in sorted(GOLDEN.iterdir())]
    history = run_log.fold(records)
    assert history.attempt == 2
    assert [claim.pid for claim in history.claims] == [101, 102]
    assert [(r.seq, run_log.start_of(r).step) for r in history.starts] == [(2, 0), (5, 8)]
    assert [(r.seq, r.attempt) for r in history.commits] == [(7, 2), (8, 2)]
    assert [commit.path for commit in history.committed] == [
        "checkpoints/00000016-0002",
        "checkpoints/00000024-0002",
    ]
    assert history.newest == Commit(
        step=24,
        path="checkpoints/00000024-0002",
        manifest="sha256:18",
        bytes=1024,
    )
    assert history.step == 24
    assert history.skips == ((24, 48), (96, 120))
    assert history.dataset == "d1"
    assert history.last_stop is not None
    assert history.last_stop.body == AttemptEnded(
        exit=0, reason="the last step is committed", committed=True
    )


def test_pruned_steps_are_removed_and_the_others_are_ascending():
    commits = [dataclasses.replace(COMMIT, step=step) for step in (30, 10, 20)]
    history = folded(CLAIM, *commits, Prune(steps=(20,)))
    assert [commit.step for commit in history.committed] == [10, 30]
    assert folded(CLAIM, *commits, Prune(steps=(10, 20, 30))).newest is None


def test_quarantined_step_is_excluded_and_a_later_save_of_it_is_valid():
    commits = [dataclasses.replace(COMMIT, step=step, path=f"p{step}") for step in (10, 20)]
    gone = Quarantine(step=20, path="p20", evidence="w has another digest")
    history = folded(CLAIM, *commits, gone)
    assert [commit.step for commit in history.committed] == [10]
    ((commit, decided),) = history.quarantined
    assert (commit.body, decided) == (commits[1], gone)
    again = dataclasses.replace(COMMIT, step=20, path="p20-2")
    history = folded(CLAIM, *commits, gone, again, gone)
    assert [commit.path for commit in history.committed] == ["p10", "p20-2"]
    assert history.paths == {"p10", "p20", "p20-2"}


def test_records_are_numbered_and_folded_in_order(tmp_path):
    log = claimed(tmp_path)
    assert [log.append(body).seq for body in BODIES[1:]] == list(range(2, len(BODIES) + 1))
    records = run_log.read_records(tmp_path)
    assert [r.body for r in records] == BODIES
    assert {r.attempt for r in records} == {1}
    assert log.history() == run_log.fold(records)


def test_older_attempt_is_fenced_and_writes_nothing(tmp_path):
    old = claimed(tmp_path)
    old.append(COMMIT)
    new = claimed(tmp_path, attempt=2)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for _ in range(2):
        with pytest.raises(Fenced, match=r"attempt 2 \(host node-a, pid 7\) owns this run") as end:
            old.append(COMMIT)
        assert end.value.exit_code == ExitCode.FENCED
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert new.append(COMMIT).seq == 4


def test_late_record_of_the_attempt_before_fences_no_claim(tmp_path):
    old = claimed(tmp_path)
    read = run_log.read_records(tmp_path)
    old.append(COMMIT)
    claim = dataclasses.replace(CLAIM, attempt=2)
    new = RunLog.claim(tmp_path, claim, after=read, clock=StoppedClock())
    assert (new.last_seq, new.history().newest) == (3, COMMIT), "it precedes the claim"
    with pytest.raises(Fenced):
        old.append(COMMIT)
    assert new.append(COMMIT).seq == 4


def test_worker_that_starts_after_a_newer_claim_is_fenced(tmp_path):
    """Its supervisor has claimed attempt 1; it reads the log only after the claim of attempt 2."""
    claimed(tmp_path)
    new = claimed(tmp_path, attempt=2)
    new.append(COMMIT)
    read = run_log.read_records(tmp_path)
    old = RunLog.of_attempt(tmp_path, read, attempt=1, clock=StoppedClock())
    with pytest.raises(Fenced, match=r"attempt 2 .* owns this run"):
        old.append(Prune(steps=(8,)))
    assert run_log.read_records(tmp_path) == read


LATE = [
    dataclasses.replace(COMMIT, step=16, path="checkpoints/late"),
    Start(step=0, path=None, dataset="other", computation={}),
    Rollback(onset=3, target=0, rows=((0, 9),), reason="late"),
    Skip(rows=((0, 9),), reason="late"),
    Prune(steps=(8,)),
    Quarantine(step=8, path="checkpoints/x", evidence="late"),
    AttemptEnded(exit=81, reason="late", committed=False),
]


@pytest.mark.parametrize("late", LATE, ids=lambda body: type(body).__name__)
def test_record_of_an_older_attempt_after_a_newer_claim_is_ignored(tmp_path, late):
    old = claimed(tmp_path)
    old.append(COMMIT)
    new = claimed(tmp_path, attempt=2)
    before = new.history()
    files.create(tmp_path / "00000004.json", record(4, late).encode())
    paths = before.paths | ({late.path} if isinstance(late, Commit) else set())
    assert new.history() == dataclasses.replace(before, paths=paths), "a name is never used again"
    assert new.append(COMMIT).seq == 5, "it fences nothing"
    with pytest.raises(Fenced):
        old.append(COMMIT)


def test_second_claim_is_fenced(tmp_path):
    first = dataclasses.replace(CLAIM, nonce="first")
    RunLog.claim(tmp_path, first, after=[], clock=StoppedClock())
    with pytest.raises(Fenced):
        RunLog.claim(tmp_path, CLAIM, after=[], clock=StoppedClock())
    assert [r.body for r in run_log.read_records(tmp_path)] == [first]


def test_claim_deletes_temporaries_of_killed_writers(tmp_path):
    log = claimed(tmp_path)
    for name in (".00000001.json.aaaaaaaaaaaa.tmp", ".00000002.json.aaaaaaaaaaaa.tmp"):
        (tmp_path / name).touch()
    log.append(COMMIT)
    claimed(tmp_path, attempt=2)
    assert sorted(os.listdir(tmp_path)) == [f"0000000{seq}.json" for seq in (1, 2, 3)]


def test_writer_is_not_fenced_by_its_own_unconfirmed_record(tmp_path, monkeypatch):
    log = claimed(tmp_path)
    with monkeypatch.context() as failing:

        def sync_dir(self, folder):
            raise OSError(5, "Input/output error")

        failing.setattr(LocalStore, "sync_dir", sync_dir)
        with pytest.raises(StorageUnavailable):
            log.append(COMMIT)
    stop = AttemptEnded(exit=74, reason="storage", committed=False)
    assert log.append(stop).seq == 3
    assert [r.body for r in run_log.read_records(tmp_path)] == [CLAIM, COMMIT, stop]


def test_record_that_was_never_written_leaves_no_gap(tmp_path, monkeypatch):
    log = claimed(tmp_path)
    with monkeypatch.context() as failing:

        def fsync(descriptor):
            raise OSError(28, "No space left on device")

        failing.setattr(os, "fsync", fsync)
        with pytest.raises(StorageUnavailable):
            log.append(COMMIT)
    assert log.append(COMMIT).seq == 2


def race(folder, *, writer, rounds, barrier, won):
    """Claims attempt after attempt together with the other writers; collects its own attempts."""
    for number in range(1, rounds + 1):
        barrier.wait(timeout=SURE_SECONDS)
        after = [record(seq, CLAIM) for seq in range(1, number)]
        claim = dataclasses.replace(CLAIM, attempt=number, nonce=str(writer))
        try:
            RunLog.claim(folder, claim, after=after, clock=StoppedClock())
        except Fenced:
            continue
        won.append(number)


def assert_linear(folder, won, *, rounds):
    """Compares the attempts that each writer has won with the log."""
    claims = run_log.fold(run_log.read_records(folder)).claims
    assert [claim.attempt for claim in claims] == list(range(1, rounds + 1))
    for writer, attempts in won.items():
        assert attempts == [c.attempt for c in claims if c.nonce == str(writer)]
    assert sum(map(len, won.values())) == rounds


@pytest.mark.slow
def test_exactly_one_of_several_threads_wins_each_of_many_races(tmp_path):
    rounds, won = 800, {writer: [] for writer in range(3)}
    barrier = threading.Barrier(len(won))
    threads = [
        threading.Thread(
            target=race,
            args=(tmp_path,),
            kwargs={"writer": w, "rounds": rounds, "barrier": barrier, "won": won[w]},
        )
        for w in won
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_linear(tmp_path, won, rounds=rounds)


def race_in_process(folder, writer, rounds, barrier, queue):
    won = []
    race(folder, writer=writer, rounds=rounds, barrier=barrier, won=won)
    queue.put((writer, won))


@pytest.mark.slow
def test_exactly_one_of_several_processes_wins_each_of_many_races(tmp_path):
    rounds, context = 60, multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=race_in_process, args=(tmp_path, writer, rounds, barrier, queue))
        for writer in range(2)
    ]
    [process.start() for process in processes]
    won = dict(queue.get(timeout=SURE_SECONDS) for _ in processes)
    for process in processes:
        process.join()
    assert_linear(tmp_path, won, rounds=rounds)


def test_threads_of_one_attempt_append_in_one_order(tmp_path):
    log = claimed(tmp_path)

    def append():
        for _ in range(50):
            log.append(COMMIT)

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(run_log.read_records(tmp_path)) == 201


def test_supervisor_and_worker_of_one_attempt_append_until_the_next_claim(tmp_path):
    """Each skips the records of the other; the next claim fences both."""
    claimed(tmp_path)
    writers = [RunLog(tmp_path, attempt=1, last_seq=1, clock=StoppedClock()) for _ in range(2)]
    counts, fenced, barrier = [0, 0], [], threading.Barrier(3)

    def append(number):
        barrier.wait()
        try:
            for counts[number] in itertools.count():
                writers[number].append(COMMIT)
                time.sleep(0.001)  # Else the claim might never come first.
        except Fenced:
            fenced.append(number)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(2)]
    [thread.start() for thread in threads]
    barrier.wait()
    successor, is_heir = dataclasses.replace(CLAIM, attempt=2), False
    while not is_heir:
        read = [record(1, CLAIM)] * len(files.list_names(tmp_path))
        with contextlib.suppress(Fenced):
            RunLog.claim(tmp_path, successor, after=read, clock=StoppedClock())
            is_heir = True
    for thread in threads:
        thread.join()
    records = run_log.read_records(tmp_path)
    assert [record.attempt for record in records] == [1] * (len(records) - 1) + [2]
    assert sorted(fenced) == [0, 1]
    assert sum(counts) == len(records) - 2


def test_initial_weights_of_a_run_are_in_its_history():
    init = {"params": "sha256:0", "path": "x", "step": "8"}
    starts = [
        Record(1, 1, 0.0, Start(step=0, path=None, dataset="d", computation={}, init=init)),
        Record(2, 2, 0.0, Start(step=8, path="y", dataset="d", computation={})),
    ]
    for record in starts:
        path = Path(f"{record.seq:08d}.json")
        assert Record.decode(record.encode(), path=path) == record
    assert b"init" not in starts[1].encode(), "default values are not written"
    assert run_log.fold(starts).init == init
    assert run_log.fold(starts[1:]).init is None
