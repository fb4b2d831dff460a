"""Recognises folders that jaxres itself writes, whose files are never documents of a corpus."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping

KINDS: Mapping[str, tuple[str, ...]] = {
    "run directory": ("attempts", "log", "config.yaml"),
    "data cache": ("listings", "corpora"),
}
"""Kind of folder -> the names by which it is recognised, the least common first; replicas have
those of their run."""


def kind_of(has_name: Callable[[str], bool]) -> str | None:
    """Returns the kind of a folder, by a function that tests for a name in it; None: another's."""
    for kind, names in KINDS.items():
        if all(map(has_name, names)):
            return kind
    return None


def run_dirs(names: Collection[str]) -> dict[str, str]:
    """Returns the run directories below a folder in a bucket -> their kind, by all names there.

    >>> run_dirs(["a.txt", "runs/a/config.yaml", "runs/a/log/1.json", "runs/a/attempts/0001/x.txt"])
    {'runs/a': 'run directory'}
    >>> run_dirs(["site/config.yaml", "site/log/1.txt"])
    {}
    """
    config = "/config.yaml"
    folders = sorted(name.removesuffix(config) for name in names if name.endswith(config))
    if not folders:
        return {}
    known = set(names)
    for name in names:
        known.update(itertools.accumulate(name.split("/")[:-1], "{}/{}".format))
    found = {
        folder: kind_of(lambda name, folder=folder: f"{folder}/{name}" in known)
        for folder in folders
    }
    return {folder: kind for folder, kind in found.items() if kind is not None}


def describe(folders: Mapping[str, str]) -> list[str]:
    """Returns a line that names the folders which are left out; none if there are none."""
    if not folders:
        return []
    first = min(folders)
    more = f", and {len(folders) - 1:,} more" if len(folders) > 1 else ""
    return [f"data.source.path: left out: {first}, a {folders[first]} of jaxres{more}"]
