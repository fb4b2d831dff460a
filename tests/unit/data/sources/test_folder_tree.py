"""A listing of a corpus leaves out no file without a message, whatever the source."""

import gzip
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from jaxres.config.schema.data import (
    DataSection,
    ImagesSource,
    JsonlSource,
    NanogptSource,
    ParquetSource,
    TextSource,
)
from jaxres.data import open_dataset
from jaxres.data.corpus import describe_corpus
from jaxres.data.sources.source_files import list_corpus, list_files, shared_files
from jaxres.faults import ConfigError, StorageRefused

ENDINGS = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet", "nanogpt": "bin", "images": "png"}
SOURCES = {
    "text": TextSource,
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "nanogpt": NanogptSource,
    "images": ImagesSource,
}


def write(kind, path, *, text="some words"):
    """Writes a file with one document of a kind of source."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), path)
    elif kind == "images":
        Image.fromarray(np.full((4, 4, 3), 100, np.uint8)).save(path, "PNG")
    else:
        path.write_text({"jsonl": f'{{"text": "{text}"}}\n'}.get(kind, text))


@pytest.fixture(params=SOURCES)
def kind(request):
    return request.param


@pytest.fixture
def corpus(tmp_path, kind):
    """A corpus of which one folder is a link."""
    ending = ENDINGS[kind]
    for number in range(3):
        write(kind, tmp_path / "corpus" / "own" / f"{number}.{ending}")
        write(kind, tmp_path / "disk" / "code" / "deep" / f"{number}.{ending}")
    (tmp_path / "corpus" / "code").symlink_to(tmp_path / "disk" / "code")
    return tmp_path / "corpus"


def names(kind, path, **fields):
    return sorted(file.name for file in list_files(SOURCES[kind](path=str(path), **fields)))


def test_files_in_folders_that_are_links_are_in_every_corpus(corpus, kind):
    ending = ENDINGS[kind]
    wanted = [f"code/deep/{n}.{ending}" for n in range(3)] + [f"own/{n}.{ending}" for n in range(3)]
    assert names(kind, corpus) == wanted
    assert names(kind, corpus / "*" / "**" / f"*.{ending}") == wanted
    assert names(kind, corpus, include=(f"code/**/*.{ending}",)) == wanted[:3]
    assert names(kind, corpus, exclude=("code/*",)) == names(kind, corpus, exclude=("code",))
    assert names(kind, corpus, exclude=("code/*",)) == wanted[3:]


@pytest.mark.parametrize("to", ["corpus", "corpus/own", "disk/code"])
def test_a_folder_that_links_lead_to_twice_is_refused(corpus, kind, to):
    link = corpus / "own" / "again"
    link.symlink_to(corpus.parent / to)
    with pytest.raises(
        ConfigError, match=r"the same folder as .* Remove the link, or leave it out"
    ):
        names(kind, corpus)
    assert len(names(kind, corpus, exclude=("own/again/*",))) == 6


def test_a_folder_that_can_not_be_listed_is_refused(corpus, kind, monkeypatch):
    listed = os.scandir

    def scandir(path="."):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)  # chmod would not stop root.
    ending = ENDINGS[kind]
    for path, fields in [
        (corpus, {}),
        (corpus, {"include": (f"*/*/*.{ending}",)}),
        (corpus / "*" / "*" / f"*.{ending}", {}),
    ]:
        with pytest.raises(StorageRefused, match=r"code/deep can't be read: .*Permission denied"):
            names(kind, path, **fields)
    assert len(names(kind, corpus, exclude=("code/deep/*",))) == 3


def warnings(kind, path, **fields):
    return list_corpus(SOURCES[kind](path=str(path), **fields)).warnings


def test_a_pattern_that_leaves_out_nothing_or_fits_nothing_is_told(corpus, kind):
    ending = ENDINGS[kind]
    for pattern in (
        "own/*",
        "own/**",
        "**/own/**",
        f"*/0.{ending}",
        f"code/deep/1.{ending}",
        "code/*",
    ):
        assert warnings(kind, corpus, exclude=(pattern,)) == []
    for pattern in ("own", "own/", "./own", "Own/*", f"0.{ending}", "/own/*"):
        told = "\n".join(warnings(kind, corpus, exclude=(pattern,)))
        assert told.startswith(f"data.source.exclude: {pattern!r} leaves out nothing")
        assert ("for the folder give 'own/*'" in told) == (pattern.strip("./") == "own")
    include = (f"own/*.{ending}", f"**/deep/*.{ending}", "**/*.rst")
    told = warnings(kind, corpus, include=include)
    assert told == ["data.source.include: '**/*.rst' fits no file"]


def test_a_dangling_link_is_refused_whatever_its_name(corpus, kind):
    away = corpus / "away"
    for target in (away, corpus.parent / "not-mounted"):
        away.unlink(missing_ok=True)
        away.symlink_to(target)
        with pytest.raises(ConfigError, match="corpus/away can't be read: it is a dangling link"):
            names(kind, corpus)
    with pytest.raises(ConfigError, match="corpus/away can't be read: it is a dangling link"):
        names(kind, corpus / "*" / f"*.{ENDINGS[kind]}")
    assert len(names(kind, corpus, exclude=("away",))) == 6


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "nanogpt", "images"], indirect=True)
def test_a_file_that_only_its_case_leaves_out_is_refused(corpus, kind):
    ending = ENDINGS[kind].title()
    write(kind, corpus / "own" / f"one.{ending}")
    with pytest.raises(ConfigError, match=rf"one\.{ending} is left out only .*'\*\*/\*\.{ending}'"):
        names(kind, corpus)
    assert len(names(kind, corpus, exclude=(f"*.{ending}",))) == 6
    assert len(names(kind, corpus / "code" / "*" / f"*.{ENDINGS[kind]}")) == 3
    write(kind, corpus / f"not-in-a-folder.{ENDINGS[kind]}")
    with pytest.raises(ConfigError, match=rf"own/one\.{ending} is left out only"):
        names(kind, corpus / "*" / f"*.{ENDINGS[kind]}")
    assert len(names(kind, corpus, include=(f"**/*.{ENDINGS[kind]}", f"**/*.{ending}"))) == 8


def test_validation_files_that_are_trained_on_through_a_link_are_counted(corpus, kind):
    linked = SOURCES[kind](path=str(corpus))
    assert shared_files(SOURCES[kind](path=str(corpus.parent / "disk")), linked) == 3
    assert shared_files(SOURCES[kind](path=str(corpus / "own")), linked) == 3


def test_files_that_no_pattern_matches_are_counted_and_reported(tmp_path):
    for name in ("a.jsonl", "b.json", "deep/c.json", "deep/README", "deep/d.jsonl", "._a.jsonl"):
        write("jsonl", tmp_path / "corpus" / name)
    source = JsonlSource(path=str(tmp_path / "corpus"), exclude=("b.*",))
    assert sorted(list_corpus(source).left_out) == ["deep/README", "deep/c.json"]
    messages = []
    section = DataSection(
        source=source, seq_len=2, heldout_fraction=0.3, cache_dir=tmp_path / "cache"
    )
    open_dataset(section, progress=messages.append)
    (left_out,) = [line for line in messages if line.startswith("Left out: ")]
    assert "2 files that no pattern of data.source.include matches (" in left_out
    assert "1 with .json" in left_out
    assert "1 with no ending" in left_out


def test_a_class_without_a_matching_image_is_refused_before_labels_shift(tmp_path):
    for name in ("ant", "cat", "dog"):
        write("images", tmp_path / "photos" / name / "1.png")
    (tmp_path / "photos" / ".cache").mkdir()
    (tmp_path / "photos" / "bee").mkdir()

    def labels(**fields):
        source = ImagesSource(path=str(tmp_path / "photos"), **fields)
        found = describe_corpus(source, DataSection(source=source).tokenizer, cache_dir=tmp_path)
        return {Path(file.name).parts[0]: file.label for file in found.files}

    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no file in the folder 'bee' matches .*\[bee/\*\]"):
            labels()
        (tmp_path / "photos" / "bee" / "1.gif").write_bytes(b"")
    assert labels(exclude=("bee/*",)) == {"ant": 0, "cat": 1, "dog": 2}
    assert labels(classes=("ant", "bee", "cat", "dog")) == {"ant": 0, "cat": 2, "dog": 3}


def told(path, cache, *, all_lines=False):
    messages = []
    section = DataSection(
        source=JsonlSource(path=str(path)), seq_len=2, heldout_fraction=0, cache_dir=cache
    )
    open_dataset(section, progress=messages.append)
    return [one for one in messages if all_lines or one.startswith("WARNING: ")]


def test_a_file_that_a_link_leads_to_twice_is_refused_and_hard_links_are_told(tmp_path):
    corpus = tmp_path / "corpus"
    write("jsonl", corpus / "a.jsonl")
    write("jsonl", tmp_path / "elsewhere.jsonl")
    (corpus / "b.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    assert told(corpus, tmp_path / "cache") == []
    for target in (corpus / "a.jsonl", tmp_path / "elsewhere.jsonl"):
        (corpus / "c.jsonl").symlink_to(target)
        with pytest.raises(ConfigError, match="is, through a link, the same file as"):
            told(corpus, tmp_path / "cache")
        (corpus / "c.jsonl").unlink()
    os.link(corpus / "a.jsonl", corpus / "c.jsonl")
    (warning,) = told(corpus, tmp_path / "cache")
    assert warning.startswith("WARNING: 1 files are hard links to others of the corpus, such as ")


def test_shards_that_are_missing_by_the_names_of_the_others_are_told(tmp_path):
    for number in (0, 1, 3):
        write("jsonl", tmp_path / "corpus" / f"train-0000{number}-of-00005.jsonl")
    for number in (1, 2):
        write("jsonl", tmp_path / "corpus" / f"more.0000{number}-of-00002.jsonl")
    assert told(tmp_path / "corpus", tmp_path / "cache") == [
        "WARNING: train-*-of-00005.jsonl: 3 of 5 shards are there"
    ]


def test_a_data_set_that_is_there_twice_is_told_at_each_start(tmp_path):
    corpus = tmp_path / "corpus"
    for name in ("0-of-01", "0-of-02", "1-of-02"):
        write("jsonl", corpus / f"train-0{name}.jsonl")
    expected = ["WARNING: train-*-of-01 and *-of-02.jsonl: shards of 2 saves, all are taken"]
    assert told(corpus, tmp_path / "cache") == expected
    for name in ("a.jsonl", "b.jsonl"):
        write("jsonl", corpus / name)
        (corpus / f"{name}.gz").write_bytes(gzip.compress((corpus / name).read_bytes()))
    expected.append("WARNING: a.jsonl is there compressed too, and 1 more: both are taken")
    assert told(corpus, tmp_path / "cache") == expected
    (corpus / "new.ndjson").write_text('{"text": "of another ending"}')
    assert told(corpus, tmp_path / "cache", all_lines=True) == [
        *expected,
        "Left out: 1 files that no pattern of data.source.include matches (1 with .ndjson), such "
        "as new.ndjson",
    ], "the same corpus is cached"


@pytest.mark.parametrize(
    ("files", "where"),
    [
        (("train.jsonl", "valid.jsonl", "test.jsonl"), "data.source.path"),
        (("data/train-0-of-1.jsonl", "data/validation-0-of-1.jsonl"), "data"),
        (("train/a.jsonl", "dev/a.jsonl"), "data.source.path"),
        (("training_1.jsonl", "tests.jsonl", "a/test.jsonl", "b/train.jsonl"), None),
    ],
)
def test_a_split_that_is_trained_on_beside_the_training_data_is_told(tmp_path, files, where):
    for name in files:
        write("jsonl", tmp_path / "corpus" / name)
    found = [line for line in told(tmp_path / "corpus", tmp_path / "cache") if "splits" in line]
    beginning = f"WARNING: {where} has splits, all are trained on: "
    assert [line.startswith(beginning) for line in found] == [True] * (where is not None)


def test_what_a_glob_leaves_out_or_overrides_is_told(tmp_path):
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", "left/d.txt"):
        write("text", tmp_path / name)
    folder = "data.source.path: left out: the folder {0}; '{0}/**/*' takes what is in it"
    given = {"path": str(tmp_path / "*"), "exclude": ("left/*",)}
    assert list_corpus(TextSource(**given)).warnings == [folder.format("sub")]
    given["path"] = str(tmp_path / "**" / "*.txt")
    assert list_corpus(TextSource(**given)).warnings == []
    given["include"] = ("**/c.txt",)
    ignored = "data.source.include has no effect: data.source.path is a file or a glob"
    assert list_corpus(TextSource(**given)).warnings == [ignored]
    given["path"] = str(tmp_path / "a.txt")
    assert ignored in list_corpus(TextSource(**given)).warnings


def test_folders_that_no_pattern_of_include_looks_into_are_told(tmp_path):
    for name in ("a.txt", "2023/b.txt", "2024/c.txt", "2024/old/d.txt"):
        write("text", tmp_path / name)
    told = (
        "data.source.include: no pattern looks into {0} folders, such as {1}; '{1}/**/*' takes "
        "what is in it"
    )
    cases = {
        ("*.txt",): [told.format(2, "2023")],
        ("*.txt", "2023/*"): [told.format(1, "2024")],
        ("*/*.txt",): [told.format(1, "2024/old")],
        ("**/*.txt",): [],
        ("2024/c.txt",): [],
    }
    found = {
        include: list_corpus(TextSource(path=str(tmp_path), include=include)).warnings
        for include in cases
    }
    assert found == cases
    source = TextSource(path=str(tmp_path), include=("*.txt",), exclude=("20*/*",))
    assert list_corpus(source).warnings == []


def test_an_exclude_pattern_for_any_folder_is_one_for_none_too(tmp_path):
    for name in ("a.py", "README.md", "sub/x.md", "sub/deep/y.md"):
        write("text", tmp_path / name)
    assert names("text", tmp_path, exclude=("**/*.md",)) == ["a.py"]
    assert names("text", tmp_path, exclude=("sub/**/*.md",)) == ["README.md", "a.py"]


@pytest.mark.parametrize("direct", [False, True])
def test_a_pipe_is_refused_for_what_it_is(tmp_path, direct):
    write("text", tmp_path / "a.txt")
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(ConfigError, match=r"b\.txt can't be read: it is a pipe, a socket or a dev"):
        names("text", tmp_path / "b.txt" if direct else tmp_path)
    assert names("text", tmp_path, exclude=("b.txt",)) == ["a.txt"]


def run_dir(folder, *names):
    """Writes what makes a folder a run directory, and files in it."""
    for name in ("config.yaml", "log/00000001.json", "attempts/0001/sharding.txt", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("from a run")
    return folder


def test_run_directories_and_caches_below_the_data_are_no_documents(corpus, kind):
    ending, wanted = ENDINGS[kind], names(kind, corpus)
    for number in range(2):
        write(kind, run_dir(corpus / "runs" / str(number)) / "attempts" / "0001" / f"x.{ending}")
    write(kind, corpus / "cache" / "corpora" / "0" / f"tokens.{ending}")
    write(kind, corpus / "cache" / "listings" / f"0.{ending}")
    assert names(kind, corpus) == names(kind, corpus / "**" / f"*.{ending}") == wanted
    told = "data.source.path: left out: cache, a data cache of jaxres, and 2 more"
    assert told in warnings(kind, corpus)
    assert told.replace("2", "1") in warnings(kind, corpus, exclude=("runs/0/*",))
    (corpus / "runs" / "0" / "log" / "00000001.json").unlink()
    (corpus / "runs" / "0" / "log").rmdir()
    others = f"runs/0/attempts/0001/x.{ending}"
    assert others in names(kind, corpus), "a folder of another program was left out"


def test_a_run_directory_itself_is_refused_as_data_but_not_files_in_it(tmp_path, kind):
    folder = run_dir(tmp_path / "run")
    write(kind, folder / "own" / f"0.{ENDINGS[kind]}")
    for pattern in ({}, {"include": (f"*/*.{ENDINGS[kind]}",)}):
        with pytest.raises(ConfigError, match=r"run is a run directory of jaxres, whose files"):
            names(kind, folder, **pattern)
    given = {"include": (f"own/*.{ENDINGS[kind]}",)}
    assert names(kind, folder / "own") == [f"0.{ENDINGS[kind]}"]
    assert names(kind, folder, **given) == [f"own/0.{ENDINGS[kind]}"]
