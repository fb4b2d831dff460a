from typing import Any

import pytest

from jaxres.config import yaml


def read(text: str) -> Any:
    node, problems = yaml.parse(text, lambda line: f"x:{line + 1}")
    assert not problems, problems
    assert node is not None
    return yaml.plain(node)


def problems_of(text: str) -> list[str]:
    return [p.line() for p in yaml.parse(text, lambda line: f"x:{line + 1}")[1]]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("3e-4", 3e-4),
        ("1e5", 1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1.5E+3", -1500.0),
        (".inf", float("inf")),
        ("1e999", float("inf")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("010", "010"),
        ("12:30", "12:30"),
        ("2024-01-02", "2024-01-02"),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("1_000", "1_000"),
        ("nan", "nan"),
        ("inf", "inf"),
        ('"3"', "3"),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
        ("[1, 1e1, no]", [1, 10.0, "no"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any):
    result = read(text)
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3", "x:3: a: given twice (first at x:1)"),
        ("a:\n  b: 1\n  b: 1", "x:3: a.b: given twice (first at x:2)"),
        ("a: &n 1\nb: *n", "x:2: not valid YAML: aliases (*name) are not supported"),
        ("a: 1\n2: 1", "x:2: a key must be text (got 2); put it in quotes"),
        (
            'a: "\\0"',
            "x:1: a: contains a character that is not allowed (NUL or an unpaired surrogate)",
        ),
        (
            "a: 1\nb: \ud800",
            "x:2: contains a character that is not allowed (NUL or an unpaired surrogate)",
        ),
        ('a: "\\ud800"', "x:1: not valid YAML: found invalid Unicode character escape code"),
        ("a: !!python/name:os.system x", "x:1: a: the tag tag:yaml.org,2002:python/name:os.system"),
        ("a: !!int x", "x:1: a: the tag tag:yaml.org,2002:int is not supported with 'x'"),
        ("a: " + "9" * 5000, "x:1: a: is a number of more than 1000 digits"),
        ("a: 1\n b: [", "x:2: not valid YAML: "),
        ("a: 1\n---\na: 2", "x:2: not valid YAML: but found another document"),
        ("\x01", "x:1: not valid YAML: "),
        *(
            (f"a: 1\nb: 2 # a note{end}a: 3\n", f"x:2: has U+{ord(end):04X}, which ends a line")
            for end in "\x85\u2028\u2029\r"
        ),
        ("[" * 900, "x:1: "),
    ],
)
def test_invalid_yaml_is_rejected_with_its_line(text: str, line: str):
    problems = problems_of(text)
    assert len(problems) == 1
    assert problems[0].startswith(line)


@pytest.mark.parametrize("text", ["a: 1\nb: [*.txt]", "a: 1\nb: *.txt", "a: @x"])
def test_a_text_that_begins_with_a_sign_of_yaml_is_told_to_need_quotes(text: str):
    assert "needs quotes" in problems_of(text)[0]
    assert "needs quotes" not in problems_of("a: 1\n b: [")[0]


@pytest.mark.parametrize(
    "value",
    [
        *("3", "3e-4", "1e5", "010", "12:30", "yes", "no", "null", "~", "", ".nan", "1_0", "0x1"),
        *(
            "def ",
            " a",
            "a\nb",
            "a: b",
            "# a",
            "*a",
            "&a",
            "{a}",
            "é🙂",
            "\x7f",
            "a\u2028b",
            "a\x85b",
            "=",
            "<<",
        ),
        *(0.1, 1e-5, 1e300, 3.0, -0.0, 10**30, 0, True, None, [], {}, [[1], {"a": None}]),
    ],
)
def test_dumped_data_parses_to_the_same_values(value: Any):
    text = yaml.dump({"key": value})
    assert repr(read(text)["key"]) == repr(value), text


@pytest.mark.parametrize("value", ["y", "N", "on", "0o17", "1e3", "1_000", "12:30:45", "null"])
def test_text_that_another_reader_takes_for_something_else_is_quoted(value: str):
    """kubectl reads YAML 1.1: a job of the name n would be false."""
    assert yaml.dump({"key": value}) == f"key: '{value}'\n"


@pytest.mark.parametrize("value", ["a\x85b", "a\u2028b", "\u2029"])
def test_no_text_has_an_unusual_end_of_line(value: str):
    """The text is indented line by line in a manifest."""
    assert len(yaml.dump({"key": value}).splitlines()) == 1


def test_an_object_that_is_there_twice_is_dumped_twice():
    twice: Any = {"a": [1, "x"]}
    assert read(yaml.dump({"one": twice, "other": [twice["a"]]})) == {
        "one": {"a": [1, "x"]},
        "other": [[1, "x"]],
    }
