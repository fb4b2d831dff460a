"""Any damage to any file of a committed step is detected and attributed to file and array."""

import io
import os
import random
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read import readback, verify
from jaxres.checkpoint.read.manifest import CheckpointDamaged
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageUnavailable
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from tests import damage as damages
from tests.promises.trainer import ROOT
from tests.tiers import slow_but
from tests.unit.checkpoint import hosts

GOLDEN = ROOT / "tests" / "golden" / "checkpoint-3"


@pytest.fixture(params=slow_but([1, 2], 1), ids=["1 host", "2 hosts"])
def written(request, written_by):
    """A run directory with steps 8 and 16, saved by real processes; must not be changed."""
    return written_by(request.param)


@pytest.fixture
def run_dir(written, tmp_path):
    shutil.copytree(written.root, tmp_path / "run")
    return RunDir(tmp_path / "run")


def commit_at(run_dir, step):
    history = run_log.fold(run_log.read_records(run_dir.log))
    (commit,) = [commit for commit in history.committed if commit.step == step]
    return run_dir.root / commit.path, commit


def run_command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = checkpoints_cli.main(["checkpoints", *map(str, arguments)], usage="")
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("part", ["", "state", "progress.json"])
def test_a_part_behind_a_link_is_verified_and_is_never_damaged_while_it_is_away(
    run_dir, tmp_path, part
):
    step_dir, commit = commit_at(run_dir, 16)
    disk, linked = tmp_path / "disk", step_dir / part if part else step_dir
    disk.mkdir()
    linked.rename(disk / "moved")
    linked.symlink_to(disk / "moved")
    assert verify.verify_step(step_dir, commit).problems == ()
    assert manifests.read(step_dir, commit).step == 16
    disk.rename(tmp_path / "unmounted")
    with pytest.raises(StorageUnavailable, match=r"is a link to .* Is it mounted"):
        verify.verify_step(step_dir, commit)


@pytest.mark.parametrize("command", ["verify", "digest"])
def test_dots_in_a_path_change_no_result(command):
    around = GOLDEN.parent / "log" / ".." / GOLDEN.name
    found = run_command(command, around)
    assert found == run_command(command, GOLDEN)
    assert found[0] == 0


def test_an_intact_step_is_verified_and_holds_what_was_saved(run_dir):
    for step in (8, 16):
        step_dir, commit = commit_at(run_dir, step)
        found = verify.verify_step(step_dir, commit)
        assert found.problems == ()
        arrays = manifests.read_arrays(step_dir, commit)
        assert {name: a.tobytes() for name, a in arrays.items()} == {
            name: hosts.values(name, step).tobytes() for name in hosts.SHAPES
        }
        code, out, _ = run_command("digest", run_dir.root, "--step", step)
        assert (code, out) == (0, f"{found.digest}\n")
    assert run_command("verify", run_dir.root)[0] == 0


def changed_arrays(step_dir, commit, before):
    """Returns the arrays that an unverified read finds changed or can't read."""
    found = set()
    manifest = manifests.Manifest.decode(before.manifest)
    for path in manifest.arrays:
        try:
            now = manifests.read_array(step_dir, commit, path, manifest)
        except CheckpointDamaged:
            found.add(path)
        else:
            if now.tobytes() != before.arrays[path]:
                found.add(path)
    return found


