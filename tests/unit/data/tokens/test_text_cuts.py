"""A long document has the same tokens in parts as at once, and special tokens in it are text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from jaxres.config.schema.data import (
    DataSection,
    HuggingfaceTokenizer,
    JsonlSource,
    Source,
    TextSource,
)
from jaxres.data import open_dataset
from jaxres.data.sources import documents
from jaxres.data.sources.source_files import SourceFile
from jaxres.data.tokens import text_cuts
from jaxres.data.tokens.tokenizer import LibraryTokenizer, open_tokenizer
from jaxres.faults import ConfigError

END = "</s>"
WORDS = [
    *("word", "it's", "I'LL", "naïve", "Übung", "x_y_", "_", "3.14", "20000", "a1b2", "foo()"),
    *("мир", "世界", "。", "שלום", "e\u0301", "\u0301", "...", "--", "<s>", "</s>", "<|x|>", "²"),
    *("\U0001f600", "\u2581", "\u2581the", "the", "\u00a0", "\u0660", "Dž", "\ufb01"),
    *("\u09df", "\u0958", "\u2488", "\u0130", "\ud55c"),
]
GAPS = [" ", " ", " ", "\n", "\n\n", "  ", "\r\n", " \n", "\t", "", "\u3000", "\n "]


@functools.cache
def texts() -> list[str]:
    """Returns texts of words and gaps in any order."""
    rng = np.random.default_rng(0)
    return [
        "".join(
            f"{rng.choice(WORDS)}{rng.choice(GAPS[: int(rng.integers(1, len(GAPS)))])}"
            for _ in range(200)
        )
        for _ in range(20)
    ]


def saved(library: Tokenizer, folder: Path, **fields: Any) -> LibraryTokenizer:
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    section = HuggingfaceTokenizer(path=folder, end_of_document=END, **fields)
    found = open_tokenizer(section)
    assert isinstance(found, LibraryTokenizer)
    return found


def trained(
    pre: Any, normalizer: Any = None, trainer: Any = trainers.BpeTrainer, model: Any = models.BPE
) -> Tokenizer:
    library = Tokenizer(model())
    if normalizer is not None:
        library.normalizer = normalizer
    library.pre_tokenizer = pre
    more = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    given = trainer(
        vocab_size=500, show_progress=False, special_tokens=["<unk>", "<s>", END], **more
    )
    library.train_from_iterator(texts(), given)
    return library


def by_regex(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, byte_level])


def sentencepiece(
    normalizer: Any, pre: Any = None, *, more: tuple[str, ...] = (), **fields: Any
) -> Tokenizer:
    """Returns a tokenizer like Llama 2's: merges over the whole text, and bytes for the rest."""
    vocab = {"<unk>": 0, "<s>": 1, END: 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for char in sorted({*"".join(WORDS), "\u2581", *"abcdefghijklmnopqrstuvwxyz'"} - {" "}):
        vocab.setdefault(char, len(vocab))
    merges = [("\u2581", "t"), ("\u2581", "w"), ("o", "r"), ("or", "d"), ("\u2581w", "ord")]
    merges += [("\u2581", "\u2581"), ("\u2581t", "h"), ("\u2581th", "e"), ("t", "h"), ("th", "e")]
    for one in more:
        vocab.setdefault(one[0], len(vocab))
        vocab.setdefault(one[1:], len(vocab))
        merges.append((one[0], one[1:]))
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    given = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>", **fields}
    library = Tokenizer(models.BPE(vocab=vocab, merges=merges, **given))
    if normalizer is not None:
        library.normalizer = normalizer
    if pre is not None:
        library.pre_tokenizer = pre
    library.decoder = decoders.ByteFallback()
    library.add_special_tokens(["<unk>", "<s>", END])
    return library


BLANK = normalizers.Replace(" ", "\u2581")
LLAMA2 = normalizers.Sequence([normalizers.Prepend("\u2581"), BLANK])


def gpt2() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


def with_added(library: Tokenizer, *tokens: Any) -> Tokenizer:
    library.add_tokens(list(tokens))
    return library


CUT: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "nfc": lambda: trained(by_regex(text_cuts.GPT2), normalizers.NFC()),
    **{
        f"{kind} of Qwen": lambda kind=kind: trained(
            by_regex(max(text_cuts.REGEXES, key=len)), getattr(normalizers, kind)()
        )
        for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
    },
    **{
        f"regex {number}": lambda pattern=pattern: trained(by_regex(pattern))
        for number, pattern in enumerate(sorted(text_cuts.REGEXES))
    },
    "bert": lambda: trained(
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
        trainers.WordPieceTrainer,
        lambda: models.WordPiece(unk_token="<unk>"),
    ),
    "llama2": lambda: sentencepiece(LLAMA2),
    "gemma": lambda: sentencepiece(BLANK, pre_tokenizers.Split(" ", "merged_with_previous")),
    "metaspace": lambda: sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "unsplit": lambda: sentencepiece(
        None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    ),
    "added": lambda: with_added(gpt2(), "<|x|>", "  ", "\n\n"),
}
"""Tokenizers of which a long document is cut."""
WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "a blank before each text": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "another pattern": lambda: trained(by_regex(r"\w+\s*|[^\w]")),
    "strip": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Strip()),
    "unigram": lambda: trained(
        pre_tokenizers.Metaspace(), None, trainers.UnigramTrainer, models.Unigram
    ),
    "tokens over both": lambda: sentencepiece(LLAMA2, more=("e\u2581", "d\n")),
    "no bytes": lambda: sentencepiece(LLAMA2, byte_fallback=False),
    "found in a text": lambda: with_added(sentencepiece(LLAMA2), "<|x|>"),
    "an added token with a blank": lambda: with_added(gpt2(), "s w"),
    "of a single word after a blank": lambda: with_added(
        gpt2(), AddedToken(" if", single_word=True, special=False)
    ),
    "blanks beside Chinese characters": lambda: trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.BertNormalizer()
    ),
    "takes the blank after it": lambda: with_added(gpt2(), AddedToken("<|x|>", rstrip=True)),
}
"""Tokenizers of which a document is encoded as one."""


