import dataclasses
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

from jaxres.config.schema.data import BytesTokenizer, DataSection, TextSource
from jaxres.data import CacheDamaged, open_dataset
from jaxres.data.corpus import (
    LEFTOVER_SECONDS,
    _cache_key,
    describe_corpus,
    fingerprint_of,
    open_corpus,
)
from jaxres.data.sources import content_key, token_stream
from jaxres.data.sources.source_files import list_files
from jaxres.data.tokens.token_folder import open_tokens
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, StorageRefused, StorageUnavailable
from jaxres.storage.checksummed_json import encode_checksummed
from tests.damage import change_meta, flip_bit_at, remove_digests
from tests.waiting import SURE_SECONDS

ROOT = Path(__file__).parents[3]


def config(path, cache, *, seq_len=8, heldout_fraction=0.2, **source):
    return DataSection(
        source=TextSource(path=str(path), **source),
        seq_len=seq_len,
        heldout_fraction=heldout_fraction,
        cache_dir=cache,
    )


def names(path, **source):
    return sorted(file.name for file in list_files(TextSource(path=str(path), **source)))


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    rng = random.Random(0)
    for i in range(20):
        file = folder / f"part{i % 3}" / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(rng.choices("ab é\n", k=rng.randrange(200))))
    (folder / "empty.md").touch()
    (folder / "readme.md").write_text("café")
    return folder


def test_every_byte_is_a_token_and_256_ends_each_file(corpus, tmp_path):
    dataset = open_dataset(config(corpus, tmp_path / "cache"))
    tokens = dataset.train.corpus.tokens
    ends = np.flatnonzero(tokens == 256)
    texts = [part[:-1].astype(np.uint8).tobytes() for part in np.split(tokens, ends + 1)[:-1]]
    assert sorted(texts) == sorted(p.read_bytes() for p in corpus.rglob("*") if p.is_file())
    assert tokens[-1] == 256
    assert dataset.vocab_size == 257
    assert dataset.tokens_per_row == 8
    assert dataset.tokenizer.decode([*dataset.tokenizer.encode("def é"), 256]) == "def é\n"


def test_the_second_open_reads_the_cache(corpus, tmp_path):
    messages = []
    first = open_dataset(config(corpus, tmp_path / "cache"), progress=messages.append)
    assert len(messages) == 2
    second = open_dataset(config(corpus, tmp_path / "cache"), progress=messages.append)
    assert len(messages) == 2
    assert first.fingerprint == second.fingerprint
    ids = np.arange(len(first.train))
    assert first.train.rows(ids).keys() == second.train.rows(ids).keys()


def test_rows_and_fingerprint_do_not_depend_on_path_time_or_cache(corpus, tmp_path):
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(corpus, copy, copy_function=shutil.copyfile)
    one = open_dataset(config(corpus, tmp_path / "cache"))
    other = open_dataset(config(copy, tmp_path / "other-cache"))
    assert one.fingerprint == other.fingerprint
    ids = np.arange(len(one.train))
    assert np.array_equal(one.train.rows(ids)["tokens_BT"], other.train.rows(ids)["tokens_BT"])


def test_a_changed_file_is_tokenised_again(corpus, tmp_path):
    before = open_dataset(config(corpus, tmp_path / "cache"))
    (corpus / "empty.md").write_text("x")
    after = open_dataset(config(corpus, tmp_path / "cache"))
    assert before.fingerprint != after.fingerprint


def test_corpora_that_differ_only_in_content_do_not_share_a_cache_entry(tmp_path):
    prints = set()
    for word in ("one", "two"):
        for i in range(9):
            file = tmp_path / word / f"{i}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(word * 9)
            os.utime(file, (0, 0))  # As in a container image.
        prints.add(open_dataset(config(tmp_path / word, tmp_path / "cache")).fingerprint)
    assert len(prints) == 2


