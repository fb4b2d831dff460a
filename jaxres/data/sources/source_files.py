"""Lists the files of a source of documents."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import stat
import sysconfig
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from jaxres.config.schema.data import (
    CustomSource,
    DocumentSource,
    FilesSource,
    HuggingfaceSource,
    ImagesSource,
    JsonlSource,
    ParquetSource,
    SingleSource,
    Source,
    TokensSource,
    single_sources,
)
from jaxres.data.sources import doubtful_names, own_folders
from jaxres.data.sources.folder_tree import (
    WILD,
    FolderTree,
    is_excluded,
    is_match,
    own_kind,
    parts_of,
    unreadable,
)
from jaxres.data.sources.saved_dataset import data_files
from jaxres.faults import ConfigError
from jaxres.storage.files import exists, is_folder, status_of
from jaxres.storage.path import SCHEME, RunPath, is_remote, parse_path

STDLIB = "{stdlib}"
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders below {stdlib} that are not part of it, or that a running Python changes."""
TABLES = {
    "_delta_log": "a table of Delta Lake",
    "metadata": "a table of Apache Iceberg",
    ".hoodie": "a table of Apache Hudi",
    "_spark_metadata": "a table that Spark has streamed to",
    "_temporary": "a job of Spark or Hadoop that has not ended",
}
"""Folders that lie beside the rows of tables and of unfinished jobs -> what these are."""
_IN_TABLE = re.compile(
    r"(?:^|/)(_delta_log|metadata(?=/.*\.metadata\.json$)|\.hoodie|_spark_metadata|_temporary)/",
    re.DOTALL,
)


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus in the listing; `name` is its path relative to the corpus."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    """Time of the last change of content, name, mode or links, which no program can set."""
    label: int | None = None
    """Label of an image file."""


def token_folder_of(source: Source) -> RunPath | None:
    """Returns the token folder that is the source, or that may be, if it is in a bucket.

    None: it has to be built. The path of `images` may be that of a folder that is built already.
    """
    if isinstance(source, TokensSource):
        return source.path
    if not isinstance(source, ImagesSource):
        return None
    if source.path.startswith(SCHEME):
        return parse_path(source.path)
    folder = Path(source.path)
    files = [folder.expanduser() / name for name in ("meta.json", "tokens.bin")]
    return folder if all(map(exists, files)) else None


@dataclass(frozen=True)
class Listing:
    """The files of a corpus, ordered by a hash of their names: its tail is representative.

    Attributes:
      folders: names of the folders in the corpus, if it is a folder.
      left_out: names of the files beside them that no pattern matches, and none excludes.
    """

    files: list[SourceFile]
    folders: list[str]
    left_out: list[str]
    warnings: list[str]
    """Warnings to print: shards that are missing, files that are there twice."""


def list_files(source: DocumentSource) -> list[SourceFile]:
    """Returns the files of a source, in the order of `Listing`. Raises as `list_corpus`."""
    return list_corpus(source).files


def list_corpus(source: DocumentSource) -> Listing:
    """Lists the files of a source, also in folders that are links.

    Raises:
      ConfigError: no file matches, all files are empty, or one is left out by its case.
      StorageRefused, StorageUnavailable: a file or a folder can't be read.
    """
    include, exclude = _patterns(source)
    root, patterns = _root_and_patterns(source.path, include)
    stdlib = _stdlib() if STDLIB in source.path else None
    _refuse_own_root(root, patterns)
    tree = FolderTree(root, exclude, skip=STDLIB_EXCLUDED if stdlib else frozenset())
    files, folders = dict[str, SourceFile](), list[str]()
    links = _Links()
    for path in itertools.chain.from_iterable(map(tree.matches, patterns)):
        name = path.relative_to(root).as_posix()
        if _is_taken(name, exclude) and not (stdlib and _is_foreign(path, stdlib)):
            status = _status(path, is_lenient=stdlib is not None)
            if status is None:
                folders.append(name)
            elif name not in files:
                times = status.st_mtime_ns, status.st_ctime_ns
                files[name] = SourceFile(name, path, status.st_size, *times)
                if not stdlib:
                    links.add(name, path, status)
    others = [name for name in tree.files() if name not in files and _is_taken(name, exclude)]
    if isinstance(source, ParquetSource | JsonlSource):
        _refuse_tables(root, [*files, *others])
    if not stdlib:
        _check_case(root, others, patterns)
    if not files:
        raise ConfigError(
            f"data.source.path: {source.path} matches no file (looked below {root} for "
            f"{', '.join(patterns)}, without {', '.join(exclude) or 'exclusions'})"
        )
    if not any(file.size_bytes for file in files.values()):
        raise ConfigError(f"data.source.path: all files of {source.path} are empty")
    ordered = sorted(files.values(), key=lambda file: (_name_hash(file.name), file.name))
    warnings = own_folders.describe(tree.own) + doubtful_names.describe(files) + links.warnings()
    if not stdlib:
        warnings += _useless_patterns(source, patterns, tree, files)
    if not stdlib and patterns != include:
        used = {str(above) for name in files for above in PurePath(name).parents}
        warnings += [
            f"data.source.path: left out: the folder {name}; '{name}/**/*' takes what is in it"
            for name in sorted(folders)
            if name not in used and not any(is_excluded(f"{name}/", each) for each in exclude)
        ]
    elif not stdlib and (closed := tree.not_entered()):
        warnings.append(
            f"data.source.include: no pattern looks into {len(closed):,} folders, such as "
            f"{closed[0]}; '{closed[0]}/**/*' takes what is in it"
        )
    return Listing(ordered, tree.folders(), [] if stdlib else others, warnings)


def _refuse_own_root(root: Path, patterns: tuple[str, ...]) -> None:
    """Raises ConfigError if the root is a folder of jaxres and patterns would take files in it."""
    parts = [parts_of(pattern) for pattern in patterns]
    if any(len(each) > 1 and WILD & set(each[0]) for each in parts) and (kind := own_kind(root)):
        raise ConfigError(
            f"data.source.path: {root} is a {kind} of jaxres, whose files would become documents. "
            "Give the folder or the glob of your own files, or another run.dir or data.cache_dir."
        )


def _useless_patterns(
    source: DocumentSource, patterns: tuple[str, ...], tree: FolderTree, files: Collection[str]
) -> list[str]:
    """Returns warnings about patterns of the config that fit no file.

    `patterns`: those of the listing, which are data.source.include if the path is a folder.
    """
    if isinstance(source, HuggingfaceSource):
        return []
    found = list[str]()
    for pattern in source.exclude:
        if tree.leaves_out(pattern) is False:
            folder = pattern.strip("/").removeprefix("./")
            hint = f"; for the folder give '{folder}/*'" if folder in tree.folders() else ""
            found.append(f"data.source.exclude: {pattern!r} leaves out nothing{hint}")
    is_default = source.include == type(source).model_fields["include"].default
    if patterns != source.include and not is_default:
        found.append("data.source.include has no effect: data.source.path is a file or a glob")
    elif len(patterns) > 1 and not is_default:
        found += [
            f"data.source.include: {pattern!r} fits no file"
            for pattern in patterns
            if not any(is_match(name, pattern) for name in files)
        ]
    return found


def _is_taken(name: str, exclude: tuple[str, ...]) -> bool:
    """Returns whether a file is taken if its name matches."""
    if PurePath(name).name.startswith("._"):
        return False  # "._x" is what macOS keeps beside the file "x" on other file systems.
    return not any(is_excluded(name, pattern) for pattern in exclude)


def _refuse_tables(root: Path, names: list[str]) -> None:
    """Raises ConfigError for a folder in which only a table's own record says which rows count."""
    for name in names:
        if (match := _IN_TABLE.search(name)) is not None:
            raise ConfigError(
                f"data.source.path: {root / name} is a part of {TABLES[match[1]]}: beside the rows "
                "that count, the folder may have deleted, replaced or unfinished ones. Write the "
                "rows as plain files with the program of the table, or, if data.source.include has "
                f"the right files only, add '{name[: match.end()]}*' to data.source.exclude."
            )


