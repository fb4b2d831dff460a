"""Rows of images: encoded files in a token folder, decoded and augmented when a row is read.

A document of the folder is the label, LABEL_BYTES little-endian bytes, and then the file as it is
(dtype uint8, tokenizer IMAGES). Pillow decodes it and releases the GIL meanwhile, so threads
suffice. What a row looks like depends on its id, on data.source and on Pillow's version only: a
random crop follows from the source's seed, the image's number and the epoch.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxres.data.batching import NUM_TRIED, Arrays, BadRecord
from jaxres.data.shuffle import Permutation
from jaxres.data.sources.doubtful_names import HELD_OUT, TRAINING
from jaxres.data.sources.source_files import SourceFile
from jaxres.data.tokens.token_folder import TokenFolder
from jaxres.faults import ConfigError
from jaxres.storage import cpu_cores
from jaxres.storage.files import read

IMAGES = "images"
"""The field `tokenizer` of meta.json."""
CLASSES = "classes.json"
"""File of a folder with the names of the classes, by label."""
FOLDERS_OF_PROGRAMS = frozenset(("@eaDir", "__MACOSX"))
"""Folders without a dot in which Synology and macOS keep small copies and attributes."""
LABEL_BYTES = 4
MAX_THREADS = 16
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
NUM_TRIES = 10
"""Of a random crop, as in torchvision's RandomResizedCrop."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that Pillow may open: for others, such as EPS, it starts programs."""
DEEP_PNG, DEEP_BYTE = b"\x89PNG\r\n", 24
"""How a PNG file begins, and where it has the bits of a value."""
TIFF = (b"II*\0", b"MM\0*")
BITS_TAG, PHOTOMETRIC_TAG, WHITE_IS_ZERO = 258, 262, 0
"""Of TIFF 6.0, section 8."""
SAMPLE_FORMAT_TAG, UNSIGNED = 339, {1, 4}
"""Of TIFF 6.0, section 19; 4 is undefined, which readers take for unsigned."""
NO_END = bytes(16)
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";"}
"""How a whole file ends, before zeros that some cameras add."""
LEAST_WHITE = 16 * 256
"""Values of 16 bits that are all below are of 8, 10 or 12 bits, and nearly black at 8 bits."""
CENTRE = 7 / 8
"""Share of the shorter side that an image without augmentation shows: 224 of 256 pixels."""


def with_labels(
    files: Sequence[SourceFile], classes: Sequence[str], *, folders: Sequence[str] = ()
) -> tuple[list[SourceFile], tuple[str, ...]]:
    """Returns image files with the label of their class, the first folder of their name.

    Args:
      files: the listing; Parquet files have labels of their own.
      classes: names of the classes by label; empty: all names in ascending order.
      folders: names of all folders; one without an image is refused, or labels would shift.

    Returns:
      The files with labels, and the names of the classes; none for Parquet files.
    """
    images = [file for file in files if not is_table(file)]
    found = sorted({file.name.partition("/")[0] for file in images if "/" in file.name})
    names = tuple(classes) or tuple(found)
    empty = [name for name in sorted({*folders} - {*found}) if not name.startswith(".")]
    if images and empty and not classes:
        raise ConfigError(
            f"data.source.path: no file in the folder {empty[0]!r} matches data.source.include, so "
            "it would have no label, and others another one. Add the ending of its files there, "
            f"give data.source.classes, or leave it out with data.source.exclude: [{empty[0]}/*]."
        )
    if not classes:
        _refuse_doubtful_classes(images)
    labels = {name: label for label, name in enumerate(names)}
    unknown = [name for name in found if name not in labels]
    if unknown:
        raise ConfigError(
            f"data.source.classes: has no {', '.join(map(repr, unknown[:10]))}, which is a folder "
            "of images. Add it, or leave the folder out with data.source.exclude."
        )
    for file in images:
        if "/" not in file.name:
            raise ConfigError(
                f"data.source.path: {file.path} is in no folder of a class. A folder of images has "
                "a folder for each class (docs/data.md); leave the file out with "
                "data.source.exclude."
            )
    if images and len(images) < len(files):
        raise ConfigError(
            f"data.source.path: {images[0].path} is an image, and other files are Parquet. Give "
            "one of both with data.source.include."
        )
    labelled = [
        file if is_table(file) else replace(file, label=labels[file.name.partition("/")[0]])
        for file in files
    ]
    return labelled, names if images else ()


def numbered(classes: Sequence[str]) -> list[str]:
    """Returns a warning if classes are named by numbers that are not their labels."""
    if not all(name.isdecimal() for name in classes):
        return []
    other = [(label, name) for label, name in enumerate(classes) if int(name) != label]
    return [
        f"data.source.path: the classes are numbers and have other labels: label {label} is the "
        f"class {name!r}. data.source.classes gives another order"
        for label, name in other[:1]
    ]


