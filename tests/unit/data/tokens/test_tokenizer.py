"""A Hugging Face tokenizer tokenises whole documents, once, and its identity is checked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxres.config.schema.data import (
    BytesTokenizer,
    DataSection,
    HuggingfaceTokenizer,
    JsonlSource,
    TextSource,
    TokensSource,
)
from jaxres.data import Dataset, open_dataset
from jaxres.data import corpus as corpus_module
from jaxres.data.corpus import describe_corpus, open_corpus
from jaxres.data.sources import documents, token_stream
from jaxres.data.tokens import tokenizer
from jaxres.faults import ConfigError
from tests import bpe

TEXTS = ["def f(x):\n    return x\n", "import json\n\n\nclass A: ...\n" * 40, "é\u4e2d"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bpe.train(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


def section(corpus: Path, tokenizer: Path, **fields: object) -> DataSection:
    return DataSection(
        source=TextSource(path=str(corpus)),
        tokenizer=HuggingfaceTokenizer(path=tokenizer, **fields),  # type: ignore[arg-type]
        seq_len=4,
        heldout_fraction=0,
        cache_dir=corpus.parent / "cache",
    )


def documents_of(dataset: Dataset) -> list[list[int]]:
    corpus = dataset.train.corpus  # type: ignore[attr-defined]
    bounds = zip(corpus.offsets, corpus.offsets[1:], strict=False)
    return [corpus.tokens[start:stop].tolist() for start, stop in bounds]


def test_a_document_is_its_tokens_and_the_end_without_template_padding_or_truncation(
    corpus: Path, trained: Path
) -> None:
    dataset = open_dataset(section(corpus, trained))
    library = Tokenizer.from_file(str(trained / "tokenizer.json"))
    assert len(library.encode(TEXTS[1]).ids) == 5, "it truncates"
    library.no_truncation()
    library.no_padding()
    end = library.token_to_id(bpe.END)
    expected = [[*library.encode(text, add_special_tokens=False).ids, end] for text in TEXTS]
    assert sorted(documents_of(dataset)) == sorted(expected)
    assert dataset.vocab_size == library.get_vocab_size()
    tokenizer = dataset.tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXTS[2])
    assert tokenizer.decode([*tokens, end, *tokens, 10_000]) == f"{TEXTS[2]}\n{TEXTS[2]}"


def test_a_changed_tokenizer_makes_another_corpus(corpus: Path, tmp_path: Path) -> None:
    one = bpe.train(tmp_path / "tokenizer", vocab_size=300)
    before = open_dataset(section(corpus, one))
    again = open_dataset(section(corpus, one / "tokenizer.json"))
    assert before.fingerprint == again.fingerprint
    bpe.train(one, vocab_size=320)
    after = open_dataset(section(corpus, one))
    assert before.fingerprint != after.fingerprint
    assert len(list((tmp_path / "cache" / "corpora").iterdir())) == 2


def test_a_built_folder_has_its_tokenizer_and_refuses_another(
    corpus: Path, trained: Path, tmp_path: Path
) -> None:
    built = open_dataset(section(corpus, trained))
    (entry,) = (tmp_path / "cache" / "corpora").iterdir()
    source = TokensSource(path=entry)
    own = open_dataset(DataSection(source=source, seq_len=4, heldout_fraction=0))
    assert own.tokenizer == built.tokenizer or own.tokenizer.name == built.tokenizer.name  # type: ignore[union-attr]
    other = HuggingfaceTokenizer(path=bpe.train(tmp_path / "other", vocab_size=310))
    with pytest.raises(ConfigError, match="were made with huggingface:"):
        open_dataset(DataSection(source=source, tokenizer=other, seq_len=4))
    (entry / "tokenizer.json").write_bytes((tmp_path / "other" / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="Put the original tokenizer"):
        open_dataset(DataSection(source=source, seq_len=4))
    assert json.loads((entry / "tokenizer_config.json").read_text())["chat_template"]


OTHER_ENDS = {
    "special_tokens_map.json": ({"eos_token": "<s>"}, "has '<s>'"),
    "config.json": ({"eos_token_id": 1}, "has '<s>'"),
    "generation_config.json": ({"eos_token_id": [1, 2, -1, 10**12]}, "has '<s>', '<pad>'"),
}


@pytest.mark.parametrize("name", OTHER_ENDS)
def test_another_end_of_documents_in_a_file_beside_the_tokenizer_is_told(
    corpus: Path, tmp_path: Path, name: str
) -> None:
    folder = bpe.train(tmp_path / "tokenizer")
    fields, says = OTHER_ENDS[name]
    agreeing = {key: bpe.END if key == "eos_token" else [0, 1] for key in fields}
    for data, expected in ((agreeing, ""), (fields, says)):
        (folder / name).write_text(json.dumps(data))
        opened = tokenizer.open_tokenizer(HuggingfaceTokenizer(path=folder))
        assert isinstance(opened, tokenizer.LibraryTokenizer)
        assert expected in opened.note
        assert bool(opened.note) == bool(expected), opened.note
    assert f"{name} has" in opened.note
    chosen = tokenizer.open_tokenizer(HuggingfaceTokenizer(path=folder, end_of_document=bpe.END))
    assert isinstance(chosen, tokenizer.LibraryTokenizer)
    assert chosen.note == ""


def test_an_unusable_tokenizer_is_one_error_that_names_it(
    corpus: Path, trained: Path, tmp_path: Path
) -> None:
    def error(tokenizer: Path, **fields: object) -> str:
        with pytest.raises(ConfigError) as caught:
            open_dataset(section(corpus, tokenizer, **fields))
        return str(caught.value)

    assert "does not exist. Give the file tokenizer.json" in error(tmp_path / "none")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert f"{bad} is not a tokenizer.json" in error(bad)
    alone = tmp_path / "alone" / "tokenizer.json"
    alone.parent.mkdir()
    alone.write_bytes((trained / "tokenizer.json").read_bytes())
    assert "special tokens: <|endoftext|>, <s>, <pad>" in error(alone)
    assert "has no token '</s>'" in error(alone, end_of_document="</s>")
    assert open_dataset(section(corpus, alone, end_of_document="<s>")).vocab_size == 400
    (alone.parent / "tokenizer_config.json").write_text("[1]")
    assert "is not a JSON object" in error(alone)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: f["model"]["vocab"].update({"twice": 300}), "'twice' have the id 300"),
        (lambda f: f["added_tokens"][1].update(id=300), "have the id 300"),
        (lambda f: f["added_tokens"][1].update(content="<pad>"), "'<pad>' have the id 1"),
        (lambda f: f["added_tokens"].append({**f["added_tokens"][1], "id": 400}), "ids 1 and 400"),
    ],
)
def test_a_word_or_an_id_that_a_tokenizer_has_twice_is_refused(
    trained: Path, change: Callable[[Any], object], says: str
) -> None:
    fields = json.loads((trained / "tokenizer.json").read_bytes())
    tokenizer._unambiguous_added(json.dumps(fields).encode(), "here")
    change(fields)
    with pytest.raises(ConfigError, match=f"here: which word has which id is ambiguous: .*{says}"):
        tokenizer._unambiguous_added(json.dumps(fields).encode(), "here")


def test_a_word_that_a_unigram_tokenizer_has_twice_is_refused(tmp_path: Path) -> None:
    for words in ("ab", "aba"):
        library = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
        library.add_special_tokens([bpe.END])
        library.save(str(tmp_path / "tokenizer.json"))
        section = HuggingfaceTokenizer(path=tmp_path, end_of_document=bpe.END)
        opened = tokenizer.open_tokenizer(section)
        assert isinstance(opened, tokenizer.LibraryTokenizer)
        if words == "ab":
            opened.require_unambiguous()
            assert opened.vocab_size == 3
    with pytest.raises(ConfigError, match="'a' has the ids 0 and 2"):
        opened.require_unambiguous()


def test_an_added_token_whose_id_the_library_changes_is_refused(
    corpus: Path, trained: Path, tmp_path: Path
) -> None:
    fields = json.loads((trained / "tokenizer.json").read_bytes())
    ids = [token["id"] for token in fields["added_tokens"]]
    free = max(*ids, *fields["model"]["vocab"].values()) + 1
    for gap in (0, 50):
        folder = tmp_path / str(gap)
        shutil.copytree(trained, folder)
        added = {**fields["added_tokens"][0], "content": "<|more|>", "id": free + gap}
        changed = {**fields, "added_tokens": [*fields["added_tokens"], added]}
        (folder / "tokenizer.json").write_text(json.dumps(changed))
        if gap:
            with pytest.raises(ConfigError, match=r"'<\|more\|>' has the id .* the library takes"):
                open_dataset(section(corpus, folder, end_of_document=bpe.END))
        else:
            assert open_dataset(section(corpus, folder, end_of_document=bpe.END)).vocab_size


def test_an_ambiguous_tokenizer_makes_no_tokens_and_cached_ones_need_no_second_parse(
    corpus: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, check = list[str](), tokenizer._unambiguous_added

    def counted(data: bytes, where: str) -> tokenizer.Words:
        checked.append(where)
        return check(data, where)

    monkeypatch.setattr(tokenizer, "_unambiguous_added", counted)
    for _ in range(2):
        built = open_dataset(section(corpus, trained))
    assert checked == [f"data.tokenizer.path: {trained / 'tokenizer.json'}"]
    fields = json.loads((trained / "tokenizer.json").read_bytes())
    fields["model"]["vocab"]["twice"] = 300
    (other := tmp_path / "other").mkdir()
    (other / "tokenizer.json").write_text(json.dumps(fields))
    given = HuggingfaceTokenizer(path=other, end_of_document=bpe.END)
    config = section(corpus, trained).model_copy(update={"tokenizer": given})
    with pytest.raises(ConfigError, match=f"{other}.* which word .*'twice' have the id 300"):
        open_dataset(config)
    entry = built.train.corpus.folder  # type: ignore[attr-defined]
    assert [path for path in entry.parent.iterdir() if path.name[0] != "."] == [entry]
    with pytest.raises(ConfigError, match="which word has which id is ambiguous"):
        open_dataset(config.model_copy(update={"source": TokensSource(path=entry)}))


HARMLESS = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
    "additional_special_tokens": ["<s>"],
    "bos_token": "<s>",
    "clean_up_tokenization_spaces": False,
    "errors": "replace",
    "model_max_length": 131072,
    "pad_token": "<pad>",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}


@pytest.mark.parametrize(
    "change",
    [
        {"add_prefix_space": True},
        {"added_tokens_decoder": {"399": {"content": "<new>"}}},
        {"added_tokens_decoder": {"7": {"content": "<s>"}}},
        {"additional_special_tokens": ["<new>"]},
        {"do_lower_case": True},
        {"dropout": 0.1},
    ],
    ids=json.dumps,
)
def test_a_setting_of_a_tokenizer_that_its_file_does_not_have_is_refused(
    corpus: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    folder = bpe.train(tmp_path / "tokenizer")
    path = folder / "tokenizer_config.json"
    given = json.loads(path.read_text()) | HARMLESS
    path.write_text(json.dumps(given))
    assert open_dataset(section(corpus, folder)).vocab_size == 400
    path.write_text(json.dumps(given | change))
    (key,) = change
    with pytest.raises(ConfigError, match=f"tokenizer_config.json beside it has .*{key}"):
        open_dataset(section(corpus, folder))


SPECIAL = {"content": "<s>", "special": True}
PLAIN_ID, PLAIN = 400, {"content": "<plain>", "normalized": True, "special": False}
BESIDE: dict[str, tuple[str, dict[str, object], bool]] = {
    "a token of added_tokens.json": ("added_tokens.json", {"<new>": 401}, True),
    "another id there": ("added_tokens.json", {"<plain>": 77}, True),
    "flags of a token": (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"400": PLAIN | {"lstrip": True}}},
        True,
    ),
    "a token that is special": (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"400": PLAIN | {"special": True}}},
        True,
    ),
    "a named token that is special": ("special_tokens_map.json", {"pad_token": PLAIN}, True),
    "no token": ("special_tokens_map.json", {"bos_token": 7}, True),
    "flags that are no flags": (
        "special_tokens_map.json",
        {"bos_token": SPECIAL | {"lstrip": 1}},
        True,
    ),
    "flags of a special token": (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"1": SPECIAL | {"rstrip": True}}},
        False,
    ),
    "flags of a named token": (
        "tokenizer_config.json",
        {"bos_token": SPECIAL | {"normalized": True}},
        False,
    ),
    "a named token": ("tokenizer_config.json", {"pad_token": "<new>"}, False),
    "one of the map": ("special_tokens_map.json", {"bos_token": "<new>"}, False),
    "several of the map": (
        "special_tokens_map.json",
        {"additional_special_tokens": ["<s>", SPECIAL | {"content": "<new>"}]},
        False,
    ),
    "a piece of text": ("special_tokens_map.json", {"bos_token": "return"}, False),
}
"""Name -> file beside tokenizer.json, its fields, whether they change texts without `control`."""
AGREEING = {
    "tokenizer_config.json": {
        "added_tokens_decoder": {"1": SPECIAL, "400": PLAIN},
        "additional_special_tokens": ["<s>", SPECIAL | {"lstrip": True}],
        "bos_token": SPECIAL | {"__type": "AddedToken", "normalized": True},
        "pad_token": "<pad>",
    },
    "special_tokens_map.json": {"bos_token": "<s>", "pad_token": SPECIAL | {"content": "<pad>"}},
    "added_tokens.json": {"<s>": 1, "<plain>": 400},
}
"""What Hugging Face's libraries write; where added_tokens_decoder has a token, its flags count."""


