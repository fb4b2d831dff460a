"""`jaxres chaos`: bad input is one clear error, and the list names every scenario."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxres import config as configs
from jaxres.cli import chaos
from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError
from jaxres.operate.chaos.scenarios import BY_NAME, DEFAULT

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "tests" / "promises" / "tiny.yaml")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], ExitCode.USAGE, "arguments are required"),
        (["walk"], ExitCode.USAGE, "invalid choice"),
        (["list", "hang"], ExitCode.USAGE, "not a scenario"),
        (["run", "/nowhere.yaml"], ExitCode.USAGE, "no such file"),
        (["run", TINY, "train.stepz=1"], ExitCode.CONFIG, "train.stepz"),
        (["run", TINY, "worker-kil"], ExitCode.USAGE, "'worker-kil': not a scenario"),
        (["run", "worker-kil"], ExitCode.USAGE, "not a scenario; did you mean 'worker-kill'?"),
        (["run", "quickstrat"], ExitCode.CONFIG, "did you mean 'quickstart'?"),
        (["run", TINY, "--only", "notice,hangs"], ExitCode.USAGE, "--only 'hangs': no such"),
        (["run", TINY, "--all", "hang"], ExitCode.USAGE, "--all: give it or names"),
        (["run", TINY, "--only", ""], ExitCode.USAGE, "--only '': no such"),
        (["run", TINY, "--faults", "0"], ExitCode.USAGE, "--faults 0: expected 1 to"),
        (["run", TINY, "--seed", "-1"], ExitCode.USAGE, "--seed -1: expected 0 to"),
        (["run", TINY, "--hosts", "0"], ExitCode.USAGE, "--hosts 0: expected 1 to"),
        (["run", TINY, "--minutes", "nan"], ExitCode.USAGE, "--minutes nan: expected a number"),
        (["run", TINY, "--minutes", "1", "--faults", "2"], ExitCode.USAGE, "give one of them"),
        (
            ["run", TINY, "--max-recovery-seconds", "0"],
            ExitCode.USAGE,
            "--max-recovery-seconds 0.0: expected a number",
        ),
        (["run", TINY, "--json", "/nowhere/x.json"], ExitCode.USAGE, "folder does not exist"),
        (["run", TINY, "run.dir=/tmp/x"], ExitCode.USAGE, "--to chooses where"),
        (["run", TINY, "--to", str(ROOT)], ExitCode.CONFIG, "it is not empty"),
    ],
)
def test_bad_input_is_one_clear_error_and_nothing_runs(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos.main(arguments, env={}) == code
    printed = capsys.readouterr()
    assert text in printed.err
    assert printed.out == ""


def test_the_list_has_a_line_for_each_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["list"], env={}) == ExitCode.DONE
    first, default, _, others = re.split(r"(?m)^(.*:)$", capsys.readouterr().out)[1:]
    names = [[line.split()[0] for line in part.splitlines() if line] for part in (default, others)]
    assert (first, names[0]) == ("In the default schedule:", list(DEFAULT))
    assert sorted(names[0] + names[1]) == sorted(BY_NAME)
    assert all(": " in line for line in (default + others).splitlines() if line)


def test_words_are_a_config_its_overrides_and_scenarios() -> None:
    options = chaos._parse(["run", "hang", TINY, "run.seed=3", "notice", "--only", "hang"])
    assert options.config == Path(TINY)
    assert options.overrides == ["run.seed=3"]
    assert options.scenarios == ("hang", "notice")
    default = chaos._parse(["run"])
    assert default.config == Path("quickstart")
    assert default.scenarios == DEFAULT
    assert chaos._parse(["run", "--all"]).scenarios == tuple(BY_NAME)


def test_a_scenario_is_left_out_if_the_data_are_in_a_bucket_or_one_host_trains(
    tmp_path: Path,
) -> None:
    data = "data.source.path=gs://bucket/text"

    def applicable(*words: str, **env: str) -> set[str]:
        options = chaos._parse(["run", TINY, data, *words])
        loaded = configs.load(options.config, options.overrides)
        command = chaos.Chaos(loaded, options, tmp_path, env=env, clock=SystemClock())
        return {*command._applicable(options.scenarios, command._why_no_place)}

    names = applicable()
    assert {BY_NAME[name].place for name in names} == {"disk"}
    network = {"partition", "peer-lost", "slow-network"}
    assert {*DEFAULT} - names == {"storage-outage", "bucket-flip", *network}
    assert network < applicable("--hosts", "2")
    with pytest.raises(UsageError, match="partition: not applicable: needs --hosts 2 or more"):
        applicable("partition")
    with pytest.raises(UsageError, match="bucket-flip: not applicable: the data are in a bucket"):
        applicable("bucket-flip")
    assert "straggler" in applicable("--all", "--hosts", "2")
    with pytest.raises(UsageError, match="straggler: not applicable: needs --hosts 2 or more"):
        applicable("straggler")
    for env in ({"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": "1"}):
        (text,) = (f"{name}={value}" for name, value in env.items())
        with pytest.raises(UsageError, match=f"unhealthy-device: .* reads no GPU with {text}"):
            applicable("unhealthy-device", **env)