def _refuse_doubtful_classes(images: Sequence[SourceFile]) -> None:
    """Raises ConfigError if folders that would be classes are hidden, or parts of the data set."""
    within: dict[str, set[str]] = {}
    for file in images:
        first, *rest = parts = PurePath(file.name).parts
        for depth, part in enumerate(parts[:-1], start=1):
            if part.startswith(".") or part in FOLDERS_OF_PROGRAMS:
                hidden = "/".join(parts[:depth])
                raise ConfigError(
                    f"data.source.path: the hidden folder {hidden!r} has images, such as small "
                    "copies that another program keeps. Leave it out with data.source.exclude: "
                    f"[{hidden}/*], or name the classes with data.source.classes."
                )
        within.setdefault(first, set()).add(rest[0] if rest[1:] else "")
    alike = dict[str, str]()
    for name in sorted(within):
        other = alike.setdefault(unicodedata.normalize("NFKC", name).casefold().strip(), name)
        if other != name:
            raise ConfigError(
                f"data.source.path: the folders {other!a} and {name!a} would be two "
                "classes. Rename one, or name the classes with data.source.classes."
            )
    if not within or any("" in names for names in within.values()):
        return
    shared = set[str].intersection(*within.values())
    splits = [name for name in within if name.lower() in TRAINING | HELD_OUT]
    if shared or splits:
        raise ConfigError(
            f"data.source.path: the folders {', '.join(sorted(within))} have only folders within "
            f"({', '.join(sorted(set().union(*within.values()))[:10])}), so they are rather parts "
            "of the data set than classes. Give the path of one of them; if they are classes, name "
            "them with data.source.classes."
        )


def parquet_classes(files: Sequence[SourceFile], column: str) -> tuple[tuple[str, ...], list[str]]:
    """Returns the names of the labels that Parquet files of `datasets` have in their schema.

    None are known for files without them, and for one that can't be read, which is told when its
    rows are; with the names is a note about these files, if others have names.

    Raises ConfigError if they differ.
    """
    unnamed = list[SourceFile]()
    arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    first: tuple[SourceFile, tuple[str, ...]] | None = None
    for file in filter(is_table, files):
        try:
            fields = json.loads((parquet.read_schema(file.path).metadata or {})[b"huggingface"])
            names = tuple(map(str, fields["info"]["features"][column]["names"]))
        except (KeyError, TypeError, ValueError, OSError, arrow.ArrowException):
            unnamed.append(file)
            continue
        if first is not None and names != first[1]:
            raise ConfigError(
                f"data.source.path: the labels of {first[0].path} are those of "
                f"{', '.join(first[1][:10])}, of {file.path} those of {', '.join(names[:10])}, in "
                "this order: one number means two classes. Save both with the same ClassLabel."
            )
        first = first or (file, names)
    if first is None or not unnamed:
        return (() if first is None else first[1]), []
    return first[1], [
        f"WARNING: {len(unnamed):,} Parquet files have no names of classes, such as "
        f"{unnamed[0].path}; their labels are taken for those of {first[0].path}"
    ]


def classes_of(folder: Path) -> tuple[str, ...]:
    """Returns the names of the classes of a folder by label; none: they are not known."""
    try:
        return tuple(json.loads(read(folder / CLASSES) or b"[]"))
    except (ValueError, TypeError):
        return ()


def is_table(file: SourceFile) -> bool:
    """Returns whether a file has many images, with their labels."""
    return file.name.lower().endswith(".parquet")


def document(label: int, content: bytes) -> NDArray[np.uint8]:
    """Returns an image as a document of a token folder."""
    return np.frombuffer(label.to_bytes(LABEL_BYTES, "little", signed=True) + content, np.uint8)


def label_of(document: NDArray[np.uint8]) -> int:
    """Returns the label of an image."""
    return int.from_bytes(document[:LABEL_BYTES].tobytes(), "little", signed=True)


