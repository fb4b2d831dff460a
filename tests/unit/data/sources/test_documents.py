"""Documents of every kind of source become the same tokens; files of another kind are refused."""

from __future__ import annotations

import codecs
import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from jaxres.config.schema.data import (
    DataSection,
    JsonlSource,
    NanogptSource,
    ParquetSource,
    Source,
    TextSource,
)
from jaxres.config.schema.training import BadRecordsSection
from jaxres.data import open_dataset
from jaxres.data.sources import documents
from jaxres.data.sources.source_files import SourceFile
from jaxres.data.tokens.text_cuts import AFTER_WORD, ANYWHERE, NOWHERE, Cuts
from jaxres.data.verify import verify_data
from jaxres.faults import ConfigError

TEXTS = ["a café", "zwei\n\nLines\n", "x" * 3000, "\N{GRINNING FACE}", "end"]


def opened(source: Source, cache: Path) -> Any:
    return open_dataset(DataSection(source=source, seq_len=4, cache_dir=cache, heldout_fraction=0))


def texts_of(source: Source, cache: Path) -> list[str]:
    corpus = opened(source, cache).train.corpus
    parts = [corpus.tokens[a:b] for a, b in zip(corpus.offsets, corpus.offsets[1:], strict=False)]
    assert all(part[-1] == 256 for part in parts)
    return [bytes(part[:-1].astype(np.uint8)).decode() for part in parts]


def lines(texts: list[Any], field: str = "text") -> bytes:
    return "".join(json.dumps({"n": 1, field: text}) + "\n" for text in texts).encode()


def test_json_lines_are_read_plain_and_compressed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    content = lines(TEXTS)
    (data / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + content + b"\n")
    (data / "b.jsonl.gz").write_bytes(gzip.compress(content[:40]) + gzip.compress(content[40:]))
    frame = zstandard.ZstdCompressor().compress
    (data / "c.jsonl.zst").write_bytes(frame(content[:40]) + frame(content[40:]))
    (data / "notes.txt").write_text("not read")
    found = texts_of(JsonlSource(path=str(data)), tmp_path / "cache")
    assert found == TEXTS * 3


def framed(content: bytes, *, window_log: int | None = None, size: int | None = None) -> bytes:
    """Returns a zstd frame, whose header may be changed to need more memory than its content."""
    whole = size is not None
    made = zstandard.ZstdCompressor(write_content_size=whole, write_checksum=not whole)
    stream = made.compressobj(size=len(content)) if whole else made.compressobj()
    frame = bytearray(stream.compress(content) + stream.flush())
    if window_log is not None:
        assert not frame[4] & 0x20, "it has no window"
        frame[5] = window_log - 10 << 3
    return bytes(frame)


def huge_content() -> bytes:
    """Returns the header of a frame that is decoded in one buffer, which would have 2**60 bytes."""
    return zstandard.FRAME_HEADER + bytes([0b11100000]) + (2**60).to_bytes(8, "little")


def skippable(size: int, content: bytes) -> bytes:
    return (0x184D2A5C).to_bytes(4, "little") + size.to_bytes(4, "little") + content


CONTENT = lines(TEXTS)
ZST = {
    "several frames": framed(CONTENT[:40]) + framed(CONTENT[40:]),
    "an empty frame": framed(b"") + framed(CONTENT),
    "with a size, without a checksum": framed(CONTENT, size=len(CONTENT)),
    "--long=31": framed(CONTENT, window_log=31),
    "--long=28, then another": framed(CONTENT[:40], window_log=28) + framed(CONTENT[40:]),
    "skippable frames": b"".join(
        (
            *(skippable(4, b"1234"), framed(CONTENT[:40]), skippable(0, b"")),
            *(framed(CONTENT[40:]), skippable(600_000, bytes(600_000))),
        )
    ),
}


def test_zst_files_of_every_form_are_read(tmp_path: Path) -> None:
    wrong = {}
    for name, data in ZST.items():
        path = tmp_path / "a.jsonl.zst"
        path.write_bytes(data)
        try:
            found = texts_of(JsonlSource(path=str(path)), tmp_path / "cache" / name)
        except ConfigError as error:
            found = [str(error)]
        if found != TEXTS:
            wrong[name] = found
    assert wrong == {}


