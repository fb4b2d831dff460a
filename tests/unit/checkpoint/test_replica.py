"""A replica of one run: several replicators in turn, and one that was killed."""

from jaxres.checkpoint.replica import Replica
from jaxres.checkpoint.throttle import BandwidthLimit
from jaxres.checkpoint.verify import verify_step
from jaxres.clock import SystemClock
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import fold, read_records


def replicator(source, to):
    clock = SystemClock()
    return Replica(source, to, limit=BandwidthLimit(None, clock=clock), clock=clock)


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
