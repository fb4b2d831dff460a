"""The GPU check tells every failure, and goes on where it stopped."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tools.gpu import check
from tools.gpu.check import Part, main

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
        r"\| fine \| what fine asks \| passed, \d+ s \| speed 1.5; device a/b \|", table
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
        "| hangs | what hangs asks | not measured yet |  |" in (tmp_path / "results.md").read_text()
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