@pytest.mark.parametrize(
    "frame",
    [framed(CONTENT, window_log=32), framed(CONTENT, window_log=41), huge_content()],
    ids=["4 GiB", "2 TiB", "content of 2**60"],
)
def test_a_zst_file_that_needs_more_memory_than_zstd_itself_has_is_refused(
    tmp_path: Path, frame: bytes
) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(framed(CONTENT) + frame)
    with pytest.raises(ConfigError, match="bytes of memory; 2,147,483,648 are the most") as refused:
        texts_of(JsonlSource(path=str(path)), tmp_path / "cache")
    assert str(path) in str(refused.value)
    assert "damaged" not in str(refused.value)


class Counted:
    """The library, which counts what it is given and what it returns."""

    def __init__(self) -> None:
        self.given, self.returned = list[int](), list[int]()
        self.frame_header_size = zstandard.frame_header_size
        self.frame_content_size = zstandard.frame_content_size
        self.get_frame_parameters = zstandard.get_frame_parameters

    def ZstdDecompressor(self, **settings: Any) -> Any:
        made = zstandard.ZstdDecompressor(**settings)

        def decompressobj() -> Any:
            frame = made.decompressobj()

            def decompress(data: bytes) -> bytes:
                self.given.append(len(data))
                self.returned.append(len(content := frame.decompress(data)))
                return content

            return SimpleNamespace(decompress=decompress)

        return SimpleNamespace(decompressobj=decompressobj)


def test_a_zst_file_is_decompressed_once_however_many_frames_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    monkeypatch.setattr(documents, "_library", lambda *_: counted)
    path = tmp_path / "a.jsonl.zst"
    frames = [framed(lines([f"text {number}"])) for number in range(3000)]
    path.write_bytes(b"".join(frames))
    assert len(texts_of(JsonlSource(path=str(path)), tmp_path / "cache")) == 3000
    first_block = len(frames[0]) - 4  # Without the checksum.
    assert sum(counted.given) == first_block + path.stat().st_size, "the begin, and then all"


@pytest.mark.slow
def test_a_line_that_is_a_bomb_is_refused_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 2**20)
    counted, unzipped = Counted(), list[int]()
    monkeypatch.setattr(documents, "_library", lambda *_: counted)

    class CountedGzip(gzip.GzipFile):
        def read(self, size: int | None = -1) -> bytes:
            content = super().read(size)
            unzipped.append(len(content))
            return content

    bomb = lines(["x" * 2**25])
    for name, compress, returned in (
        ("a.jsonl.zst", framed, counted.returned),
        ("a.jsonl.gz", gzip.compress, unzipped),
    ):
        (tmp_path / name).write_bytes(compress(bomb))
        with monkeypatch.context() as patch:
            patch.setattr(gzip, "GzipFile", CountedGzip)
            with pytest.raises(ConfigError, match="line 1 is longer than 1,048,576 bytes"):
                texts_of(JsonlSource(path=str(tmp_path / name)), tmp_path / "cache")
        assert max(returned) <= 2**17, f"{name}: one read has returned much at once"
        assert sum(returned) <= 2**20 + 2**18, f"{name}: more than the longest line was read"


def test_a_long_text_in_parts_has_the_same_pieces_as_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARS", 10)
    monkeypatch.setattr(documents, "CHUNK_BYTES", 16)
    chance = random.Random(0)
    text = "".join(chance.choices("ab \n", (6, 6, 2, 1), k=1000))
    spaces, lines_only = Cuts(re.compile(r"\w(?= )")), Cuts(re.compile(r"\w(?=\n)"))
    for cuts in (ANYWHERE, NOWHERE, spaces, lines_only):
        for size in (0, 1, 10, 16, 17, 999):
            at_once = list(documents._cut([text[:size]], cuts))
            assert list(documents._cut(documents._parts(text[:size]), cuts)) == at_once


def table(texts: list[str | None]) -> pyarrow.Table:
    return pyarrow.table({"id": range(len(texts)), "body": texts})


@pytest.mark.slow
def test_parquet_is_read_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table([*TEXTS, None, ""]), path, row_group_size=2)
    source = ParquetSource(path=str(path), column="body")
    assert texts_of(source, tmp_path / "cache") == TEXTS
    coded = pyarrow.table({"body": pyarrow.array(TEXTS).dictionary_encode()})
    pyarrow.parquet.write_table(coded, path)
    assert texts_of(source, tmp_path / "cache") == TEXTS


def test_token_ids_of_nanogpt_and_llm_c_are_read(tmp_path: Path) -> None:
    ids = np.array([5, 6, 50256, 7, 50256, 8, 9], "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    (tmp_path / "nano.bin").write_bytes(ids.tobytes())
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + ids.tobytes())
    for name in ("nano", "llmc"):
        corpus = opened(
            NanogptSource(path=str(tmp_path / f"{name}.bin")), tmp_path / "cache"
        ).train.corpus
        assert corpus.tokens.tolist() == ids.tolist()
        assert corpus.offsets.tolist() == [0, 3, 5, 7]
        assert (corpus.meta.vocab_size, corpus.meta.tokenizer) == (50257, "ids")