class Before:
    def __init__(self, step_dir, commit):
        self.manifest = (step_dir / manifests.MANIFEST).read_bytes()
        self.arrays = {p: a.tobytes() for p, a in manifests.read_arrays(step_dir, commit).items()}
        self.files = {p: p.read_bytes() for p in step_dir.rglob("*") if p.is_file()}

    def has_larger(self):
        sizes = {p: p.stat().st_size for p in self.files if p.exists()}
        return any(size > len(self.files[p]) for p, size in sizes.items())

    def restore(self):
        for path, data in self.files.items():
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    slow_but(damages.DAMAGES, damages.flip_bit),
    ids=lambda damage: damage.__name__,
)
def test_every_damage_to_every_file_is_found_and_the_right_array_named(run_dir, damage):
    step_dir, commit = commit_at(run_dir, 16)
    before, chance = Before(step_dir, commit), random.Random(damage.__name__)
    named = set()
    for path in sorted(before.files):
        times = 12 if path.stat().st_size > 16_000 else 1
        if not path.stat().st_size and damage not in (damages.delete, damages.append):
            continue
        for _ in range(times):
            damage(path, chance)
            found = verify.verify_step(step_dir, commit)
            name = path.relative_to(step_dir).as_posix()
            manifest = step_dir / manifests.MANIFEST
            is_whole = manifest.exists() and manifest.read_bytes() == before.manifest
            wrong = name if is_whole else manifests.MANIFEST
            assert wrong in {problem.file for problem in found.problems}, name
            if name != manifests.MANIFEST and path.name != manifests.MANIFEST:
                arrays = {problem.array for problem in found.problems} - {None}
                if before.has_larger():  # Nothing else is read then.
                    assert not arrays, name
                    before.restore()
                    continue
                manifest_hit = any(p.file == manifests.MANIFEST for p in found.problems)
                assert manifest_hit or arrays == changed_arrays(step_dir, commit, before), name
                named |= arrays
            before.restore()
    assert verify.verify_step(step_dir, commit).problems == ()
    if damage.__name__ not in ("append", "swap"):  # These make a file larger.
        assert named, "no damage hit the values of any array"


def test_a_file_larger_than_recorded_is_neither_opened_nor_read(run_dir):
    """TensorStore would ask for a tebibyte of memory, and a checksum of it would take hours."""
    step_dir, commit = commit_at(run_dir, 16)
    names = sorted(p.relative_to(step_dir).as_posix() for p in Before(step_dir, commit).files)
    names.remove(manifests.MANIFEST)
    assert any(name.endswith("manifest.ocdbt") for name in names)
    sizes = {name: (step_dir / name).stat().st_size for name in names}
    larger = [*((n, size + 1) for n, size in sizes.items()), *((n, 2**40) for n in names)]
    for name, num_bytes in larger:
        os.truncate(step_dir / name, num_bytes)
        text = f"{name} has {num_bytes} bytes, the manifest records {sizes[name]} bytes"
        assert verify.verify_step(step_dir, commit).problems == (verify.Defect(text, file=name),)
        with pytest.raises(CheckpointDamaged, match=text):
            manifests.read(step_dir, commit)
        os.truncate(step_dir / name, sizes[name])
    assert verify.verify_step(step_dir, commit).problems == ()


def test_a_farm_of_links_in_a_step_is_not_walked(run_dir):
    """Two links in each of 40 folders are a trillion paths."""
    step_dir, commit = commit_at(run_dir, 16)
    for level in range(40):
        (step_dir / f"farm{level}").mkdir()
        for link in ("a", "b"):
            (step_dir / f"farm{level}" / link).symlink_to(f"../farm{level + 1}")
    (step_dir / "farm40").symlink_to("farm0")
    assert manifests.read(step_dir, commit).step == 16
    assert verify.verify_step(step_dir, commit).problems == ()
    assert run_command("digest", run_dir.root, "--step", 16)[0] == 0
    assert manifests.inventory(step_dir).keys() == manifests.read(step_dir, commit).files.keys()


def test_a_pipe_in_the_place_of_any_file_is_damage_and_is_not_waited_for(run_dir):
    step_dir, commit = commit_at(run_dir, 16)
    before = Before(step_dir, commit)
    results = {}
    for path in sorted(before.files):
        damages.to_pipe(path, random.Random(0))
        problems = verify.verify_step(step_dir, commit).problems
        results[path.relative_to(step_dir).as_posix()] = {problem.file for problem in problems}
        path.unlink()
        before.restore()
    assert {name: found for name, found in results.items() if name not in found} == {}


