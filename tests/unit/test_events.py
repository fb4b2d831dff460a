import dataclasses
import errno
import math
import threading

from jaxres.runlog import event_log
from jaxres.runlog.event_log import EventLog, read_events, read_json_lines
from jaxres.runlog.events import Evaluated, Noted, PhaseChanged, StepsPruned


@dataclasses.dataclass
class Ticking:
    """A clock that is one second on at every look."""

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
            "event": "PhaseChanged",
            "phase": "restore",
            "detail": "step 8",
        },
        {"time": 1003.0, "monotonic": 4.0, "event": "StepsPruned", "steps": [1, 2]},
    ]


def test_a_number_that_is_not_finite_is_null(tmp_path):
    with EventLog(tmp_path / "e", clock=Ticking()) as log:
        log.emit(Evaluated(8, math.nan, math.inf, 0))
    (event,) = read_events(tmp_path / "e")
    assert (event["loss"], event["best_loss"]) == (None, None)


def test_listeners_hear_what_is_written_and_after_it_is(tmp_path):
    heard = []
    listener = lambda event: heard.append((event, len(read_events(tmp_path / "e"))))  # noqa: E731
    with EventLog(tmp_path / "e", clock=Ticking(), listeners=[listener]) as log:
        log.emit(Noted("one"))
        log.emit(Noted("two"))
    assert heard == [(Noted("one"), 1), (Noted("two"), 2)]


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


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / "e"
    path.write_bytes(b'{"a":1}\n{"a":\n\0\0\0\0\n{"a":"\xff"}\n{"a":2}\n{"a":3')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    assert read_json_lines(tmp_path / "absent") == []


class Full:
    """A file on a full disk, until it has room."""

    def __init__(self, file):
        self.file, self.has_room = file, False

    def write(self, data):
        if not self.has_room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def close(self):
        self.file.close()


def test_on_a_full_disk_events_are_still_told_and_what_was_dropped_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "MAX_WAITING", 3)
    heard = []
    with EventLog(tmp_path / "e", clock=Ticking(), listeners=[heard.append]) as log:
        disk = log._lines._file = Full(log._lines._file)
        for number in range(10):
            log.emit(Noted(str(number)))
        assert heard == [Noted(str(number)) for number in range(10)]
        disk.has_room = True
        log.emit(Noted("10"))
    told = [event["message"] for event in read_events(tmp_path / "e")]
    assert told[:5] == ["0", "7", "8", "9", "10"]
    assert told[5:] == ["6 events were dropped while storage refused to take them"]
    assert heard[-1] == Noted(told[-1])


def test_events_that_never_got_to_the_file_are_said_at_the_end(tmp_path):
    heard = []
    with EventLog(tmp_path / "e", clock=Ticking(), listeners=[heard.append]) as log:
        log._lines._file = Full(log._lines._file)
        log.emit(Noted("one"))
        log.emit(Noted("two"))
    assert heard[-1] == Noted("2 events could not be written to the event file")
