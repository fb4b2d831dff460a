"""Lists the files of a source of documents."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from jaxres.config.schema_data import (
    DocumentSource,
    HuggingfaceSource,
    ImagesSource,
    SingleSource,
    Source,
    TokensSource,
    single_sources,
)
from jaxres.faults import ConfigError, RunError
from jaxres.storage.files import fault_of
from jaxres.storage.path import SCHEME, RunPath, parse_path

STDLIB = "{stdlib}"
SAVED_KEYS = (
    "_data_files",
    "_fingerprint",
    "_format_columns",
    "_format_kwargs",
    "_format_type",
    "_output_all_columns",
    "_split",
    "_info",
)
"""Keys of the state.json of `datasets` that do not change which rows there are, nor their texts."""
SAVED_INDICES = ("_indices_data_files", "_indices")
"""Keys of it that name the files with the numbers of the rows that are left, in their order."""
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders below {stdlib} that are not part of it, or that a running Python changes."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus in the listing; `name` is its path relative to the corpus."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int
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
    return folder if (folder.expanduser() / "meta.json").exists() else None


def list_files(source: DocumentSource) -> list[SourceFile]:
    """Lists the corpus, ordered by a hash of the names so that its tail is representative."""
    include, exclude = _patterns(source)
    root, patterns = _root_and_patterns(source.path, include)
    stdlib = _stdlib() if STDLIB in source.path else None
    files: dict[str, SourceFile] = {}
    for path in _matches(root, patterns, skip=STDLIB_EXCLUDED if stdlib else frozenset()):
        if path.name.startswith("._") or (stdlib and _is_foreign(path, stdlib)):
            continue  # "._x" is what macOS keeps beside the file "x" on other file systems.
        name = path.relative_to(root).as_posix()
        if not any(fnmatchcase(name, pattern) for pattern in exclude):
            _list_file(files, name, path, skip_dangling=stdlib is not None)
    if any("**" in pattern for pattern in patterns) and not stdlib and patterns == include:
        _check_folders(root, exclude)
    if not files:
        raise ConfigError(
            f"data.source.path: {source.path} matches no file (looked below {root} for "
            f"{', '.join(patterns)}, without {', '.join(exclude) or 'exclusions'})"
        )
    if not any(file.size_bytes for file in files.values()):
        raise ConfigError(f"data.source.path: all files of {source.path} are empty")
    return sorted(files.values(), key=lambda file: (_name_hash(file.name), file.name))


def shared_files(one: SingleSource, other: Source) -> int:
    """Returns how many local files of a source another one has too."""
    sources = single_sources(other).values()
    listed = [_local_paths(one), set[Path]().union(*map(_local_paths, sources))]
    return len(listed[0] & listed[1])


def _local_paths(source: SingleSource) -> set[Path]:
    if not isinstance(source, DocumentSource) or source.path.startswith(SCHEME):
        return set()
    if token_folder_of(source) is not None:
        return set()
    return {file.path for file in list_files(source)}


def _patterns(source: DocumentSource) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the patterns of files to include and to exclude."""
    if isinstance(source, HuggingfaceSource):
        return _saved_dataset_files(Path(source.path).expanduser()), ()
    return source.include, source.exclude


def _saved_dataset_files(folder: Path) -> tuple[str, ...]:
    """Returns the names of the data files of a folder that `datasets` has saved."""
    where = f"data.source.path: {folder}"
    try:
        state = json.loads((folder / "state.json").read_bytes())
        names = [file["filename"] for file in state["_data_files"]]
        if not names or not all(map(_is_inside, names)):
            raise ValueError(f"the files {names[:3]}, which are not all in the folder")
        _check_saved_state(state, where)
        return tuple(map(_escape, names))
    except (FileNotFoundError, NotADirectoryError) as error:
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        what = f"one of its splits: {', '.join(splits)}" if splits else "a folder of save_to_disk"
        raise ConfigError(
            f"{where} has no state.json, which `datasets` writes for each split. Give {what}."
        ) from error
    except OSError as error:
        raise unreadable(folder / "state.json", error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{where}: state.json does not list data files as `datasets` writes them: {error!r}. "
            "Save the split again with save_to_disk."
        ) from error


