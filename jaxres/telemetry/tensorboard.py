"""Observer that writes TensorBoard event files in a background thread: curves, texts, images.

A failure here is reported once. It never ends training, and training waits at most LAG_SECONDS in
all. The run's metrics lines are authoritative; these files are a copy. The files of a run in a
bucket are written on this machine and copied to the bucket every UPLOAD_SECONDS and at the end.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import queue
import textwrap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxres.clock import Clock
from jaxres.faults import ConfigError, RunError
from jaxres.runlog import evaluations, events
from jaxres.runlog.events import Emit, Event, Noted
from jaxres.runlog.metrics import MetricsLine
from jaxres.storage import files
from jaxres.storage.path import GcsPath
from jaxres.storage.threads import make_thread

CAPACITY = 10_000
"""Maximum number of queued points."""
PERIOD_SECONDS = 1.0
"""Interval between two writes of all queued points; a kill loses at most one interval."""
UPLOAD_SECONDS = 60.0
"""Interval between two copies to the bucket: more is lost only with the machine."""
MAX_FILE_BYTES = 8 * 2**20
"""Size from which points go to a new file, because each copy sends a whole file."""
MAX_TEXT_CHARS = 4000
"""Size from which a text sample is cut."""
MAX_IMAGES = 8
LAG_SECONDS = 2.0
CLOSE_SECONDS = 5.0


Value = float | str | NDArray[np.uint8]
"""Value of a curve, a text, or an image uint8 [H, W, 3] (RGB)."""


@dataclass(frozen=True)
class Point:
    """Values of one step; without values, a mark that discards earlier points from this step on."""

    time: float
    step: int
    values: Mapping[str, Value]


class EventFiles:
    """The event files of one attempt; readers order them by their names."""

    def __init__(self, folder: Path, *, attempt: int) -> None:
        """Creates the first file."""
        self._folder, self._attempt, self._number = folder, attempt, 0
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = self._begin()

    def _begin(self) -> Any:
        # tensorboardX's SummaryWriter is not used: its thread dies at the first error, and a later
        # add_scalar blocks forever.
        from tensorboardX.event_file_writer import EventsWriter

        self._size_bytes = 0
        return EventsWriter(str(self._folder / f"events.{self._attempt:04d}.{self._number:04d}"))

    def write(self, points: Sequence[Point]) -> None:
        """Writes points; they survive this process."""
        for point in points:
            event = _encode(point)
            self._writer.write_event(event)
            self._size_bytes += event.ByteSize()
        self._writer.flush()
        if self._size_bytes > MAX_FILE_BYTES:
            self._writer.close()
            self._number += 1
            self._writer = self._begin()

    def close(self) -> None:
        """Closes the newest file."""
        self._writer.close()


class BucketCopy:
    """Copies a folder's files to a bucket, files of earlier attempts on this machine too."""

    def __init__(self, folder: Path, to: GcsPath) -> None:
        """Stores the paths; sends no request."""
        self._folder, self._to = folder, to
        self._copied: dict[str, int] | None = None
        """Size of each file in the bucket; None: not known yet."""

    def update(self) -> None:
        """Copies the files that have grown; raises RunError if the bucket does not accept them."""
        if self._copied is None:
            self._copied = files.sizes(self._to)
        for path in sorted(self._folder.iterdir()):
            if path.stat().st_size != self._copied.get(path.name):
                data = files.read_whole(path)
                files.replace(self._to / path.name, data)
                self._copied[path.name] = len(data)


