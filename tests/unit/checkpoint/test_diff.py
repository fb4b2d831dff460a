import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxres.checkpoint.diff import FactDiff, compare, facts
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.runlog.paths import RunDir
from tests.unit.checkpoint.conftest import claimed, progress, state


def test_equal_bits_are_equal_including_nan():
    for dtype in (np.float32, ml_dtypes.bfloat16):
        array = np.array([1, np.nan, np.inf], dtype)
        assert compare(array, array.copy()) is None
    assert compare(np.zeros((0, 3)), np.zeros((0, 3))) is None


def test_bits_are_compared_and_not_values():
    found = compare(np.float32([0.0, 1.0]), np.float32([-0.0, 1.0]))
    assert (found.elements, found.of_elements, found.largest) == (1, 2, 0.0)


def test_the_first_and_the_largest_difference_are_reported():
    a = np.zeros((3, 4), np.float32)
    b = a.copy()
    b[1, 2], b[2, 0] = 0.25, -3.0
    found = compare(a, b)
    assert (found.elements, found.first, found.largest, found.nonfinite) == (2, (1, 2), 3.0, 0)


def test_a_nan_on_one_side_is_counted_and_hides_no_number():
    a, b = np.float32([1, 2, np.inf]), np.float32([np.nan, 4, 1])
    found = compare(a, b)
    assert (found.elements, found.largest, found.nonfinite) == (3, 2.0, 2)
    found = compare(a[:1], b[:1])
    assert (found.largest, found.nonfinite) == (None, 1)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "largest"),
    [
        (np.uint32, 0, 2**32 - 1, 2**32 - 1),
        (np.int64, -(2**63), 2**63 - 1, float(2**64 - 1)),
        (np.uint64, 2**64 - 1, 2**64 - 3, 2),
        (np.int8, -128, 127, 255),
        (np.bool_, True, False, 1),
        (ml_dtypes.bfloat16, 1.0, 1.5, 0.5),
        (np.complex128, 3j, 4, 5),
    ],
)
def test_a_single_number_of_any_type_is_compared_without_overflow(dtype, a, b, largest):
    found = compare(np.array(a, dtype), np.array(b, dtype))
    assert (found.elements, found.of_elements, found.first) == (1, 1, ())
    assert (found.largest, found.blocks, found.of_blocks) == (largest, 1, 1)


def test_blocks_are_those_of_the_digest():
    a = np.zeros((256, 256), np.float32)  # 16 blocks of 64 x 64
    b = a.copy()
    b[0, 0] = b[63, 63] = b[64, 0] = b[255, 255] = 1
    found = compare(a, b)
    assert (found.elements, found.blocks, found.of_blocks) == (4, 3, 16)


def test_facts_are_compared_with_guard_memory_and_by_presence():
    a = {"step": 8, "best_loss": None, "guards": {"spike": {"mean": 1.0}, "off": {}}}
    b = {"step": 8, "best_loss": 2.5, "guards": {"spike": {"mean": 1.5}}, "new": 1}
    assert facts(a, b) == (
        FactDiff("best_loss", None, 2.5),
        FactDiff("guards/spike/mean", 1.0, 1.5),
        FactDiff("new", None, 1),
    )
    assert facts(a, a) == ()


@pytest.fixture
def run_diff(capsys):
    """Runs `checkpoints diff` and returns exit code, standard output, standard error."""

    def run(*arguments):
        capsys.readouterr()
        code = checkpoints_cli.main(["checkpoints", "diff", *map(str, arguments)], usage="")
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def other(tmp_path):
    return claimed(RunDir(tmp_path / "other"))


def save(attempt, tree, facts):
    with attempt.checkpoints(keep_last=9) as checkpoints:
        checkpoints.save(tree, facts)
        checkpoints.wait()


