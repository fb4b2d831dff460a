"""Every answer of docs/ARCHITECTURE.md names a file and a name that is defined in it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ANSWER = re.compile(r"`(jaxres/[\w/]+\.py):([\w.]+)`")


def _rows() -> list[tuple[str, str]]:
    """Returns each question with the text of its answers."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    section = text.split("\n## Where is ...?\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [line.strip("|").split("|") for line in lines]
    return [(question.strip(), answers) for question, answers, _ in cells]


def _defined(text: str) -> set[str]:
    """Returns the names that a module defines: `name`, and `Class.method` for methods."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_no_question_is_asked_twice():
    questions = [question for question, _ in _rows()]
    assert len(set(questions)) == len(questions) > 1


@pytest.mark.parametrize(("question", "answers"), _rows(), ids=[row[0] for row in _rows()])
def test_an_answer_names_what_exists(question, answers):
    found = ANSWER.findall(answers)
    assert found, f"{question} has no answer of the form `path:name`"
    assert len(found) == answers.count("`") // 2, f"{question}: an answer has another form"
    for path, name in found:
        assert (ROOT / path).is_file(), f"{question} {path} does not exist"
        assert name in _defined((ROOT / path).read_text()), f"{question} {path} has no {name}"


def test_a_method_and_a_value_are_found_and_an_absent_name_is_not():
    text = "A: int = 1\nB = 2\nclass C:\n    def d(self): ...\nasync def e(): ...\n"
    assert _defined(text) == {"A", "B", "C", "C.d", "e"}