def _check_saved_state(state: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError if the rows are not simply all rows of the data files, in order."""
    remedy = (
        "Load it with `datasets`, and save `dataset.flatten_indices()` with save_to_disk into "
        "another folder"
    )
    for key in SAVED_INDICES:
        if state.get(key):
            raise ConfigError(
                f"{where}: state.json names {key}: the data set is a selection of the rows of its "
                "files, or another order of them (filter, select, shuffle, sort), which jaxres "
                f"does not read. {remedy}."
            )
    others = {k: v for k, v in state.items() if k not in (*SAVED_KEYS, *SAVED_INDICES)}
    entries = [
        file for file in state["_data_files"] if any(file[k] for k in file if k != "filename")
    ]
    history = [one for one in others.get("_inplace_history") or () if one.get("transforms")]
    changed = {key: value for key, value in others.items() if value and key != "_inplace_history"}
    changed |= {"_data_files": entries} if entries else {}
    changed |= {"_inplace_history": history} if history else {}
    if changed:
        raise ConfigError(
            f"{where}: state.json has {json.dumps(changed)[:300]}, which may change the rows, and "
            f"jaxres does not read that. {remedy}."
        )


def _is_inside(name: str) -> bool:
    """Returns whether a relative name means a file in the folder."""
    parts = PurePath(name).parts
    return bool(parts) and "\0" not in name and not {"/", ".."} & set(parts)


def _root_and_patterns(given: str, include: tuple[str, ...]) -> tuple[Path, tuple[str, ...]]:
    """Splits the path into an existing folder and the patterns to match below it."""
    path = Path(given.replace(STDLIB, str(_stdlib()))).expanduser()
    if path.is_dir():
        return path.resolve(), include
    if path.exists():
        return path.parent.resolve(), (_escape(path.name),)
    wild = [i for i, part in enumerate(path.parts) if set(part) & set("*?[")]
    if wild:
        root = Path(*path.parts[: wild[0]])
        if root.is_dir():
            return root.resolve(), (str(PurePath(*path.parts[wild[0] :])),)
    raise ConfigError(
        f"data.source.path: {given} does not exist ({path.absolute()}). If the data have "
        "moved, give the new path: a run resumes with it if the content is the same."
    )


def _escape(name: str) -> str:
    """Returns the pattern that matches only this name."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _matches(root: Path, patterns: tuple[str, ...], *, skip: frozenset[str]) -> Iterator[Path]:
    """Yields the matching files, without descending into the top folders named in `skip`.

    Those may be large, and a restart waits for the listing.
    """
    for pattern in patterns:
        try:
            if not (skip and pattern.startswith("**/")):
                yield from root.glob(pattern)
                continue
            yield from root.glob(pattern.removeprefix("**/"))
            for folder in root.iterdir():
                if folder.name not in skip and folder.is_dir() and not folder.is_symlink():
                    yield from folder.glob(pattern)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"data.source.include: {pattern!r} is not a valid pattern: {error}"
            ) from error
        except OSError as error:
            raise fault_of(error)(f"data.source.path: {root} can't be listed: {error}") from error


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def _is_foreign(path: Path, stdlib: Path) -> bool:
    """Returns whether a file in the library's folder is not part of the library."""
    depth = len(stdlib.parts)
    is_below = path.parts[:depth] == stdlib.parts
    return is_below and not STDLIB_EXCLUDED.isdisjoint(path.parts[depth:])


def _list_file(files: dict[str, SourceFile], name: str, path: Path, *, skip_dangling: bool) -> None:
    """Adds a regular file; ignores folders and devices; raises if the path can't be read."""
    try:
        if path.is_file():
            status = path.stat()
            files[name] = SourceFile(name, path, status.st_size, status.st_mtime_ns)
            return
        dangling = path.is_symlink() and not path.exists()
    except OSError as error:
        raise unreadable(path, error) from error
    if dangling and not skip_dangling:
        raise unreadable(path, "it is a dangling link")


def _check_folders(root: Path, exclude: tuple[str, ...]) -> None:
    """Raises a RunError if a folder can't be listed, which pathlib's glob ignores."""

    def raise_unreadable(error: OSError) -> None:
        path = Path(error.filename)
        name = path.relative_to(root).as_posix()
        if not any(fnmatchcase(f"{name}/", pattern) for pattern in exclude):
            raise unreadable(path, error)

    for _ in os.walk(root, onerror=raise_unreadable):
        pass


def unreadable(path: Path, reason: OSError | str) -> RunError:
    kind = fault_of(reason) if isinstance(reason, OSError) else ConfigError
    return kind(
        f"data.source.path: {path} can't be read: {reason}. "
        "Fix it, or exclude it with data.source.exclude."
    )


def _name_hash(name: str) -> bytes:
    return hashlib.blake2b(os.fsencode(name), digest_size=16).digest()
