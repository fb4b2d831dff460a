"""Schema of the data set: sources, tokenizers, row length and held-out part."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, get_args

from pydantic import Field, JsonValue

from jaxres.config.schema.base import (
    Dimension,
    Folder,
    LocalPath,
    NonNegativeFloat,
    PathPattern,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Seed,
    VocabSize,
    content_path,
    form,
    free,
)

ImportPath = Annotated[str, form(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "package.module:function")]

HELDOUT = "heldout"
"""Name of the held-out part of the training data among the validation sets."""
SetName = Annotated[str, form(r"[A-Za-z0-9_-]{1,40}", "1 to 40 letters, digits, - or _")]


class FilesSource(Section):
    """Fields of every source whose documents are read from files and tokenised once."""

    path: PathPattern = content_path()
    """Folder, file or glob; also gs://BUCKET/FOLDER or one object in a bucket.

    `{stdlib}` is replaced by the folder of Python's standard library. Data in a bucket is copied
    to data.cache_dir first."""
    include: tuple[str, ...] = ("**/*",)
    """Patterns of files below the folder, as in pathlib's glob."""
    exclude: tuple[str, ...] = ()
    """Patterns of relative paths to exclude; `*` also matches `/`, and `**/` no folder too."""


class TextSource(FilesSource):
    """Data source: text files; each file is a document."""

    kind: Literal["text"] = "text"
    encoding: Literal["utf-8", "binary"] = free("utf-8")
    """utf-8: refuse other files (78); binary: any bytes, for the bytes tokenizer only."""


class JsonlSource(FilesSource):
    """Data source: JSON Lines; each line is a document."""

    kind: Literal["jsonl"] = "jsonl"
    include: tuple[str, ...] = ("**/*.jsonl", "**/*.jsonl.gz", "**/*.jsonl.zst")
    """Patterns of files below the folder. Files ending in .gz and .zst are decompressed."""
    field: str = "text"
    """Key of a line's object that has the text."""


class ParquetSource(FilesSource):
    """Data source: Parquet files; each row is a document."""

    kind: Literal["parquet"] = "parquet"
    include: tuple[str, ...] = ("**/*.parquet",)
    """Patterns of files below the folder."""
    column: str = "text"
    """Column that has the text: of type string, or binary (UTF-8)."""


class HuggingfaceSource(Section):
    """Data source: a folder that `datasets` has written with `save_to_disk`; rows are documents."""

    kind: Literal["huggingface"] = "huggingface"
    path: PathPattern = content_path()
    """Folder of one split; also gs://BUCKET/FOLDER, which is copied to data.cache_dir first."""
    column: str = "text"
    """Column that has the text: of type string, or binary (UTF-8)."""


class NanogptSource(FilesSource):
    """Data source: `.bin` files of token ids, as of nanoGPT; also with llm.c's header."""

    kind: Literal["nanogpt"] = "nanogpt"
    include: tuple[str, ...] = ("**/*.bin",)
    """Patterns of files below the folder."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the ids, little-endian. Files with a header say it themselves."""
    vocab_size: VocabSize = 50257
    """Number of token ids. Default: GPT-2's."""
    end_of_document: int | None = Field(50256, ge=0, lt=2**32)
    """Token that ends a document; null: each file is one document. Default: GPT-2's."""


class ImagesSource(FilesSource):
    """Data source: images with labels, for custom models."""

    kind: Literal["images"] = "images"
    include: tuple[str, ...] = tuple(
        f"**/*.{ending}"
        for lower in ("jpg", "jpeg", "png", "webp", "bmp", "parquet")
        for ending in (lower, lower.upper())
    )
    """Patterns of files below the folder: images in a folder for each class, or Parquet files."""
    image_column: str = "image"
    """Column of Parquet files that has the encoded images: bytes, or {bytes, path}."""
    label_column: str = "label"
    """Column of Parquet files that has the labels, whole numbers."""
    classes: tuple[str, ...] = ()
    """Names of the folders in the order of their labels, 0, 1, ...; empty: their own order."""
    size: Dimension = 224
    """Width and height, in pixels, of what the model gets."""
    augment: Literal["none", "crop_flip"] = "none"
    """none: the middle; crop_flip: a random crop, half of them mirrored, another in each epoch.

    Held-out images are never augmented."""
    augment_seed: Seed = 0
    """Seed of the random crops."""


class TokensSource(Section):
    """Data source: a folder of tokens, made by another tool."""

    kind: Literal["tokens"] = "tokens"
    path: Folder = content_path()
    """Folder in the token format (docs/data.md), or gs://BUCKET/FOLDER.

    Blocks of a folder in a bucket are read when a row needs them; without digests it is copied to
    data.cache_dir first."""


class CustomSource(Section):
    """Data source: an object that the user's code returns."""

    kind: Literal["custom"] = "custom"
    target: ImportPath
    """Function `package.module:build` that returns an object with __len__ and __getitem__."""
    args: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it.
    """Keyword arguments of the target."""
    path_args: tuple[str, ...] = free(())
    """Arguments, such as paths, whose content the object's `fingerprint` covers: they are free."""


