"""A URL in the place of a local path is refused: it would be a folder of its name, or be shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres.config import load
from jaxres.config.schema.fields import iter_fields
from jaxres.faults import ConfigError

from .conftest import Write

URLS = (
    *("s3://KEY:hunter2@bucket/x", "https://me:hunter2@host/x", "https:/me:hunter2@host/x"),
    *("file:///x", "hf://org/x"),
)
IN_BUCKET = ("gs://bucket/x", "gs:/bucket/x")
NO_BUCKET = ("data.tokenizer.path", "data.cache_dir", "launch.gce.package")
NO_BUCKET += ("checkpoint.memory.folder", "compilation.cache_dir")


def path_keys() -> dict[str, tuple[tuple[str, str], ...]]:
    """Returns the keys of paths, with the kinds under which they exist."""
    texts = ("data.source.path",)
    return {
        leaf.key: leaf.under
        for leaf in iter_fields()
        if leaf.key in texts or Path in _types(leaf.info.annotation)
    }


def _types(annotation: object) -> list[object]:
    inner = getattr(annotation, "__args__", ())
    return [annotation, *(t for part in inner for t in _types(part))]


LISTS, ITEM = {"program.files"}, "[0]"


def problem(write: Write, key: str, value: str) -> str:
    under = path_keys()[key]
    kinds = {f"{section}.kind={kind}" for section, kind in under if kind}
    with pytest.raises(ConfigError) as raised:
        load(write(), [*kinds, f"{key}={f'[{value!r}]' if key in LISTS else value}"])
    return str(raised.value)


def test_a_url_in_the_place_of_a_path_is_refused_and_its_password_is_not_shown(write: Write):
    keys = path_keys()
    assert {*NO_BUCKET, "run.dir", "model.path", "init_from.path", "data.source.path"} <= {*keys}
    wrong = []
    for key in keys:
        for url in URLS + IN_BUCKET * (key in NO_BUCKET):
            said = [
                line
                for line in problem(write, key, url).splitlines()
                if f"{key}{ITEM * (key in LISTS)}: " in line
            ]
            is_named = any("must be a" in line and "local" in line for line in said)
            wrong += [(key, url, said)] * (not is_named or "hunter2" in "".join(said))
    assert not wrong, wrong


def test_a_local_path_may_look_like_a_url_behind_its_beginning(write: Write):
    paths = ("/s3:/a", "a:b/c")
    config = load(write(), [f"data.cache_dir={paths[0]}", f"data.source.path={paths[1]}"]).config
    assert (str(config.data.cache_dir), config.data.source.path) == paths
