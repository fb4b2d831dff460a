"""A bad config, data set or command ends typed with one clear message, and nothing is lost."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from jaxres.data.token_folder import write_tokens
from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from tests.promises.trainer import (
    MLP,
    STEPS,
    TINY,
    Place,
    Trainer,
    digest,
    line,
    snapshot,
    starts,
    trajectory,
)


@dataclass(frozen=True)
class Bad:
    """Overrides that can't work, and what the message must say."""

    overrides: tuple[str, ...]
    says: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


# Refused before a device is touched: no run directory is made.
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
    "no section": Bad(("steps=3",), ("steps: unknown key", "train.steps")),
    "value for a section": Bad(("train=3",), ("train: is a section", "train.steps=...")),
    "not built yet": Bad(
        ("train.reduction=invariant",), ("train.reduction", "not built yet", "use fast")
    ),
    "heads not divisible": Bad(
        ("mesh.tensor=4",),
        ("mesh.tensor: 4 does not divide model.num_heads=2", "model.num_kv_heads=2", "1, 2"),
    ),
    "uneven microbatches": Bad(
        ("train.microbatches=7",), ("24 is not divisible by train.microbatches=7", "21 or 28")
    ),
}

# Refused once devices, data or the user's code are looked at: the run directory is a mere claim.
BAD_PARTS = {
    "missing corpus": Bad(
        ("data.source.path=/nowhere/corpus",), ("data.source.path: /nowhere/corpus does not exist",)
    ),
    "custom data that is not there": Bad(
        ("data.source.kind=custom", "data.source.target=no_such_module:rows"),
        ("data.source.target", "no_such_module", "PYTHONPATH"),
    ),
    "custom model that is not there": Bad(
        ("model.kind=custom", "model.target=json:no_such_model"),
        ("model.target", "json", "has no `no_such_model`"),
    ),
    "weights that are not there": Bad(
        ("init_from={kind: safetensors, path: /nowhere/weights}",),
        ("init_from.path: /nowhere/weights: no such file",),
    ),
    "batch not divisible by devices": Bad(
        ("train.global_batch_size=22",),
        ("train.global_batch_size=22", "4 devices:", "try 20 or 24", "feasible: 1, 2, 11, 22"),
        (("JAX_NUM_CPU_DEVICES", "4"),),
    ),
    "mesh of other devices": Bad(
        ("mesh.data=3",),
        ("mesh: data=3", "does not make 4 device(s)", "product is 4"),
        (("JAX_NUM_CPU_DEVICES", "4"),),
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_config_is_refused_before_anything_is_written(place: Place, name: str) -> None:
    bad = BAD_CONFIGS[name]
    trainer = place.start("run", *bad.overrides)
    trainer.refused(Exit.CONFIG, *bad.says)
    assert not trainer.run_dir.root.exists()


def test_bad_file_is_named_with_its_line(place: Place) -> None:
    text = TINY.read_text().replace("seq_len: 64", "seq_lne: 64")
    config = place.root / "bad.yaml"
    config.write_text(text)
    at = next(i for i, row in enumerate(text.splitlines(), start=1) if "seq_lne" in row)
    trainer = place.start("run", config=config)
    trainer.refused(Exit.CONFIG, f"{config}:{at}: data.seq_lne", "did you mean 'seq_len'?")
    assert not trainer.run_dir.root.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["absent.yaml"], ["absent.yaml: no such file"]),
        ([str(TINY), "--verbose"], ["--verbose: unknown flag", "usage: python -m jaxres.train"]),
        ([str(TINY), "--resume=yes", "-x=1"], ["-x=1", "section.field=value"]),
        ([], ["expected one config file or run directory", "usage: python -m jaxres.train"]),
        ([str(TINY), str(TINY)], ["expected one config file or run directory"]),
        (["tests"], ["tests: no config.yaml here", "not a run directory"]),
    ],
    ids=["absent file", "unknown flag", "flag with a value", "nothing", "two files", "no run"],
)
def test_bad_command_is_a_usage_error(place: Place, words: list[str], says: list[str]) -> None:
    place.command(place.run_dir("run"), words).refused(Exit.USAGE, *says)