def _check_case(root: Path, left_out: list[str], patterns: tuple[str, ...]) -> None:
    """Raises a ConfigError if a file matches no pattern only because of its case."""
    for name in left_out:
        if any(is_match(name.lower(), pattern.lower()) for pattern in patterns):
            raise ConfigError(
                f"data.source.path: {root / name} is left out only because of upper and lower "
                f"case in its name. Add '**/*{PurePath(name).suffix}' to data.source.include, "
                "rename it, or leave it out with data.source.exclude."
            )


def refuse(source: SingleSource) -> None:
    """Raises ConfigError if the path of a source leads nowhere, or a pattern is invalid.

    Whether its files fit is not looked at, nor what is in a bucket.
    """
    if isinstance(source, CustomSource) or str(source.path).startswith(SCHEME):
        return
    include: tuple[str, ...] = ()
    if isinstance(source, FilesSource) and token_folder_of(source) is None:
        include = source.include
    for pattern in _root_and_patterns(str(source.path), include)[1]:
        parts_of(pattern)


def read_below(source: Source, folder: RunPath, names: Iterable[str]) -> list[str]:
    """Returns the names of a folder's files that a source would read, as it lies in its own."""
    if not isinstance(source, FilesSource) or source.path.startswith(SCHEME) != is_remote(folder):
        return []
    if is_remote(folder):
        root, patterns, place = source.path.rstrip("/"), source.include, str(folder)
    else:
        found, patterns = _root_and_patterns(source.path, source.include)
        root, place = str(found), str(Path(str(folder)).resolve())
    if not place.startswith(f"{root}/"):
        return []
    below = place.removeprefix(f"{root}/")
    return [
        name
        for name in names
        if _is_taken(f"{below}/{name}", source.exclude)
        and any(is_match(f"{below}/{name}", pattern) for pattern in patterns)
    ]


