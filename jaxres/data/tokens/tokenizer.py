"""Tokenizers: bytes, and the tokenizers of the library `tokenizers` (Hugging Face)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxres.config.schema.data import HuggingfaceTokenizer
from jaxres.config.schema.data import Tokenizer as TokenizerSection
from jaxres.data.tokens import text_cuts, tokenizer_settings
from jaxres.data.tokens.text_cuts import ANYWHERE, Cuts
from jaxres.faults import ConfigError
from jaxres.storage import foreign_json
from jaxres.storage.files import fault_of, is_folder, read_whole, refuse_lfs_pointer

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
BYTES = "bytes"
"""Name of the bytes tokenizer in meta.json."""
LIBRARY = "huggingface:"
"""Begin of the name of a tokenizer of the library."""
LOST = "\ufffd"
"""Character that a decoder gives for bytes that are no character."""
FILE_NAME = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
OF_MODEL = ("config.json", "generation_config.json")
"""Files of a model that may have the number of the token that ends a document."""
DEFAULT_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
}


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def name(self) -> str:
        """Name in meta.json; equal names mean that each id is the same token."""
        ...

    @property
    def encoding(self) -> str:
        """How a text becomes tokens; changes if it may become others. Empty: as ever."""
        ...

    @property
    def cuts(self) -> Cuts:
        """Where a text may be cut so that its parts have the tokens of the whole."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids: one more than the largest."""
        ...

    @property
    def end_of_document(self) -> int:
        """Token that ends every document."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """Files that Hugging Face's libraries open it from; none for the bytes tokenizer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, without the end of a document, as a prompt needs."""
        ...

    def encode_all(
        self, texts: Sequence[str | bytes], *, later: Sequence[bool] = ()
    ) -> list[NDArray[Any]]:
        """Returns the tokens of several texts, computed on all cores if that is worth it.

        `later` says which of them are later parts of a text that was cut; by default none.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; unknown tokens are left out or become U+FFFD."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    r"""One token for each byte, and one more token that ends a document.

    Tokens beyond the vocabulary, which an embedding's padding rows can produce, are \ufffd, as are
    bytes that are not UTF-8. The end of a document is a newline.

    >>> ByteTokenizer().encode("é!")
    [195, 169, 33]
    >>> ByteTokenizer().decode([97, END_OF_DOCUMENT, 255, 300])
    'a\n\ufffd\ufffd'
    """

    name: str = BYTES
    vocab_size: int = VOCAB_SIZE
    end_of_document: int = END_OF_DOCUMENT
    encoding: str = ""
    cuts: Cuts = ANYWHERE

    @property
    def files(self) -> Mapping[str, bytes]:
        """None."""
        return {}

    def encode(self, text: str) -> list[int]:
        """Returns the text's UTF-8 bytes."""
        return list(text.encode())

    def encode_all(
        self, texts: Sequence[str | bytes], *, later: Sequence[bool] = ()
    ) -> list[NDArray[Any]]:
        """Returns the UTF-8 bytes of each text."""
        encoded = (text.encode() if isinstance(text, str) else text for text in texts)
        return [np.frombuffer(data, np.uint8) for data in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of the bytes."""
        return b"".join(_byte(token) for token in tokens).decode(errors="replace")


def _byte(token: int) -> bytes:
    """Returns the byte of a token; for other tokens 0xff, which is never valid UTF-8."""
    if token == END_OF_DOCUMENT:
        return b"\n"
    return bytes([token]) if 0 <= token < END_OF_DOCUMENT else b"\xff"


@dataclass(frozen=True)
class LibraryTokenizer:
    """A tokenizer of the library `tokenizers`, without its padding, truncation and template.

    The special tokens that its template would add, such as one at the beginning, are not added: a
    document is its text's tokens and then `end_of_document`. A text that spells a special token has
    the tokens of its letters, unless `special_tokens` is "control".
    """

    name: str
    vocab_size: int
    end_of_document: int
    files: Mapping[str, bytes]
    """tokenizer.json, and tokenizer_config.json with the end of a document as eos_token."""
    library: Any
    """The `tokenizers.Tokenizer`."""
    special_tokens: str = "text"
    note: str = ""
    """A note about it for the user; empty: none."""
    where: str = FILE_NAME
    """Begin of messages about it."""

    @property
    def encoding(self) -> str:
        """Changes the corpora that are cached: 1 took special tokens in a text for control.

        2 did so with words of a Unigram model.
        """
        is_unigram = self.special_tokens == "text" and tokenizer_settings.is_unigram(self.library)
        return f" encoding {3 if is_unigram else 2} {self.special_tokens}"

    @property
    def cuts(self) -> Cuts:
        """Where a text may be cut."""
        return self._cuts[0]

    @functools.cached_property
    def _cuts(self) -> tuple[Cuts, Any]:
        """Where a text may be cut, and the library's tokenizer of later parts."""
        control = self.special_tokens == "control"
        cuts, other = text_cuts.cuts_of(self.library.to_str(), control=control)
        if other is None:
            return cuts, self.library
        later = type(self.library).from_str(other)
        later.encode_special_tokens = not control
        return cuts, later

    @property
    def unknown(self) -> int | None:
        """The token for text outside the vocabulary; None: there is none."""
        token = getattr(self.library.model, "unk_token", None)
        return None if token is None else self.library.token_to_id(token)

    @functools.cached_property
    def text_vocab_size(self) -> int:
        """Token ids of texts and of their ends: one more than the largest that is not special."""
        added = self.library.get_added_tokens_decoder()
        special = {id_ for id_, token in added.items() if token.special} - {self.end_of_document}
        ids = set(self.library.get_vocab(with_added_tokens=True).values())
        return max(ids - special) + 1

    def require_unambiguous(self) -> None:
        """Raises ConfigError if its file has a word or an id twice, or the library takes other ids.

        It takes 0.4 s with 200,000 words, so only tokens that are made, or those of another program
        at a start, need it.
        """
        for word, id_ in _unambiguous_added(self.files[FILE_NAME], self.where):
            if (taken := self.library.token_to_id(word)) != id_:
                raise ConfigError(
                    f"{self.where}: its added token {word!r} has the id {id_}, and the library "
                    f"takes {taken}, the next free one: other programs would read other rows of "
                    "the embedding. Give the ids between words that are not used, in a copy of it."
                )

    def has_end(self, text: str) -> bool:
        """Returns whether a text has the token that ends a document."""
        try:
            return self.end_of_document in self.encode(text)
        except ConfigError:
            return False  # It does not encode it at all.

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text.

        Raises ConfigError if the library can't encode it, or the model has no row for a token.
        """
        with _errors_of_library():
            ids = self.library.encode(text, add_special_tokens=False).ids
        if ids and max(ids) >= self.vocab_size:
            token = self.library.id_to_token(max(ids))
            raise ConfigError(
                f"the text has the token {max(ids)} ({token!r}), and the model's embedding has "
                f"{self.vocab_size} rows. Leave it out of the text."
            )
        return ids

    def encode_all(
        self, texts: Sequence[str | bytes], *, later: Sequence[bool] = ()
    ) -> list[NDArray[Any]]:
        """Returns the tokens of each text; the library uses all cores."""
        found: list[NDArray[Any]] = [np.empty(0, np.uint32)] * len(texts)
        flags = np.array(later or [False] * len(texts), bool)
        for which in (False, True):
            library = self._cuts[1] if which else self.library
            numbers = np.flatnonzero(flags == which).tolist()
            with _errors_of_library():
                given = [texts[number] for number in numbers]
                encoded = library.encode_batch_fast(given, add_special_tokens=False)
            for number, item in zip(numbers, encoded, strict=True):
                found[number] = np.array(item.ids, np.uint32)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; the end of a document is a newline."""
        parts, begin = list[str](), 0
        ends = [i for i, token in enumerate(tokens) if token == self.end_of_document]
        for end in [*ends, len(tokens)]:
            known = [token for token in tokens[begin:end] if token < self.vocab_size]
            parts.append(self.library.decode(known, skip_special_tokens=False))
            begin = end + 1
        return "\n".join(parts)


@contextlib.contextmanager
def _errors_of_library() -> Iterator[None]:
    """Converts exceptions of the library, plain Exceptions, into ConfigError."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"data.tokenizer.path: the tokenizer can't encode a text: {error}. Give it an unknown "
            "token, or a vocabulary that has all of the text."
        ) from error


def open_tokenizer(section: TokenizerSection) -> Tokenizer:
    """Returns the tokenizer of a config.

    Raises:
      ConfigError: its file or library is missing, or it has no token that ends a document.
    """
    if not isinstance(section, HuggingfaceTokenizer):
        return ByteTokenizer()
    path = section.path.expanduser()
    with _reading(path):
        folder, file = (path, path / FILE_NAME) if is_folder(path) else (path.parent, path)
    data = _read(file)
    if data is None:
        raise ConfigError(
            f"data.tokenizer.path: {file} does not exist. Give the file tokenizer.json, or the "
            "folder that has it. If it has moved, give the new path."
        )
    where, settings = f"data.tokenizer.path: {file}", _settings(folder / SETTINGS)
    special, added = _settings(folder / SPECIAL), _settings(folder / ADDED)
    of_model = dict[str, Any]()
    if section.end_of_document is None:
        of_model = {name: _settings(folder / name).get("eos_token_id") for name in OF_MODEL}
        of_model |= {SETTINGS: settings.get("eos_token_id")}
        if settings.get("eos_token") is None:
            settings |= {"eos_token": special.get("eos_token")}
    tokenizer = parse_tokenizer(
        data,
        settings,
        where=where,
        end_of_document=section.end_of_document,
        special_tokens=section.special_tokens,
        of_model=of_model,
    )
    if section.end_of_document is None and not tokenizer.note:
        named = {SPECIAL: tokenizer_settings.content(special.get("eos_token"))}
        tokenizer = replace(tokenizer, note=_other_ends(tokenizer, named, of_model, where))
    _check_encoding(tokenizer, where)
    ids = tokenizer.library.get_vocab(with_added_tokens=True)
    tokenizer_settings.check(settings, data, ids, where=where)
    control = section.special_tokens == "control"
    tokenizer_settings.check_tokens(
        tokenizer.library, settings, special, added, control=control, where=where
    )
    return tokenizer


def limited(tokenizer: Tokenizer | None, rows: int | None) -> Tokenizer | None:
    """Returns the tokenizer of a model with so many rows: it encodes no text with other tokens."""
    if rows is None or not isinstance(tokenizer, LibraryTokenizer):
        return tokenizer
    return replace(tokenizer, vocab_size=min(rows, tokenizer.vocab_size))


def _check_encoding(tokenizer: LibraryTokenizer, where: str) -> None:
    """Raises ConfigError if a text may have the token that ends a document, or random tokens."""
    if getattr(tokenizer.library.model, "dropout", None):
        raise ConfigError(
            f"{where}: its model has dropout={tokenizer.library.model.dropout}: a text would have "
            "other tokens each time. Set it to null in a copy of the file."
        )
    text = _text_with_end(tokenizer) if tokenizer.special_tokens == "text" else None
    if text is not None:
        raise ConfigError(
            f"{where}: a text that has {text} has the token that ends a document, which is no "
            "special token there. Set data.tokenizer.end_of_document to one that is, make it "
            'special ("special": true in `added_tokens`) in a copy of the file, or accept it: '
            "data.tokenizer.special_tokens=control."
        )


def _text_with_end(tokenizer: LibraryTokenizer) -> str | None:
    """Returns a text in which the end of documents is a token, as it is printed, or None."""
    decoders = importlib.import_module("tokenizers.decoders")
    library, end = tokenizer.library, tokenizer.end_of_document
    spelling = str(library.id_to_token(end))
    words = {
        library.decode([end], skip_special_tokens=False),
        decoders.ByteLevel().decode([spelling]),
        spelling.replace("\u2581", " ").removeprefix("##"),
    } - {spelling}
    for word in (spelling, *sorted(words)):  # Within a word too: a Unigram model takes it there.
        if any(map(tokenizer.has_end, (word, f" {word}", f"a{word}", f"a {word}", f"{word}a"))):
            return repr(word)
    is_plain = end not in library.get_added_tokens_decoder()
    if is_plain and any(LOST in word for word in words) and LOST not in spelling:
        return f"the bytes of {spelling!r}"  # A part of a character.
    return None


def of_folder(folder: Path, name: str, *, special_tokens: str = "text") -> Tokenizer | None:
    """Returns the tokenizer that made a token folder; None: it is not known.

    Args:
      folder: the folder, with a copy of the tokenizer.
      special_tokens: what the spelling of a special token in a text becomes.

    Raises:
      ConfigError: the folder's tokenizer.json is not the one that made its tokens.
    """
    if name == BYTES:
        return ByteTokenizer()
    data = _read(folder / FILE_NAME)
    if data is None or not name.startswith(LIBRARY):
        return None
    tokenizer = parse_tokenizer(
        data,
        _settings(folder / SETTINGS),
        where=str(folder / FILE_NAME),
        special_tokens=special_tokens,
    )
    if tokenizer.name != name:
        raise ConfigError(
            f"{folder / FILE_NAME} is {tokenizer.name}, but the tokens beside it were made with "
            f"{name}. Put the original tokenizer.json and tokenizer_config.json back, or remove "
            "both: training does not need them."
        )
    return tokenizer


def parse_tokenizer(
    data: bytes,
    settings: Mapping[str, Any],
    *,
    where: str,
    end_of_document: str | None = None,
    special_tokens: str = "text",
    of_model: Mapping[str, Any] = MappingProxyType({}),
) -> LibraryTokenizer:
    """Returns a tokenizer of the library.

    Args:
      data: contents of tokenizer.json.
      settings: fields of tokenizer_config.json.
      end_of_document: None: eos_token of the settings.
      special_tokens: what the spelling of a special token in a text becomes.
      of_model: files of its model -> their eos_token_id, which counts if the settings say nothing.

    Raises:
      ConfigError: it can't be used.
    """
    library = _library_tokenizer(data, where)
    library.encode_special_tokens = special_tokens == "text"
    if special_tokens == "text" and tokenizer_settings.is_unigram(library):
        tokenizer_settings.spell_special_words(library)
    ids = library.get_vocab(with_added_tokens=True)
    note = ""
    if end_of_document is None:
        end_of_document = tokenizer_settings.content(settings.get("eos_token"))
    if not isinstance(end_of_document, str):
        end_of_document, note = _end_of_model(library, of_model, where)
    if end_of_document not in ids:
        raise ConfigError(
            f"{where} has no token {end_of_document!r}, which data.tokenizer.end_of_document or "
            "tokenizer_config.json names."
        )
    settings = {**DEFAULT_SETTINGS, **settings, "eos_token": end_of_document}
    digest = xxhash.xxh3_128_hexdigest(data + b"\0" + end_of_document.encode())
    return LibraryTokenizer(
        name=f"{LIBRARY}{digest}",
        vocab_size=max(ids.values()) + 1,
        end_of_document=ids[end_of_document],
        files={FILE_NAME: data, SETTINGS: json.dumps(settings, indent=1).encode()},
        library=library,
        special_tokens=special_tokens,
        note=note,
        where=where,
    )


def _library_tokenizer(data: bytes, where: str) -> Any:
    """Returns the library's tokenizer of a tokenizer.json, which neither pads nor cuts texts."""
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise ConfigError(
            "data.tokenizer.kind=huggingface needs the package `tokenizers`. Run "
            "`pip install -e '.[data]'` in the checkout of jaxres."
        ) from error
    try:
        library = Library.from_buffer(data)
    except Exception as error:
        raise ConfigError(f"{where} is not a tokenizer.json: {error}") from error
    library.no_padding()
    library.no_truncation()
    return library


def _other_ends(
    tokenizer: LibraryTokenizer, named: Mapping[str, Any], of_model: Mapping[str, Any], where: str
) -> str:
    """Returns a notice of files that name another end of documents; "": none does."""
    library = tokenizer.library
    end = library.id_to_token(tokenizer.end_of_document)
    others = [f"{file} has {token!r}" for file, token in named.items() if token not in (None, end)]
    for file, ids in of_model.items():
        given = ids if isinstance(ids, list) else [ids]
        numbers = [id_ for id_ in given if type(id_) is int and 0 <= id_ < 2**32]
        if numbers and tokenizer.end_of_document not in numbers:
            others.append(f"{file} has {', '.join(map(repr, map(library.id_to_token, numbers)))}")
    if not others:
        return ""
    return (
        f"{where}: a document ends with {end!r}, the eos_token of {SETTINGS}; {'; '.join(others)}. "
        "If that is meant, set data.tokenizer.end_of_document"
    )


Words = list[tuple[str, int]]
"""Tokens with their ids."""


def vocabulary(data: bytes) -> tuple[Words, Words]:
    """Returns the added tokens of a tokenizer.json, and the words of its model.

    Raises:
      ValueError, TypeError, KeyError, AttributeError, IndexError: it has another form.
    """
    fields = foreign_json.loads(data)
    added = [(token["content"], token["id"]) for token in fields.get("added_tokens") or []]
    words = fields["model"].get("vocab") or {}
    if isinstance(words, dict):
        return added, list(words.items())
    # A Unigram model has a list of words with their scores, in the order of their ids. Its trainer
    # adds a special token again if a text spells it: the library takes the last.
    special = {content for content, _ in added}
    return added, [(word[0], i) for i, word in enumerate(words) if word[0] not in special]


def _unambiguous_added(data: bytes, where: str) -> Words:
    """Returns the added tokens of a tokenizer.json.

    Raises:
      ConfigError: it has a word or an id twice. The library keeps one of them without a message,
        and not every reader the same one.
    """
    try:
        added, own = vocabulary(data)
        of_id, of_word = dict[int, str](), dict[str, int]()
        for word, id_ in (*own, *added):
            if of_id.setdefault(id_, word) != word:
                raise ValueError(f"{of_id[id_]!r} and {word!r} have the id {id_}")
            if of_word.setdefault(word, id_) != id_:
                raise ValueError(f"{word!r} has the ids {of_word[word]} and {id_}")
        return added
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{where}: which word has which id is ambiguous: {error}. Take the file that its model "
            "was trained with, or save the tokenizer again."
        ) from error


