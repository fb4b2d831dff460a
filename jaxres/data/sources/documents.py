"""Reads the documents of a source's files: text, JSON Lines, Parquet, Arrow, token ids.

A file is read as a sequence of pieces, in bounded memory. Where a piece ends depends on the content
only, so a build that was killed continues after the last piece that it has written.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import importlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxres.config.schema.data import (
    DocumentSource,
    HuggingfaceSource,
    ImagesSource,
    JsonlSource,
    NanogptSource,
    ParquetSource,
    TextSource,
)
from jaxres.data.sources import images
from jaxres.data.sources.folder_tree import unreadable
from jaxres.data.sources.source_files import SourceFile
from jaxres.data.sources.zstd_frames import ZstdFrames, buffered
from jaxres.data.tokens.text_cuts import ANYWHERE, MAX_WHOLE_CHARS, NOWHERE, Cuts
from jaxres.data.tokens.token_width import IdPattern, refuse_chunk, refuse_version
from jaxres.faults import ConfigError

PIECE_CHARS = 2**20
"""A longer document is tokenised in parts, if it has places where a cut changes no token."""
CHUNK_BYTES = 4 * 2**20
MAX_LINE_BYTES = 2**30
ROWS_PER_READ = 256
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes that a writer of an Arrow stream writes."""
HEADER_BYTES = 1024
IMAGES_PER_READ = 16
MAX_LABEL = 2**31 - 1
IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
HEADERS = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
"""First int32 of llm.c's files -> type of their ids (karpathy/llm.c, dev/data/data_common.py)."""

REFUSED_AS_TEXT = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".ndjson": "jsonl",
    ".arrow": "huggingface",
    ".bin": "nanogpt",
}
"""End of a name -> the kind of source that reads such a file; `kind: text` refuses it."""
CONTENTS = {
    b"PAR1": ("Parquet", "parquet"),
    b"ARROW1": ("Arrow", "huggingface"),
    b"\xff\xff\xff\xff": ("an Arrow stream", "huggingface"),
    b"\x1f\x8b": ("compressed with gzip", None),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", None),
    b"\xfd7zXZ\0": ("compressed with xz", None),
    b"BZh91AY&SY": ("compressed with bzip2", None),
    b"PK\x03\x04": ("a zip archive", None),
    b"\x93NUMPY": ("a NumPy array", None),
    b"\x89PNG": ("a PNG image", "images"),
    b"\xff\xd8\xff": ("a JPEG image", "images"),
    b"%PDF": ("PDF", None),
}
"""First bytes of a file -> its type, and the kind of source that reads it."""
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order mark at the beginning of a text -> its encoding; longer marks first."""


@dataclass(frozen=True)
class TextPiece:
    """A part of a document's text."""

    text: str | bytes
    ends_document: bool
    begins_document: bool = True
    problem: str = ""
    """Why the document is a bad record, which has no text; empty: it is none."""


@dataclass(frozen=True)
class TokenPiece:
    """Token ids of one or more documents, with their end-of-document tokens."""

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    """Indices, in ascending order, after whose token a document ends."""


def read_pieces(
    file: SourceFile, source: DocumentSource, raw: BinaryIO, cuts: Cuts = ANYWHERE
) -> Iterator[TextPiece] | Iterator[TokenPiece]:
    """Yields the pieces of an open file; a long document is cut where `cuts` allows it.

    The file stays open: the caller compares it with its listing afterwards.

    Raises:
      ConfigError: the file is of another kind, damaged, or lacks the field or column.
    """
    if isinstance(source, TextSource):
        return _text(file, raw, cuts, is_binary=source.encoding == "binary")
    if isinstance(source, NanogptSource):
        return _token_ids(file, source, raw)
    if isinstance(source, ImagesSource):
        return _images(file, source, raw)
    if isinstance(source, JsonlSource):
        texts = _jsonl(file, source.field, raw)
    elif isinstance(source, ParquetSource):
        texts = _parquet(file, source.column, raw)
    else:
        assert isinstance(source, HuggingfaceSource), source
        texts = _arrow(file, source.column, raw)
    return (
        piece
        for text in texts
        for piece in (
            [text] if isinstance(text, TextPiece) else _cut(_parts(text), cuts, file.path)
        )
    )


