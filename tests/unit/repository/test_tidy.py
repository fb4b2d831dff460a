"""Every rule of `tools/tidy.py` refuses an example that violates it."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tidy(tmp_path, monkeypatch):
    """A function that checks a text as a file of the package."""
    spec = importlib.util.spec_from_file_location("tidy", ROOT / "tools" / "tidy.py")
    assert spec is not None
    assert spec.loader is not None
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    monkeypatch.chdir(tmp_path)

    def check(text, *, name="jaxres/supervisor/late.py"):
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
def test_a_function_that_reads_the_wall_clock_is_refused(tidy, reading):
    text = f"class Watch:\n    def is_late(self, clock, beat, path):\n        return {reading}\n"
    (problem,) = tidy(text)
    assert problem.startswith(
        "jaxres/supervisor/late.py:3: Watch.is_late reads the wall clock, which jumps"
    )


def test_the_monotonic_clock_and_a_recorded_time_are_allowed(tidy):
    text = "def is_late(clock, record):\n    return clock.monotonic() - record.time > awake.now()\n"
    assert tidy(text) == []


def test_a_listed_function_may_read_the_wall_clock_and_must_do_so(tidy):
    text = "class EventLog:\n    def emit(self, event):\n        return {0}\n"
    assert tidy(text.format("self._clock.wall()"), name="jaxres/runlog/event_log.py") == []
    (problem,) = tidy(text.format("0"), name="jaxres/runlog/event_log.py")
    assert problem == (
        "jaxres/runlog/event_log.py: EventLog.emit no longer reads the wall clock: remove it from "
        "WALL_CLOCK_MAY"
    )


def test_a_function_with_many_parameters_is_refused(tidy):
    names = ", ".join(f"p{n}: int" for n in range(7))
    assert tidy(f"class A:\n    def f(self, {names}, *, q: int) -> None: ...\n") == []
    (problem,) = tidy(f"class A:\n    def f(self, {names}, *, q: int, r: int) -> None: ...\n")
    assert problem == "jaxres/supervisor/late.py:2: f has 9 parameters, at most 8"


def test_a_splat_of_a_literal_tuple_is_refused_in_a_call(tidy):
    assert tidy("f(*given)\ng = [*(1, 2)]\n") == []
    (problem,) = tidy("f(*(1, 2), x=3)\n")
    assert problem.startswith("jaxres/supervisor/late.py:1: a splat of a literal tuple")


@pytest.mark.parametrize("word", ["those", "what", "that", "the same", "how"])
def test_a_docstring_that_does_not_name_what_is_returned_is_refused(tidy, word):
    text = 'class A:\n    def f(self):\n        """Returns {}.\n\n        More.\n        """\n'
    assert tidy(text.format(f"{word}x")) == []
    assert tidy(text.format(f"the number, as {word} is")) == []
    (problem,) = tidy(text.format(f"{word} is"))
    assert problem.startswith(f"jaxres/supervisor/late.py:3: 'Returns {word} ...': name the result")


@pytest.fixture
def rules():
    spec = importlib.util.spec_from_file_location("tidy", ROOT / "tools" / "tidy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line", ["No_body reads it.", "it is placed a_new", "the look_out's thread"]
)
def test_a_retired_word_is_refused(rules, tmp_path, line):
    path = tmp_path / "late.py"
    path.write_text(f"x = 1\n# {line.replace('_', '')}\n")  # Else this file is refused too.
    (problem,) = rules._retired_words(path)
    assert problem.startswith(f"{path}:2: ")


def test_a_longer_word_that_holds_a_retired_one_is_not_refused(rules, tmp_path):
    path = tmp_path / "late.py"
    path.write_text("# recommends an indoor amendment\n")
    assert list(rules._retired_words(path)) == []


def test_a_long_line_of_a_page_is_refused_unless_it_is_a_row_or_has_a_long_link(rules, tmp_path):
    path, word = tmp_path / "page.md", "word " * 23
    path.write_text(f"{word}12345\n| {word}123456 |\n{word}[12](adr/0001-{word}.md)\n")
    assert list(rules._long_lines(path)) == []
    path.write_text(f"# Page\n\n{word}123456\n")
    (problem,) = rules._long_lines(path)
    assert problem == f"{path}:3: 121 characters, at most 120: wrap the line"


def test_a_class_with_the_name_of_another_is_refused(rules, tmp_path, monkeypatch):
    paths = [Path("jaxres", name) for name in ("a.py", "b.py")]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("class Place: ...\n")
    monkeypatch.setattr(rules, "_tracked", lambda *_: paths)
    monkeypatch.chdir(tmp_path)
    (problem,) = rules._classes_of_one_name()
    assert problem.startswith("jaxres/b.py:1: class Place exists already, at jaxres/a.py:1")


@pytest.mark.parametrize("folder", ["jaxres/data", "tests/unit/data"])
def test_a_folder_with_more_than_twenty_files_is_refused(rules, monkeypatch, folder):
    names = ["__init__", *(f"m{number}" for number in range(20))]
    paths = [Path(folder, f"{name}.py") for name in names]
    paths += [Path(folder, "tokens", f"m{number}.py") for number in range(20)]
    monkeypatch.setattr(rules, "_tracked", lambda *_: paths)
    assert list(rules._crowded_folders()) == []
    paths.append(Path(folder, "one_more.py"))
    (problem,) = rules._crowded_folders()
    assert problem.startswith(f"{folder}: 21 files, at most 20: ")


def test_a_module_that_claims_a_fault_of_another_home_is_refused(rules, tmp_path, monkeypatch):
    home = tmp_path / "jaxres" / "launch" / "gce" / "state" / "lease.py"
    home.parent.mkdir(parents=True)
    home.write_text('"""Home of: launcher_lost. Home of: hang. A lease."""\n')
    monkeypatch.setattr(rules, "_tracked", lambda *_: [home.relative_to(tmp_path)])
    monkeypatch.chdir(tmp_path)
    (problem,) = rules._faults_of_homes()
    assert "claims fault hang" in problem