class TensorBoard:
    """Owns one attempt's event files and the thread that writes them; a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        attempt: int,
        emit: Emit,
        clock: Clock,
        copy_to: GcsPath | None = None,
    ) -> None:
        """Checks that tensorboardX is installed; starts and writes nothing before `__enter__`.

        Args:
          folder: the folder of the event files.
          copy_to: where the files are copied to; None: nowhere.

        Raises:
          ConfigError: the package that writes event files is not installed.
        """
        if not _is_installed():
            raise ConfigError(
                "telemetry.tensorboard: the package tensorboardX, which writes event files, is not "
                "installed. Run `pip install -e '.[tensorboard]'` in the checkout of jaxres, or "
                "set telemetry.tensorboard=false."
            )
        self._folder = folder
        self._attempt = attempt
        self._emit = emit
        self._clock = clock
        self._copy = None if copy_to is None else BucketCopy(folder, copy_to)
        self._is_copy_late = False
        self._points: queue.Queue[Point] = queue.Queue(CAPACITY)
        self._tokens_per_step = 0
        self._first_step = 1
        """Step that the newest start of training begins with."""
        self._images_step: int | None = None
        """Step of the images; None: none yet."""
        self._num_lost = 0
        self._failed = False
        self._abandoned = False
        self._stop = threading.Event()
        self._thread = make_thread("tensorboard", self._run, daemon=True)

    def __enter__(self) -> TensorBoard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._abandoned = True
            self._note("the last points were not written in time")
        elif self._num_lost and not self._failed:
            self._note(f"the points of {self._num_lost} steps are missing")

    def on_event(self, event: Event) -> None:
        """Queues the values of an event that has a curve or a text."""
        match event:
            case events.RunBuilt(tokens_per_step=tokens_per_step):
                self._tokens_per_step = tokens_per_step
            case events.TrainingStarted(step=step):
                self._first_step = step + 1
                self._put(self._first_step, {})
            case events.Evaluated(step=step, loss=loss, losses=losses):
                values = evaluations.curves({**vars(event), "losses": losses})
                self._put(step, values or {"heldout/loss": loss})
            case events.SampleWritten(text=text, step=step):
                self._put(step, {"sample": text[:MAX_TEXT_CHARS]})
            case _:
                pass

    def on_images(self, images: NDArray[np.uint8]) -> None:
        """Queues the first images of the batch that training begins with, uint8 [B, H, W, 3].

        Once an attempt, unless a mark has discarded them. The writing thread encodes them.
        """
        if self._images_step is not None and self._images_step < self._first_step:
            return
        self._images_step = self._first_step
        shown = images[:MAX_IMAGES].copy()  # A slice alone would keep the whole batch in memory.
        self._put(self._first_step, {f"images/{n}": image for n, image in enumerate(shown)})

    def on_step(self, line: MetricsLine) -> None:
        """Queues the values of a completed step."""
        values = {
            "train/loss": line.loss,
            "train/grad_norm": line.grad_norm,
            "train/learning_rate": line.learning_rate,
            "train/loss_scale": line.loss_scale,
        }
        values |= {f"train/{name}": value for name, value in line.model_metrics.items()}
        if line.step_seconds > 0:
            values["train/tokens_per_second"] = self._tokens_per_step / line.step_seconds
        if line.usual_step_seconds:
            usual = self._tokens_per_step / line.usual_step_seconds
            values["train/usual_tokens_per_second"] = usual
        self._put(line.step, {tag: value for tag, value in values.items() if value is not None})

    def _put(self, step: int, values: Mapping[str, Value]) -> None:
        if self._failed:
            return
        point = Point(self._clock.wall(), step, values)
        try:
            self._points.put(point, block=self._num_lost == 0, timeout=LAG_SECONDS)
        except queue.Full:
            if self._num_lost == 0:
                self._note(f"writing is too slow; points from step {step} on are omitted for now")
            self._num_lost += 1

    def _run(self) -> None:
        """Writes until the context ends, or until something fails."""
        try:
            self._write()
        except (OSError, ValueError, TypeError, ImportError) as error:
            self._failed = True
            if not self._abandoned:
                self._note(f"no further points are written ({error}); metrics.jsonl is unaffected")

    def _write(self) -> None:
        event_files = EventFiles(self._folder, attempt=self._attempt)
        ended, copied_at = False, self._clock.monotonic()
        while not ended:
            ended = self._stop.wait(PERIOD_SECONDS)
            if points := [self._points.get_nowait() for _ in range(self._points.qsize())]:
                event_files.write(points)
            if ended:
                event_files.close()
            if ended or self._clock.monotonic() - copied_at >= UPLOAD_SECONDS:
                self._update_copy()
                copied_at = self._clock.monotonic()

    def _update_copy(self) -> None:
        """Copies to the bucket, or leaves it to the next time."""
        if self._copy is None:
            return
        try:
            self._copy.update()
            self._is_copy_late = False
        except RunError as error:
            if not (self._is_copy_late or self._abandoned):
                self._note(f"the bucket has no copy of the newest points ({error})")
            self._is_copy_late = True

    def _note(self, text: str) -> None:
        self._emit(Noted(f"tensorboard ({self._folder}): {text}"))


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("tensorboardX") is not None
    except ImportError:
        return False


def _encode(point: Point) -> Any:
    """Returns a point as a tensorboardX event.

    TensorBoard drops its points from the step of a START event on.
    """
    from tensorboardX.proto import event_pb2, summary_pb2

    records: Any = (
        event_pb2  # protobuf creates the classes at import, so type checkers can't see them.
    )
    summaries: Any = summary_pb2
    common = {"wall_time": point.time, "step": point.step}
    if not point.values:
        start = records.SessionLog(status=records.SessionLog.START)
        return records.Event(**common, session_log=start)
    values = [
        summaries.Summary.Value(tag=tag, **_encoded_value(value))
        for tag, value in point.values.items()
    ]
    return records.Event(**common, summary=summaries.Summary(value=values))


def _encoded_value(value: Value) -> dict[str, Any]:
    """Returns the fields of a tensorboardX Summary.Value besides its tag."""
    if not isinstance(value, str | np.ndarray):
        return {"simple_value": value}
    from tensorboardX.proto import summary_pb2, tensor_pb2, types_pb2

    summaries: Any = summary_pb2
    tensors: Any = tensor_pb2
    types: Any = types_pb2
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        importlib.import_module("PIL.Image").fromarray(value).save(file, "PNG", compress_level=1)
        height, width, colors = value.shape
        size = {"height": height, "width": width, "colorspace": colors}
        return {"image": summaries.Summary.Image(**size, encoded_image_string=file.getvalue())}
    # TensorBoard shows Markdown: indented lines are shown as they are.
    verbatim = textwrap.indent(value, "    ", lambda line: True)
    text = tensors.TensorProto(
        dtype=types.DT_STRING, string_val=[verbatim.encode(errors="replace")], tensor_shape={}
    )
    plugin = summaries.SummaryMetadata.PluginData(plugin_name="text")
    return {"tensor": text, "metadata": summaries.SummaryMetadata(plugin_data=plugin)}