@dataclass(frozen=True)
class ImageRows:
    """Images [start, stop) of a folder, in an order of their own: files of a class are adjacent.

    Row: image uint8[size, size, 3] and label int32[].
    """

    corpus: TokenFolder
    size: int
    augment: bool
    seed: int
    start: int
    stop: int
    is_evaluated: bool = False
    """Whether an image that can't be used is replaced by the next one, instead of BadRecord."""
    num_classes: int | None = None
    """Classes of the model, none of which a label beyond them is; None: not known."""

    def evaluated(self) -> ImageRows:
        """Returns the rows for evaluations, which always have the same rows and skip none."""
        return replace(self, augment=False, is_evaluated=True)

    def __len__(self) -> int:
        """Number of images."""
        return self.stop - self.start

    @property
    def varies_by_epoch(self) -> bool:
        """Whether an id is epoch * number of rows + row."""
        return self.augment

    def rows(self, ids: NDArray[np.int64]) -> Arrays:
        """Returns image uint8 [B, size, size, 3] and label int32 [B]; raises BadRecord."""
        epochs, rows = np.divmod(np.asarray(ids, np.int64), len(self))
        if len(ids) and (epochs.min() < 0 or (epochs.max() > 0 and not self.augment)):
            raise IndexError(f"row ids {ids.min()}..{ids.max()} of {len(self)} rows")
        numbers = self.numbers(rows)
        contents = self.read(numbers)
        images = np.empty((len(ids), self.size, self.size, 3), np.uint8)
        labels = np.array([label_of(one) for one in contents], np.int32)

        def decode(index: int) -> None:
            number, epoch = int(numbers[index]), int(epochs[index])
            try:
                images[index] = self._decoded(number, epoch, contents[index])
            except BadRecord:
                if not self.is_evaluated:
                    raise
                images[index], labels[index] = self._next(int(rows[index]))

        with ThreadPoolExecutor(num_threads(len(ids)), "jaxres-images") as pool:
            list(pool.map(decode, range(len(ids))))
        return {"image": images, "label": labels}

    def _next(self, row: int) -> tuple[NDArray[np.uint8], int]:
        """Returns the pixels and label of the next image that can be decoded."""
        for after in range(1, NUM_TRIED + 1):
            numbers = self.numbers(np.array([(row + after) % len(self)]))
            (document,) = self.read(numbers)
            try:
                return self._decoded(int(numbers[0]), 0, document), label_of(document)
            except BadRecord:
                if after == NUM_TRIED:
                    raise
        raise AssertionError("not reached")

    def numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers in the folder of the images of some rows."""
        order = Permutation(self.corpus.meta.num_documents, seed=0, name="images")
        ranks, where = np.unique(rows + self.start, return_inverse=True)
        return order.ids(ranks)[where] if len(ranks) else ranks

    def read(self, numbers: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Returns the documents of some images."""
        corpus = self.corpus
        corpus.check_offsets(numbers, numbers + 2)
        starts, stops = corpus.offsets[numbers], corpus.offsets[numbers + 1]
        corpus.check_tokens(starts, stops)
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        return [np.asarray(corpus.tokens[start:stop]) for start, stop in spans]

    def _decoded(self, number: int, epoch: int, document: NDArray[np.uint8]) -> NDArray[np.uint8]:
        label = label_of(document)
        if self.num_classes is not None and not 0 <= label < self.num_classes:
            raise BadRecord(
                f"{self.corpus.path('tokens.bin')}: image {number} has the label {label}, not in "
                f"0..{self.num_classes - 1} (model.num_classes={self.num_classes}). Raise it, or "
                "correct data.source.label_column."
            )
        try:
            picture = open_picture(document[LABEL_BYTES:].tobytes())
            box, flip = centre(*picture.size), False
            if self.augment:
                box, flip = random_crop(*picture.size, key=(self.seed, number, epoch))
            resized = picture.resize((self.size, self.size), 2, box=box)  # 2: bilinear.
        except MemoryError:
            raise
        except Exception as error:
            path = self.corpus.path("tokens.bin")
            raise BadRecord(f"{path}: {_undecodable(number, document, error)}") from error
        pixels = np.asarray(resized)
        return pixels[:, ::-1] if flip else pixels


class UnusableDepth(ValueError):
    """The values of an image have no known black and white."""


def open_picture(content: bytes) -> Any:
    """Returns a decoded file as an upright Pillow image with three channels of 8 bits.

    16 bits are divided by 256, 12 bits of TIFF by 16. Transparency and color profiles are left out;
    of several pages or frames the first one is taken.

    Raises:
      ValueError: the file is not whole.
      UnusableDepth: the values are of 32 bits, fractions or signed, or have fewer bits than the
        file says: Pillow would clip them to black or white.
    """
    library = pillow("Image")
    opened = _opened(content)
    end = ENDS.get(opened.format, b"")
    if content.endswith(NO_END) and not content.rstrip(b"\0").endswith(end):
        raise ValueError("it ends with zeros, as an unfinished copy does")
    bits = _bits(opened, content)
    if opened.mode in ("I", "F") or (bits > 8 and opened.mode == "CMYK"):
        raise UnusableDepth(f"it has values of {bits} bits (mode {opened.mode} of Pillow)")
    if _is_signed(opened):
        raise UnusableDepth(f"it has values of {bits} bits with a sign")
    is_negative = opened.format == "TIFF" and opened.tag_v2.get(PHOTOMETRIC_TAG) == WHITE_IS_ZERO
    picture = pillow("ImageOps").exif_transpose(opened)
    if picture.mode.startswith("I;16"):
        values = np.asarray(picture)
        if bits == 16 and values.any():
            _check_range(int(values.max()))
        if is_negative:  # Pillow inverts only images of 8 bits and less.
            values = (1 << bits) - 1 - values
        picture = library.fromarray((values >> (bits - 8)).astype(np.uint8))
    if "transparency" in picture.info:  # Pillow warns of a palette with several transparent colors.
        picture = picture.convert("RGBA")
    picture = picture.convert("RGB")
    if bits == 16 and opened.mode.startswith("RGB"):
        _check_range(int(np.asarray(picture).max()) * 256)
    return picture