def test_a_block_that_two_hosts_share_is_digested_from_what_both_have_written(written):
    step_dir, _ = commit_at(written, 16)
    names = {path.name for path in (step_dir / "digests").iterdir()}
    alone = not list((step_dir / "state").glob("ocdbt.process_1.*"))
    wanted = {"process_0.json"} if alone else {"process_0.json", "process_1.json", "read_back.json"}
    assert names == wanted


def test_verify_names_step_file_and_array_and_exits_with_1(run_dir):
    step_dir, commit = commit_at(run_dir, 8)
    largest = max((step_dir / "state").rglob("*"), key=lambda p: p.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[:9000] + bytes([data[9000] ^ 1]) + data[9001:])
    code, out, _ = run_command("verify", run_dir.root)
    lines = out.splitlines()
    assert code == 1
    assert lines[0].startswith(f"step 8: damaged: {largest.relative_to(step_dir)} has checksum ")
    (array,) = [path for path in hosts.SHAPES if f"damaged: {path} has digest" in lines[1]]
    assert "in block [" in lines[1]
    assert array
    assert lines[2].startswith("step 16: valid: ")
    assert run_command("verify", run_dir.root, "--step", 16)[0] == 0
    assert run_command("verify", run_dir.root, "--step", 8)[0] == 1
    assert commit.step == 8


def test_verify_of_a_step_that_is_not_committed_exits_with_1(run_dir):
    assert run_command("verify", run_dir.root, "--step", 9)[:2] == (
        1,
        f"{run_dir.root}: step 9 is not committed\n",
    )
    shutil.rmtree(commit_at(run_dir, 16)[0])
    code, out, _ = run_command("verify", run_dir.root)
    assert code == 1
    assert "step 16: damaged: MANIFEST.json is missing" in out


@pytest.mark.slow
def test_verify_needs_no_jax(run_dir):
    code = (
        "import sys; from jaxres.cli.checkpoints import command as checkpoints; "
        "code = checkpoints.main(sys.argv[1:], usage=''); "
        "assert 'jax' not in sys.modules and 'orbax' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "checkpoints", "verify", run_dir.root]
    completed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert completed.stdout.count(": valid: ") == 2


def test_storage_that_fails_or_returns_two_results_is_not_damage(run_dir, monkeypatch):
    step_dir, commit = commit_at(run_dir, 16)
    real, calls = readback.file_info, []

    def once_wrong(path, pace):
        calls.append(path)
        is_first = path.name == "progress.json" and calls.count(path) == 1
        return manifests.info_of(b"wrong") if is_first else real(path)

    monkeypatch.setattr(verify, "file_info", once_wrong)
    with pytest.raises(StorageUnavailable, match="two reads of the same part of step 16 differ"):
        verify.verify_step(step_dir, commit)

    def failing(path, pace):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(verify, "file_info", failing)
    with pytest.raises(StorageUnavailable, match="Nothing was judged damaged"):
        verify.verify_step(step_dir, commit)
    assert run_command("verify", run_dir.root)[0] == ExitCode.STORAGE


def test_steps_whose_folder_is_unavailable_are_not_damaged(run_dir):
    run_dir.checkpoints.rename(run_dir.root / "away")
    code, _, err = run_command("verify", run_dir.root)
    assert code == ExitCode.STORAGE
    assert "Is it mounted?" in err


def test_the_content_digest_of_the_committed_checkpoint_never_changes():
    code, out, _ = run_command("verify", GOLDEN)
    assert code == 0
    assert out.startswith("step 8: valid: ")
    digest = "sha256:91d86d9d2f1b197a7d138731e8a6b639996d7a1d8e72978b526d1e2218c11758"
    assert run_command("digest", GOLDEN)[1] == f"{digest}\n"