def shared_files(one: SingleSource, other: Source) -> int:
    """Returns the number of local files of a source that another one has too, links included."""
    sources = single_sources(other).values()
    listed = [_local_files(one), set[tuple[int, int]]().union(*map(_local_files, sources))]
    return len(listed[0] & listed[1])


def _local_files(source: SingleSource) -> set[tuple[int, int]]:
    """Returns device and inode of the files of a source."""
    if not isinstance(source, DocumentSource) or source.path.startswith(SCHEME):
        return set()
    if token_folder_of(source) is not None:
        return set()
    paths = [file.path for file in list_files(source)]
    try:
        return {(status.st_dev, status.st_ino) for status in map(os.stat, paths)}
    except OSError as error:
        raise unreadable(Path(error.filename), error) from error


def _patterns(source: DocumentSource) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the patterns of files to include and to exclude."""
    if isinstance(source, HuggingfaceSource):
        return tuple(map(_escape, data_files(Path(source.path).expanduser()))), ()
    return source.include, source.exclude


def _root_and_patterns(given: str, include: tuple[str, ...]) -> tuple[Path, tuple[str, ...]]:
    """Splits the path into an existing folder and the patterns to match below it."""
    path = Path(given.replace(STDLIB, str(_stdlib()))).expanduser()
    try:
        if is_folder(path):
            return path.resolve(), include
        if status_of(path) is not None:
            return path.parent.resolve(), (_escape(path.name),)
        wild = [i for i, part in enumerate(path.parts) if WILD & set(part)]
        if wild and is_folder(root := Path(*path.parts[: wild[0]])):
            return root.resolve(), (str(PurePath(*path.parts[wild[0] :])),)
    except OSError as error:
        raise unreadable(path, error) from error
    raise ConfigError(
        f"data.source.path: {given} does not exist ({path.absolute()}). If the data have "
        "moved, give the new path: a run resumes with it if the content is the same."
    )


def _escape(name: str) -> str:
    """Returns the pattern that matches only this name."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def _is_foreign(path: Path, stdlib: Path) -> bool:
    """Returns whether a file in the library's folder is not part of the library."""
    depth = len(stdlib.parts)
    is_below = path.parts[:depth] == stdlib.parts
    return is_below and not STDLIB_EXCLUDED.isdisjoint(path.parts[depth:])


def _status(path: Path, *, is_lenient: bool) -> os.stat_result | None:
    """Returns the status of a file; None: it is a folder.

    Raises ConfigError if it can't be read, as a dangling link or a pipe; None if it is lenient.
    """
    try:
        status = status_of(path)
        dangling = status is None and path.is_symlink()
    except OSError as error:
        raise unreadable(path, error) from error
    if status is not None and stat.S_ISREG(status.st_mode):
        return status
    is_special = status is not None and not stat.S_ISDIR(status.st_mode)
    if (dangling or is_special) and not is_lenient:
        what = "a dangling link" if dangling else "a pipe, a socket or a device, not a file"
        raise unreadable(path, f"it is {what}")
    return None


class _Links:
    """The files of a listing that are the same one under several names."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, int], Path] = {}
        self._again = list[str]()

    def add(self, name: str, path: Path, status: os.stat_result) -> None:
        """Takes a file. Raises ConfigError if a link leads to one that is there already."""
        first = self._first.setdefault((status.st_dev, status.st_ino), path)
        if first == path or not status.st_size:
            return
        if path.is_symlink() or first.is_symlink():
            raise ConfigError(
                f"data.source.path: {path} is, through a link, the same file as {first}, so it "
                "would be trained on twice. Remove the link, or leave it out with "
                "data.source.exclude."
            )
        self._again.append(name)

    def warnings(self) -> list[str]:
        """Returns a warning about hard links; some tools make them of equal files."""
        if not self._again:
            return []
        return [
            f"{len(self._again):,} files are hard links to others of the corpus, such as "
            f"{self._again[0]}, so their documents are there several times"
        ]


def _name_hash(name: str) -> bytes:
    return hashlib.blake2b(os.fsencode(name), digest_size=16).digest()