def _bad_record(problem: str) -> TextPiece:
    """Returns the piece of a document that is no text; the bytes around it can still be read."""
    return TextPiece("", ends_document=True, problem=problem)


def check_text_name(file: SourceFile, source: DocumentSource) -> None:
    """Raises ConfigError if the name of a text file belongs to another kind of file."""
    if isinstance(source, TextSource) and source.encoding != "binary":
        name = file.name.lower()
        for suffix, kind in REFUSED_AS_TEXT.items():
            if name.endswith(suffix):
                raise _wrong_kind(file, f"named as a {suffix} file", kind)


def check_unchanged(file: SourceFile, raw: BinaryIO) -> None:
    """Raises ConfigError if an open file differs from the listing."""
    status = os.fstat(raw.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise ConfigError(
            f"data.source.path: {file.path} changed while it was read. Start again when it no "
            "longer changes, or exclude it with data.source.exclude."
        )


def _wrong_kind(file: SourceFile, what: str, kind: str | None, remedy: str = "") -> ConfigError:
    remedy = f"Set data.source.kind={kind} (docs/data.md)" if kind else remedy or "Convert it"
    return ConfigError(
        f"data.source.path: {file.path} is {what}, not of data.source.kind's format. {remedy}, or "
        "leave the file out with data.source.exclude."
    )


def _check_start(file: SourceFile, raw: BinaryIO, *, but: str | None = None) -> None:
    """Raises ConfigError if the first bytes identify another kind of file than `but`."""
    first = raw.read(16)
    raw.seek(0)
    for magic, (what, kind) in CONTENTS.items():
        if first.startswith(magic) and (kind is None or kind != but):
            raise _wrong_kind(file, what, kind)


def _text(file: SourceFile, raw: BinaryIO, cuts: Cuts, *, is_binary: bool) -> Iterator[TextPiece]:
    if is_binary:
        while chunk := raw.read(CHUNK_BYTES):
            yield TextPiece(chunk, ends_document=False)
        yield TextPiece(b"", ends_document=True)
        return
    _check_start(file, raw)
    _check_encoding(file, raw.read(4))
    raw.seek(0)
    yield from _cut(_utf8(file, raw), cuts, file.path)


def _check_encoding(file: SourceFile, first: bytes) -> None:
    """Raises ConfigError if the first bytes of a text are a byte order mark of another encoding."""
    for mark, name in MARKS.items():
        if first.startswith(mark):
            remedy = f"Convert it (iconv -f {name} -t UTF-8)"
            raise _wrong_kind(file, f"encoded in {name}, not UTF-8", None, remedy)


def _utf8(file: SourceFile, raw: BinaryIO) -> Iterator[str]:
    """Yields the text of a file without a byte order mark at its beginning.

    Raises ConfigError at NUL bytes and invalid UTF-8.
    """
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        # Limited by the listed size, so that a file that keeps growing ends too.
        chunk = raw.read(CHUNK_BYTES) if at <= file.size_bytes else b""
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            wrong = error.object[error.start]
            what = f"not UTF-8 (byte 0x{wrong:02x} near {at + error.start:,})"
            remedy = (
                "Convert it (iconv -f latin1 -t utf-8), or set data.source.encoding=binary to "
                "train on its bytes"
            )
            raise _wrong_kind(file, what, None, remedy) from error
        if "\0" in text:
            remedy = "If its bytes are to be trained on, set data.source.encoding=binary"
            raise _wrong_kind(file, "binary (it has NUL bytes)", None, remedy)
        yield text if at else text.removeprefix("\ufeff")
        if not chunk:
            return
        at += len(chunk)


def _parts(text: str) -> Iterator[str]:
    """Yields a text in parts: cutting pieces off a long one would copy its rest for each."""
    return (text[start : start + CHUNK_BYTES] for start in range(0, len(text), CHUNK_BYTES))


def _cut(
    texts: Iterable[str], cuts: Cuts = NOWHERE, where: object = "the text"
) -> Iterator[TextPiece]:
    """Yields the pieces of one document, whose text comes in parts of any length.

    Without places at which a cut is known to change no token it is one piece.
    """
    rest, begins = "", True
    for text in texts:
        rest += text
        while len(rest) > PIECE_CHARS:
            end = cuts.last_before(rest, PIECE_CHARS) or cuts.first_after(rest, PIECE_CHARS)
            if (end or len(rest)) > MAX_WHOLE_CHARS:
                raise _too_long(where)
            if end is None:
                break
            yield TextPiece(rest[:end], ends_document=False, begins_document=begins)
            rest, begins = rest[end:], False
    yield TextPiece(rest, ends_document=True, begins_document=begins)


def _too_long(where: object) -> ConfigError:
    return ConfigError(
        f"data.source.path: {where} has a document with {MAX_WHOLE_CHARS:,} characters without "
        "a place at which the tokenizer could be used on each part and give the tokens of the "
        "whole (docs/data.md). Divide it into documents, such as a paragraph a line of JSON Lines."
    )


def _jsonl(file: SourceFile, field: str, raw: BinaryIO) -> Iterator[str | TextPiece]:
    name = file.name.lower()
    if not name.endswith((".gz", ".zst")):
        _check_start(file, raw)
    lines = _decompressed(file, raw)
    number = 0
    while line := lines.readline(MAX_LINE_BYTES):
        number += 1
        where = f"data.source.path: {file.path}, line {number}"
        if number == 1:
            _check_encoding(file, line)
        if len(line) == MAX_LINE_BYTES:
            raise ConfigError(f"{where} is longer than {MAX_LINE_BYTES:,} bytes")
        is_whole = line.endswith(b"\n")
        line = line.removeprefix(codecs.BOM_UTF8).strip()
        if line:
            yield _field(line, field, where, is_whole=is_whole)


def _field(line: bytes, field: str, where: str, *, is_whole: bool) -> str | TextPiece:
    """Returns the text of a line, an empty one for null; a bad record if it is no JSON or no text.

    A last line without its end that is no JSON is refused: the file may have been cut off there.
    """
    fix = "Fix the line, or exclude the file with data.source.exclude."
    try:
        # int() takes at most 4300 digits.
        item = json.loads(
            line.decode(),
            parse_int=float,
            object_pairs_hook=lambda pairs: _with_one(field, pairs),
        )
    except (ValueError, RecursionError) as error:
        problem = f"{where} is not JSON: {error}. {fix}"
        if is_whole:
            return _bad_record(problem)
        raise ConfigError(problem) from error
    if not isinstance(item, dict):
        raise ConfigError(
            f"{where} is a JSON {type(item).__name__}, not an object; a file of JSON Lines has "
            f"one object a line. {fix}"
        )
    if field not in item:
        raise ConfigError(
            f"{where} has no {field!r}; its keys are {', '.join(map(repr, list(item)[:20]))}. Set "
            "data.source.field to the key that has the text."
        )
    text = item[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        kind = "number" if isinstance(text, float) else type(text).__name__
        raise ConfigError(f"{where}: {field!r} is a {kind}, not a string. {fix}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return _bad_record(f"{where}: {field!r} is not valid Unicode: {error}. {fix}")
    return text


def _with_one(field: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object. Raises ValueError if it has a field twice: either could be meant."""
    item = dict(pairs)
    if len(item) < len(pairs) and [key for key, _ in pairs].count(field) > 1:
        raise ValueError(f"an object has the key {field!r} several times")
    return item


def _decompressed(file: SourceFile, raw: BinaryIO) -> io.BufferedReader:
    """Returns the lines of a file, whose name tells whether it is compressed."""
    read, name = raw.read, file.name.lower()
    if name.endswith((".gz", ".zst")) and not file.size_bytes:
        raise ConfigError(
            f"data.source.path: {file.path} has no bytes, not even those of a compressed file "
            "without text. Copy it again, or exclude it with data.source.exclude."
        )
    if name.endswith(".gz"):
        read = gzip.GzipFile(fileobj=raw).read
    elif name.endswith(".zst"):
        read = ZstdFrames(_library("zstandard", "a .zst file"), file, raw).read
    return buffered(file, read)


def _parquet(file: SourceFile, column: str, raw: BinaryIO) -> Iterator[str | TextPiece]:
    parquet = _library("pyarrow.parquet", "data.source.kind=parquet")
    _check_start(file, raw, but="parquet")
    with _arrow_errors(file):
        opened = parquet.ParquetFile(raw, pre_buffer=False, page_checksum_verification=True)
        _check_column(file, opened.schema_arrow, column)
        row = 0
        for rows in opened.iter_batches(batch_size=ROWS_PER_READ, columns=[column]):
            # `columns` takes "a.b" for the field b of a struct a, too, and adds that one.
            yield from _strings(file, rows.column(column), column, row)
            row += len(rows)


def _arrow(file: SourceFile, column: str, raw: BinaryIO) -> Iterator[str | TextPiece]:
    ipc = _library("pyarrow.ipc", "data.source.kind=huggingface")
    with _arrow_errors(file):
        opened = ipc.open_stream(raw)
        _check_column(file, opened.schema, column)
        row = 0
        for rows in opened:
            rows.validate()
            values = _checked_bytes(rows.column(column))
            for start in range(0, len(rows), ROWS_PER_READ):
                part = values.slice(start, ROWS_PER_READ)
                yield from _strings(file, part, column, row + start)
            row += len(rows)
        _check_end(file, raw)


def _checked_bytes(values: Any) -> Any:
    """Returns a column as one of bytes, of which no value is outside its buffers.

    Text that is not UTF-8 is no damage of the file: `_strings` makes it a bad record.

    Raises:
      pyarrow.ArrowInvalid: offsets or indices are damaged.
    """
    pyarrow = importlib.import_module("pyarrow")
    if pyarrow.types.is_dictionary(values.type):
        words = _checked_bytes(values.dictionary)
        values = pyarrow.DictionaryArray.from_arrays(values.indices, words)
    else:
        names = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}
        values = values.view(getattr(pyarrow, names.get(str(values.type), str(values.type)))())
    values.validate(full=True)
    return values


def _check_end(file: SourceFile, raw: BinaryIO) -> None:
    """Raises ConfigError unless an Arrow stream that is read ends as a writer ends it."""
    end = raw.tell()
    raw.seek(max(0, end - len(END_OF_STREAM)))
    if raw.read(len(END_OF_STREAM) + 1) == END_OF_STREAM:
        return
    what = (
        f"has {file.size_bytes - end:,} bytes after its Arrow stream, which would be left out"
        if end < file.size_bytes
        else "ends without the mark of an Arrow stream's end: its last rows may be missing"
    )
    raise ConfigError(
        f"data.source.path: {file.path} {what}. Copy the file again, or save the data set again "
        "with save_to_disk."
    )


def _images(file: SourceFile, source: ImagesSource, raw: BinaryIO) -> Iterator[TokenPiece]:
    if file.label is not None:
        content = raw.read(file.size_bytes + 1)  # One more, so that a file that grows is noticed.
        _check_image(content, f"data.source.path: {file.path}")
        yield _image(file.label, content)
        return
    parquet = _library("pyarrow.parquet", "data.source.kind=images of Parquet files")
    _check_start(file, raw, but="parquet")
    with _arrow_errors(file):
        opened = parquet.ParquetFile(raw, pre_buffer=False, page_checksum_verification=True)
        names = [source.image_column, source.label_column]
        for name, key in zip(names, ("image_column", "label_column"), strict=True):
            if name not in opened.schema_arrow.names:
                raise ConfigError(
                    f"data.source.path: {file.path} has no column {name!r}; its columns are "
                    f"{', '.join(opened.schema_arrow.names)}. Set data.source.{key}."
                )
            _refuse_twice(file, opened.schema_arrow.names, name)
        kind = opened.schema_arrow.field(names[0]).type
        if importlib.import_module("pyarrow.types").is_struct(kind):
            _refuse_twice(file, [field.name for field in kind], "bytes", f" in {names[0]!r}")
        row = 0
        for part in opened.iter_batches(batch_size=IMAGES_PER_READ, columns=names):
            values = zip(*(part.column(name).to_pylist() for name in names), strict=True)
            for image, label in values:
                row += 1
                where = f"data.source.path: {file.path}, row {row}"
                content = image.get("bytes") if isinstance(image, dict) else image
                if not isinstance(content, bytes) or not isinstance(label, int):
                    raise ConfigError(
                        f"{where} has {type(content).__name__} in column {names[0]!r} and "
                        f"{type(label).__name__} in {names[1]!r}; it needs the bytes of an image "
                        "file and a whole number"
                    )
                if not 0 <= label <= MAX_LABEL:
                    raise ConfigError(f"{where}: the label is {label}, not in 0..{MAX_LABEL:,}")
                _check_image(content, where)
                yield _image(label, content)


def _check_image(content: bytes, where: str) -> None:
    is_webp = content.startswith(b"RIFF") and content[8:12] == b"WEBP"
    if not is_webp and not content.startswith(IMAGE_STARTS):
        raise ConfigError(
            f"{where} is no JPEG, PNG, WebP, GIF, BMP or TIFF image: it begins with "
            f"{content[:8]!r}. Replace it, or leave it out with data.source.exclude."
        )
    try:
        images.check_depth(content)
    except images.UnusableDepth as error:
        raise ConfigError(
            f"{where}: {error}, so its black and white are not known. Convert it to 8 bits a "
            "channel, or leave it out."
        ) from error


def _image(label: int, content: bytes) -> TokenPiece:
    document = images.document(label, content)
    return TokenPiece(document, np.array([len(document) - 1]))


def _refuse_twice(file: SourceFile, names: Sequence[str], column: str, within: str = "") -> None:
    """Raises ConfigError for a file that has several columns of one name."""
    if (count := names.count(column)) > 1:
        raise ConfigError(
            f"data.source.path: {file.path} has {count} columns {column!r}{within}. Write the file "
            "again with another name for each of them."
        )


def _check_column(file: SourceFile, schema: Any, column: str) -> None:
    where = f"data.source.path: {file.path}"
    if column not in schema.names:
        raise ConfigError(
            f"{where} has no column {column!r}; its columns are {', '.join(schema.names)}. Set "
            "data.source.column to the one that has the text."
        )
    types = importlib.import_module("pyarrow.types")
    _refuse_twice(file, schema.names, column)
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    if not any(getattr(types, f"is_{name}")(kind) for name in names):
        raise ConfigError(
            f"{where}: column {column!r} is of type {kind}, not string or binary (UTF-8). Set "
            "data.source.column to the one that has the text."
        )


def _strings(file: SourceFile, values: Any, column: str, before: int) -> Iterator[str | TextPiece]:
    """Yields the texts of a column, an empty one for null; `before` rows of the file are before."""
    pyarrow = importlib.import_module("pyarrow")
    if pyarrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    for row, data in enumerate(values.cast(pyarrow.large_binary()).to_pylist(), before + 1):
        try:
            yield (data or b"").decode()
        except UnicodeDecodeError as error:
            where = f"data.source.path: {file.path}, row {row}"
            yield _bad_record(f"{where}: {column!r} is not UTF-8: {error}. Fix the row.")


@contextlib.contextmanager
def _arrow_errors(file: SourceFile) -> Iterator[None]:
    """Names the file in errors of pyarrow."""
    pyarrow = importlib.import_module("pyarrow")
    try:
        yield
    except MemoryError:  # That of pyarrow is an ArrowException too.
        raise
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(file.path, error) from error
        raise ConfigError(
            f"data.source.path: {file.path} can't be read: {error}. It is truncated, damaged or "
            "of another kind. Copy it again, or exclude it with data.source.exclude."
        ) from error


def _token_ids(file: SourceFile, source: NanogptSource, raw: BinaryIO) -> Iterator[TokenPiece]:
    where = f"data.source.path: {file.path}"
    _check_start(file, raw)
    dtype, begin = np.dtype(source.dtype).newbyteorder("<"), 0
    header = raw.read(HEADER_BYTES)
    refuse_chunk(header, where)
    fields = np.frombuffer(header, "<u4") if len(header) == HEADER_BYTES else np.zeros(3, "<u4")
    if int(fields[0]) in HEADERS:
        dtype, begin = HEADERS[int(fields[0])], HEADER_BYTES
        refuse_version(int(fields[1]), where)
        declared = int(fields[2]) * dtype.itemsize + begin
        if declared != file.size_bytes:
            raise ConfigError(
                f"{where} has {file.size_bytes:,} bytes, and its header says {declared:,}. It is "
                "truncated or damaged; copy it again."
            )
    if (file.size_bytes - begin) % dtype.itemsize:
        raise ConfigError(f"{where} has {file.size_bytes:,} bytes: no whole number of {dtype}")
    raw.seek(begin)
    num_read, pattern = 0, IdPattern()
    while chunk := raw.read(CHUNK_BYTES):
        while len(chunk) % dtype.itemsize and (more := raw.read(1)):
            chunk += more
        ids = np.frombuffer(chunk, dtype)
        if ids.max() >= source.vocab_size:
            at = int(np.argmax(ids >= source.vocab_size))
            raise ConfigError(
                f"{where}: token {num_read + at:,} is {ids[at]}, but data.source.vocab_size is "
                f"{source.vocab_size}. Set the tokenizer's, or data.source.dtype if the ids have "
                "another type."
            )
        num_read += len(ids)
        pattern.add(ids)
        is_last = begin + num_read * dtype.itemsize >= file.size_bytes
        yield TokenPiece(ids, _ends(ids, source.end_of_document, is_last=is_last))
    if (problem := pattern.problem()) is not None:
        raise ConfigError(
            f"{where}: read as {dtype.name}, little-endian, {problem}. Set data.source.dtype to "
            "its writer's type, or write the file again as uint16 or uint32, little-endian."
        )
    if zeros := pattern.zeros_at_end():
        raise ConfigError(
            f"{where}: its last {zeros:,} ids are 0, as those of a file whose writer was killed. "
            "Write it again; if they only fill it up, cut them off "
            f"(truncate -s {file.size_bytes - zeros * dtype.itemsize})."
        )


def _ends(ids: NDArray[Any], token: int | None, *, is_last: bool) -> NDArray[np.int64]:
    """Returns the indices at which a document ends; the end of the file ends one too."""
    ends = np.flatnonzero(ids == token) if token is not None else np.empty(0, np.int64)
    if is_last and (not len(ends) or ends[-1] != len(ids) - 1):
        ends = np.append(ends, len(ids) - 1)
    return ends


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{what} needs the package {package}. Run `pip install -e '.[data]'` in the checkout "
            "of jaxres."
        ) from error