def check_depth(content: bytes) -> None:
    """Raises UnusableDepth as `open_picture`; decodes no image of 8 unsigned bits or fewer."""
    if not content.startswith(TIFF):
        bits = content[DEEP_BYTE : DEEP_BYTE + 1]
        if not (content.startswith(DEEP_PNG) and bits == b"\x10"):
            return
    try:
        opened = _opened(content)
        if _bits(opened, content) > 8 or _is_signed(opened):
            open_picture(content)
    except (UnusableDepth, MemoryError, ConfigError):
        raise
    except Exception:  # noqa: BLE001 - Decoders fail in many ways: a bad record when it is read.
        return


def _opened(content: bytes) -> Any:
    return pillow("Image").open(io.BytesIO(content), formats=FORMATS)


def _bits(opened: Any, content: bytes) -> int:
    """Returns the bits per value that the file declares."""
    if opened.format == "TIFF":
        return max(opened.tag_v2.get(BITS_TAG, (1,)))
    return content[DEEP_BYTE] if opened.format == "PNG" else 8


def _is_signed(opened: Any) -> bool:
    """Returns whether a TIFF has values with a sign, which Pillow reads as unsigned ones."""
    declared = opened.tag_v2.get(SAMPLE_FORMAT_TAG, 1) if opened.format == "TIFF" else 1
    return not {*np.atleast_1d(declared).tolist()} <= UNSIGNED


def _check_range(highest: int) -> None:
    if highest < LEAST_WHITE:
        raise UnusableDepth(
            f"it has values of 16 bits, all below {LEAST_WHITE:,} of 65,535, as if they had fewer"
        )


def _undecodable(number: int, document: NDArray[np.uint8], error: Exception) -> str:
    size = len(document) - LABEL_BYTES
    return (
        f"image {number}, label {label_of(document)}, a file of {size:,} bytes, can't be decoded: "
        f"{error}"
    )


def undecodable_images(
    numbers: NDArray[np.int64], documents: Sequence[NDArray[np.uint8]]
) -> list[str]:
    """Decodes images; returns the error of each that can't be decoded."""

    def problem(index: int) -> str | None:
        try:
            open_picture(documents[index][LABEL_BYTES:].tobytes())
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - Decoders fail in many ways.
            return _undecodable(int(numbers[index]), documents[index], error)
        return None

    with ThreadPoolExecutor(num_threads(len(documents)), "jaxres-images") as pool:
        return [text for text in pool.map(problem, range(len(documents))) if text is not None]


def pillow(module: str) -> Any:
    """Returns a module of Pillow; raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise ConfigError(
            "data.source.kind=images needs the package pillow. Run `pip install -e '.[data]'` in "
            "the checkout of jaxres."
        ) from error


def num_threads(num_rows: int) -> int:
    """Returns the number of threads that decode a batch."""
    return max(1, min(num_rows, cpu_cores.usable(), MAX_THREADS))


Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""


def centre(width: int, height: int) -> Box:
    """Returns the middle square of an image.

    >>> centre(256, 512)
    (16.0, 144.0, 240.0, 368.0)
    """
    side = min(width, height) * CENTRE
    left, upper = (width - side) / 2, (height - side) / 2
    return (left, upper, left + side, upper + side)


def random_crop(width: int, height: int, *, key: Sequence[int]) -> tuple[Box, bool]:
    """Returns a crop of random area and shape, and whether to flip it; a function of the key.

    As torchvision's RandomResizedCrop and RandomHorizontalFlip, with other random numbers.
    """
    # The raw stream of a bit generator is the same in every version of NumPy.
    raw = np.random.Philox(np.random.SeedSequence(list(key))).random_raw(1 + 4 * NUM_TRIES)
    values = iter((np.asarray(raw, np.uint64) >> np.uint64(11)) / 2.0**53)
    flip = bool(next(values) < 0.5)
    for _ in range(NUM_TRIES):
        area, shape, across, down = (float(next(values)) for _ in range(4))
        pixels = width * height * (SCALE[0] + area * (SCALE[1] - SCALE[0]))
        low, high = map(math.log, RATIO)
        ratio = math.exp(low + shape * (high - low))
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = int(across * (width - w + 1)), int(down * (height - h + 1))
            return (left, upper, left + w, upper + h), flip
    return centre(width, height), flip