def test_two_runs_with_equal_states_are_equal_and_show_the_same_digest(attempt, other, run_diff):
    attempt.save(8)
    other.save(8)
    code, out, _ = run_diff(attempt.run_dir.root, other.run_dir.root)
    checkpoints_cli.main(["checkpoints", "digest", str(attempt.run_dir.root)], usage="")
    assert code == 0
    assert out.splitlines()[-1].startswith("equal: sha256:")
    assert out.count(out.split()[-1]) == 3, "both sides and the verdict"


@pytest.mark.slow
def test_every_differing_array_is_listed(attempt, other, run_diff):
    attempt.save(8)
    tree = state(8)
    tree["params"] = {
        "w": tree["params"]["w"].at[3, 1].add(0.5),
        "b": jnp.ones(4, jnp.bfloat16),
    }
    tree["opt"] = {"count": tree["opt"]["count"], "mu": jnp.zeros(2)}
    save(other, tree, progress(8))
    code, out, _ = run_diff(attempt.run_dir.root, other.run_dir.root)
    assert code == 1
    assert out.splitlines()[2:] == [
        "opt/mu: absent in A, float32[2] in B",
        "params/b: bfloat16[3] in A, bfloat16[4] in B",
        "params/w: float32[16,8]: 1 of 128 elements differ, in 1 of 1 blocks, first at [3,1], "
        "largest difference 0.5",
        "3 of 6 arrays and 0 facts differ",
    ]


def test_two_steps_of_one_run_are_compared_and_printed_as_json(attempt, run_diff):
    attempt.save(8, 16)
    code, out, _ = run_diff(attempt.run_dir.root, "--step", 8, "--other-step", 16, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [row["step"] for row in rows if row["kind"] == "state"] == [8, 16]
    arrays = {row["path"]: row["difference"] for row in rows if row["kind"] == "array"}
    assert set(arrays) == {"key", "opt/count", "params/w", "step"}
    assert (arrays["step"]["largest"], arrays["step"]["first"]) == (8.0, [])
    assert [(r["name"], r["a"], r["b"]) for r in rows if r["kind"] == "fact"] == [
        ("cursor", 192, 384),
        ("step", 8, 16),
        ("tokens", 8000, 16000),
    ]
    assert rows[-1] == {"kind": "verdict", "equal": False}


def test_guard_memory_is_compared_although_the_digest_excludes_it(attempt, other, run_diff):
    attempt.save(8)
    facts = dataclasses.replace(progress(8), best_loss=2.5, guards={"spike": {"mean": 1.0}})
    save(other, state(8), facts)
    code, out, _ = run_diff(attempt.run_dir.root, other.run_dir.root)
    assert code == 1
    assert out.splitlines()[2:] == [
        "best_loss: none in A, 2.5 in B",
        "guards/spike/mean: none in A, 1.0 in B",
        "0 of 5 arrays and 2 facts differ",
        "the content digests are equal: what differs is not a part of them",
    ]


def test_states_that_cannot_be_compared_are_refused_with_the_usual_exit_codes(
    attempt, run_diff, tmp_path
):
    attempt.save(8)
    root = attempt.run_dir.root
    assert run_diff(root)[0] == 64
    assert "compared with itself" in run_diff(root)[2]
    code, _, err = run_diff(root, "--other-step", 9)
    assert (code, err) == (64, f"{root}: step 9 is not committed (committed: 8) (exit 64 USAGE)\n")
    assert run_diff(root, tmp_path / "none")[0] == 64
    next((attempt.step_dir(8) / "state" / "d").iterdir()).unlink()
    assert run_diff(root, root)[0] == 85


@pytest.mark.slow
def test_the_comparison_needs_no_jax(attempt):
    attempt.save(8)
    source = (
        "import sys; from jaxres.cli.checkpoints import command as checkpoints; "
        "code = checkpoints.main(sys.argv[1:], usage=''); sys.exit(code or 'jax' in sys.modules)"
    )
    command = [sys.executable, "-c", source, "checkpoints", "diff"]
    subprocess.run([*command, *[str(attempt.run_dir.root)] * 2], check=True, capture_output=True)
