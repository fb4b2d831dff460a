"""The kind of source changes no bit, and a run on any of them resumes exactly after SIGKILL."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import yaml
from tokenizers import Tokenizer

from jaxres.__main__ import main
from jaxres.data import Permutation, write_tokens
from jaxres.data.sources.source_files import _name_hash
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Skip
from tests import bpe
from tests.promises.images import photos
from tests.promises.trainer import (
    FAULTY,
    MLP,
    ROOT,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    history,
    run_history,
    starts,
)

NUM_DOCUMENTS = 40
MODEL = tuple(one for one in MLP if not one.startswith(("train.steps", "evaluation")))
HOSTS = (1, pytest.param(2, marks=pytest.mark.campaign))
EXPORTED = ("model.kind=gpt", "model.num_layers=1", "model.d_model=32", "model.num_heads=2")


def documents() -> list[str]:
    rng = random.Random(0)
    words = "".join(path.read_text() for path in bpe.SOURCES).split()
    return [" ".join(rng.choices(words, k=rng.randrange(5, 300))) for _ in range(NUM_DOCUMENTS)]


def text(folder: Path, texts: Sequence[str]) -> None:
    names = sorted((f"{n}.txt" for n in range(len(texts))), key=_name_hash)
    for name, content in zip(names, texts, strict=True):
        (folder / name).write_text(content)


def jsonl(folder: Path, texts: Sequence[str]) -> None:
    lines = "".join(json.dumps({"text": one}) + "\n" for one in texts)
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def parquet(folder: Path, texts: Sequence[str]) -> None:
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / "all.parquet", row_group_size=7)


def huggingface(folder: Path, texts: Sequence[str]) -> None:
    table = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_stream(folder / "data-0.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))


def ids(texts: Sequence[str]) -> list[list[int]]:
    return [[*one.encode(), 256] for one in texts]


def nanogpt(folder: Path, texts: Sequence[str]) -> None:
    np.concatenate(ids(texts)).astype("<u2").tofile(folder / "train.bin")


def tokens(folder: Path, texts: Sequence[str]) -> None:
    write_tokens(folder, ids(texts), vocab_size=257, tokenizer="bytes")


KINDS: dict[str, tuple[Callable[[Path, Sequence[str]], None], tuple[str, ...]]] = {
    "text": (text, ()),
    "jsonl": (jsonl, ()),
    "parquet": (parquet, ()),
    "huggingface": (huggingface, ()),
    "nanogpt": (nanogpt, ("data.source.vocab_size=257", "data.source.end_of_document=256")),
    "tokens": (tokens, ()),
}


def source(kind: str, folder: Path) -> list[str]:
    """Writes the documents; returns the overrides that train on them."""
    write, overrides = KINDS[kind]
    folder.mkdir()
    write(folder, documents())
    return [f"data.source.kind={kind}", f"data.source.path={folder}", *overrides]


def config(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text("data: {seq_len: 64, heldout_fraction: 0.1}\ntelemetry: {log_every_seconds: 1}")
    return path


def kill_and_resume(
    workspace: Workspace,
    name: str,
    overrides: Sequence[str],
    *,
    path: Path,
    hosts: int = 1,
    last: int = 60,
    env: dict[str, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> RunDir:
    """Trains, kills at a random commit, and trains to the end."""

    def start(held_after: int | None = None) -> TrainingProcess:
        how: dict[str, Any] = {"config": path, "env": env, "held_after": held_after}
        if hosts == 1:
            return workspace.start(name, *overrides, **how)
        return workspace.launch(name, *overrides, hosts=hosts, **how)

    first = start(held_after=last + 1)
    first.wait_commit(random.randrange(1, last))
    first.kill()
    assert first.wait_exit() == -9, first.printed()
    meanwhile()
    again = start()
    assert again.wait_exit() == 0, again.printed()
    begun, *_, resumed = starts(again.run_dir)
    assert (begun, resumed > 0) == (0, True), "it was not killed between a commit and its end"
    return again.run_dir


CASES = (
    pytest.param(1, ("jsonl", "nanogpt"), marks=pytest.mark.slow),
    pytest.param(1, tuple(KINDS), marks=pytest.mark.campaign),
    pytest.param(2, tuple(KINDS), marks=pytest.mark.campaign),
)


@pytest.mark.parametrize(("hosts", "kinds"), CASES, ids=["two-kinds", "one-host", "two-hosts"])
def test_the_same_documents_of_any_kind_give_the_same_run_also_after_a_kill(
    workspace: Workspace, tmp_path: Path, hosts: int, kinds: Sequence[str]
) -> None:
    path, common = config(tmp_path), (*MODEL, "train.steps=100")
    overrides = [*common, *source("text", tmp_path / "files")]
    if hosts == 1:
        workspace.finish("unbroken", *overrides, config=path)
    else:
        workspace.launched("unbroken", *overrides, config=path, hosts=hosts)
    for kind in kinds:
        overrides = [*common, *source(kind, tmp_path / f"{kind}-data")]
        run_dir = kill_and_resume(workspace, kind, overrides, path=path, hosts=hosts)
        assert_bit_exact(run_dir, workspace.run_dir("unbroken"))


@pytest.mark.slow
def test_a_run_on_packed_rows_resumes_exactly_and_refuses_another_packing(
    workspace: Workspace, tmp_path: Path
) -> None:
    path = config(tmp_path)
    overrides = [
        *(*MODEL, "train.steps=100", "data.packing=best_fit"),
        *(*source("tokens", tmp_path / "tokens-data"), f"data.cache_dir={tmp_path / 'cache'}"),
    ]
    workspace.finish("unbroken", *overrides, config=path)
    unbroken = workspace.run_dir("unbroken")

    def lose_the_plans() -> None:
        refused = workspace.start("killed", *overrides, "data.packing=pad", config=path)
        refused.assert_fails(78, 'data.packing: recorded "best_fit", given "pad"')
        shutil.rmtree(tmp_path / "cache")

    run_dir = kill_and_resume(workspace, "killed", overrides, path=path, meanwhile=lose_the_plans)
    assert_bit_exact(run_dir, unbroken)
    assert re.search(r"tokens an epoch, \d+\.\d% padding", workspace.trainers[-1].printed())
    tokens, _, plan = (run_history(run_dir).dataset or "").partition("+")
    assert tokens
    assert plan


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.slow
def test_a_mixture_resumes_exactly_and_leaves_out_the_bad_records_of_a_source(
    workspace: Workspace, tmp_path: Path, hosts: int
) -> None:
    """Two sources: one has an item that can't be read, one is used up; the weights change."""
    files = tmp_path / "files"
    files.mkdir()
    np.random.default_rng(0).integers(0, 64, 2500).astype("<u2").tofile(files / "train.bin")
    few = {"kind": "nanogpt", "path": str(files), "vocab_size": 64, "end_of_document": None}
    many = {"kind": "custom", "target": "tests.promises.faulty:rows"}
    parts = [
        {"name": "many", "weight": 0.5, "source": many},
        {"name": "few", "weight": 0.5, "epochs": 3, "source": few},
    ]
    schedule = [{"after_step": 10, "weights": {"many": 0.8, "few": 0.2}}]
    path = tmp_path / "mixture.yaml"
    section = yaml.safe_load(FAULTY.read_text())
    section["data"]["source"] = {"kind": "mixture", "sources": parts, "schedule": schedule}
    path.write_text(yaml.safe_dump(section))
    # Of "many", the row that a batch between step 10 and step 20 has.
    bad = int(Permutation(1800, seed=0, name="many").ids(np.array([200]))[0])
    env = {"POISON": f"{bad}:raise", "PACE": "0.002"}
    unbroken = workspace.run_dir("unbroken")
    if hosts == 1:
        workspace.finish("unbroken", config=path, env=env)
    else:
        workspace.launched("unbroken", config=path, env=env, hosts=hosts)
    run_dir = kill_and_resume(workspace, "killed", (), path=path, hosts=hosts, env=env, last=50)
    assert_bit_exact(run_dir, unbroken)
    for one in (run_dir, unbroken):
        bodies = [record.body for record in run_log.read_records(one.log)]
        (skip,) = (body for body in bodies if isinstance(body, Skip))
        ((start, stop),) = skip.rows
        assert (stop - start, f"item {bad}" in skip.reason) == (1, True)
        assert 10 * 24 < start < 20 * 24