def in_parts(tokenizer: LibraryTokenizer, text: str, file: SourceFile) -> tuple[int, list[int]]:
    pieces = list(documents._cut([text], tokenizer.cuts, file))
    assert "".join(str(piece.text) for piece in pieces) == text
    again = list(documents._cut(list(text), tokenizer.cuts, file))
    assert again == pieces, "where it is cut depends on the text only"
    later = [not piece.begins_document for piece in pieces]
    assert later == [False] + [True] * (len(pieces) - 1)
    encoded = tokenizer.encode_all([piece.text for piece in pieces], later=later)
    return len(pieces), np.concatenate(encoded).tolist()


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> SourceFile:
    monkeypatch.setattr(documents, "PIECE_CHARS", 30)
    monkeypatch.setattr(text_cuts, "NEAR_CHARS", 20)
    return SourceFile("a", Path("a"), 1, 1, 1)


@pytest.mark.parametrize("special", ["text", "control"])
@pytest.mark.parametrize("name", CUT)
def test_a_long_document_has_the_tokens_of_the_whole(
    tmp_path: Path, file: SourceFile, name: str, special: str
) -> None:
    library = CUT[name]()
    tokenizer = saved(library, tmp_path / "t", special_tokens=special)
    num_pieces = 0
    for text in texts():
        pieces, found = in_parts(tokenizer, text, file)
        num_pieces += pieces
        assert found == tokenizer.encode(text)
    may_be_cut = special == "text" or name not in ("llama2", "metaspace", "unsplit")
    assert (num_pieces > 4 * len(texts())) == may_be_cut