def test_a_file_with_another_content_at_the_same_size_and_time_is_tokenised_again(corpus, tmp_path):
    victim = corpus / "part0" / "0.txt"
    victim.write_text("abcd" * 20)
    before, status = open_dataset(config(corpus, tmp_path / "cache")), victim.stat()
    victim.write_bytes(bytes(reversed(victim.read_bytes())))
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    now = victim.stat()
    assert (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    after = open_dataset(config(corpus, tmp_path / "cache"))
    assert before.fingerprint != after.fingerprint
    assert after.fingerprint == open_dataset(config(corpus, tmp_path / "new")).fingerprint


def as_kept_by_an_earlier_version(path, cache):
    """Keeps the tokens of a corpus in which a byte order mark at a text's beginning is text."""
    listed = list_files(TextSource(path=str(path)))
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(listed, key=lambda file: file.name):
        content = xxhash.xxh3_128_digest(Path(file.path).read_bytes())
        digest.update(file.name.encode() + b"\0" + content)
    fields = {"format": 1, "content": digest.hexdigest()}
    place = content_key.place_of(listed, cache)
    place.parent.mkdir(parents=True)
    place.write_bytes(encode_checksummed(fields))
    source = TextSource(path=str(path), encoding="binary")
    built = describe_corpus(source, BytesTokenizer(), cache_dir=cache)
    source = TextSource(path=str(path))
    entry = cache / "corpora" / _cache_key(source, fields["content"], built.tokenizer_name)
    open_corpus(dataclasses.replace(built, entry=entry), progress=lambda _: None)
    place.write_bytes(encode_checksummed(fields))
    return entry


@pytest.mark.parametrize("mark", ["\ufeff", ""])
def test_tokens_of_an_earlier_version_are_used_unless_a_byte_order_mark_is_in_them(tmp_path, mark):
    """A corpus without marks is neither read nor tokenised again."""
    path, messages = tmp_path / "corpus", []
    path.mkdir()
    (path / "0.txt").write_text(plain := "no mark" * 20)
    (path / "1.txt").write_text(f"{mark}text", encoding="utf-8")
    entry = as_kept_by_an_earlier_version(path, tmp_path / "cache")
    assert open_tokens(entry).meta.num_tokens == len(f"{plain}{mark}text".encode()) + 2
    for _ in range(2):
        section = config(path, tmp_path / "cache", heldout_fraction=0.0)
        dataset = open_dataset(section, progress=messages.append)
        assert dataset.train.corpus.meta.num_tokens == len(f"{plain}text") + 2
    assert len(messages) == (2 if mark else 0), "tokenised again, and only once"


def test_files_that_are_copied_again_or_moved_find_their_tokens_again(corpus, tmp_path):
    open_dataset(config(corpus, tmp_path / "cache"))
    (entry,) = (tmp_path / "cache" / "corpora").iterdir()
    tokens = (entry / "tokens.bin").stat().st_ino
    for copy_function in (shutil.copy2, shutil.copyfile):
        copy = tmp_path / copy_function.__name__
        shutil.copytree(corpus, copy, copy_function=copy_function)
        for _ in range(2):
            told = []
            open_dataset(config(copy, tmp_path / "cache"), progress=told.append)
            assert not [line for line in told if line.startswith("Tokenising")]
    assert list((tmp_path / "cache" / "corpora").iterdir()) == [entry]
    assert (entry / "tokens.bin").stat().st_ino == tokens


def test_a_file_that_changes_at_the_same_size_and_time_while_it_is_read_is_an_error(
    corpus, tmp_path
):
    victim = corpus / "part0" / "0.txt"
    victim.write_text("abcd" * 20)
    data, status = victim.read_bytes(), victim.stat()

    def change(message):
        victim.write_bytes(bytes(reversed(data)))
        os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(ConfigError, match=r"changed while they were read, such as .*0\.txt"):
        open_dataset(config(corpus, tmp_path / "cache"), progress=change)
    assert list((tmp_path / "cache" / "corpora").glob("*")) == []
    victim.write_bytes(data)

    def touch(message):
        victim.chmod(0o600)
        os.link(victim, tmp_path / f"link {len(list(tmp_path.iterdir()))}")

    opened = open_dataset(config(corpus, tmp_path / "cache"), progress=touch)
    assert opened.fingerprint == open_dataset(config(corpus, tmp_path / "new")).fingerprint


def test_documents_are_ordered_by_a_hash_of_their_names(tmp_path):
    for i in range(400):
        file = tmp_path / ("early" if i < 200 else "late") / f"{i}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
    files = [file.name for file in list_files(TextSource(path=str(tmp_path)))]
    late = sum(name.startswith("late") for name in files[-100:])
    assert 25 < late < 75  # Mean 50, five standard deviations.


def test_folder_file_and_glob_select_their_files(corpus):
    assert len(names(corpus)) == 22
    assert names(corpus, include=("*.md",)) == ["empty.md", "readme.md"]
    assert len(names(corpus, exclude=("part1/*", "*.md"))) == 13
    assert names(corpus / "readme.md") == ["readme.md"]
    assert names(corpus / "*.md") == ["empty.md", "readme.md"]
    assert names(corpus / "part*" / "[01].txt") == ["part0/0.txt", "part1/1.txt"]
    (corpus / "[x].txt").write_text("x")
    assert names(corpus / "[x].txt") == ["[x].txt"]


def test_the_standard_library_excludes_packages_and_compiled_files():
    stdlib = Path(sysconfig.get_path("stdlib"))
    found = names("{stdlib}", include=("*.py", "site-packages/*.*", "json/**/*"))
    assert {"json/decoder.py", "os.py"} <= set(found)
    assert not [name for name in found if "site-packages" in name or name.endswith(".pyc")]
    assert names("{stdlib}/json/decoder.py") == ["decoder.py"]
    assert (stdlib / "os.py").exists()


def error_of(message, path, tmp_path, *, kind=ConfigError, **source):
    with pytest.raises(kind, match=message) as caught:
        open_dataset(config(path, tmp_path / "cache", **source))
    return str(caught.value)


def test_an_unusable_path_is_one_error_that_names_it(corpus, tmp_path):
    assert str(tmp_path / "no") in error_of("does not exist", tmp_path / "no", tmp_path)
    assert "no/*.txt" in error_of("does not exist", tmp_path / "no" / "*.txt", tmp_path)
    assert str(corpus) in error_of("matches no file", corpus, tmp_path, include=("*.rst",))
    assert str(corpus) in error_of("matches no file", corpus, tmp_path, exclude=("*",))
    error_of("include: '/etc' is not a valid pattern", corpus, tmp_path, include=("/etc",))
    empty = corpus / "empty.md"
    assert str(empty) in error_of("are empty", empty, tmp_path)
    (corpus / "link").symlink_to(tmp_path / "gone")
    assert str(corpus / "link") in error_of("dangling link", corpus, tmp_path)
    assert open_dataset(config(corpus, tmp_path / "cache", exclude=("link",)))


def test_an_unreadable_file_or_folder_is_reported_by_name(corpus, tmp_path, monkeypatch):
    opened = token_stream.open_file

    def refuse(path):
        if path.name == "0.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    with monkeypatch.context() as patch:
        patch.setattr(token_stream, "open_file", refuse)  # chmod would not stop root.
        refused = error_of("can't be read", corpus, tmp_path, kind=StorageRefused)
        assert "/part0/0.txt" in refused
    listed = os.scandir

    def scandir(path="."):
        if str(path).endswith("part1"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        refused = error_of("can't be read", corpus, tmp_path, kind=StorageRefused)
        assert str(corpus / "part1") in refused
        assert len(names(corpus, exclude=("part1/*",))) == 15


def test_a_file_that_changes_while_it_is_read_is_an_error(corpus, tmp_path):
    victim = corpus / "part0" / "0.txt"

    def change(message):
        victim.write_bytes(b"another content")

    with pytest.raises(ConfigError, match=r"0\.txt changed while it was read"):
        open_dataset(config(corpus, tmp_path / "cache"), progress=change)
    assert list((tmp_path / "cache" / "corpora").glob("*")) == []


def test_an_unwritable_cache_is_reported_with_the_remedy(corpus, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    text = error_of(r"data\.cache_dir: .* can't be written", corpus, tmp_path)
    assert str(tmp_path / "cache") in text


def test_a_full_disk_is_reported_with_the_remedy(corpus, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageUnavailable, match=r"data\.cache_dir: .*No space left.* Free space"):
        open_dataset(config(corpus, tmp_path / "cache"))
    assert list((tmp_path / "cache" / "corpora").glob("*")) == []


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "meta.json"])
def test_a_damaged_cache_entry_is_rebuilt(corpus, tmp_path, name):
    whole = open_dataset(config(corpus, tmp_path / "cache"))
    (entry,) = (tmp_path / "cache" / "corpora").iterdir()
    with (entry / name).open("r+b") as file:
        file.truncate(20)
    messages = []
    again = open_dataset(config(corpus, tmp_path / "cache"), progress=messages.append)
    assert "damaged and will be rebuilt" in messages[0]
    assert again.fingerprint == whole.fingerprint
    assert list((tmp_path / "cache" / "corpora").iterdir()) == [entry]
    assert open_tokens(entry).meta.fingerprint == whole.fingerprint


def test_damage_in_a_cached_corpus_ends_the_attempt_and_the_next_one_builds_it_again(
    corpus, tmp_path
):
    whole = open_dataset(config(corpus, tmp_path / "cache"))
    ids = np.arange(len(whole.train))
    expected = whole.train.rows(ids)["tokens_BT"]
    (entry,) = (tmp_path / "cache" / "corpora").iterdir()
    flip_bit_at(entry / "tokens.bin", 40)
    damaged = open_dataset(config(corpus, tmp_path / "cache"))
    for _ in range(2):  # The memory maps stay, so a second batch finds it as well.
        with pytest.raises(CacheDamaged, match=r"tokens\.bin: block 0 .*builds it again") as caught:
            damaged.train.rows(ids)
    assert caught.value.exit_code == ExitCode.STORAGE, "it is restarted"
    (aside,) = (tmp_path / "cache" / "corpora").iterdir()
    assert aside.name.startswith(f".damaged-{entry.name}")

    messages = []
    again = open_dataset(config(corpus, tmp_path / "cache"), progress=messages.append)
    assert "Tokenising" in messages[0]
    assert again.fingerprint == whole.fingerprint
    assert np.array_equal(again.train.rows(ids)["tokens_BT"], expected)
    with pytest.raises(CacheDamaged):  # A process that still has the damaged one open
        damaged.train.rows(ids)
    assert open_tokens(entry).meta == again.train.corpus.meta, "leaves the new one alone"
    assert aside.exists()
    old = time.time() - 25 * 3600
    for path in (*aside.iterdir(), aside):
        os.utime(path, (old, old))
    open_dataset(config(corpus, tmp_path / "cache"))
    assert not aside.exists()


def test_a_damaged_token_in_a_cached_corpus_is_not_taken_for_a_bad_record(corpus, tmp_path):
    open_dataset(config(corpus, tmp_path / "cache"))
    (entry,) = (tmp_path / "cache" / "corpora").iterdir()
    flip_bit_at(entry / "tokens.bin", 41, bit=7)  # The token is out of range now.
    with pytest.raises(CacheDamaged):
        open_dataset(config(corpus, tmp_path / "cache")).train.rows(np.array([0, 1, 2]))


def test_a_cached_corpus_of_another_tokenizer_is_rebuilt(corpus, tmp_path):
    open_dataset(config(corpus, tmp_path / "cache"))
    (entry,) = (tmp_path / "cache" / "corpora").iterdir()
    change_meta(entry, vocab_size=1257, checksum=None)
    assert open_dataset(config(corpus, tmp_path / "cache")).vocab_size == 257


def test_a_cached_corpus_without_digests_is_used_as_before(corpus, tmp_path):
    whole = open_dataset(config(corpus, tmp_path / "cache"))
    (entry,) = (tmp_path / "cache" / "corpora").iterdir()
    remove_digests(entry)
    messages = []
    again = open_dataset(config(corpus, tmp_path / "cache"), progress=messages.append)
    assert (messages, again.fingerprint) == ([], whole.fingerprint)


def test_the_fingerprint_of_the_files_is_that_of_the_corpus(corpus, tmp_path):
    section = config(corpus, tmp_path / "cache")
    dataset = open_dataset(section)
    listed = describe_corpus(section.source, section.tokenizer, cache_dir=section.cache_dir)
    assert fingerprint_of(listed) == dataset.fingerprint


BUILDER = """
import sys, time
from pathlib import Path
from jaxres.config.schema.data import DataSection, TextSource
from jaxres.data import open_dataset
from jaxres.data.sources import token_stream

path, cache, mode = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
if mode == "slow":  # Blocks inside the build, after the first file.
    read = token_stream.read_pieces
    def slow(*arguments):
        yield from read(*arguments)
        print("reading", flush=True)
        time.sleep(6000)
    token_stream.read_pieces = slow
source = TextSource(path=path)
config = DataSection(source=source, seq_len=8, heldout_fraction=0.2, cache_dir=Path(cache))
dataset = open_dataset(config, progress=print)
print("done", dataset.fingerprint, len(dataset.train), flush=True)
"""


def builder(corpus, cache, mode="fast"):
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(corpus), str(cache), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def release(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_build_concurrently_all_get_a_complete_corpus(corpus, tmp_path, damaged):
    cache = tmp_path / "cache"
    if damaged:
        open_dataset(config(corpus, cache))
        (entry,) = (cache / "corpora").iterdir()
        (entry / "tokens.bin").write_bytes(b"")
    builders = [builder(corpus, cache) for _ in range(2)]
    for process in builders:
        assert process.stdout.readline() == "ready\n"
    for process in builders:
        release(process)
    lines = {process.communicate(timeout=SURE_SECONDS)[0].splitlines()[-1] for process in builders}
    assert [process.returncode for process in builders] == [0, 0]
    (entry,) = (cache / "corpora").iterdir()
    (line,) = lines
    assert line.split()[:2] == ["done", open_tokens(entry).meta.fingerprint]


@pytest.mark.slow
def test_a_killed_build_does_not_affect_the_next_one(corpus, tmp_path):
    cache = tmp_path / "cache"
    process = builder(corpus, cache, "slow")
    release(process)
    while process.stdout.readline() != "reading\n":
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=SURE_SECONDS)
    (left,) = (cache / "corpora").iterdir()
    assert left.name.startswith(".building-")
    dataset = open_dataset(config(corpus, cache))
    fresh = open_dataset(config(corpus, tmp_path / "fresh"))
    assert dataset.fingerprint == fresh.fingerprint
    assert not left.exists()
    left.mkdir()
    old = time.time() - LEFTOVER_SECONDS - 60
    os.utime(left, (old, old))
    open_dataset(config(corpus, cache))
    assert not left.exists()


@pytest.mark.slow
def test_data_imports_no_jax():
    code = "import sys, jaxres.data; print([m for m in ('jax', 'grain') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
