import dataclasses
import importlib
import io
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from jaxres.clock import SystemClock
from jaxres.data import Batch
from jaxres.runlog import events
from jaxres.runlog.metrics import MetricsLine
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from jaxres.telemetry import tensorboard
from jaxres.telemetry.tensorboard import TensorBoard
from jaxres.train.components import BadRows, DataLoader
from jaxres.train.data_loader import showing_first_batch
from tests.waiting import SURE_SECONDS, wait_until

LINE = MetricsLine(
    seq=2,
    step=1,
    attempt=1,
    loss=2.0,
    grad_norm=1.0,
    learning_rate=0.5,
    tokens=10,
    step_seconds=0.1,
    skipped=False,
    samples="",
)
BUILT = events.RunBuilt("gpt", 1, "1 x cpu", 9, 9, 20, 10, 1.0, 99)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tensorboard, "PERIOD_SECONDS", 0.005)
    monkeypatch.setattr(tensorboard, "LAG_SECONDS", SURE_SECONDS)
    monkeypatch.setattr(tensorboard, "CLOSE_SECONDS", SURE_SECONDS)


@pytest.fixture
def notes():
    return []


@pytest.fixture
def board(tmp_path, notes, quick):
    """Returns a function that creates the TensorBoard writer of an attempt."""

    def attempt(number=1, folder=tmp_path / "tensorboard", copy_to=None):
        return TensorBoard(
            folder, attempt=number, emit=notes.append, clock=SystemClock(), copy_to=copy_to
        )

    return attempt


def train(board, steps, *, offset=0.0):
    """Sends a training segment: the start, then every step."""
    board.on_event(BUILT)
    board.on_event(events.TrainingStarted(steps[0] - 1, None, ""))
    for step in steps:
        board.on_step(dataclasses.replace(LINE, step=step, loss=step + offset))