@pytest.mark.parametrize("name", WHOLE)
def test_a_document_is_encoded_as_one_where_a_cut_is_not_certain(
    tmp_path: Path, file: SourceFile, name: str
) -> None:
    tokenizer = saved(WHOLE[name](), tmp_path / "t")
    for text in texts():
        assert in_parts(tokenizer, text, file) == (1, tokenizer.encode(text))


def test_a_document_without_places_is_refused_if_it_is_too_long(
    file: SourceFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_WHOLE_CHARS", 100)
    cuts = text_cuts.Cuts(text_cuts.AFTER_WORD)
    assert len(list(documents._cut(["ab " * 300], cuts, file))) > 20
    assert len(list(documents._cut(["a" * 99], cuts, file))) == 1
    for one in (cuts, text_cuts.NOWHERE):
        with pytest.raises(ConfigError, match="Divide it into documents"):
            list(documents._cut(["a" * 101, " b"], one, file))


def corpus_of(source: Source, tokenizer: HuggingfaceTokenizer, cache: Path) -> Any:
    config = DataSection(
        source=source, tokenizer=tokenizer, seq_len=4, heldout_fraction=0, cache_dir=cache
    )
    opened = open_dataset(config)
    return opened.train.corpus, opened.tokenizer  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_corpus_of_long_documents_has_the_tokens_of_the_whole(
    tmp_path: Path, file: SourceFile, kind: str
) -> None:
    saved(sentencepiece(LLAMA2), tmp_path / "t")
    (tmp_path / "data").mkdir()
    given = [text.replace("\r", "") for text in texts()[:3]]
    if kind == "text":
        (tmp_path / "data" / "a.txt").write_text(given[0])
        source: Source = TextSource(path=str(tmp_path / "data"))
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in given)
        (tmp_path / "data" / "a.jsonl").write_text(lines)
        source = JsonlSource(path=str(tmp_path / "data"))
    section = HuggingfaceTokenizer(path=tmp_path / "t", end_of_document=END)
    corpus, tokenizer = corpus_of(source, section, tmp_path / "cache")
    expected = [tokenizer.encode(text) for text in (given[:1] if kind == "text" else given)]
    end = tokenizer.end_of_document
    assert corpus.tokens.tolist() == [id_ for ids in expected for id_ in [*ids, end]]


SPELLED = f"a <s> b {END} c <unk>word"


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_text_that_spells_special_tokens_has_the_tokens_of_its_letters(
    tmp_path: Path, kind: str, name: str
) -> None:
    folder, data = tmp_path / "t", tmp_path / "data"
    library = saved(CUT[name](), folder).library
    data.mkdir()
    if kind == "text":
        (data / "a.txt").write_text(SPELLED)
        source: Source = TextSource(path=str(data))
    else:
        (data / "a.jsonl").write_text(json.dumps({"text": SPELLED}))
        source = JsonlSource(path=str(data))
    section = HuggingfaceTokenizer(path=folder, end_of_document=END)
    corpus, tokenizer = corpus_of(source, section, tmp_path / "cache")
    special = {library.token_to_id(token) for token in ("<unk>", "<s>", END)}
    ids = corpus.tokens.tolist()
    assert corpus.meta.num_documents == 1
    assert special.isdisjoint(ids[:-1])
    assert ids[-1] == library.token_to_id(END)
    assert ids[:-1] == tokenizer.encode(SPELLED), "a prompt has the same tokens"
    control = section.model_copy(update={"special_tokens": "control"})
    other, tokenizer = corpus_of(source, control, tmp_path / "cache")
    assert special & set(other.tokens[:-1].tolist()) == special
    assert special <= set(tokenizer.encode(SPELLED))
    assert len(list((tmp_path / "cache" / "corpora").iterdir())) == 2, "each has its own entry"
    assert other.meta.tokenizer == corpus.meta.tokenizer, "each id is the same token"


