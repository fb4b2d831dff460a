"""`jaxres resume-check` passes a sound config; with hidden state it names step and array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxres.config import load
from jaxres.train import resume_results
from tests.promises.trainer import FAULTY, Workspace
from tests.waiting import SURE_SECONDS

pytestmark = pytest.mark.slow
CODE = "tests.promises.hidden_state"


def check(workspace: Workspace, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Returns exit code and result of a check of the FAULTY config."""
    command = [str(FAULTY), f"data.cache_dir={workspace.caches}"]
    command += [f"compilation.cache_dir={workspace.caches / 'xla'}", *arguments, "--json"]
    run_dir = workspace.run_dir("check")
    checking = workspace.command(run_dir, ["resume-check", *command], verb=("jaxres",))
    code, printed = checking.wait_exit(3 * SURE_SECONDS), checking.printed()
    assert code in (0, 1), printed
    return code, json.loads(printed.splitlines()[-1])


def test_a_sound_config_is_bitwise_over_every_kind_of_break(workspace: Workspace) -> None:
    folder = workspace.root / "runs"
    code, result = check(workspace, "--to", str(folder), "--topology", "2")
    first, other = result["runs"]
    assert [one["kind"] for one in first["breaks"]] == ["kill", "notice", "hang"], result
    assert [one["exit"] for one in first["breaks"]] in ([137, 75, 80], [80, 75, 80])
    assert first["equal"]
    assert result["guarantee"] == "bitwise"
    assert other["topology"] == "2"
    assert [one["kind"] for one in other["breaks"]] == ["notice"]
    assert result["topologies"]["2"] in ("bitwise", "statistical")
    assert code == (0 if result["topologies"]["2"] == "bitwise" else 1)
    assert not workspace.run_dir("check").root.exists()
    config = load(FAULTY, [f"data.cache_dir={workspace.caches}"]).config
    assert resume_results.read(config).is_good
    assert json.loads(resume_results.path_of(config).read_text())["trajectory"] in str(result)


def test_a_counter_in_the_loss_is_found_with_step_and_array(workspace: Workspace) -> None:
    target = f"model.target={CODE}:counted_model"
    code, result = check(workspace, target, "--steps", "4", "--breaks", "1")
    resumed = result["runs"][0]["breaks"][0]["resumed_at"]
    assert resumed > 0, "the check waits for the first commit"
    difference = result["first_difference"]
    assert (code, result["guarantee"]) == (1, "different")
    assert (difference["run"], difference["step"]) == ("broken-1", resumed + 1)
    assert difference["what"] == "loss"
    assert difference["place"]["array"] == "params/bias_V"
    assert difference["place"]["bits"][0] != difference["place"]["bits"][1]
    assert "at the first step after the resume" in result["cause"]


@pytest.mark.campaign
def test_a_counter_that_is_a_constant_of_the_step_is_found(
    workspace: Workspace, tmp_path: Path
) -> None:
    model = f"{{kind: custom, target: '{CODE}:restart_model', args: {{file: {tmp_path / 'n'}}}}}"
    code, result = check(workspace, f"model={model}", "--steps", "4", "--breaks", "1")
    assert (code, result["first_difference"]["step"]) == (1, 1)
    assert result["first_difference"]["place"]["array"] == "params/bias_V"
    assert "is a constant in it" in result["cause"]


@pytest.mark.campaign
def test_an_unseeded_shuffle_is_found_with_step_and_array(workspace: Workspace) -> None:
    target = f"data.source.target={CODE}:shuffled_rows"
    code, result = check(workspace, target, "--steps", "4", "--breaks", "1")
    assert (code, result["guarantee"]) == (1, "different")
    assert (result["first_difference"]["step"], result["first_difference"]["what"]) == (1, "loss")
    assert result["first_difference"]["place"]["array"] == "params/bias_V"
    assert "equal rows of the data set have other content in each process" in result["cause"]
