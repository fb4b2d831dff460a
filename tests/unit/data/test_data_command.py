"""`jaxres data` builds a corpus once, shows rows as the model gets them, and counts documents."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from jaxres import config as configs
from jaxres.cli import data as data_command
from jaxres.config.schema.data import DataSection, TokensSource
from jaxres.data import corpus, open_dataset, write_tokens
from jaxres.data.sources.source_files import read_below
from jaxres.data.verify import DataReport
from jaxres.exit_codes import ExitCode
from jaxres.storage.path import GcsPath
from tests import bpe
from tests.damage import change_meta

TEXTS = ["hello world", "hello world", "a second one", ""]


@pytest.fixture
def config(tmp_path: Path) -> str:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_text(lines)
    path = tmp_path / "x.yaml"
    path.write_text(
        f"data:\n  source: {{kind: jsonl, path: {tmp_path}}}\n  seq_len: 4\n"
        f"  cache_dir: {tmp_path / 'cache'}\n  heldout_fraction: 0\n"
        "model: {kind: mlp}\ntrain: {steps: 30, global_batch_size: 2}\n"
    )
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = data_command.main(arguments, env=os.environ)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_rows_are_shown_in_the_order_of_the_run(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "show", config, "data.seq_len=5", "--rows", "7", "--at", "7")
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith("position")]
    assert rows[0].startswith("position 7: row ")
    assert sorted(int(row.split()[3]) for row in rows) == list(range(7)), "one epoch"
    assert "segment 1, 1 of 2 weighted: 'd\\n'\n  segment 2, 3 of 3 weighted: 'hel'" in out, out


def test_documents_tokens_lengths_and_duplicates_are_counted(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "inspect", config, "--json")
    assert (code, "without text, which are left out: 1" in err) == (0, True)
    found = json.loads(out)
    sizes = [len(text) + 1 for text in TEXTS if text]
    assert (found["num_documents"], found["num_duplicates"]) == (3, 1)
    assert found["num_tokens"] == sum(sizes)
    assert (found["lengths"]["shortest"], found["lengths"]["longest"]) == (12, 13)
    assert found["num_tokens_used"] == len(set("".join(TEXTS))) + 1
    assert found["rows"] == {"train": 9, "heldout": 0}
    code, out, _ = run(capsys, "inspect", config)
    assert "documents: 3, of which 1 equal an earlier one" in out
    assert "an epoch takes 4.5 steps, the run has 30" in out


def test_tokens_that_no_row_may_have_are_counted(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(tmp_path / "set", [[1, 2, 8], [3, 8, 4, 7]], vocab_size=9, tokenizer="mine")
    fields = [config, f"data.source={{kind: tokens, path: {tmp_path / 'set'}}}"]
    code, out, err = run(capsys, "inspect", *fields)
    assert (code, "WARNING" in out) == (0, False), err
    change_meta(tmp_path / "set", vocab_size=8, checksum=None)
    code, out, err = run(capsys, "inspect", *fields)
    assert (code, "WARNING: 2 tokens have an id of 8 or more" in out) == (0, True), err
    code, out, err = run(capsys, "inspect", *fields, "--json")
    assert json.loads(out)["num_tokens_beyond"] == 2


def test_images_that_no_row_may_have_are_counted(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in range(4):
        (tmp_path / "photos" / f"c{label}").mkdir(parents=True)
        for number in range(label + 1):
            picture = Image.new("RGB", (8, 8), (label, number, 0))
            picture.save(tmp_path / "photos" / f"c{label}" / f"{number}.png")
    source = f"data.source={{kind: images, path: {tmp_path / 'photos'}, size: 8}}"
    for classes, warns in ((4, False), (2, True)):
        sizes = "num_layers: 1, d_model: 8, num_heads: 1, patch_size: 4, image_size: 8"
        fields = [config, source, f"model={{kind: vit, {sizes}, num_classes: {classes}}}"]
        code, out, err = run(capsys, "inspect", *fields)
        assert (code, "7 images of the labels 2, 3, not in 0..1" in out) == (0, warns), err


def test_packed_rows_are_shown_with_their_padding(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = (config, "data.seq_len=15", "data.packing=pad", f"data.cache_dir={tmp_path / 'c'}")
    code, out, err = run(capsys, "inspect", *fields)
    assert code == 0, err
    sizes = [len(text) + 1 for text in TEXTS if text]
    assert f"{1 - sum(sizes) / 45:.1%} of the positions padding" in out
    assert f"{len(sizes)} to train on" in out
    assert "+" in out.partition("fingerprint: ")[2], "the fingerprint has the plan"
    assert json.loads(run(capsys, "inspect", *fields, "--json")[1])["padding"] > 0
    code, out, err = run(capsys, "show", *fields, "--rows", "3")
    assert (code, out.count("  segment 1, "), out.count("  padding: ")) == (0, 3, 3), err


def test_the_data_of_a_run_on_packed_rows_are_compared_without_their_plan() -> None:
    report = DataReport((), "all blocks", "abc")
    for recorded, problems in (("abc", 0), ("abc+plan", 0), ("other+plan", 1)):
        history = SimpleNamespace(newest=3, dataset=recorded)
        assert data_command.as_text(report, history)[0] == problems  # pyright: ignore[reportArgumentType]


def test_a_built_folder_trains_like_its_source(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "built"
    code, printed, _ = run(capsys, "build", config, "--out", str(out))
    assert (code, f"data.source.path={out}" in printed) == (0, True)
    built = open_dataset(DataSection(source=TokensSource(path=out), seq_len=4, heldout_fraction=0))
    code, printed, _ = run(capsys, "build", config)
    assert built.fingerprint in printed
    ids = np.arange(len(built.train))
    assert built.train.rows(ids)["weights_BT"].sum() > 0
    code, _, err = run(capsys, "build", config, "--out", str(out))
    assert (code, "exists already" in err) == (ExitCode.USAGE, True)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".building")]


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["data.source={kind: nanogpt, path: HERE}"], "tokens.bin"),
        (["data.source={kind: text, path: HERE, exclude: ['*.npy']}"], "meta.json, tokens.bin"),
        (["data.source={kind: text, path: 'HERE/*/*.json'}"], "meta.json"),
        (["data.source={kind: text, path: HERE, exclude: ['built/*']}"], None),
        (["data.source={kind: text, path: HERE/a.jsonl}"], None),
        ([], None),  # Its patterns match .jsonl only.
    ],
)
def test_a_folder_that_the_source_would_read_is_not_built(
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    refused: str | None,
) -> None:
    given = [text.replace("HERE", str(tmp_path)) for text in overrides]
    (tmp_path / "link").symlink_to(tmp_path)
    out = tmp_path / "link" / "built"
    source = configs.load(Path(config), given).config.data.source
    found = read_below(source, out, ("meta.json", "tokens.bin", "offsets.npy"))
    assert ", ".join(found) == (refused or "")
    if refused is not None:
        code, _, err = run(capsys, "build", config, *given, "--out", str(out))
        assert (code, f"would read {refused}" in err) == (ExitCode.USAGE, True), err
        assert not out.exists()


def test_a_folder_in_a_bucket_that_the_source_would_read_is_not_built(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "data.source={kind: nanogpt, path: gs://bucket/ids/}"
    code, _, err = run(capsys, "build", config, source, "--out", "gs://bucket/ids/built")
    assert (code, "would read tokens.bin there" in err) == (ExitCode.USAGE, True), err
    beside = configs.load(Path(config), [source]).config.data.source
    assert read_below(beside, GcsPath("bucket", "ids-built"), ["tokens.bin"]) == []
    assert read_below(beside, Path("/ids/built"), ["tokens.bin"]) == []


def test_a_full_disk_is_named_by_the_argument_that_names_the_place(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(corpus, "_build", full)
    code, _, err = run(capsys, "build", config, "--out", str(tmp_path / "out"))
    assert (code, "data.cache_dir" in err) == (ExitCode.STORAGE, False), err
    assert f"--out: the tokenised corpus can't be written to {tmp_path}" in err
    code, _, err = run(capsys, "build", config)
    assert (code, "give data.cache_dir another folder" in err) == (ExitCode.STORAGE, True), err


def test_the_plan_of_packed_rows_is_built_too(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = [config, "data.packing=best_fit"]
    code, _, err = run(capsys, "build", *packed)
    assert (code, "Packing 3 documents into rows (best_fit)" in err) == (0, True)
    assert len(list((tmp_path / "cache" / "packings").glob("*.npy"))) > 0
    code, _, err = run(capsys, "show", *packed)
    assert (code, "Packing" in err) == (0, False), err


def test_a_folder_is_built_into_a_bucket(
    config: str, gcs_bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"gs://{gcs_bucket}/corpora/one"
    for _ in range(2):  # Again after an interruption.
        code, printed, err = run(capsys, "build", config, "--out", out)
        assert (code, out in printed) == (0, True), err
    source = TokensSource(path=GcsPath(gcs_bucket, "corpora/one"))
    section = DataSection(source=source, seq_len=4, heldout_fraction=0, cache_dir=tmp_path / "new")
    assert open_dataset(section).fingerprint in printed
    (tmp_path / "a.jsonl").write_text('{"text": "another"}')
    code, _, err = run(capsys, "build", config, "--out", out)
    assert (code, "exists already, with other content" in err) == (ExitCode.CONFIG, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "--rows", "x"], ExitCode.USAGE, "'x': expected a number from 0"),
        (["show", "--at", "9" * 20], ExitCode.USAGE, "expected a number from 0"),
        (["count"], ExitCode.USAGE, "choose from"),
        (
            ["build", "data.source.kind=tokens", "data.source.path=/x"],
            ExitCode.USAGE,
            "nothing to tokenise",
        ),
        (["inspect", "data.source.field=body"], ExitCode.CONFIG, "line 1 has no 'body'"),
        (["inspect", "data.source.include=[no]"], ExitCode.CONFIG, "matches no file"),
    ],
)
def test_bad_input_is_one_clear_error(
    config: str,
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verb, *rest = arguments
    found, out, err = run(capsys, verb, config, *rest)
    assert (found, out, message in err) == (code, "", True), err
    assert message in err.splitlines()[-1], err


class Numbers:
    """Rows of a user, of which the second has a token that a model of 300 rows lacks."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[int]:
        return [1, 2, 299 if index == 0 else 300, 4, 5]


@pytest.mark.parametrize("command", ["show", "inspect"])
def test_data_that_do_not_fit_the_model_are_not_shown_as_fine(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = bpe.train(tmp_path / "tokenizer", vocab_size=270, texts=TEXTS)
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    tokenizer = f"data.tokenizer={{kind: huggingface, path: {folder}}}"
    assert run(capsys, command, config, tokenizer, f"model.vocab_size={size}")[0] == 0
    code, out, err = run(capsys, command, config, tokenizer, f"model.vocab_size={size - 1}")
    assert (code, out) == (ExitCode.CONFIG, "")
    assert f"model.vocab_size: {size - 1} rows for a tokenizer of {size} tokens" in err


def test_rows_that_the_model_can_not_take_are_not_shown(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"data.source={{kind: custom, target: '{__name__}:Numbers'}}"
    others = ("show", config, source, "data.tokenizer={kind: bytes}", "--rows", "4")
    code, out, _ = run(capsys, *others, "model.vocab_size=301")
    assert (code, out.count("300")) == (0, 3)
    code, out, err = run(capsys, *others, "model.vocab_size=300")
    assert code == ExitCode.CONFIG
    assert "300" in err
    assert "0..299" in err
