import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import SingleHost
from jaxres.config.schema.training import GuardsSection, RollbackSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Fenced, RollbackRun, StopRun, fault
from jaxres.runlog import run_log
from jaxres.runlog.records import Branch
from jaxres.runlog.run_log import Commit, Record, RunLog, Start, fold
from jaxres.storage import files
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.process.worker_group import WorkerGroup
from jaxres.train import __main__ as train_command
from jaxres.train import completion
from jaxres.train.completion import Completion
from jaxres.train.resume import _agreed_history, apply_rollback, withdraw_commits
from tests.manual_clock import ManualClock
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS


def quickstart(tmp_path, *overrides):
    return attempt_runner.resolve_run(
        configs_dir() / "quickstart.yaml", [f"run.dir={tmp_path / 'run'}", *overrides]
    )


def configs_dir():
    return Path(__file__).parents[3] / "configs"


@pytest.fixture
def signal_mask():
    """Restores the signal mask: an attempt blocks signals, here in the process of the tests."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("signal_mask")
def test_an_attempt_whose_claim_is_fenced_writes_no_config(tmp_path, monkeypatch):
    resolved = quickstart(tmp_path, "run.seed=2")
    winner = attempt_runner.new_claim(
        resolved[0].config, run_log.fold([]), env={}, job=WorkerGroup()
    )
    new_claim = attempt_runner.new_claim

    def lose_then_claim(*args, **kwargs):
        RunLog.claim(resolved[1].log, winner, after=[], clock=SystemClock())
        return new_claim(*args, **kwargs)

    monkeypatch.setattr(attempt_runner, "resolve_run", lambda *_: resolved)
    monkeypatch.setattr(attempt_runner, "new_claim", lose_then_claim)
    with pytest.raises(Fenced):
        train_command._train([str(tmp_path)], is_command=True, fork=None)
    written = [p for p in resolved[1].root.rglob("*") if p.is_file()]
    assert {path.name for path in written} == {"00000001.json", "owner.lock", "owner.json"}


@pytest.fixture
def started(tmp_path):
    """The run directory after a first attempt with the quickstart config."""
    loaded, run_dir = quickstart(tmp_path)
    claim = attempt_runner.new_claim(loaded.config, run_log.fold([]), env={}, job=WorkerGroup())
    log = RunLog.claim(run_dir.log, claim, after=[], clock=SystemClock())
    files.make_dir(run_dir.attempt(1))
    for path in (run_dir.config, run_dir.attempt(1) / "config.yaml"):
        path.write_text(configs.dump_yaml(loaded.config))
    quickstart(tmp_path, "run.seed=2")
    log.append(Start(step=0, path=None, dataset="d", computation={}))
    return run_dir


def test_a_run_keeps_the_config_that_it_was_started_with(tmp_path, started):
    quickstart(tmp_path)
    with pytest.raises(ConfigError, match="another trajectory"):
        quickstart(tmp_path, "run.seed=2")


def test_an_edited_or_deleted_config_does_not_change_the_run(tmp_path, started):
    other = quickstart(tmp_path / "elsewhere", "run.seed=2")[0].config
    started.config.write_text(configs.dump_yaml(other))
    assert attempt_runner.resolve_run(started.root, [])[0].config.run.seed != other.run.seed
    started.config.unlink()
    with pytest.raises(ConfigError, match="another trajectory"):
        quickstart(tmp_path, "run.seed=2")


def commit_last_step(run_dir):
    """Commits the last step of the run without its files."""
    records = run_log.read_records(run_dir.log)
    claim = attempt_runner.new_claim(
        resume_config(run_dir), run_log.fold(records), env={}, job=WorkerGroup()
    )
    log = RunLog.claim(run_dir.log, claim, after=records, clock=SystemClock())
    steps = resume_config(run_dir).train.steps
    log.append(Commit(step=steps, path="checkpoints/x", manifest="m", bytes=1))


def resume_config(run_dir, *overrides):
    return attempt_runner.resolve_run(run_dir.root, overrides)[0].config


def test_moved_data_resume_the_run_which_is_complete_only_once_they_are_compared(started, capsys):
    moved = resume_config(started, "data.source.path=/elsewhere")
    commit_last_step(started)
    files.make_dir(started.checkpoints)
    assert completion.check(started, moved) == Completion(False, unconfirmed="checkpoints/x")
    assert capsys.readouterr() == ("", ""), "other data would count as trained on"
    completion.check(started, resume_config(started))
    assert "its checkpoint is damaged" in capsys.readouterr().err, "the same data: it is verified"


def test_a_run_is_found_in_the_default_directory_of_the_first_digest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart = configs_dir() / "quickstart.yaml"
    loaded = configs.load(quickstart)
    first, current = configs.run_dirs(loaded.config, loaded.name)
    assert attempt_runner.resolve_run(quickstart, [])[1].root == current
    current.joinpath("log").mkdir(parents=True)
    first.mkdir()  # Its log may be lost; the start reports that.
    assert attempt_runner.resolve_run(quickstart, [])[1].root == first
    moved = ["data.source.path={stdlib}/email"]
    assert attempt_runner.resolve_run(quickstart, moved)[1].root == current


def test_a_started_run_without_any_record_of_its_config_is_refused(tmp_path, started):
    (started.attempt(1) / "config.yaml").unlink()
    started.config.unlink()
    with pytest.raises(ConfigError, match="Restore one of them from a copy"):
        quickstart(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("code", [ExitCode.STORAGE, ExitCode.CONFIG])
def test_a_failed_process_exits_at_once_despite_its_threads(code):
    source = (
        "import threading, time; from jaxres.train.__main__ import hard_exit;"
        "threading.Thread(target=time.sleep, args=(600,)).start();"
        f"print('done', end=''); hard_exit({code.value})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", source],
        timeout=SURE_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (code, "done")


def test_states_in_memory_are_not_trusted_although_no_commit_is_withdrawn():
    """A host may be killed before it has discarded them, or a copy reach its neighbour later."""
    begun = Start(step=0, path=None, dataset="d", computation={})
    records, calls = [Record(n, 1, 0.0, body) for n, body in enumerate([CLAIM, begun], 1)], []

    def append(body):
        calls.append("record")
        records.append(Record(len(records) + 1, 1, 0.0, body))
        return records[-1]

    run = SimpleNamespace(
        checkpoints=SimpleNamespace(discard_from=lambda step: None, rewind=lambda step: None),
        memory=SimpleNamespace(discard=lambda: calls.append("discard")),
        log=SimpleNamespace(history=lambda: fold(records), append=append),
        peers=SingleHost(),
    )
    key = {"seq": 2, "nonce": CLAIM.nonce, "step": 9, "dataset": "d"}
    assert fold(records).continues(**key)
    withdraw_commits(run, StopRun(fault("silent_corruption"), "two results", last_good_step=5))
    assert not fold(records).continues(**key)
    assert calls == ["record", "discard"]


@pytest.mark.parametrize("own", [2, 3, 4])
def test_every_host_takes_the_records_that_host_0_has_told(own):
    """A record that one host alone has read, such as a late commit, would split the hosts."""
    bodies = [CLAIM, *(Commit(step=n, path=f"c/{n}", manifest="m", bytes=1) for n in (8, 16, 24))]
    records = [Record(seq, 1, 0.0, body) for seq, body in enumerate(bodies, 1)]
    reads = iter([records[:own], *([records] * 3)])
    told = SimpleNamespace(broadcast=lambda topic, make, *, seconds: "3")
    run = SimpleNamespace(
        log=SimpleNamespace(
            records=lambda: next(reads), records_through=lambda seq: records[:seq], folder="log"
        ),
        peers=told,
        clock=ManualClock(0.0),
        barrier_seconds=1.0,
    )
    assert _agreed_history(run, entry=0).step == 16


def test_a_branch_goes_back_to_its_first_step_at_most():
    """Its guards have the parent's memory, so that an onset may lie before it."""
    origin = Branch(path="parent", step=40, manifest="m", dataset="d")
    copied, own = (Commit(step=n, path=f"checkpoints/{n}", manifest="m", bytes=1) for n in (40, 50))
    begun = Start(step=40, path="checkpoints/40", dataset="d", computation={})
    bodies, discarded = [CLAIM, origin, copied, begun, own], []
    records = [Record(seq, 1, 0.0, body) for seq, body in enumerate(bodies, 1)]

    def append(body):
        records.append(Record(len(records) + 1, 1, 0.0, body))
        return records[-1]

    run = SimpleNamespace(
        checkpoints=SimpleNamespace(discard_from=discarded.append, rewind=discarded.append),
        memory=SimpleNamespace(discard=lambda: None),
        log=SimpleNamespace(history=lambda: fold(records), append=append),
        limits=GuardsSection(rollback=RollbackSection()),
        peers=SingleHost(),
        emit=lambda event: None,
    )
    apply_rollback(run, RollbackRun(38, (300, 400), "the loss stays high"), entry=0)
    assert [commit.step for commit in fold(records).committed] == [40], "its first step is gone"
    assert discarded == [41, 40]