def test_where_a_document_is_cut_depends_on_its_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARS", 10)
    file = SourceFile("a", Path("a"), 1, 1, 1)
    text = "ab\ncd\n ef\nghijklmnopqrstuvwxyz\n\nend"

    def cut(parts: list[str], cuts: Cuts) -> list[Any]:
        return [piece.text for piece in documents._cut(parts, cuts, file)]

    whole = cut([text], ANYWHERE)
    assert whole == ["ab\ncd\n ef", "\nghijklmno", "pqrstuvwxy", "z\n\nend"]
    assert cut(list(text), ANYWHERE) == whole
    words = ["ab\ncd\n ef", "\nghijklmnopqrstuvwxyz", "\n\nend"]
    for parts in ([text], list(text)):
        assert cut(parts, Cuts(AFTER_WORD)) == words


WRONG: list[tuple[str, bytes, str]] = [
    ("a.parquet", b"x", "named as a .parquet file.*data.source.kind=parquet"),
    ("a.jsonl", b"{}", "data.source.kind=jsonl"),
    ("a.json.gz", gzip.compress(b"x"), "compressed with gzip"),
    ("a.bin", b"x", "data.source.kind=nanogpt"),
    ("a.arrow", b"x", "data.source.kind=huggingface"),
    ("renamed", b"PAR1 x", "is Parquet.*data.source.kind=parquet"),
    ("image", b"\x89PNG\r\n", "a PNG image"),
    ("nul.txt", b"abc\0def", "NUL bytes.*encoding=binary"),
    ("latin1.txt", b"caf\xe9 au lait", "not UTF-8 .byte 0xe9 near 3.*iconv"),
    ("cut.txt", "é".encode()[:1], "not UTF-8"),
    ("windows.txt", "text".encode("utf-16"), "encoded in UTF-16.*iconv -f UTF-16 -t UTF-8"),
    ("wide.txt", codecs.BOM_UTF32_BE + "text".encode("utf-32-be"), "encoded in UTF-32"),
]


