"""A run in a bucket ends like one on a disk, despite kills and faults of the service."""

from __future__ import annotations

import email
import itertools
import re
import time
from pathlib import Path

import pytest

from jaxres.checkpoint.commit_tracker import MIN_LATE_SECONDS
from jaxres.data import write_tokens
from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from jaxres.supervisor.attempt_runner import RESTART_VARIABLE
from jaxres_emulators.gcs import GcsServer
from tests.damage import flip_bit_at
from tests.promises.trainer import (
    FAULTY,
    MLP,
    PACED,
    STEPS,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    digest,
    run_history,
    starts,
    trajectory,
)


@pytest.mark.campaign
def test_killed_run_of_two_hosts_in_a_bucket_resumes_bit_exact(
    bucket: Workspace, fault_free_pair: RunDir
) -> None:
    """First with one supervisor for both hosts, then with one each: they share only the bucket."""
    trainer = bucket.launch("run", config=FAULTY, hosts=2, env=PACED)
    trainer.wait_commit(13)
    trainer.kill()
    trainer.wait_exit()
    last = bucket.start_hosts("run", config=FAULTY, hosts=2)
    assert [supervisor.wait_exit() for supervisor in last] == [0, 0], [
        supervisor.printed() for supervisor in last
    ]
    assert starts(last[0].run_dir)[-1] >= 13
    assert_bit_exact(last[0].run_dir, fault_free_pair)


@pytest.mark.campaign
def test_supervised_run_in_a_bucket_is_restarted_automatically(
    bucket: Workspace, fault_free: RunDir
) -> None:
    trainer = bucket.launch("run", config=FAULTY, hosts=1, env=PACED, restart=True)
    trainer.wait_commit(20)
    trainer.kill(target="worker")
    assert trainer.wait_exit() == 0, trainer.printed()
    assert starts(trainer.run_dir)[-1] >= 20
    assert run_history(trainer.run_dir).attempt == 2
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "hits"), [(0.03, 3), pytest.param(0.2, 50, marks=pytest.mark.campaign)]
)
def test_run_with_random_storage_faults_ends_bit_exact(
    bucket: Workspace, unbroken: RunDir, gcs_server: GcsServer, share: float, hits: int
) -> None:
    """Requests fail at random in every supported way."""
    storm = gcs_server.fail("storm", probability=share, times=None, late_seconds=0.05, seed=3)
    arguments = [*MLP, "checkpoint.save_every_steps=50", "checkpoint.timeout_seconds=600"]
    codes = [bucket.start("run", *arguments).wait_exit()]
    while codes[-1] != 0 and len(codes) < 6:
        codes.append(bucket.start("run", *arguments).wait_exit())
    gcs_server.faults.clear()
    assert codes[-1] == 0, (codes, bucket.trainers[-1].printed())
    assert set(codes) <= {0, ExitCode.STORAGE}, codes
    assert storm.hits >= hits, "no storm"
    run_dir = bucket.run_dir("run")
    assert not run_history(run_dir).quarantined, "what did not answer was taken for damaged"
    assert trajectory(run_dir) == trajectory(unbroken)
    assert digest(run_dir) == digest(unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "pace"), [(10, 0.01), pytest.param(120, 0.1, marks=pytest.mark.campaign)]
)
def test_training_continues_while_the_bucket_is_unavailable_and_saving_recovers(
    bucket: Workspace, fault_free: RunDir, gcs_server: GcsServer, seconds: int, pace: float
) -> None:
    """With `checkpoint.busy: wait`: after the first failing save, later ones are skipped."""
    arguments = ["checkpoint.max_failed_saves=100", "checkpoint.busy=wait"]
    trainer = bucket.start("run", *arguments, config=FAULTY, env={"PACE": str(pace)})
    trainer.wait_commit(10)
    away = gcs_server.fail("503", times=None, seconds=seconds)
    begun = time.monotonic()
    seen = [reported(trainer)]
    while time.monotonic() < begun + seconds:
        time.sleep(1)
        seen.append(reported(trainer))
    assert trainer.wait_exit() == 0, trainer.printed()
    assert away.hits > 5
    stood = max(sum(1 for _ in still) for _, still in itertools.groupby(seen))
    assert stood <= 3 * MIN_LATE_SECONDS, f"training stood still: {seen}\n{trainer.printed()}"
    assert trainer.events_of("save_skipped"), "no save was left out"
    assert max(trainer.steps()) == 60
    assert not run_history(trainer.run_dir).quarantined
    assert run_history(trainer.run_dir).attempt == 1
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.campaign
def test_bucket_that_denies_access_for_a_while_ends_nothing(
    bucket: Workspace, fault_free: RunDir, gcs_server: GcsServer
) -> None:
    trainer = bucket.start("run", config=FAULTY, env=PACED)
    trainer.wait_commit(10)
    denied = gcs_server.fail("403", times=None)
    trainer.wait(lambda: trainer.printed().count("ALARM: step ") >= 2, what="two failed saves")
    gcs_server.faults.clear()
    assert trainer.wait_exit() == 0, trainer.printed()
    assert denied.hits > 5
    assert run_history(trainer.run_dir).attempt == 1
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "exit"), [({}, ExitCode.CONFIG), ({RESTART_VARIABLE: "1"}, ExitCode.STORAGE)]
)
def test_denied_access_is_a_config_error_at_a_start_and_an_outage_at_a_restart(
    bucket: Workspace, gcs_server: GcsServer, env: dict[str, str], exit: ExitCode
) -> None:
    gcs_server.fail("403", times=None)
    trainer = bucket.start("run", config=FAULTY, env=env)
    trainer.assert_fails(exit, "can't be used", "Storage Object User")