def with_plain_token(folder: Path) -> Path:
    """Trains a tokenizer and gives it a token that is not special, in a folder without settings."""
    library = Tokenizer.from_file(str(bpe.train(folder) / "tokenizer.json"))
    library.add_tokens([AddedToken("<plain>", normalized=True)])
    assert library.token_to_id("<plain>") == PLAIN_ID
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").unlink()
    return folder


@pytest.mark.parametrize("mode", ["text", "control"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_token_beside_a_tokenizer_that_its_file_does_not_have_so_is_refused(
    corpus: Path, tmp_path: Path, name: str, mode: str
) -> None:
    folder = with_plain_token(tmp_path / "tokenizer")
    file, fields, always = BESIDE[name]
    given = section(corpus, folder, special_tokens=mode, end_of_document=bpe.END)
    (folder / file).write_text(json.dumps(fields))
    if not always and mode == "text":
        assert tokenizer.open_tokenizer(given.tokenizer).vocab_size == 401
        return
    with pytest.raises(ConfigError, match=r"beside it has .*save_pretrained") as caught:
        tokenizer.open_tokenizer(given.tokenizer)
    assert name in ("no token", "flags that are no flags") or f"{file}" in str(caught.value)


@pytest.mark.parametrize("mode", ["text", "control"])
def test_tokens_beside_a_tokenizer_that_agree_with_it_are_accepted(
    corpus: Path, tmp_path: Path, mode: str
) -> None:
    folder = with_plain_token(tmp_path / "tokenizer")
    given = section(corpus, folder, special_tokens=mode, end_of_document=bpe.END)
    for file, fields in AGREEING.items():
        (folder / file).write_text(json.dumps(fields))
    assert tokenizer.open_tokenizer(given.tokenizer).vocab_size == 401


def test_a_long_document_has_the_same_tokens_in_pieces(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(path.read_text() for path in bpe.SOURCES)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    found = []
    for number, chars in enumerate((documents.PIECE_CHARS, 4096)):
        monkeypatch.setattr(documents, "PIECE_CHARS", chars)
        config = DataSection(
            source=JsonlSource(path=str(tmp_path / "a.jsonl")),
            tokenizer=HuggingfaceTokenizer(path=trained),
            seq_len=4,
            cache_dir=tmp_path / str(number),
        )
        found.append(open_dataset(config).fingerprint)
    assert found[0] == found[1]


KILLED_BUILD = """
import os, signal, sys
from pathlib import Path
from jaxres.config.schema.data import *
from jaxres.data import corpus, open_dataset
from jaxres.data.sources import token_stream

path, tokenizer, cache, kill_at = sys.argv[1:]
corpus.SYNC_SECONDS = 0.0
token_stream.BATCH_CHARS = 2000
left = int(kill_at)
write = corpus._write_journal
def count(*arguments):
    global left
    write(*arguments)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
corpus._write_journal = count
section = DataSection(
    source=JsonlSource(path=path),
    tokenizer=HuggingfaceTokenizer(path=Path(tokenizer)),
    seq_len=8,
    cache_dir=Path(cache),
)
print(open_dataset(section, progress=print).fingerprint)
"""


@pytest.mark.slow
def test_a_killed_build_continues_where_it_was(tmp_path: Path, trained: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        texts = ["word " * int(n) for n in rng.integers(0, 900, 30)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)

    def build(cache: str, kill_at: int) -> subprocess.CompletedProcess[str]:
        arguments = [str(tmp_path), str(trained), str(tmp_path / cache), str(kill_at)]
        command = [sys.executable, "-c", KILLED_BUILD, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    whole = build("whole", 0)
    assert whole.returncode == 0, whole.stderr
    for kill_at in (9,):
        killed = build("cache", kill_at)
        assert killed.returncode == -9, killed.stdout + killed.stderr
    finished = build("cache", 0)
    assert "tokens of an interrupted start" in finished.stdout, finished.stdout
    assert finished.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    entries = [next((tmp_path / name / "corpora").iterdir()) for name in ("whole", "cache")]
    files = [{path.name: path.read_bytes() for path in entry.iterdir()} for entry in entries]
    assert files[0] == files[1]
    assert len(list((tmp_path / "cache" / "corpora").iterdir())) == 1


@pytest.mark.slow
def test_a_damaged_part_of_a_killed_build_is_not_used(tmp_path: Path, trained: Path) -> None:
    lines = "".join(json.dumps({"text": f"text {n} " * 100}) + "\n" for n in range(90))
    (tmp_path / "a.jsonl").write_text(lines)
    config = DataSection(
        source=JsonlSource(path=str(tmp_path)), seq_len=8, cache_dir=tmp_path / "whole"
    )
    whole = open_dataset(config).fingerprint
    code = KILLED_BUILD.replace("tokenizer=HuggingfaceTokenizer(path=Path(tokenizer)),", "")
    arguments = [str(tmp_path), str(trained), str(tmp_path / "cache")]
    killed = subprocess.run([sys.executable, "-c", code, *arguments, "3"], check=False)
    assert killed.returncode == -9
    (building,) = (tmp_path / "cache" / "corpora").iterdir()
    with (building / "tokens.bin").open("r+b") as file:
        file.seek(100)
        file.write(b"\x07")
    printed: list[str] = []
    config = config.model_copy(update={"cache_dir": tmp_path / "cache"})
    assert open_dataset(config, progress=printed.append).fingerprint == whole
    assert any("can't be used" in line for line in printed), printed


def test_the_default_tokenizer_is_bytes() -> None:
    assert DataSection(source=TextSource(path="x")).tokenizer == BytesTokenizer()


def vocabulary_only(folder: Path, model: models.Model) -> HuggingfaceTokenizer:
    """Writes a tokenizer that has the words or letters a, b and no others."""
    library = Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<e>"])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    return HuggingfaceTokenizer(path=folder, end_of_document="<e>")


UNKNOWN = {
    "WordLevel": (
        models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"),
        "WARNING: 2 tokens (33.33%) are the unknown token",
    ),
    "BPE": (
        models.BPE(vocab={"a": 0, "b": 1}, merges=[]),
        "WARNING: the tokenizer drops 2 characters of the text that are not in its vocabulary, "
        "such as 'z' '\\u4e2d'.",
    ),
    "none": (models.WordLevel({"a": 0, "b": 1}), None),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_text_outside_the_vocabulary_is_told(tmp_path: Path, name: str) -> None:
    model, warning = UNKNOWN[name]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a z b \u4e2d a")
    section = vocabulary_only(tmp_path / "tokenizer", model)
    source = TextSource(path=str(tmp_path / "data"))
    corpus = describe_corpus(source, section, cache_dir=tmp_path / "cache")
    messages: list[str] = []
    if warning is None:
        with pytest.raises(ConfigError, match="the tokenizer can't encode a text: WordLevel"):
            open_corpus(corpus, progress=messages.append)
        return
    for _ in range(2):  # The second one opens the cached corpus.
        open_corpus(corpus, progress=messages.append)
        assert [one[: len(warning)] for one in messages if one.startswith("WARNING")] == [warning]
        messages.clear()


def test_what_an_interrupted_build_has_lost_of_the_text_is_told_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a Z"}\n' + '{"text": "a b"}\n' * 9)
    section = vocabulary_only(tmp_path / "tokenizer", UNKNOWN["BPE"][0])
    source, messages = JsonlSource(path=str(tmp_path / "a.jsonl")), list[str]()
    described = describe_corpus(source, section, cache_dir=tmp_path / "cache")
    write = corpus_module._write_journal

    def stop(*given: Any) -> None:
        write(*given)
        raise RuntimeError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(corpus_module, "SYNC_SECONDS", 0.0)
        patched.setattr(token_stream, "BATCH_PIECES", 1)
        patched.setattr(corpus_module, "_write_journal", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            open_corpus(described, progress=messages.append)
    open_corpus(described, progress=messages.append)
    assert any("tokens of an interrupted start" in line for line in messages)
    assert "such as 'Z'" in messages[-2], messages


TRAINED_ON = ["the quick brown fox jumps over the lazy dog", "\u4e2d\u6587 \u044f \u05d0"] * 3


def byte_level(folder: Path, *, alphabet: list[str]) -> HuggingfaceTokenizer:
    """Trains a BPE on bytes that has only those of some text and of an alphabet."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[call-arg]
        vocab_size=400, special_tokens=["<e>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TRAINED_ON, trainer)
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    return HuggingfaceTokenizer(path=folder, end_of_document="<e>")


def test_each_character_without_all_of_its_bytes_is_named(tmp_path: Path) -> None:
    text = "The \u4e2d\u6587\u4e2e fox \U0001f600 = X\n"
    (tmp_path / "a.txt").write_text(text)
    source, messages = TextSource(path=str(tmp_path / "a.txt")), list[str]()
    for name, alphabet in (("some", []), ("all", pre_tokenizers.ByteLevel.alphabet())):
        section = byte_level(tmp_path / name, alphabet=alphabet)
        corpus = describe_corpus(source, section, cache_dir=tmp_path / f"cache-{name}")
        open_corpus(corpus, progress=messages.append)
    (told,) = [line for line in messages if line.startswith("WARNING")]
    assert "drops 6 characters" in told
    assert "such as '\\n' '=' 'T' 'X' '\\u4e2e' '\\U0001f600'." in told


def test_a_tokenizer_of_bytes_loses_nothing_and_nothing_is_told(
    corpus: Path, trained: Path, tmp_path: Path
) -> None:
    tokenizer = HuggingfaceTokenizer(path=trained)
    messages: list[str] = []
    described = describe_corpus(TextSource(path=str(corpus)), tokenizer, cache_dir=tmp_path / "c")
    open_corpus(described, progress=messages.append)
    assert not [one for one in messages if "WARNING" in one]
