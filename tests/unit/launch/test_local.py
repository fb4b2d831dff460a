"""Promises of `launch local`: its words are read strictly, and every worker gets its place."""

from pathlib import Path

import pytest

from jaxres.faults import Exit, UsageError
from jaxres.launch import __main__ as launch
from jaxres.launch import local
from jaxres.launch.local import Asked
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import attempt_runner
from tests.unit.records import CLAIM


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("c.yaml --hosts 4", Asked(Path("c.yaml"), (), 4, 4, None)),
        ("--hosts=1 runs/a", Asked(Path("runs/a"), (), 1, 1, None)),
        (
            "c.yaml train.steps=3 --hosts 2 --devices-per-host=8 --run.seed=1",
            Asked(Path("c.yaml"), ("train.steps=3", "--run.seed=1"), 2, 2, 8),
        ),
        ("c.yaml --hosts 2..4", Asked(Path("c.yaml"), (), 2, 4, None)),
        ("c.yaml --no-restart --hosts 2", Asked(Path("c.yaml"), (), 2, 2, None, restart=False)),
    ],
)
def test_words_are_read(words, asked):
    assert local.parse(words.split()) == asked


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("c.yaml", "--hosts"),
        ("c.yaml --hosts", "--hosts"),
        ("c.yaml --hosts 0", "--hosts 0"),
        ("c.yaml --hosts -1", "--hosts -1"),
        ("c.yaml --hosts=two", "--hosts two"),
        ("c.yaml --hosts 1.5", "--hosts 1.5"),
        ("c.yaml --hosts 4..2", "--hosts 4..2"),
        ("c.yaml --hosts 2..", "--hosts "),
        ("c.yaml --hosts ..2", "--hosts "),
        ("c.yaml --hosts 2 --devices-per-host 0", "--devices-per-host 0"),
        ("--hosts 2", "got nothing"),
        ("a.yaml b.yaml --hosts 2", "a.yaml b.yaml"),
        ("c.yaml --hosts 2 --inline", "--inline: unknown flag"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_usage(words, named):
    with pytest.raises(UsageError) as refused:
        local.parse(words.split())
    assert named in str(refused.value)
    assert local.USAGE in str(refused.value)


@pytest.mark.parametrize("words", [[], ["slurm"], ["--hosts", "2"]])
def test_an_unknown_place_is_refused(words):
    with pytest.raises(UsageError, match="expected where to launch"):
        launch._launch(words)


def test_help_is_an_end_in_order(capsys):
    assert launch.main(["local", "--help"]) == Exit.DONE
    assert "virtual CPU devices" in capsys.readouterr().out


def test_every_worker_is_told_its_place_and_one_alone_nothing_new():
    two = CLAIM.__class__(**(vars(CLAIM) | {"num_hosts": 2, "coordinator": "127.0.0.1:7"}))
    run_dir = RunDir(Path("runs/a"))
    command = attempt_runner.worker_command(run_dir, two, attempt_runner.Member(1, 2))
    place = ["--host", "1", "--num-hosts", "2", "--coordinator", "127.0.0.1:7"]
    assert command[-6:] == place
    alone = attempt_runner.worker_command(run_dir, CLAIM, attempt_runner.ALONE)
    assert command[:-6] == alone


def test_the_attempt_is_opened_for_so_many_hosts(monkeypatch):
    opened = []
    monkeypatch.setattr(attempt_runner, "attempt", lambda *_, **given: opened.append(given) or 0)
    for num_hosts, devices in ((1, None), (3, 2)):
        asked = Asked(Path("c"), (), num_hosts, num_hosts, devices, restart=False)
        local.launch(asked, env={"HOME": "/"})
    alone, three = opened
    with alone["meet"](None, None) as one, three["meet"](None, None) as job:
        assert (one.num_hosts, one.hosts, one.coordinator) == (1, (0,), None)
        assert (job.num_hosts, job.hosts) == (3, (0, 1, 2))
        assert job.coordinator.startswith("127.0.0.1:")
    assert alone["env"] == {"HOME": "/"}
    assert three["env"] == {"HOME": "/", "JAX_NUM_CPU_DEVICES": "2"}
    assert three["run"].keywords["env"] == three["env"]
