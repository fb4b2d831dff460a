"""A bad config, data set or command exits with its code and one clear message; nothing is lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass

import numpy as np
import pytest

from jaxres.data.tokens.token_writer import write_tokens
from jaxres.exit_codes import ExitCode
from jaxres.jax_cli import replay
from jaxres.runlog.paths import RunDir
from tests import damage
from tests.promises.trainer import (
    MLP,
    STEPS,
    TINY,
    TrainingProcess,
    Workspace,
    digest,
    run_history,
    snapshot,
    starts,
    trajectory,
)
from tests.tiers import slow_but


@dataclass(frozen=True)
class Bad:
    """Invalid overrides, and texts that the message must contain."""

    overrides: tuple[str, ...]
    says: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


# Rejected before a device is used: no run directory is created.
BAD_CONFIGS = {
    "unknown key": Bad(
        ("train.step=3",), ("command line (train.step=3)", "unknown key", "did you mean 'steps'?")
    ),
    "several at once": Bad(
        ("model.nmu_heads=2", "train.global_batch_size=seven", "mesh.fsdp=-2"),
        ("did you mean 'num_heads'?", "must be a whole number", "mesh.fsdp: must be at least -1"),
    ),
    "two axes for all the rest": Bad(
        ("mesh.fsdp=-1", "mesh.tensor=-1"), ("mesh.tensor", "only one axis can be -1")
    ),
    "settings of JAX that no run can have": Bad(
        (),
        ("JAX_DISABLE_JIT=1: the steps are compiled", "JAX_PLATFORMS=cdua: 'cdua' is no platform"),
        env=(("JAX_DISABLE_JIT", "1"), ("JAX_PLATFORMS", "cdua")),
    ),
    "a flag that XLA does not know": Bad(
        (),
        ("XLA_FLAGS=--xla_no_such_flag=1: Unknown flag in XLA_FLAGS",),
        env=(("XLA_FLAGS", "--xla_no_such_flag=1"),),
    ),
    "no section": Bad(("steps=3",), ("steps: unknown key", "train.steps")),
    "value for a section": Bad(("train=3",), ("train: is a section", "train.steps=...")),
    "heads not divisible": Bad(
        ("mesh.tensor=4",),
        ("mesh.tensor: 4 does not divide model.num_heads=2", "model.num_kv_heads=2", "1, 2"),
    ),
    "uneven microbatches": Bad(
        ("train.microbatches=7",), ("24 is not divisible by train.microbatches=7", "21 or 28")
    ),
    "missing corpus": Bad(
        ("data.source.path=/nowhere/corpus",), ("data.source.path: /nowhere/corpus does not exist",)
    ),
    "custom data that is not there": Bad(
        ("data.source.kind=custom", "data.source.target=no_such_module:rows"),
        ("data.source.target", "no_such_module", "PYTHONPATH"),
    ),
    "invalid pattern of files": Bad(
        ("data.source.include=['**a']",), ("data.source.include: '**a' is not a valid pattern",)
    ),
    "weights that are not there": Bad(
        ("init_from={kind: safetensors, path: /nowhere/weights}",),
        ("init_from.path: /nowhere/weights: no such file",),
    ),
    "packages of hooks and models that are not there": Bad(
        (
            "hooks=[{target: 'no_such_module:look'}]",
            "model.kind=custom",
            "model.target=absent:build",
        ),
        ("hooks[0].target: no module no_such_module", "model.target: no module absent"),
    ),
}

# Rejected after devices, data or user code are read: the run directory holds only a claim.
BAD_PARTS = {
    "rows of other names": Bad(
        (
            "data.source={kind: custom, target: 'tests.promises.faulty:other_names'}",
            "model.vocab_size=300",
        ),
        ("data.source: rows have the arrays input_ids, labels", "it lacks tokens_BT, targets_BT"),
    ),
    "custom model that is not there": Bad(
        ("model.kind=custom", "model.target=json:no_such_model"),
        ("model.target", "json", "has no `no_such_model`"),
    ),
    "batch not divisible by devices": Bad(
        ("train.global_batch_size=22",),
        ("train.global_batch_size=22", "4 devices:", "try 20 or 24", "feasible: 1, 2, 11, 22"),
        (("JAX_NUM_CPU_DEVICES", "4"),),
    ),
    "devices that do not divide the virtual shards": Bad(
        ("train.reduction=invariant",),
        ("3 devices: mesh.data x mesh.fsdp = 3 does not divide", "feasible: 1, 2, 4, 8"),
        (("JAX_NUM_CPU_DEVICES", "3"),),
    ),
    "mesh of other devices": Bad(
        ("mesh.data=3",),
        ("mesh: data=3", "does not make 4 device(s)", "product is 4"),
        (("JAX_NUM_CPU_DEVICES", "4"),),
    ),
}


@pytest.mark.parametrize(
    "name",
    slow_but(BAD_CONFIGS, "missing corpus", "two axes for all the rest", "unknown key"),
)
def test_bad_config_is_rejected_before_anything_is_written(workspace: Workspace, name: str) -> None:
    bad = BAD_CONFIGS[name]
    trainer = workspace.start("run", *bad.overrides, env=dict(bad.env))
    trainer.assert_fails(ExitCode.CONFIG, *bad.says)
    assert not trainer.run_dir.root.exists()


def test_bad_file_is_named_with_its_line(workspace: Workspace) -> None:
    text = TINY.read_text().replace("seq_len: 64", "seq_lne: 64")
    config = workspace.root / "bad.yaml"
    config.write_text(text)
    at = next(i for i, row in enumerate(text.splitlines(), start=1) if "seq_lne" in row)
    trainer = workspace.start("run", config=config)
    trainer.assert_fails(ExitCode.CONFIG, f"{config}:{at}: data.seq_lne", "did you mean 'seq_len'?")
    assert not trainer.run_dir.root.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.yaml"], ["absent.yaml: no such file"]),
        ([str(TINY), "--verbose"], ["--verbose: unknown flag", "`python -m jaxres.train --help`"]),
        ([str(TINY), "--resume=yes", "-x=1"], ["-x=1", "section.field=value"]),
        ([], ["expected one config file or run directory", "`python -m jaxres.train --help`"]),
        ([str(TINY), str(TINY)], ["expected one config file or run directory"]),
        (["tests"], ["tests: no config.yaml here", "not a run directory"]),
    ],
    ids=["absent file", "unknown flag", "flag with a value", "nothing", "two files", "no run"],
)
def test_bad_command_is_a_usage_error(
    workspace: Workspace, arguments: list[str], says: list[str]
) -> None:
    workspace.command(workspace.run_dir("run"), arguments).assert_fails(ExitCode.USAGE, *says)


@pytest.mark.campaign
def test_bad_component_is_rejected_and_blocks_no_later_start(workspace: Workspace) -> None:
    """All at once, because each start takes seconds, mostly for the import of jax."""
    trainers = {
        name: workspace.start(name, *MLP, *bad.overrides, env=dict(bad.env))
        for name, bad in BAD_PARTS.items()
    }
    for name, trainer in trainers.items():
        trainer.assert_fails(ExitCode.CONFIG, *BAD_PARTS[name].says)
        left = run_history(trainer.run_dir)
        assert (left.starts, left.commits) == ((), ()), "the corrected command is free to start"
        assert left.last_stop is not None, "the end is on record"


@pytest.mark.slow
def test_a_platform_without_a_device_is_the_hosts_fault(workspace: Workspace) -> None:
    env = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    trainer = workspace.start("run", *MLP, env=env)
    trainer.assert_fails(ExitCode.UNHEALTHY, "JAX_PLATFORMS=cuda: JAX can use no device: ")
    left = run_history(trainer.run_dir)
    assert left.starts == (), left


@pytest.mark.slow
def test_a_hook_that_does_not_exist_is_named_before_the_data_are_opened(
    workspace: Workspace,
) -> None:
    trainer = workspace.start("run", *MLP, "hooks=[{target: 'tests.promises.faulty:absent'}]")
    trainer.assert_fails(ExitCode.CONFIG, "hooks[0].target", "has no `absent`")
    phases = {event.get("phase") for event in trainer.events()}
    assert phases.isdisjoint({"data", "build", "compile"}), phases


@pytest.mark.campaign
def test_unreadable_corpus_is_rejected_until_it_is_fixed(workspace: Workspace) -> None:
    corpus = workspace.root / "corpus"
    corpus.mkdir()
    arguments = (*MLP, f"data.source.path={corpus}", 'data.source.include=["**/*"]')
    (corpus / "empty.txt").touch()
    loop = corpus / "loop.txt"
    loop.symlink_to(loop)
    workspace.start("run", *arguments).assert_fails(
        ExitCode.CONFIG, str(loop), "can't be read", "data.source.exclude"
    )

    loop.unlink()
    workspace.start("run", *arguments).assert_fails(ExitCode.CONFIG, str(corpus), "are empty")

    for i in range(4):
        (corpus / f"{i}.txt").write_text("now there is something to learn from\n" * 100)
    workspace.finish("run", *arguments)
    assert run_history(workspace.run_dir("run")).step == STEPS


@pytest.mark.campaign
def test_damaged_token_folder_is_rejected_until_it_is_fixed(workspace: Workspace) -> None:
    folder, documents = workspace.root / "tokens", [np.arange(1000) % 50 for _ in range(4)]
    write_tokens(folder, documents, vocab_size=50, tokenizer="other")
    tokens = (folder / "tokens.bin").read_bytes()
    arguments = (*MLP, "data.source.kind=tokens", f"data.source.path={folder}")

    (folder / "tokens.bin").write_bytes(tokens[:-7])
    workspace.start("run", *arguments).assert_fails(
        ExitCode.CONFIG,
        str(folder / "tokens.bin"),
        "has 7,993 bytes",
        "4,000 tokens",
        "Rewrite the folder",
    )

    # Row 2 holds the tokens 128 to 192. It is detected when it is read, at the latest in epoch 1.
    wrong = np.frombuffer(tokens, "<u2").copy()
    wrong[150] = 77
    (folder / "tokens.bin").write_bytes(wrong.tobytes())
    workspace.start("run", *arguments, "guards.bad_records=null").assert_fails(
        ExitCode.CONFIG, str(folder / "tokens.bin"), "block 0", "Restore the folder from a copy"
    )
    damage.remove_digests(folder)  # As of a version that wrote none.
    workspace.start("run", *arguments, "guards.bad_records=null").assert_fails(
        ExitCode.CONFIG,
        str(folder / "tokens.bin"),
        "row 2",
        "token 150",
        "is 77",
        "vocab_size is 50",
    )
    assert run_history(workspace.run_dir("run")).step == 0

    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    documents[0] = documents[0][::-1]
    write_tokens(folder, documents, vocab_size=50, tokenizer="other")
    workspace.finish("run", *arguments)
    assert run_history(workspace.run_dir("run")).step == STEPS


@pytest.mark.slow
def test_a_changed_trajectory_is_rejected_and_the_run_can_resume(
    workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    run_dir = workspace.copy(killed, "run")
    before = snapshot(run_dir.root)
    trainer = workspace.start("run", *MLP, "data.seq_len=32", "run.seed=1")
    trainer.assert_fails(
        ExitCode.CONFIG,
        f"{run_dir.root}: this run was started with another trajectory",
        "  data.seq_len: recorded 64, given 32 (command line)",
        "  run.seed: recorded 0, given 1 (command line)",
        "To resume that run, drop the overrides; to start a new run, change run.dir",
    )
    assert snapshot(run_dir.root) == before
    resumes(workspace.finish("run", *MLP), unbroken)


def resumes(trainer: TrainingProcess, unbroken: RunDir) -> None:
    """Asserts that a resumed run ends like an uninterrupted one."""
    assert starts(trainer.run_dir)[-1] >= 60, "it did not resume"
    assert trajectory(trainer.run_dir) == trajectory(unbroken)
    assert digest(trainer.run_dir) == digest(unbroken)


@pytest.mark.slow
def test_a_changed_step_count_is_rejected_if_the_learning_rate_depends_on_it(
    workspace: Workspace,
) -> None:
    arguments = (*MLP, "optimizer.schedule.kind=cosine", "train.steps=40")
    run_dir = workspace.finish("run", *arguments).run_dir
    before = snapshot(run_dir.root)
    workspace.start("run", *arguments, "train.steps=60").assert_fails(
        ExitCode.CONFIG,
        "  train.steps: recorded 40, given 60 (command line)",
        "The learning rate depends on train.steps",
        "optimizer.schedule.horizon_steps=40",
    )
    assert snapshot(run_dir.root) == before

    workspace.finish("run", *arguments, "train.steps=60", "optimizer.schedule.horizon_steps=40")
    assert run_history(run_dir).step == 60


@pytest.mark.campaign
def test_more_steps_and_other_free_keys_are_allowed_and_kept(
    workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    run_dir = workspace.copy(killed, "run")
    free = ("checkpoint.save_every_steps=8", "checkpoint.keep_last=900", "data.prefetch_batches=2")
    more, held = f"train.steps={2 * STEPS}", STEPS + 20
    trainer = workspace.start("run", *MLP, *free, more, held_after=held)
    trainer.wait_commit(STEPS + 8)
    trainer.kill()
    assert trainer.wait_exit() == -9
    assert digest(run_dir, STEPS) == digest(unbroken)

    # Supervisors restart with the directory alone, so the larger number must be recorded.
    trainer = workspace.command(run_dir, [str(run_dir.root)])
    assert trainer.wait_exit() == 0, trainer.printed()
    assert starts(run_dir)[-1] > STEPS
    assert run_history(run_dir).step == 2 * STEPS


@pytest.mark.slow
def test_another_dataset_is_rejected_and_the_run_can_resume(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = workspace.root / "corpus"
    corpus.mkdir()
    for i in range(4):
        (corpus / f"{i}.txt").write_text("something to learn from\n" * 100)
    arguments = (*MLP, f"data.source.path={corpus}", 'data.source.include=["**/*"]')
    trainer = workspace.start("run", *arguments, held_after=70)
    trainer.wait_commit(60)
    trainer.kill()
    assert trainer.wait_exit() == -9

    (corpus / "0.txt").write_text("something else to learn from\n" * 100)
    before = run_history(trainer.run_dir)
    workspace.start("run", *arguments).assert_fails(
        ExitCode.CONFIG, "data.source", "rows are not the ones", "Restore the old data"
    )
    after = run_history(trainer.run_dir)
    assert (after.starts, after.commits) == (before.starts, before.commits)

    (corpus / "0.txt").write_text("something to learn from\n" * 100)
    moved = (*arguments, f"data.source.path={corpus.rename(workspace.root / 'moved')}")
    workspace.finish("run", *moved)
    assert starts(trainer.run_dir)[-1] >= 60
    assert run_history(trainer.run_dir).step == STEPS

    # A run that is complete is so for its own data only.
    other = workspace.root / "other"
    shutil.copytree(workspace.root / "moved", other)
    (other / "0.txt").write_text("something else to learn from\n" * 100)
    workspace.start("run", *arguments, f"data.source.path={other}").assert_fails(
        ExitCode.CONFIG, "data.source", "rows are not the ones"
    )
    assert (
        replay.main([str(trainer.run_dir.root), "--step", "70", f"data.source.path={other}"])
        == ExitCode.CONFIG
    )
    assert "rows are not the ones" in capsys.readouterr().err
    final = digest(trainer.run_dir)
    copy = shutil.copytree(workspace.root / "moved", workspace.root / "copy")
    workspace.finish("run", *arguments, f"data.source.path={copy}")
    assert (run_history(trainer.run_dir).step, digest(trainer.run_dir)) == (STEPS, final)
    again = workspace.finish("run", *arguments, f"data.source.path={copy}")
    assert f"step {STEPS} of {STEPS} is committed already" in again.printed()


@pytest.mark.slow
def test_run_directory_alone_resumes_also_after_it_was_moved(
    workspace: Workspace, killed: RunDir, unbroken: RunDir
) -> None:
    run_dir = workspace.copy(killed, "moved")
    workspace.command(run_dir, [str(run_dir.root), "run.dir=elsewhere"]).assert_fails(
        ExitCode.CONFIG, "run.dir", "elsewhere", str(run_dir.root)
    )
    assert snapshot(run_dir.root) == snapshot(killed.root)
    trainer = workspace.command(run_dir, [str(run_dir.root)])
    assert trainer.wait_exit() == 0, trainer.printed()
    resumes(trainer, unbroken)


@pytest.mark.parametrize("by", slow_but(["run directory", "config"], "run directory"))
def test_starting_a_finished_run_exits_0_and_changes_nothing(
    workspace: Workspace, unbroken: RunDir, by: str
) -> None:
    run_dir = workspace.copy(unbroken, "run")
    by_config = [str(TINY), f"run.dir={run_dir.root}", *MLP]
    arguments = by_config if by == "config" else [str(run_dir.root)]
    trainer = workspace.command(run_dir, arguments)
    assert trainer.wait_exit() == 0, trainer.printed()
    assert f"step {STEPS} of {STEPS} is committed already" in trainer.printed()
    assert snapshot(run_dir.root) == snapshot(unbroken.root)


def test_unreadable_log_record_is_rejected(workspace: Workspace, killed: RunDir) -> None:
    run_dir = workspace.copy(killed, "run")
    record = run_dir.log / "00000002.json"
    record.write_text(json.dumps({"kind": "from the future"}))
    before = snapshot(run_dir.root)
    # Not as `run_dir`: the helpers read the log to number the attempt.
    workspace.command(workspace.run_dir("none"), [str(run_dir.root)]).assert_fails(
        ExitCode.CONFIG, str(record), "this version reads format", "Nothing was changed"
    )
    assert snapshot(run_dir.root) == before
