"""The GPU check tells every failure, and goes on where it stopped."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tools.gpu import check
from tools.gpu import results as gpu_results
from tools.gpu.check import Part, main
from tools.gpu.parts import PARTS as ALL
from tools.gpu.parts import code_digest
from tools.gpu.results import Result

PARTS = [
    Part(name, "tests.unit.repository.gpu_parts", minutes, f"what {name} asks")
    for name, minutes in [("fails", 1), ("leaves", 1), ("hangs", 0.15), ("fine", 1)]
]


def results(out):
    text = (out / "results.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["name"]: line for line in lines}


@pytest.mark.slow
def test_a_part_that_fails_hangs_or_leaves_a_process_is_told_and_stops_no_other(tmp_path, capsys):
    assert main(["--out", str(tmp_path)], PARTS) == 1
    found = results(tmp_path)
    assert {name: one["status"] for name, one in found.items()} == {
        "fails": "failed",
        "leaves": "failed",
        "hangs": "timed out",
        "fine": "passed",
    }
    assert found["fails"]["error"].endswith("AssertionError: on purpose")
    assert found["leaves"]["error"] == "left 1 process(es) behind"
    left = Path(f"/proc/{found['leaves']['figures']['pid']}/cmdline")
    assert not left.exists() or not left.read_bytes(), "it is at most a zombie"
    assert found["hangs"]["error"] == "after 9 s: hangs"
    table = (tmp_path / "results.md").read_text()
    assert re.search(
        r"\| `fine` \| what fine asks \| passed, \d+ s, [\d-]+ \| speed 1.5; device a/b \|", table
    )
    assert "fails: failed" in capsys.readouterr().out


def test_what_a_part_has_measured_is_kept_if_it_fails_later(tmp_path):
    parts = [Part("partly", "tests.unit.repository.gpu_parts", 1, "")]
    assert main(["--out", str(tmp_path)], parts) == 1
    found = results(tmp_path)["partly"]
    assert found["status"] == "failed"
    assert found["error"].endswith("AssertionError: failed: bad")
    assert found["figures"] == {
        "where": str(tmp_path / "partly/x"),
        "bad": "failed: AssertionError: on purpose",
        "speed": 2.0,
    }


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # It is not awaited.
def test_a_process_that_does_not_end_after_sigkill_does_not_hang_the_check(tmp_path, monkeypatch):
    """The signals go nowhere, as for a process that is stuck in a driver."""
    kill, unkillable = os.kill, set()
    monkeypatch.setattr(check.os, "kill", lambda pid, number: unkillable.add(pid))
    monkeypatch.setattr(check, "KILL_ROUNDS", 1)
    monkeypatch.setattr(check, "KILLED_SECONDS", 0.1)
    try:
        assert main(["--out", str(tmp_path), "--only", "hangs"], PARTS) == 1
    finally:
        for pid in unkillable:
            kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    (pid,) = unkillable
    error = results(tmp_path)["hangs"]["error"]
    assert f"process {pid} has not ended 0 s after SIGKILL" in error


@pytest.mark.slow
def test_a_second_start_goes_on_with_what_has_not_passed(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--only", "fine"], PARTS) == 0
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"name": "fi\n')  # It was killed while it wrote.
    before = (tmp_path / "results.jsonl").read_text()
    assert main(["--out", str(tmp_path), "--only", "fine"], PARTS) == 0
    assert (tmp_path / "results.jsonl").read_text() == before
    assert "fine: passed before" in capsys.readouterr().out
    assert main(["--out", str(tmp_path), "--only", "fine", "--again"], PARTS) == 0
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3
    assert main(["--out", str(tmp_path), "--minutes", "0", "--only", "fails"], PARTS) == 1
    assert results(tmp_path)["fails"]["status"] == "no time left"
    assert (
        "| `hangs` | what hangs asks | not measured yet |  |"
        in (tmp_path / "results.md").read_text()
    )


@pytest.mark.slow
def test_a_second_start_takes_first_what_has_never_run(tmp_path, capsys):
    two = [part for part in PARTS if part.name in ("fails", "fine")]
    assert main(["--out", str(tmp_path), "--only", "fails"], two) == 1
    assert main(["--out", str(tmp_path), "--minutes", "0", "--only", "fine"], two) == 1
    capsys.readouterr()
    assert main(["--out", str(tmp_path)], two) == 1
    out = capsys.readouterr().out
    assert out.index("fine: passed") < out.index("fails: failed")


def test_missing_packages_and_unknown_parts_are_named(tmp_path, capsys, monkeypatch):
    assert main(["--out", str(tmp_path), "--only", "fine", "no"], PARTS) == 64
    assert "--only no: no such part (parts: fails, leaves, hangs, fine)" in capsys.readouterr().err
    monkeypatch.setitem(check.NEEDED, "no_such_module", "no-such-package")
    assert main(["--out", str(tmp_path)], PARTS) == 64
    assert "missing packages: no-such-package" in capsys.readouterr().err
    assert not (tmp_path / "results.jsonl").exists()


@pytest.mark.slow  # It imports jax in a new process.
def test_a_machine_whose_gpu_jax_does_not_use_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "_has_gpu", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["--out", str(tmp_path)]) == 64
    assert "JAX does not use this machine's GPU: its platform is cpu" in capsys.readouterr().err
    assert not (tmp_path / "results.jsonl").exists()


def test_every_part_is_a_function_with_a_question():
    names = [part.name for part in check.PARTS]
    assert len(set(names)) == len(names)
    for part in check.PARTS:
        source = check.ROOT / f"{part.module.replace('.', '/')}.py"
        assert f"\ndef {part.name}(folder: Path)" in source.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part", [part.name for part in check.PARTS])
def test_each_part_passes_in_a_rehearsal_on_cpus(part, tmp_path):
    code = main(["--rehearse", "--only", part, "--out", str(tmp_path)])
    assert code == 0, (tmp_path / f"{part}.txt").read_text()[-4000:]


def test_a_part_that_does_not_fit_into_the_minutes_that_are_left_waits(tmp_path):
    parts = [
        Part(name, "tests.unit.repository.gpu_parts", minutes, "")
        for name, minutes in [("hangs", 5), ("fine", 0.4)]
    ]
    assert main(["--out", str(tmp_path), "--minutes", "0.5"], parts) == 1
    found = results(tmp_path)
    assert {name: one["status"] for name, one in found.items()} == {
        "hangs": "no time left",
        "fine": "passed",
    }


def test_the_digest_of_a_part_is_that_of_the_code_that_decides_its_figures(tmp_path):
    part = Part("p", "tools.gpu.p", 1, "", ("models",))
    for name in ("tools/gpu/p.py", "tools/gpu/runs.py", "jaxres/models/a.py", "jaxres/data/b.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a = 1\n")
    first = code_digest(part, root=tmp_path)
    (tmp_path / "jaxres/data/b.py").write_text("a = 2\n")
    assert code_digest(part, root=tmp_path) == first, "the part does not depend on data"
    for name in ("tools/gpu/p.py", "tools/gpu/runs.py", "jaxres/models/a.py"):
        before = code_digest(part, root=tmp_path)
        (tmp_path / name).write_text("a = 3\n")
        assert code_digest(part, root=tmp_path) != before, name
    for part in ALL:
        folders = [check.ROOT / "jaxres" / folder for folder in part.code]
        assert all(any(folder.rglob("*.py")) for folder in folders), part.name


def row(status="passed", device="H100", code="", seconds=1.0, name="saves"):
    part = next(part for part in ALL if part.name == name)
    return Result(name, status, seconds, {}, device=device, code=code or code_digest(part))


@pytest.mark.parametrize(
    ("given", "is_known"),
    [
        (row(), True),
        (row(code="unknown"), False),
        (row(device="H200"), False),
        (row(status="failed"), False),
    ],
    ids=["the same", "other code", "another device", "failed"],
)
def test_what_is_known_for_this_code_and_device_is_left_out(tmp_path, given, is_known):
    path = tmp_path / "results.jsonl"
    path.write_text(gpu_results.line(given))
    assert gpu_results.known("H100", path=path) == ({"saves": given} if is_known else {})


def test_recorded_results_replace_older_ones_of_the_same_part_and_device(tmp_path, capsys):
    committed, new = tmp_path / "committed.jsonl", tmp_path / "new.jsonl"
    old = [row(), row(device="A100"), row(name="hang")]
    committed.write_text("".join(map(gpu_results.line, old)))
    given = [row(seconds=2.0), row(seconds=3.0), row(name="hang", status="no time left")]
    rehearsed = row(name="health", device="")
    new.write_text("".join(map(gpu_results.line, [*given, rehearsed])) + '{"name": "cut')
    assert gpu_results.record(new, into=committed) == ["saves"]
    assert gpu_results.read(committed) == [row(seconds=3.0), *old[1:]]


def test_committed_results_are_of_parts_that_exist():
    rows = gpu_results.read(gpu_results.COMMITTED)
    assert len(rows) == len(gpu_results.COMMITTED.read_text().splitlines()), "a line is cut off"
    assert {row.name for row in rows} <= {part.name for part in ALL}
    assert all(row.device and row.date and row.versions for row in rows)