def test_bad_part_is_refused_and_bars_nothing(place: Place) -> None:
    """All at once: each start costs seconds, most of them spent on loading jax."""
    trainers = {
        name: place.start(name, *MLP, *bad.overrides, env=dict(bad.env))
        for name, bad in BAD_PARTS.items()
    }
    for name, trainer in trainers.items():
        trainer.refused(Exit.CONFIG, *BAD_PARTS[name].says)
        left = line(trainer.run_dir)
        assert (left.starts, left.commits) == ((), ()), "the corrected command is free to start"
        assert left.last_stop is not None, "the end is on record"


def test_corpus_that_cannot_be_read_is_refused_until_it_is_mended(place: Place) -> None:
    corpus = place.root / "corpus"
    corpus.mkdir()
    words = (*MLP, f"data.source.path={corpus}", 'data.source.include=["**/*"]')
    (corpus / "empty.txt").touch()
    loop = corpus / "loop.txt"
    loop.symlink_to(loop)
    place.start("run", *words).refused(
        Exit.CONFIG, str(loop), "can't be read", "data.source.exclude"
    )

    loop.unlink()
    place.start("run", *words).refused(Exit.CONFIG, str(corpus), "are empty")

    for i in range(4):
        (corpus / f"{i}.txt").write_text("now there is something to learn from\n" * 100)
    place.finish("run", *words)
    assert line(place.run_dir("run")).step == STEPS


def test_damaged_token_folder_is_refused_until_it_is_mended(place: Place) -> None:
    folder, documents = place.root / "tokens", [np.arange(1000) % 50 for _ in range(4)]
    write_tokens(folder, documents, vocab_size=50, tokenizer="other")
    tokens = (folder / "tokens.bin").read_bytes()
    words = (*MLP, "data.source.kind=tokens", f"data.source.path={folder}")

    (folder / "tokens.bin").write_bytes(tokens[:-7])
    place.start("run", *words).refused(
        Exit.CONFIG, str(folder / "tokens.bin"), "has 7,993 bytes", "4,000 tokens", "anew"
    )

    # Row 2 holds the tokens 128 to 192. It is found only when it is read, at the latest by epoch 1.
    wrong = np.frombuffer(tokens, "<u2").copy()
    wrong[150] = 77
    (folder / "tokens.bin").write_bytes(wrong.tobytes())
    place.start("run", *words, "guards.bad_records=null").refused(
        Exit.CONFIG, str(folder / "tokens.bin"), "row 2", "token 150", "is 77", "vocab_size is 50"
    )
    assert line(place.run_dir("run")).step == 0

    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    documents[0] = documents[0][::-1]
    write_tokens(folder, documents, vocab_size=50, tokenizer="other")
    place.finish("run", *words)
    assert line(place.run_dir("run")).step == STEPS


def test_another_trajectory_is_refused_and_the_run_goes_on(
    place: Place, killed: RunDir, unbroken: RunDir
) -> None:
    run_dir = place.copy(killed, "run")
    before = snapshot(run_dir.root)
    trainer = place.start("run", *MLP, "data.seq_len=32", "run.seed=1")
    trainer.refused(
        Exit.CONFIG,
        f"{run_dir.root}: this run was started with another trajectory",
        "  data.seq_len: 64 there, 32 here (command line)",
        "  run.seed: 0 there, 1 here (command line)",
        "To go on with that run drop the overrides; to start a new one change run.dir",
    )
    assert snapshot(run_dir.root) == before
    goes_on(place.finish("run", *MLP), unbroken)


def goes_on(trainer: Trainer, unbroken: RunDir) -> None:
    """Holds a run that was resumed to the end of an unbroken one."""
    assert starts(trainer.run_dir)[-1] >= 60, "it did not resume"
    assert trajectory(trainer.run_dir) == trajectory(unbroken)
    assert digest(trainer.run_dir) == digest(unbroken)


