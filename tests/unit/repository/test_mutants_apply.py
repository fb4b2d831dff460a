"""Every mutant applies: one that does not would be noticed only when it is run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools.mutants.tables import ROOT, Mutant, apply, decode, read_all

MUTANTS = read_all()


def complaint(mutant: Mutant, tree: Path) -> str:
    """Returns why a mutant does not apply, or breaks no test that exists; empty: it is sound."""
    for name in mutant.files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    file, _, test = mutant.promise.partition("::")
    if test and not re.search(
        rf"def {re.escape(test.partition('[')[0])}\(", (ROOT / file).read_text()
    ):
        return f"{mutant.name}: there is no {mutant.promise}"
    return (why := apply(mutant, tree)) and f"{mutant.name}: {why}"


def test_every_mutant_applies_to_this_tree_and_names_a_test(tmp_path: Path) -> None:
    assert len(MUTANTS) > 500
    assert [said for mutant in MUTANTS if (said := complaint(mutant, tmp_path))] == []


def test_each_table_has_the_mutants_of_its_folder() -> None:
    for path in (ROOT / "tests" / "mutants").glob("*.toml"):
        for name in re.findall(r'^file = "(.+)"$', path.read_text(), re.MULTILINE):
            parts = Path(name).parts
            is_inside = parts[0] == "jaxres" and len(parts) > 2
            assert path.stem == (parts[1] if is_inside else "other"), name


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"file": "f", "old": "a", "new": "b"}, "needs promise"),
        ({"promise": "t", "file": "f", "old": "a"}, "needs promise, file, old and new"),
        ({"promise": "t", "edits": [{"file": "f", "old": "a"}]}, "needs promise, file"),
        ({"promise": "t", "file": "f", "old": "a", "new": "b", "red": "x"}, "unknown red"),
        (
            {"promise": "t", "file": "f", "old": "a", "new": "b", "raises": "Exception"},
            "needs a narrower class than Exception",
        ),
    ],
)
def test_an_incomplete_or_too_wide_row_is_refused(row: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=f"x: {says}"):
        decode("x", row)


@pytest.mark.parametrize(("text", "says"), [("b", "0 times"), ("a a", "2 times")])
def test_a_text_that_does_not_occur_once_is_refused_and_nothing_is_changed(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "f").write_text(text)
    mutant = decode("x", {"promise": "t", "file": "f", "old": "a", "new": "c"})
    assert says in apply(mutant, tmp_path)
    assert (tmp_path / "f").read_text() == text