def reported(trainer: TrainingProcess) -> int:
    """Returns the newest finished step that was printed."""
    found = re.findall(r"step (\d+)/60", trainer.printed())
    return int(found[-1]) if found else 0


@pytest.mark.campaign
def test_start_while_the_bucket_is_unavailable_exits_with_storage_and_loses_nothing(
    bucket: Workspace, gcs_server: GcsServer
) -> None:
    first = bucket.start("run", *MLP, held_after=50)
    first.wait_commit(40)
    first.kill()
    first.wait_exit()
    before = run_log.read_records(first.run_dir.log)
    bucket.fresh = True
    second = bucket.start("run", *MLP)
    away = gcs_server.fail("503", times=None)  # Long before Python starts.
    second.assert_fails(ExitCode.STORAGE, "has not answered", "Nothing committed is lost")
    assert away.hits > 3
    gcs_server.faults.clear()
    assert run_log.read_records(first.run_dir.log) == before
    bucket.finish("run", *MLP)
    assert run_history(first.run_dir).step == STEPS


@pytest.mark.slow
def test_request_files_work_in_a_bucket(bucket: Workspace, fault_free: RunDir) -> None:
    first = bucket.start("run", config=FAULTY, env=PACED)
    first.wait_commit(10)
    files.create(first.run_dir.request("stop"), b"")
    assert first.wait_stopped() == ExitCode.STOPPED, first.printed()
    stopped = run_history(first.run_dir).step
    assert stopped < 60
    assert "stop" in files.list_names(first.run_dir.attempt(1)), "it was not moved"
    last = bucket.finish("run", config=FAULTY)
    assert starts(last.run_dir) == [0, stopped]
    assert_bit_exact(last.run_dir, fault_free)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_corpus_in_a_bucket_gives_the_same_run_as_one_on_a_disk(
    bucket: Workspace, workspace: Workspace, hosts: int
) -> None:
    """All hosts copy the corpus at the same time; another text is refused."""
    folder = Path(email.__file__).parent
    there = GcsPath(bucket.run_dir("x").root.bucket, "corpora/email")
    for path in folder.glob("*.py"):
        files.replace(there / path.name, path.read_bytes())
    arguments = (*MLP, "train.steps=20", 'data.source.include=["*.py"]')
    own = (f"data.source.path={there}", f"data.cache_dir={workspace.root / 'cache'}")
    first = workspace.launched("first", *arguments, *own, hosts=hosts)
    other = workspace.launched("other", *arguments, f"data.source.path={folder}", hosts=hosts)
    assert_bit_exact(first.run_dir, other.run_dir)

    files.replace(there / "utils.py", b"another text\n")
    again = workspace.launch("first", *arguments, *own, "train.steps=40", hosts=hosts)
    again.assert_fails(ExitCode.CONFIG, "data.source: the rows are not the ones")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_tokens_in_a_bucket_give_the_same_run_as_on_a_disk(
    workspace: Workspace, gcs_server: GcsServer, gcs_bucket: str, hosts: int, seconds: int
) -> None:
    """With latency, a cache of few blocks, a kill, damage in the cache, and an outage."""
    here, there = workspace.root / "tokens", GcsPath(gcs_bucket, "tokens")
    texts = [path.read_bytes() for path in sorted(Path(email.__file__).parent.glob("*.py"))]
    write_tokens(here, [[*text, 256] for text in texts], vocab_size=257, tokenizer="bytes")
    for path in here.iterdir():
        files.replace(there / path.name, path.read_bytes())
    cache = workspace.root / "cache"
    arguments = (*MLP, "data.source={kind: tokens}", "train.steps=100")
    own = (f"data.source.path={there}", f"data.cache_dir={cache}", "data.bucket_cache_gb=0.0004")
    on_disk = workspace.launched("disk", *arguments, f"data.source.path={here}", hosts=hosts)

    gcs_server.late_seconds = 0.05
    try:
        first = workspace.launch("bucket", *arguments, *own, hosts=hosts)
        first.wait_commit(30)
        first.kill()
        first.wait_exit()
        kept = [path for path in (cache / "blocks").glob("*/*/*") if path.name[0] != "."]
        assert 0 < len(kept) <= 7 + hosts, "the cache is not bounded"
        for path in kept:
            flip_bit_at(path, path.stat().st_size // 2)
        away = gcs_server.fail("503", path="tokens.bin.*alt=media", times=None, seconds=seconds)
        again = workspace.launch("bucket", *arguments, *own, hosts=hosts)
        assert again.wait_exit() == 0, again.printed()
    finally:
        gcs_server.late_seconds = 0.0
    assert away.hits > 3
    assert run_history(again.run_dir).attempt == 2
    assert not list((cache / "staged").glob("*/tokens.bin"))
    assert not run_history(again.run_dir).bad_rows
    assert starts(again.run_dir)[-1] >= 30
    assert_bit_exact(again.run_dir, on_disk.run_dir)