def _end_of_model(library: Any, of_model: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Returns the token that ends a document of a model, and a note about it.

    Raises ConfigError if there is none, or several.
    """
    given = {file: ids if isinstance(ids, list) else [ids] for file, ids in of_model.items()}
    files = {id_: file for file, ids in given.items() for id_ in ids if type(id_) is int}
    ids = sorted(id_ for id_ in files if id_ >= 0)
    token = library.id_to_token(ids[0]) if len(ids) == 1 else None
    if token is not None:
        why = f"the eos_token_id of {files[ids[0]]}: {SETTINGS} has no eos_token"
        return token, f"{where}: a document ends with {token!r}, {why}"
    special = [token.content for token in library.get_added_tokens_decoder().values()]
    raise ConfigError(
        f"{where}: nothing tells which token ends a document (no eos_token in {SETTINGS} beside "
        f"it; eos_token_id in {' and '.join(OF_MODEL)}: {', '.join(map(str, ids)) or 'none'}). "
        "Set data.tokenizer.end_of_document, or eos_token in that file, to one of its special "
        f"tokens: {', '.join(special) or 'it has none; add one'}."
    )


def _settings(path: Path) -> dict[str, Any]:
    """Returns the fields of a file beside tokenizer.json; none if it does not exist."""
    data = _read(path)
    try:
        fields = {} if data is None else foreign_json.loads(data)
    except ValueError as error:
        raise ConfigError(f"data.tokenizer.path: {path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"data.tokenizer.path: {path} is not a JSON object")
    return fields


def _read(path: Path) -> bytes | None:
    with _reading(path):
        try:
            data = read_whole(path)
        except FileNotFoundError:
            return None
    refuse_lfs_pointer(data, f"data.tokenizer.path: {path}")
    return data


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise fault_of(error)(f"data.tokenizer.path: {path} can't be read: {error}") from error
