"""A house rule that finds nothing is no rule: `tools/tidy.py` is fed what it must refuse."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tidy(tmp_path, monkeypatch):
    """The rules, over a file of the package that holds a text."""
    spec = importlib.util.spec_from_file_location("tidy", ROOT / "tools" / "tidy.py")
    assert spec is not None
    assert spec.loader is not None
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    monkeypatch.chdir(tmp_path)

    def check(text, *, name="jaxres/supervise/late.py"):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return list(rules._check(path))

    return check


@pytest.mark.parametrize(
    "reading",
    [
        "clock.wall() - beat > 3",
        "self._clock.wall() - beat > 3",
        "later(by=clock.wall)",
        "datetime.now() > beat",
        "path.stat().st_mtime > beat",
        "path.stat().st_mtime_ns > beat",
    ],
)
def test_who_decides_by_the_wall_clock_is_named(tidy, reading):
    text = f"class Watch:\n    def is_late(self, clock, beat, path):\n        return {reading}\n"
    (problem,) = tidy(text)
    assert problem.startswith(
        "jaxres/supervise/late.py:3: Watch.is_late reads the wall clock, which jumps"
    )


def test_who_reads_the_monotonic_clock_or_a_recorded_time_is_not(tidy):
    text = "def is_late(clock, record):\n    return clock.monotonic() - record.time > awake.now()\n"
    assert tidy(text) == []


def test_who_may_read_it_may_and_is_struck_off_when_it_does_not_any_more(tidy):
    text = "class EventLog:\n    def emit(self, event):\n        return {0}\n"
    assert tidy(text.format("self._clock.wall()"), name="jaxres/runlog/event_log.py") == []
    (problem,) = tidy(text.format("0"), name="jaxres/runlog/event_log.py")
    assert problem == (
        "jaxres/runlog/event_log.py: EventLog.emit does not read the wall clock any more: take it out of "
        "WALL_CLOCK_MAY"
    )