PAGE, _, IMAGES = (
    (ROOT / "docs" / "data.md")
    .read_text()
    .partition("\n## What a run reads")[0]
    .partition("\n## Train on your own images")
)
SMALL = ("model.kind=mlp", "train.steps=2", "evaluation.every_steps=0", "data.seq_len=16")


@pytest.mark.slow
def test_every_command_that_trains_on_own_files_works_as_the_docs_say(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my.yaml").write_text(
        settings.replace("path: texts", f"path: {tmp_path / 'texts'}")
    )
    folders = {"texts": text, "dump": jsonl, "tables": parquet, "saved/train": huggingface}
    for name, write in folders.items():
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name, documents())
    np.tile(np.arange(500), 4).astype("<u2").tofile(tmp_path / "train.bin")
    bpe.train(tmp_path / "tokenizer")
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [line.split() for line in lines if not line.startswith("#")]
    assert len(commands) == 15
    for number, (*words,) in enumerate(commands):
        given = [re.sub(r"(path=|--out=)", rf"\1{tmp_path}/", word) for word in words]
        given = [str(tmp_path / word) if word in ("my.yaml", "built") else word for word in given]
        cache = f"data.cache_dir={tmp_path / 'cache'}"
        if words[0] == "jaxres":
            assert main([*given[1:], cache, "data.seq_len=16"]) == 0
            assert capsys.readouterr().out
        else:
            run_dir = workspace.run_dir(str(number))
            here = [f"run.dir={run_dir.root}", cache, *SMALL]
            trainer = workspace.command(run_dir, [*given[3:], *here])
            assert trainer.wait_exit() == 0, f"{words}\n{trainer.printed()}"
            assert run_history(run_dir).step == 2


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.campaign
def test_a_run_on_images_as_in_the_docs_resumes_exactly(
    workspace: Workspace, tmp_path: Path, hosts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random crops over several epochs; from a folder, from Parquet, and from a built folder."""
    (module,) = re.findall(r"```python\n(.*?)```", IMAGES, re.DOTALL)
    (settings,) = re.findall(r"```yaml\n(.*?)```", IMAGES, re.DOTALL)
    (tmp_path / "pictures.py").write_text(module)
    path = tmp_path / "images.yaml"
    cached = f"\n  cache_dir: {tmp_path / 'cache'}"
    path.write_text(
        settings.replace("path: photos", f"path: {tmp_path / 'photos'}").replace(
            "heldout_fraction: 0.1", f"heldout_fraction: 0.1{cached}"
        )
    )
    contents = photos(tmp_path / "photos")
    overrides, env = ("checkpoint.save_every_steps=5",), {"PYTHONPATH": str(tmp_path)}
    unbroken = workspace.run_dir("unbroken")
    if hosts == 1:
        workspace.finish("unbroken", *overrides, config=path, env=env)
    else:
        workspace.launched("unbroken", *overrides, config=path, env=env, hosts=hosts)
    run_dir = kill_and_resume(
        workspace, "killed", overrides, path=path, hosts=hosts, env=env, last=80
    )
    assert_bit_exact(run_dir, unbroken)
    losses = [row["loss"] for row in history(run_dir)]
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) / 2, "it does not learn"
    if hosts > 1:
        return
    built = tmp_path / "built"
    assert main(["data", "inspect", str(path)]) == 0
    assert "images of each label: 0: 30, 1: 30" in capsys.readouterr().out
    assert main(["data", "build", str(path), "--out", str(built)]) == 0
    assert f"data.source.kind=images data.source.path={built}" in capsys.readouterr().out
    moved = [*overrides, f"data.source.path={built}"]
    assert workspace.start("killed", *moved, config=path, env=env).wait_exit() == 0
    assert run_history(run_dir).step == 100
    (tmp_path / "tables").mkdir()
    table = pyarrow.table({"image": contents, "label": [0] * 30 + [1] * 30})
    pyarrow.parquet.write_table(table, tmp_path / "tables" / "all.parquet")
    shards = [f"data.source.path={tmp_path / 'tables'}", "data.source.label_column=label"]
    workspace.finish("shards", *shards, config=path, env=env)


def last_evaluation(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", str(run_dir.root), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["evaluation"]


def evaluated_steps(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Returns the steps to which `jaxres history` says the loss of each set."""
    assert main(["history", str(run_dir.root), "--json"]) == 0
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert main(["history", str(run_dir.root)]) == 0
    assert capsys.readouterr().out.count("  heldout ") == 2
    return [line["step"] for line in lines if set(line.get("losses", ())) == {"heldout", "own"}]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.slow
def test_a_hugging_face_tokenizer_goes_the_whole_way(
    workspace: Workspace, tmp_path: Path, hosts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokenised, trained, killed, resumed, sampled as text, exported, and opened again."""
    path = config(tmp_path)
    trained = bpe.train(tmp_path / "tokenizer")
    valid = tmp_path / "valid"
    valid.mkdir()
    text(valid, documents()[:5])
    overrides = [
        *(*MODEL, "train.steps=100", *EXPORTED),
        *source("jsonl", tmp_path / "data"),
        "data.tokenizer.kind=huggingface",
        f"data.tokenizer.path={trained}",
        "telemetry.sample_tokens=20",
        "evaluation.every_steps=50",
        f"data.validation=[{{name: own, source: {{kind: text, path: {valid}}}}}]",
        "telemetry.sample_prompt=return",
    ]
    unbroken = workspace.run_dir("unbroken")
    if hosts == 1:
        workspace.finish("unbroken", *overrides, config=path)
    else:
        workspace.launched("unbroken", *overrides, config=path, hosts=hosts)

    def change_the_tokenizer() -> None:
        original = (trained / "tokenizer.json").read_bytes()
        bpe.train(trained, vocab_size=390)
        refused = workspace.start("killed", *overrides, config=path)
        refused.assert_fails(78, "the rows are not the ones that this run was started with")
        (trained / "tokenizer.json").write_bytes(original)

    run_dir = kill_and_resume(
        workspace, "killed", overrides, path=path, hosts=hosts, meanwhile=change_the_tokenizer
    )
    assert_bit_exact(run_dir, unbroken)
    evaluations = [last_evaluation(one, capsys) for one in (run_dir, unbroken)]
    assert evaluations[0] == evaluations[1]
    assert evaluations[0]["step"] == 100
    assert evaluated_steps(unbroken, capsys) == [50, 100]
    assert set(evaluations[0]["losses"]) == set(evaluations[0]["bits_per_byte"])
    assert set(evaluations[0]["losses"]) == {"heldout", "own"}
    assert 0 < evaluations[0]["bits_per_byte"]["own"] < 8, "better than knowing nothing"
    assert "return" in workspace.trainers[-1].printed()

    out = tmp_path / "export"
    assert main(["checkpoints", "export", str(run_dir.root), "--out", str(out)]) == 0
    library = Tokenizer.from_file(str(out / "tokenizer.json"))
    settings = json.loads((out / "tokenizer_config.json").read_text())
    fields = json.loads((out / "config.json").read_text())
    assert settings["eos_token"] == bpe.END
    assert settings["chat_template"], "the user's own settings are kept"
    assert fields["eos_token_id"] == library.token_to_id(bpe.END)
    assert library.to_str() == Tokenizer.from_file(str(trained / "tokenizer.json")).to_str()
    capsys.readouterr()