def test_other_steps_are_refused_where_the_rate_depends_on_them(place: Place) -> None:
    words = (*MLP, "optimizer.schedule.kind=cosine", "train.steps=40")
    run_dir = place.finish("run", *words).run_dir
    before = snapshot(run_dir.root)
    place.start("run", *words, "train.steps=60").refused(
        Exit.CONFIG,
        "  train.steps: 40 there, 60 here (command line)",
        "The learning rate depends on train.steps",
        "optimizer.schedule.horizon_steps=40",
    )
    assert snapshot(run_dir.root) == before

    place.finish("run", *words, "train.steps=60", "optimizer.schedule.horizon_steps=40")
    assert line(run_dir).step == 60


def test_more_steps_and_other_free_keys_are_allowed_and_kept(
    place: Place, killed: RunDir, unbroken: RunDir
) -> None:
    run_dir = place.copy(killed, "run")
    free = ("checkpoint.save_every_steps=8", "checkpoint.keep_last=900", "data.prefetch_batches=2")
    trainer = place.start("run", *MLP, *free, f"train.steps={2 * STEPS}")
    trainer.wait_commit(STEPS + 8)
    trainer.kill()
    assert trainer.ended() == -9
    assert digest(run_dir, STEPS) == digest(unbroken)

    # Supervisors restart by the directory alone: the larger number must not be forgotten.
    trainer = place.command(run_dir, [str(run_dir.root)])
    assert trainer.ended() == 0, trainer.said()
    assert starts(run_dir)[-1] > STEPS
    assert line(run_dir).step == 2 * STEPS


def test_another_dataset_is_refused_and_the_run_goes_on(place: Place) -> None:
    corpus = place.root / "corpus"
    corpus.mkdir()
    for i in range(4):
        (corpus / f"{i}.txt").write_text("something to learn from\n" * 100)
    words = (*MLP, f"data.source.path={corpus}", 'data.source.include=["**/*"]')
    trainer = place.start("run", *words)
    trainer.wait_commit(60)
    trainer.kill()
    assert trainer.ended() == -9

    (corpus / "0.txt").write_text("something else to learn from\n" * 100)
    before = line(trainer.run_dir)
    place.start("run", *words).refused(
        Exit.CONFIG, "data.source", "rows are not the ones", "Bring the old data back"
    )
    after = line(trainer.run_dir)
    assert (after.starts, after.commits) == (before.starts, before.commits)

    (corpus / "0.txt").write_text("something to learn from\n" * 100)
    place.finish("run", *words)
    assert starts(trainer.run_dir)[-1] >= 60
    assert line(trainer.run_dir).step == STEPS


def test_run_directory_alone_resumes_also_where_it_was_moved(
    place: Place, killed: RunDir, unbroken: RunDir
) -> None:
    run_dir = place.copy(killed, "moved")
    place.command(run_dir, [str(run_dir.root), "run.dir=elsewhere"]).refused(
        Exit.CONFIG, "run.dir", "elsewhere", str(run_dir.root)
    )
    assert snapshot(run_dir.root) == snapshot(killed.root)
    trainer = place.command(run_dir, [str(run_dir.root)])
    assert trainer.ended() == 0, trainer.said()
    goes_on(trainer, unbroken)


def test_run_that_is_done_answers_and_changes_nothing(place: Place, unbroken: RunDir) -> None:
    run_dir = place.copy(unbroken, "run")
    for words in ([str(run_dir.root)], [str(TINY), f"run.dir={run_dir.root}", *MLP]):
        trainer = place.command(run_dir, words)
        assert trainer.ended() == 0, trainer.said()
        assert f"step {STEPS} of {STEPS} is committed already" in trainer.said()
        assert snapshot(run_dir.root) == snapshot(unbroken.root)


def test_record_that_cannot_be_read_is_refused(place: Place, killed: RunDir) -> None:
    run_dir = place.copy(killed, "run")
    record = run_dir.log / "00000002.json"
    record.write_text(json.dumps({"kind": "from the future"}))
    before = snapshot(run_dir.root)
    # Not as `run_dir`: the vocabulary itself reads the log to number the attempt.
    place.command(place.run_dir("none"), [str(run_dir.root)]).refused(
        Exit.CONFIG, str(record), "newer version", "Nothing was changed"
    )
    assert snapshot(run_dir.root) == before