@pytest.mark.parametrize(("name", "content", "message"), WRONG, ids=[one[0] for one in WRONG])
def test_text_of_another_kind_is_refused_before_anything_is_trained_on(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "good.txt").write_text("good")
    (data / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        opened(TextSource(path=str(data)), tmp_path / "cache")
    assert str(data / name) in str(caught.value)
    assert list((tmp_path / "cache" / "corpora").glob("*")) == []
    dataset = opened(TextSource(path=str(data), encoding="binary"), tmp_path / "cache")
    assert dataset.train.corpus.meta.num_tokens == len(content) + 1 + 5


def test_a_byte_order_mark_at_the_beginning_of_a_file_is_no_text(tmp_path: Path) -> None:
    marked, plain = tmp_path / "marked.txt", tmp_path / "plain.txt"
    marked.write_text("\ufeffa \ufeffmark", encoding="utf-8")
    plain.write_text("a \ufeffmark", encoding="utf-8")
    fingerprints = {
        opened(TextSource(path=str(path)), tmp_path / "cache").fingerprint
        for path in (marked, plain)
    }
    assert len(fingerprints) == 1


@pytest.mark.parametrize("compressed", [False, True])
def test_json_lines_in_another_encoding_are_refused(tmp_path: Path, compressed: bool) -> None:
    lines = (json.dumps({"text": "words"}) + "\n").encode("utf-16")
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    path.write_bytes(gzip.compress(lines) if compressed else lines)
    with pytest.raises(ConfigError, match=r"a\.jsonl.*encoded in UTF-16.*iconv"):
        opened(JsonlSource(path=str(path)), tmp_path / "cache")


def cut_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(table(["text"] * 1000), path)
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(path: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 100
    path.write_bytes(header.tobytes() + bytes(50))


def empty_gz(path: Path) -> None:
    path.with_name("b.jsonl").write_bytes(lines(TEXTS))
    path.touch()


BAD: dict[str, tuple[type[Any], dict[str, Any], str, bytes | Callable[[Path], None], str]] = {
    "not JSON": (JsonlSource, {}, "a.jsonl", lines(["x"]) + b'{"text": ', "line 2 is not JSON"),
    "an array": (JsonlSource, {}, "a.jsonl", b'[{"text": "x"}]', "line 1 is a JSON list"),
    "no field": (JsonlSource, {}, "a.jsonl", lines(["x"], "body"), r"no 'text'; .*'n', 'body'"),
    "a number": (JsonlSource, {}, "a.jsonl", b'{"text": 3}', "'text' is a number, not a string"),
    "surrogate": (
        JsonlSource,
        {},
        "a.jsonl",
        b'{"text": "\\ud800"}',
        "every document is empty or a bad record: .* line 1: 'text' is not valid Unicode",
    ),
    "deep": (
        JsonlSource,
        {},
        "a.jsonl",
        b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        "line 1 is not JSON: maximum recursion depth",
    ),
    "cut gz": (
        JsonlSource,
        {},
        "a.jsonl.gz",
        gzip.compress(lines(TEXTS))[:-9],
        "a.jsonl.gz can't be decompressed",
    ),
    "empty gz": (JsonlSource, {"include": ("*",)}, "a.jsonl.gz", empty_gz, r"gz has no bytes"),
    "cut zst": (
        JsonlSource,
        {},
        "a.jsonl.zst",
        zstandard.compress(lines(TEXTS))[:-9],
        "ends within a frame",
    ),
    "not zst": (JsonlSource, {}, "a.jsonl.zst", lines(TEXTS), "can't be decompressed"),
    "Parquet as JSON": (JsonlSource, {"include": ("*",)}, "a", b"PAR1", "kind=parquet"),
    "all empty": (JsonlSource, {}, "a.jsonl", lines(["", None]), "every document is empty"),
    "cut Parquet": (ParquetSource, {}, "a.parquet", cut_parquet, "a.parquet can't be read"),
    "no column": (
        ParquetSource,
        {"column": "text"},
        "a.parquet",
        lambda path: pyarrow.parquet.write_table(table(["x"]), path),
        "no column 'text'; its columns are id, body",
    ),
    "numbers": (
        ParquetSource,
        {"column": "id"},
        "a.parquet",
        lambda path: pyarrow.parquet.write_table(table(["x"]), path),
        "'id' is of type int64, not string",
    ),
    "two of a name": (
        ParquetSource,
        {},
        "a.parquet",
        lambda path: pyarrow.parquet.write_table(
            pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, names=["text", "text"]), path
        ),
        "has 2 columns 'text'",
    ),
    "odd": (NanogptSource, {}, "a.bin", b"123", "no whole number of uint16"),
    "id too large": (
        NanogptSource,
        {},
        "a.bin",
        np.array([1, 60000], "<u2").tobytes(),
        "token 1 is 60000, but data.source.vocab_size is 50257",
    ),
    "cut header": (NanogptSource, {}, "a.bin", cut_header, "its header says 1,224"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_one_error_that_names_it(tmp_path: Path, name: str) -> None:
    kind, options, file, content, message = BAD[name]
    data = tmp_path / "data"
    data.mkdir()
    if callable(content):
        content(data / file)
    else:
        (data / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        opened(kind(path=str(data), **options), tmp_path / "cache")
    assert str(data) in str(caught.value)
    assert list((tmp_path / "cache" / "corpora").glob("*")) == []


UNREADABLE = {
    "half of an emoji": (b'{"text": "half \\ud83d here"}', "'text' is not valid Unicode"),
    "the field twice": (b'{"text": "one", "n": 1, "te\\u0078t": "two"}', "key 'text' several"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "is not JSON: 'utf-8' codec"),
    "two lines in one": (b'{"text": "cut of{"text": "next"}', "is not JSON"),
}


def strict_error(source: Source, cache: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_dataset(DataSection(source=source, seq_len=4, cache_dir=cache), **options)
    return str(caught.value)


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_line_that_is_no_text_is_left_out_as_the_policy_says(tmp_path: Path, name: str) -> None:
    bad, problem = UNREADABLE[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(TEXTS[:3]) + bad + b"\n" + lines(TEXTS[3:]) + bad + b"\n")
    source, told = JsonlSource(path=str(path)), list[str]()
    section = DataSection(source=source, seq_len=4, cache_dir=tmp_path, heldout_fraction=0)
    dataset = open_dataset(section, progress=told.append)
    assert texts_of(source, tmp_path) == TEXTS
    named = [one for one in told if one.startswith("BAD RECORD: ")]
    assert [f"{path}, line {n}" in one for n, one in zip((4, 7), named, strict=True)] == [True] * 2
    assert all(problem in one for one in named)
    assert "WARNING: bad records, which are left out: 2" in told
    assert verify_data(section).fingerprint == dataset.fingerprint
    error = strict_error(source, tmp_path, bad_records=None)
    assert f"{path}, line 4" in error
    assert "guards.bad_records=null" in error
    one, again = BadRecordsSection(max=1), list[str]()
    error = strict_error(source, tmp_path / "other", bad_records=one)
    assert f"{path}, line 7" in error
    assert "1 documents are left out" in error
    open_dataset(section, progress=again.append)
    assert again == ["WARNING: bad records, which are left out: 2"], "a cached corpus tells it too"
    error = strict_error(source, tmp_path, bad_records=one)
    assert "2 documents are left out of it as bad records, and guards.bad_records.max=1" in error


def test_what_an_encoding_has_read_is_not_what_another_one_reads(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa text")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 and more")
    mark, latin = (TextSource(path=str(tmp_path / name)) for name in ("a.txt", "b.txt"))
    binary = {"encoding": "binary"}
    cache = tmp_path / "cache"
    fields = {"seq_len": 4, "heldout_fraction": 0.0, "cache_dir": cache}
    found = [
        open_dataset(DataSection(source=one, **fields)).fingerprint
        for one in (mark, mark.model_copy(update=binary), mark)
    ]
    assert found[0] == found[2] != found[1]
    open_dataset(DataSection(source=latin.model_copy(update=binary), **fields))
    assert "b.txt" in strict_error(latin, cache)


def test_a_number_of_any_length_in_another_field_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": ' + "9" * 5000 + ', "text": "a text"}\n')
    assert texts_of(JsonlSource(path=str(tmp_path)), tmp_path / "cache") == ["a text"]


def write_table(path: Path, columns: dict[str, Any]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


NAMES = ["page.text", "page", "page.", ".text", "", "a b", "l.list.element", "page..text", "page\n"]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_column_of_any_name_is_read_beside_a_struct(tmp_path: Path, name: str) -> None:
    struct = [{"text": "of the struct", "id": 1}] * len(TEXTS)
    columns: dict[str, Any] = {"page": struct, "l": [["of the list"]] * len(TEXTS), name: TEXTS}
    path = tmp_path / "a.parquet"
    write_table(path, columns)
    assert texts_of(ParquetSource(path=str(path), column=name), tmp_path / "cache") == TEXTS


def test_a_field_of_a_struct_is_refused_by_its_name(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", {"page": [{"text": "x"}]})
    for column, message in (
        ("page.text", "no column 'page.text'; its columns are page. Set"),
        ("page", "'page' is of type struct.*Set data.source.column"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(ParquetSource(path=str(tmp_path / "a.parquet"), column=column), tmp_path / "c")


TEXT_TYPES: dict[str, Any] = {
    "binary": pyarrow.binary(),
    "large_binary": pyarrow.large_binary(),
    "binary_view": pyarrow.binary_view(),
    "string": pyarrow.string(),
    "large_string": pyarrow.large_string(),
    "string_view": pyarrow.string_view(),
    "dictionary of binary": pyarrow.dictionary(pyarrow.int32(), pyarrow.binary()),
    "dictionary of string": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
}


@pytest.mark.parametrize("name", TEXT_TYPES)
def test_texts_of_every_type_are_read_as_utf_8(tmp_path: Path, name: str) -> None:
    kind = TEXT_TYPES[name]
    values = [text.encode() for text in TEXTS]
    values[1:1] = [None, b"caf\xe9"]
    is_coded = pyarrow.types.is_dictionary(kind)
    plain = pyarrow.array(values, pyarrow.binary())
    array = plain.cast(kind.value_type if is_coded else kind, safe=False)
    array = array.dictionary_encode() if is_coded else array
    write_table(tmp_path / "a.parquet", {"body": array})
    source, told = ParquetSource(path=str(tmp_path), column="body"), list[str]()
    section = DataSection(source=source, seq_len=4, cache_dir=tmp_path / "c", heldout_fraction=0)
    open_dataset(section, progress=told.append)
    assert texts_of(source, tmp_path / "c") == TEXTS
    (named,) = [one for one in told if one.startswith("BAD RECORD: ")]
    assert f"{tmp_path / 'a.parquet'}, row 3: 'body' is not UTF-8" in named


def test_missing_memory_is_no_damage_of_a_file(tmp_path: Path) -> None:
    file = SourceFile("a", tmp_path / "a.parquet", 1, 1, 1)
    with pytest.raises(MemoryError), documents._arrow_errors(file):
        raise pyarrow.ArrowMemoryError("malloc of size 5120000000 failed")
    with pytest.raises(ConfigError, match="truncated, damaged"), documents._arrow_errors(file):
        raise pyarrow.ArrowInvalid("no magic bytes")
