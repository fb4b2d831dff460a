"""Unreadable rows are recorded as skips in the run log, and the run ends as if they had been known
from the start. Damage of a cached corpus is no bad record: the cache is built again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.data import Permutation, open_dataset, sample_ids_at
from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog, Skip
from tests.damage import flip_bit_at
from tests.promises.trainer import (
    FAULTY,
    MLP,
    TINY,
    Workspace,
    assert_bit_exact,
    digest,
    history,
    run_history,
)

ROWS, STEPS = 24, 24
POSITIONS = {100: "raise", 110: "range", 300: "hang"}
"""Positions in the stream: two in the batch of step 5, one in that of step 13."""
OVERRIDES = (
    f"train.steps={STEPS}",
    "evaluation.every_steps=0",
    "data.timeout_seconds=6",
    "deadlines.data_seconds=200",
    "guards.bad_records.max=2",
)


def item(position: int) -> int:
    return int(sample_ids_at(Permutation(1800, seed=0), position, 1)[0][0])


def poison(**others: str) -> dict[str, str]:
    bad = {item(position): what for position, what in POSITIONS.items()} | {
        item(int(position[1:])): what for position, what in others.items()
    }
    return {"POISON": ",".join(f"{index}:{what}" for index, what in bad.items())}


def skipped(run_dir: RunDir) -> list[Skip]:
    bodies = [record.body for record in run_log.read_records(run_dir.log)]
    return [body for body in bodies if isinstance(body, Skip)]


def skipped_from_the_start(run_dir: RunDir) -> None:
    """Writes the skips into the log of a run before it reaches the rows."""
    seq = len(run_log.read_records(run_dir.log))
    log = RunLog(run_dir.log, attempt=1, last_seq=seq, clock=SystemClock())
    rows = tuple((position, position + 1) for position in POSITIONS)
    log.append(Skip(rows=rows, reason="requested by the test"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, caches: Path) -> str:
    workspace = Workspace(tmp_path_factory.mktemp("skips"), caches)
    run_dir = workspace.finish("skips", *OVERRIDES, "train.steps=3", config=FAULTY).run_dir
    skipped_from_the_start(run_dir)
    assert workspace.start("skips", *OVERRIDES, config=FAULTY).wait_exit() == ExitCode.DONE
    assert len(skipped(run_dir)) == 1
    return digest(run_dir)


def assert_left_out(run_dir: RunDir) -> None:
    first, second = skipped(run_dir)
    assert first.rows == ((100, 101), (110, 111))
    assert "ValueError: a broken record" in first.reason
    assert "not in 0..63" in first.reason
    assert second.rows == ((300, 301),)
    assert "can't be read within" in second.reason
    assert [row["step"] for row in history(run_dir)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_records_that_raise_hang_or_are_out_of_range_leave_no_trace(
    workspace: Workspace, expected: str
) -> None:
    trainer = workspace.start("run", *OVERRIDES, config=FAULTY, env=poison())
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    assert_left_out(trainer.run_dir)
    assert digest(trainer.run_dir) == expected
    assert "BAD RECORD: position 100 of the stream:" in trainer.printed()
    starts = [record.body.step for record in run_history(trainer.run_dir).starts]  # type: ignore[union-attr]
    assert starts == [0, 4, 12], "no finished step is lost"


@pytest.mark.slow
def test_killed_when_a_skip_is_recorded_the_run_ends_alike(
    workspace: Workspace, expected: str
) -> None:
    trainer = workspace.start("run", *OVERRIDES, config=FAULTY, env=poison())
    trainer.wait(lambda: bool(skipped(trainer.run_dir)), what="a skip")
    trainer.kill()
    assert trainer.wait_exit() < 0
    again = workspace.start("run", *OVERRIDES, config=FAULTY, env=poison())
    assert again.wait_exit() == ExitCode.DONE, again.printed()
    assert_left_out(again.run_dir)
    assert digest(again.run_dir) == expected


@pytest.mark.slow
def test_a_host_that_finds_bad_records_informs_the_others(workspace: Workspace) -> None:
    """Both hosts skip the rows that one of them found, and end as if they had known them."""
    reported = workspace.launched(
        "reported", *OVERRIDES, "train.steps=3", hosts=2, config=FAULTY
    ).run_dir
    skipped_from_the_start(reported)
    workspace.launched("reported", *OVERRIDES, hosts=2, config=FAULTY)
    trainer = workspace.launched("run", *OVERRIDES, hosts=2, config=FAULTY, env=poison())
    assert_left_out(trainer.run_dir)
    assert digest(trainer.run_dir) == digest(reported)
    for host in (0, 1):
        events = trainer.events_of("bad_records_skipped", host)
        assert [event["rows"] for event in events] == [[[100, 101], [110, 111]], [[300, 301]]]


@pytest.mark.slow
def test_more_bad_records_than_allowed_end_the_run(workspace: Workspace) -> None:
    env = poison(p400="raise")
    trainer = workspace.start("run", *OVERRIDES, config=FAULTY, env=env)
    trainer.assert_fails(
        ExitCode.DIVERGED, "position 400", "2 times already (guards.bad_records.max)"
    )
    assert len(skipped(trainer.run_dir)) == 2


@pytest.mark.slow
def test_a_permanently_bad_record_is_read_and_counted_once(workspace: Workspace) -> None:
    """Three epochs with two batches each, one of which holds the record."""
    arguments = (
        "train.steps=6",
        "train.global_batch_size=900",
        "evaluation.every_steps=0",
        "guards.bad_records.max=1",
    )
    trainer = workspace.start("run", *arguments, config=FAULTY, env=poison_only(item(100)))
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    (found,) = skipped(trainer.run_dir)
    assert found.rows == ((100, 101),)
    assert [row["step"] for row in history(trainer.run_dir)] == list(range(1, 7))
    again = workspace.start(
        "run", *arguments, "train.steps=8", config=FAULTY, env=poison_only(item(100))
    )
    assert again.wait_exit() == ExitCode.DONE, again.printed()
    assert len(skipped(again.run_dir)) == 1


def poison_only(index: int) -> dict[str, str]:
    return {"POISON": f"{index}:raise"}


def damaged_cache(cache: Path) -> Path:
    """Builds the corpus of the config, and flips one bit of it at the same size and time."""
    open_dataset(configs.load(TINY, [f"data.cache_dir={cache}"]).config.data)
    (entry,) = (cache / "corpora").iterdir()
    flip_bit_at(entry / "tokens.bin", 2 * 65_536 + 8)
    return entry


@pytest.mark.slow
def test_a_flipped_bit_in_a_cached_corpus_changes_no_bit_of_the_run(
    workspace: Workspace, unbroken: RunDir
) -> None:
    cache = workspace.root / "cache"
    entry = damaged_cache(cache)
    arguments = (*MLP, f"data.cache_dir={cache}")
    failed = workspace.start("run", *arguments)
    failed.assert_fails(ExitCode.STORAGE, "tokens.bin: block 2 ", "builds it again")
    assert not entry.exists()
    history = run_history(failed.run_dir)
    assert not history.bad_rows, "damage was taken for a bad record"
    workspace.finish("run", *arguments)
    assert entry.exists()
    assert_bit_exact(failed.run_dir, unbroken)


@pytest.mark.campaign
def test_launch_builds_a_damaged_cache_again_by_itself(
    workspace: Workspace, unbroken: RunDir
) -> None:
    cache = workspace.root / "cache"
    damaged_cache(cache)
    arguments = (*MLP, f"data.cache_dir={cache}", "restart.storage_backoff_seconds=0.1")
    launched = workspace.launched("run", *arguments, hosts=1, restart=True)
    assert len(run_history(launched.run_dir).claims) == 2
    assert_bit_exact(launched.run_dir, unbroken)