def test_a_token_that_ends_documents_but_may_be_in_a_text_is_refused(tmp_path: Path) -> None:
    library = with_added(gpt2(), "<end>")
    saved(library, tmp_path / "t")
    section = HuggingfaceTokenizer(path=tmp_path / "t", end_of_document="<end>")
    with pytest.raises(ConfigError, match="'<end>' has the token that ends a document"):
        open_tokenizer(section)
    assert open_tokenizer(section.model_copy(update={"special_tokens": "control"}))


@pytest.mark.parametrize("prepended", [False, True])
def test_a_text_that_spells_a_word_of_a_unigram_model_has_no_control_token(
    tmp_path: Path, prepended: bool
) -> None:
    letters = [(letter, -3.0) for letter in sorted({*END, *"<s>", "a", "\u2581"})]
    library = Tokenizer(models.Unigram([("<unk>", 0.0), (END, 0.0), ("<s>", 0.0), *letters], 0))
    library.pre_tokenizer = pre_tokenizers.Metaspace() if prepended else None
    library.add_special_tokens(["<unk>", END, "<s>"])
    words = (END, f"a{END}", f"a {END} a", f"{END}<s>{END}", f"<{END}")
    plain_ids = library.encode("a aa a").ids
    section = HuggingfaceTokenizer(path=tmp_path / "t", end_of_document=END)
    tokenizer = saved(library, tmp_path / "t")
    assert tokenizer.encode("a aa a") == plain_ids
    for word in words:
        assert {1, 2}.isdisjoint(tokenizer.encode(word)), word
        assert {1, 2}.isdisjoint(tokenizer.encode_all([word])[0].tolist()), word
        assert 1 in library.encode(word).ids, "the library alone takes it"
    control = open_tokenizer(section.model_copy(update={"special_tokens": "control"}))
    assert all(1 in control.encode(word) for word in words)
    assert tokenizer.encoding == " encoding 3 text", "cached corpora of before are not used"
    assert control.encoding == " encoding 2 control"


def plain(kind: str) -> Tokenizer:
    """Returns a tokenizer whose words are "cat", " cat", and each single byte."""
    if kind == "wordpiece":
        vocab = {"[UNK]": 0, "a": 1, "cat": 2, "##cat": 3}
        library = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        library.pre_tokenizer = pre_tokenizers.Whitespace()
        return library
    letters = dict.fromkeys(pre_tokenizers.ByteLevel.alphabet())
    space = "\u2581" if kind == "metaspace" else "\u0120"
    words = [*letters, *([space] if kind == "metaspace" else []), "ca", "cat", f"{space}cat"]
    merges = [("c", "a"), ("ca", "t"), (space, "cat")]
    library = Tokenizer(models.BPE({word: id_ for id_, word in enumerate(words)}, merges))
    if kind == "metaspace":
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        library.decoder = decoders.Metaspace(prepend_scheme="never")
    else:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel() if kind == "bytes" else None
    return library


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("bytes", "\u0120cat"),
        ("bytes", "\u010a"),
        ("bytes", "\u00e4"),  # Begins a Chinese character.
        ("bytes without a decoder", "\u0120cat"),
        ("metaspace", "\u2581cat"),
        ("metaspace", "\u2581"),
        ("wordpiece", "cat"),
        ("wordpiece", "##cat"),
    ],
)
def test_a_plain_word_does_not_end_documents(tmp_path: Path, kind: str, end: str) -> None:
    library = plain(kind)
    library.add_special_tokens([END])
    saved(library, tmp_path / "t")
    section = HuggingfaceTokenizer(path=tmp_path / "t", end_of_document=end)
    with pytest.raises(ConfigError, match="has the token that ends a document"):
        open_tokenizer(section)
    assert open_tokenizer(section.model_copy(update={"special_tokens": "control"}))
    assert open_tokenizer(section.model_copy(update={"end_of_document": END}))


def test_a_tokenizer_with_random_merges_is_refused(tmp_path: Path) -> None:
    library = gpt2()
    library.save(str(tmp_path / "tokenizer.json"))
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    fields["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"dropout=0\.1"):
        open_tokenizer(HuggingfaceTokenizer(path=tmp_path, end_of_document=END))