TextualSource = TextSource | JsonlSource | ParquetSource | HuggingfaceSource
"""Sources that a tokenizer reads."""
DocumentSource = TextualSource | NanogptSource | ImagesSource
"""Sources that are tokenised, or copied, into a cached token folder."""
SingleSource = DocumentSource | TokensSource | CustomSource
"""Sources that are no mixture."""


class WeightedSource(Section):
    """One source of a mixture."""

    name: SetName
    """Name of the source; its rows are shuffled by it, so it belongs to the trajectory."""
    weight: NonNegativeFloat
    """Share of the rows, relative to the other weights; 0: none before the schedule gives some."""
    epochs: PositiveInt | None = None
    """How often each row is trained on; then the other sources take its share. null: no limit."""
    source: Annotated[SingleSource, Field(discriminator="kind")]
    """Source of the rows; text has the tokenizer of data.tokenizer."""


class WeightChange(Section):
    """New weights of a mixture, from a step on."""

    after_step: PositiveInt
    """The last step with the weights before. Counted in rows of the stream, skipped ones too."""
    weights: dict[str, NonNegativeFloat]
    """Weight of every source, by its name."""


class MixtureSource(Section):
    """Data source: rows of several sources, in shares that may change at stated steps."""

    kind: Literal["mixture"] = "mixture"
    sources: tuple[WeightedSource, ...] = ()
    """The sources, each with a name and a weight."""
    schedule: tuple[WeightChange, ...] = ()
    """Changes of the weights, by ascending steps."""


Source = Annotated[SingleSource | MixtureSource, Field(discriminator="kind")]


def kinds_of(sources: UnionType) -> tuple[str, ...]:
    """Returns the values of `kind` of a union of sources.

    >>> kinds_of(TextualSource)
    ('text', 'jsonl', 'parquet', 'huggingface')
    """
    return tuple(source.model_fields["kind"].default for source in get_args(sources))


def single_sources(source: Source) -> dict[str, SingleSource]:
    """Returns the sources of a data set by their keys in the config: itself, or a mixture's."""
    if not isinstance(source, MixtureSource):
        return {"data.source": source}
    return {
        f"data.source.sources[{number}].source": part.source
        for number, part in enumerate(source.sources)
    }


class BytesTokenizer(Section):
    """Tokenizer whose tokens are the bytes of the text."""

    kind: Literal["bytes"] = "bytes"
    """One token per byte (0..255), and token 256 at the end of every document."""


class HuggingfaceTokenizer(Section):
    """Tokenizer of the library `tokenizers`."""

    kind: Literal["huggingface"] = "huggingface"
    path: LocalPath = content_path()
    """The file tokenizer.json, or a folder that has one."""
    end_of_document: str | None = None
    """Token that ends every document. Default: eos_token of tokenizer_config.json beside it.

    Else eos_token_id of config.json and generation_config.json beside it, if it is one token."""
    special_tokens: Literal["text", "control"] = free("text")
    """What the spelling of a special token in a text becomes.

    `text`: the tokens of its letters. `control`: the special token, as texts need that a chat
    template has made. A restart may change it if the data have the same tokens with both.
    """


Tokenizer = Annotated[BytesTokenizer | HuggingfaceTokenizer, Field(discriminator="kind")]


class ValidationSet(Section):
    """A data set of which nothing is trained on."""

    name: SetName
    """Name in the console, the metrics and TensorBoard."""
    source: Annotated[SingleSource, Field(discriminator="kind")]
    """Source of the rows; text has the tokenizer of the training data."""


class DataSection(Section):
    """Data set: source, tokenizer, row length and held-out part."""

    source: Source
    """Source of the training text or rows; with `kind: mixture`, several."""
    tokenizer: Tokenizer = BytesTokenizer()
    """Tokenizer of text. Sources of token ids need none; it then only decodes samples."""
    seq_len: Dimension = 256
    """Tokens per row."""
    packing: Literal["concat", "best_fit", "pad"] = "concat"
    """How documents become rows.

    concat: rows are windows of the documents one after another, and cut documents anywhere.
    best_fit: whole documents together in rows, with little padding; only longer ones are cut.
    pad: one document a row, then padding. Not for custom sources."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the corpus, at its end, that is used for evaluation and never for training."""
    validation: tuple[ValidationSet, ...] = free(())
    """Data sets that are evaluated besides the held-out part, each by itself."""
    cache_dir: LocalPath = free(Path("~/.cache/jaxres"))
    """Cache of tokenised corpora and of data from a bucket; `~` is the home folder."""
    bucket_cache_gb: PositiveFloat = free(20.0)
    """Size of the blocks of token folders in a bucket that are kept in data.cache_dir/blocks."""
    prefetch_batches: Dimension = free(8)
    """Batches that are read ahead in the background; refilled when half of them are used."""
    timeout_seconds: Seconds = free(300.0)
    """Longest wait for one batch before the attempt fails."""
