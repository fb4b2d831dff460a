"""Re-bases the mutants after a refactoring, by a three-way merge of tokens.

    python tools/mutants/rebase.py BASE            every mutant that no longer applies
    python tools/mutants/rebase.py BASE NAME ...   these

BASE is a commit on which the patches, as they stand in the working tree, still apply. For every file
of a patch the merge takes the file at BASE, the same file with the patch applied, and the file in the
working tree, and merges them token by token: a renamed identifier in a line that the mutant changes
is no conflict. A file that has moved is found by the lines that it shares. What conflicts is listed
and left for a person. Exits 1 if a patch still does not apply.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from difflib import SequenceMatcher, unified_diff
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TOKEN = re.compile(r"\w+|[^\S\n]+|\n|[^\w\s]")
TARGET = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
CREATED = re.compile(r"^--- /dev/null\n\+\+\+ b/(\S+)", re.MULTILINE)


class Conflict(Exception):
    """A mutant that can't be merged without a person."""


def main(arguments: list[str]) -> int:
    """Re-bases the chosen mutants and prints one line for each."""
    base, *names = arguments
    patches = sorted(HERE.glob("*.patch"))
    failed = 0
    for patch in patches:
        if (names and patch.stem not in names) or (not names and applies(patch)):
            continue
        try:
            patch.write_text(rebased(patch, base=base))
            outcome = "re-based" if applies(patch) else "merged, but does not apply"
        except Conflict as conflict:
            outcome = f"CONFLICT: {conflict}"
        failed += outcome != "re-based"
        sys.stdout.write(f"{patch.stem}: {outcome}\n")
    return 1 if failed else 0


def applies(patch: Path) -> bool:
    """Returns whether a patch applies to the working tree."""
    command = ["git", "apply", "--check", str(patch)]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def rebased(patch: Path, *, base: str) -> str:
    """Returns the patch against the working tree.

    Raises:
      Conflict: if the merge needs a person.
    """
    text = patch.read_text()
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("# "))
    if CREATED.search(text):
        raise Conflict("it creates a file")
    hunks = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = TARGET.findall(text)
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(at(base, path))
        applied = subprocess.run(
            ["patch", "-p1", "-s", "-i", str(patch)], cwd=folder, capture_output=True, text=True
        )
        if applied.returncode:
            raise Conflict(f"it does not apply to {base}: {applied.stdout.strip()}")
        for path in paths:
            today = moved_to(base, path)
            ours = (ROOT / today).read_text()
            theirs = (folder / path).read_text()
            try:
                merged = merge(at(base, path), ours=ours, theirs=theirs)
            except Conflict:
                names = renames(at(base, path), ours)
                before, after = renamed(at(base, path), names), renamed(theirs, names)
                merged = merge(before, ours=ours, theirs=after)
            hunks.append(diff(today, ours, merged))
    return header + "".join(hunks)


@cache
def at(commit: str, path: str) -> str:
    """Returns a file as it is in a commit."""
    shown = subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True
    )
    if shown.returncode:
        raise Conflict(shown.stderr.strip())
    return shown.stdout


@cache
def moved_to(base: str, path: str) -> str:
    """Returns where a file is now: its own path, else the file that shares most of its lines."""
    if (ROOT / path).exists():
        return path
    lines = Counter(line for line in at(base, path).splitlines() if len(line) > 20)
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": True},
    )
    candidates = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]

    def shared(name: str) -> int:
        return (lines & Counter((ROOT / name).read_text().splitlines())).total()

    best = max(candidates, key=shared)
    if 4 * shared(best) < lines.total():
        raise Conflict(f"{path} is gone, and no file has a quarter of its lines")
    return best


def merge(base: str, *, ours: str, theirs: str) -> str:
    """Merges token by token.

    >>> merge("a = f(x)", ours="a = g(x)", theirs="a = f(x + 1)")
    'a = g(x + 1)'
    """
    with tempfile.TemporaryDirectory() as name:
        files = []
        for part, text in (("ours", ours), ("base", base), ("theirs", theirs)):
            file = Path(name, part)
            file.write_text("".join(f"{token!r}\n" for token in TOKEN.findall(text)))
            files.append(str(file))
        done = subprocess.run(
            ["git", "merge-file", "-p", "--diff3", *files], capture_output=True, text=True
        )
    if done.returncode:
        raise Conflict(first_conflict(done.stdout))
    return "".join(eval_token(line) for line in done.stdout.splitlines())


def renames(base: str, ours: str) -> dict[str, str]:
    """Returns the identifiers that were replaced by another one, each always by the same.

    >>> renames("b = f(a)", "b = g(a)")
    {'f': 'g'}
    """
    before, after = TOKEN.findall(base), TOKEN.findall(ours)
    found: dict[str, set[str]] = {}
    for kind, i, j, k, m in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "replace" and j - i == m - k:
            for old, new in zip(before[i:j], after[k:m], strict=True):
                if old.isidentifier() and new.isidentifier():
                    found.setdefault(old, set()).add(new)
    return {old: new.pop() for old, new in found.items() if len(new) == 1}


def renamed(text: str, names: dict[str, str]) -> str:
    """Returns a text with its identifiers replaced."""
    return "".join(names[token] if token in names else token for token in TOKEN.findall(text))


def eval_token(line: str) -> str:
    """Returns the token that a line holds.

    >>> eval_token(repr("if"))
    'if'
    """
    return (
        line[1:-1]
        .replace("\\n", "\n")
        .replace("\\t", "\t")
        .replace("\\'", "'")
        .replace("\\\\", "\\")
    )


def first_conflict(merged: str) -> str:
    """Returns the first conflict as text."""
    block = merged.partition("<<<<<<< ")[2].partition(">>>>>>> ")[0].splitlines()[1:]
    parts: list[str] = [""]
    for line in block:
        if line.startswith(("||||||| ", "=======")):
            parts.append("")
        else:
            parts[-1] += eval_token(line)
    return " <> ".join(repr(part) for part in parts)


def diff(path: str, ours: str, merged: str) -> str:
    """Returns a patch that `git apply` takes."""
    if ours == merged:
        raise Conflict(f"{path}: nothing is left of it")
    lines = unified_diff(
        ours.splitlines(keepends=True),
        merged.splitlines(keepends=True),
        f"a/{path}",
        f"b/{path}",
    )
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
