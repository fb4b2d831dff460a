import dataclasses
import errno
import math
import os
import threading
import tracemalloc

import pytest

from jaxres.faults import ConfigError
from jaxres.runlog import event_log
from jaxres.runlog.event_log import (
    EventLog,
    read_events,
    read_json_lines,
    read_json_lines_since,
)
from jaxres.runlog.events import Evaluated, Noted, PhaseChanged, StepsPruned
from jaxres.storage.line_writer import within_memory


@dataclasses.dataclass
class Ticking:
    """A clock that advances by one second at every call."""

    now: float = 0.0

    def wall(self):
        self.now += 1
        return 1000 + self.now

    def monotonic(self):
        self.now += 1
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_events_are_written_in_order_with_both_times(tmp_path):
    path = tmp_path / "attempts" / "events.jsonl"
    with EventLog(path, clock=Ticking()) as log:
        log.emit(PhaseChanged("restore", "step 8"))
        log.emit(StepsPruned((1, 2)))
    assert read_events(path) == [
        {
            "time": 1001.0,
            "monotonic": 2.0,
            "event": "phase_changed",
            "phase": "restore",
            "detail": "step 8",
        },
        {"time": 1003.0, "monotonic": 4.0, "event": "steps_pruned", "steps": [1, 2]},
    ]


def test_a_number_that_is_not_finite_is_null(tmp_path):
    with EventLog(tmp_path / "e", clock=Ticking()) as log:
        log.emit(Evaluated(8, math.nan, math.inf, 0))
    (event,) = read_events(tmp_path / "e")
    assert (event["loss"], event["best_loss"]) == (None, None)


@pytest.mark.parametrize("damaged", ["1e308", "NaN", "Infinity", f"1{'0' * 400}", '"1"', "null"])
@pytest.mark.parametrize("name", ["time", "monotonic"])
def test_a_line_whose_time_is_damaged_is_no_event(tmp_path, name, damaged):
    with EventLog(tmp_path / "e", clock=Ticking()) as log:
        log.emit(Noted("one"))
    line = (tmp_path / "e").read_text()
    number = {"time": "1001.0", "monotonic": "2.0"}[name]
    (tmp_path / "e").write_text(line.replace(f'"{name}": {number}', f'"{name}": {damaged}') + line)
    assert [event["message"] for event in read_events(tmp_path / "e")] == ["one"]


def test_listeners_are_called_after_the_event_is_written(tmp_path):
    received = []
    listener = lambda event: received.append((event, len(read_events(tmp_path / "e"))))  # noqa: E731
    with EventLog(tmp_path / "e", clock=Ticking(), listeners=[listener]) as log:
        log.emit(Noted("one"))
        log.emit(Noted("two"))
    assert received == [(Noted("one"), 1), (Noted("two"), 2)]


def test_an_event_is_on_file_as_soon_as_it_is_emitted(tmp_path):
    with EventLog(tmp_path / "e", clock=Ticking()) as log:
        log.emit(Noted("one"))
        assert [event["message"] for event in read_events(tmp_path / "e")] == ["one"]


def test_events_of_several_threads_are_whole_lines(tmp_path):
    with EventLog(tmp_path / "e", clock=Ticking()) as log:
        threads = [
            threading.Thread(target=lambda: [log.emit(Noted("x" * 5000)) for _ in range(50)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [event["message"] for event in read_events(tmp_path / "e")] == ["x" * 5000] * 200


def test_partial_line_of_a_killed_process_is_skipped(tmp_path):
    path = tmp_path / "e"
    path.write_bytes(b'{"a":1}\n{"a":\n\0\0\0\0\n{"a":"\xff"}\n{"a":2}\n{"a":3')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    assert read_json_lines(tmp_path / "absent") == []


@pytest.mark.slow
def test_a_file_grown_by_damage_is_read_with_little_memory(tmp_path):
    """Zeros without a newline, as a lost write leaves them: the lines around them are read."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n')
    os.truncate(path, 2**26)
    with path.open("ab") as file:
        file.write(b'\n{"a": 2}\n{"a": 3')
    tracemalloc.start()
    try:
        assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
        assert read_json_lines_since(path, 9) == ([{"a": 2}], path.stat().st_size - len('{"a": 3'))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**26, f"{peak:,} bytes for a file of {2**26:,}"


def test_a_file_without_end_is_named_and_not_read(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n')
    os.truncate(path, 10 * 2**30)
    for read in (read_json_lines, lambda path: read_json_lines_since(path, 9)):
        with pytest.raises(ConfigError, match=rf"{path}: can't be used \(a file of 10,737,4"):
            read(path)


def test_what_was_read_is_named_where_memory_ends(tmp_path):
    with (
        pytest.raises(MemoryError, match=r"events\.jsonl was read"),
        within_memory(tmp_path / "events.jsonl"),
    ):
        raise MemoryError


class FullDisk:
    """A file on a disk that is full until `has_room` is set."""

    def __init__(self, file):
        self.file, self.has_room = file, False

    def write(self, data):
        if not self.has_room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def close(self):
        self.file.close()


def test_listeners_get_all_events_on_a_full_disk_and_dropped_ones_are_counted(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(event_log, "MAX_WAITING", 4)
    received = []
    with EventLog(tmp_path / "e", clock=Ticking(), listeners=[received.append]) as log:
        disk = log._lines._sink._file = FullDisk(log._lines._sink._file)
        for number in range(10):
            log.emit(Noted(str(number)))
        assert received == [Noted(str(number)) for number in range(10)]
        disk.has_room = True
        log.emit(Noted("10"))
    written = [event["message"] for event in read_events(tmp_path / "e")]
    assert written[:5] == ["0", "7", "8", "9", "10"]
    assert written[5:] == ["6 events were dropped while storage refused to take them"]
    assert received[-1] == Noted(written[-1])


def test_events_that_were_never_written_are_reported_at_the_end(tmp_path):
    received = []
    with EventLog(tmp_path / "e", clock=Ticking(), listeners=[received.append]) as log:
        log._lines._sink._file = FullDisk(log._lines._sink._file)
        log.emit(Noted("one"))
        log.emit(Noted("two"))
    assert received[-1] == Noted("2 events could not be written to the event file")