def curves(folder):
    """Returns the curves of a folder as TensorBoard reads them: tag -> [(step, value)]."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder), {"scalars": 0})
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def tensors(folder, plugin):
    """Returns the data that a plugin of TensorBoard shows: tag -> [(step, array of bytes)]."""
    reader = importlib.import_module(
        "tensorboard.backend.event_processing.plugin_event_accumulator"
    )
    arrays = importlib.import_module("tensorboard.util.tensor_util")
    found = reader.EventAccumulator(str(folder), {"tensors": 0})
    found.Reload()
    return {
        tag: [(one.step, arrays.make_ndarray(one.tensor_proto)) for one in found.Tensors(tag)]
        for tag in found.PluginTagToContent(plugin)
    }


def texts(folder):
    """Returns the text samples of a folder: [(step, text)]."""
    ((tag, points),) = tensors(folder, "text").items()
    assert tag == "sample"
    assert all(text.shape == () for _, text in points)  # Others are shown as tables.
    return [(step, text.item().decode()) for step, text in points]


def images(folder):
    """Returns the images of a folder: tag -> [(step, pixels)]."""
    found = {}
    for tag, points in tensors(folder, "images").items():
        pixels = [np.asarray(Image.open(io.BytesIO(png))) for _, (_, _, png) in points]
        sizes = [(int(height), int(width)) for _, (width, height, _) in points]
        assert sizes == [one.shape[:2] for one in pixels]
        found[tag] = [(step, one) for (step, _), one in zip(points, pixels, strict=True)]
    return found


def losses(folder):
    """Returns the loss curve of a folder that may not exist yet."""
    return curves(folder).get("train/loss", []) if folder.exists() else []


def test_every_curve_has_its_values_at_their_steps(board, tmp_path, notes):
    with board() as writer:
        train(writer, range(1, 4))
        writer.on_event(events.Evaluated(3, 1.5, 1.5, 3))
    assert curves(tmp_path / "tensorboard") == {
        "train/loss": [(1, 1.0), (2, 2.0), (3, 3.0)],
        "train/grad_norm": [(1, 1.0), (2, 1.0), (3, 1.0)],
        "train/learning_rate": [(1, 0.5), (2, 0.5), (3, 0.5)],
        "train/tokens_per_second": [(1, 100.0), (2, 100.0), (3, 100.0)],
        "heldout/loss": [(3, 1.5)],
    }
    assert notes == []


def test_the_text_sample_is_a_text_of_its_step_and_is_shown_as_it_is(board, tmp_path, notes):
    with board() as writer:
        train(writer, range(1, 4))
        writer.on_event(events.SampleWritten("def ", "def f(x):\n\n  # *x*\udcff", 3))
    assert texts(tmp_path / "tensorboard") == [(3, "    def f(x):\n    \n      # *x*?")]
    assert notes == []


def test_a_long_text_sample_is_cut(board, tmp_path):
    with board() as writer:
        train(writer, range(1, 4))
        writer.on_event(events.SampleWritten("a", "a" * 5000, 3))
    assert texts(tmp_path / "tensorboard") == [(3, "    " + "a" * 4000)]


def test_a_restart_discards_the_texts_of_later_steps_only(board, tmp_path):
    for number, (first, last) in enumerate([(1, 4), (5, 8), (7, 8)], 1):
        with board(number) as writer:
            train(writer, range(first, last + 1))
            writer.on_event(events.SampleWritten("", str(number), last))
    assert texts(tmp_path / "tensorboard") == [(4, "    1"), (8, "    3")]


def pictures(num_rows, *, seed):
    """Returns images uint8 [B, 5, 7, 3], all different."""
    return np.random.default_rng(seed).integers(0, 256, (num_rows, 5, 7, 3), np.uint8)


def show(writer, pixels, *, after, before=()):
    """Begins training after a step; the first batches are `before`, that of the images, another."""
    batches = [(Batch({"image": x}, np.arange(1), 0, 1), {}) for x in (pixels, pixels[::-1])]
    served = iter([*before, *batches])
    loader = DataLoader(
        open=lambda history: lambda cursor: next(served), num_rows=9, tokens_per_step=9
    )
    shown = showing_first_batch(loader, lambda batch: writer.on_images(batch.arrays["image"]))
    writer.on_event(events.TrainingStarted(after, None, ""))
    batch_at = shown.open(None)
    got = [batch_at(0) for _ in range(len(before) + 2)]
    assert all(one is other for one, other in zip(got, [*before, *batches], strict=True))
    pixels[:] = 0  # The memory of a batch may be used again.


@pytest.mark.parametrize("num_rows", [3, 20])
def test_the_first_images_of_an_attempt_are_shown_as_the_model_gets_them(
    board, tmp_path, notes, num_rows
):
    pixels = pictures(num_rows, seed=1)
    with board() as writer:
        show(writer, pixels.copy(), after=4, before=[None, BadRows((), "", None)])
        writer.on_step(dataclasses.replace(LINE, step=5))
    found = images(tmp_path / "tensorboard")
    assert list(found) == [f"images/{number}" for number in range(min(num_rows, 8))]
    for number, points in enumerate(found.values()):
        ((step, shown),) = points
        assert step == 5
        np.testing.assert_array_equal(shown, pixels[number])
    assert losses(tmp_path / "tensorboard") == [(5, 2.0)]
    assert notes == []


def test_images_are_shown_once_an_attempt_and_again_where_a_rollback_has_discarded_them(
    board, tmp_path
):
    def steps():
        return [step for step, _ in images(tmp_path / "tensorboard")["images/0"]]

    with board() as writer:
        for seed, after in enumerate([4, 7, 6]):
            show(writer, pictures(2, seed=seed), after=after)
    assert steps() == [5]
    with board(2) as writer:
        for seed, after in enumerate([7, 5, 9]):
            show(writer, pictures(2, seed=seed), after=after)
    assert steps() == [5, 6]


@pytest.mark.slow
def test_after_a_kill_each_step_has_one_value_that_of_the_newest_attempt(board, tmp_path):
    source = (
        "import os, sys, time, pathlib; from tests.unit.telemetry import test_tensorboard as t;"
        "from jaxres.telemetry import tensorboard as b; b.PERIOD_SECONDS = 0.005;"
        "board = b.TensorBoard(pathlib.Path(sys.argv[1]), attempt=1, emit=print,"
        " clock=t.SystemClock()); board.__enter__(); t.train(board, range(1, 9));"
        "t.wait_until(lambda: len(t.losses(pathlib.Path(sys.argv[1]))) == 8, 'points');"
        "os.kill(os.getpid(), 9)"
    )
    folder = tmp_path / "tensorboard"
    ended = subprocess.run([sys.executable, "-c", source, str(folder)], check=False)
    assert ended.returncode == -9
    assert [step for step, _ in losses(folder)] == list(range(1, 9))
    with board(2) as second:
        train(second, range(5, 8), offset=0.5)
    assert len(list(folder.iterdir())) == 2
    expected = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5.5), (6, 6.5), (7, 7.5)]
    assert curves(folder)["train/loss"] == expected
    assert [step for step, _ in curves(folder)["train/grad_norm"]] == list(range(1, 8))


def test_a_file_truncated_by_a_kill_hides_no_later_points(board, tmp_path):
    with board(1) as writer:
        train(writer, range(1, 5))
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    with board(2) as second:
        train(second, range(3, 6))
    steps = [step for step, _ in curves(tmp_path / "tensorboard")["train/loss"]]
    assert steps == [1, 2, 3, 4, 5]


def steps_in_bucket(bucket, tmp_path):
    """Returns the steps of the loss curve in a bucket, which is what a lost machine leaves."""
    folder = tmp_path / "of-the-bucket"
    folder.mkdir(exist_ok=True)
    for name in files.list_names(bucket):
        (folder / name).write_bytes(files.read(bucket / name))
    return [step for step, _ in losses(folder)]


def test_curves_of_a_run_in_a_bucket_outlive_the_machine(board, tmp_path, gcs_bucket, monkeypatch):
    bucket = GcsPath(gcs_bucket, "run/tensorboard")
    monkeypatch.setattr(tensorboard, "UPLOAD_SECONDS", 0.0)
    with board(1, tmp_path / "first-vm", bucket) as first:
        train(first, range(1, 5))
        wait_until(lambda: len(steps_in_bucket(bucket, tmp_path)) == 4)  # It may die here.
    monkeypatch.setattr(tensorboard, "UPLOAD_SECONDS", 1e9)
    with board(2, tmp_path / "second-vm", bucket) as second:
        train(second, range(5, 8))
    assert steps_in_bucket(bucket, tmp_path) == list(range(1, 8))


def test_a_bucket_that_refuses_the_copy_is_reported_once_and_gets_it_later(
    board, tmp_path, gcs_bucket, gcs_server, notes, monkeypatch
):
    bucket = GcsPath(gcs_bucket, "run/tensorboard")
    monkeypatch.setattr(tensorboard, "UPLOAD_SECONDS", 0.0)
    denied = gcs_server.fail("403", times=None)
    with board(copy_to=bucket) as writer:
        train(writer, range(1, 5))
        wait_until(lambda: denied.hits > 2)
        gcs_server.faults.clear()
    (note,) = notes
    assert "the bucket has no copy of the newest points" in note.message
    assert steps_in_bucket(bucket, tmp_path) == [1, 2, 3, 4]


def test_a_long_attempt_has_several_files(board, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "MAX_FILE_BYTES", 1000)
    with board() as writer:
        for first in range(1, 100, 20):
            train(writer, range(first, first + 20))
            wait_until(writer._points.empty)
    assert len(list((tmp_path / "tensorboard").iterdir())) > 2
    assert [step for step, _ in losses(tmp_path / "tensorboard")] == list(range(1, 101))


@pytest.mark.slow
def test_a_failing_writer_is_reported_once_and_does_not_delay_training(board, tmp_path, notes):
    (tmp_path / "file").touch()
    with board(folder=tmp_path / "file" / "x") as writer:
        wait_until(lambda: notes, "note")
        train(writer, range(1, 3 * tensorboard.CAPACITY))
    (note,) = notes
    assert "Not a directory" in note.message
    assert "metrics.jsonl is unaffected" in note.message


class FullDisk:
    """A file on which every write fails."""

    def write(self, data):
        raise OSError(28, "No space left on device")

    flush = close = write


def test_a_full_disk_is_reported_once(board, notes, monkeypatch):
    writers = pytest.importorskip("tensorboardX.record_writer")
    monkeypatch.setattr(writers, "open_file", lambda path: FullDisk())
    with board() as writer:
        train(writer, range(1, 5))
    assert [note.message.count("No space left") for note in notes] == [1]


def test_a_hanging_writer_costs_one_wait_and_the_missing_steps_are_reported(
    board, notes, monkeypatch
):
    writers = pytest.importorskip("tensorboardX.event_file_writer")
    monkeypatch.setattr(tensorboard, "CAPACITY", 4)
    monkeypatch.setattr(tensorboard, "LAG_SECONDS", 2.0)
    release = threading.Event()
    write = writers.EventsWriter.write_event

    def hang(self, event):
        release.wait(2 * SURE_SECONDS)
        write(self, event)

    monkeypatch.setattr(writers.EventsWriter, "write_event", hang)
    with board() as writer:
        started = time.monotonic()
        train(writer, range(1, 1000))
        assert time.monotonic() - started < SURE_SECONDS, "each step waits"
        (note,) = notes
        assert "writing is too slow; points from step" in note.message
        release.set()
    assert len(notes) == 2
    assert "steps are missing" in notes[1].message


def test_a_hanging_writer_is_abandoned_at_exit(board, notes, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(tensorboard, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(TensorBoard, "_write", lambda self: release.wait(2 * SURE_SECONDS))
    with board() as writer:
        train(writer, range(1, 3))
    assert [note.message.endswith("not written in time") for note in notes] == [True]
    release.set()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["absent", "blocked"])
def test_without_the_package_the_run_is_rejected_and_the_extra_is_named(tmp_path, way):
    block = {
        "absent": "sys.modules['tensorboardX'] = None",
        "blocked": "sys.meta_path.insert(0, Blocker())",
    }[way]
    source = f"""
import pathlib, sys
class Blocker:
    def find_spec(self, name, *_):
        if name == "tensorboardX":
            raise ImportError(name)
{block}
from jaxres.train.__main__ import hard_exit, main
hard_exit(main(sys.argv[1:]))
"""
    config = "configs/quickstart.yaml"
    overrides = [
        "--inline",
        "train.steps=1",
        f"run.dir={tmp_path / 'run'}",
        f"data.cache_dir={tmp_path}",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", source, config, *overrides, "telemetry.tensorboard=true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 78, ended.stderr
    assert "pip install -e '.[tensorboard]'" in ended.stderr
