"""Promises of `launch local`: arguments are parsed strictly, and every worker gets its rank."""

import re
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError
from jaxres.launch import __main__ as launch
from jaxres.launch import local
from jaxres.launch.local import Options
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import attempt_runner
from tests.unit.runlog.example_records import CLAIM


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("c.yaml --hosts 4", Options(Path("c.yaml"), (), 4, 4, None)),
        ("--hosts=1 runs/a", Options(Path("runs/a"), (), 1, 1, None)),
        (
            "c.yaml train.steps=3 --hosts 2 --devices-per-host=8 --run.seed=1",
            Options(Path("c.yaml"), ("train.steps=3", "--run.seed=1"), 2, 2, 8),
        ),
        ("c.yaml --hosts 2..4", Options(Path("c.yaml"), (), 2, 4, None)),
        ("c.yaml --no-restart --hosts 2", Options(Path("c.yaml"), (), 2, 2, None, restart=False)),
        (
            "c.yaml --hosts 99 --oversubscribe",
            Options(Path("c.yaml"), (), 99, 99, None, oversubscribe=True),
        ),
    ],
)
def test_arguments_are_parsed(arguments, options):
    assert local.parse(arguments.split()) == options


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("c.yaml", "--hosts"),
        ("c.yaml --hosts", "--hosts"),
        ("c.yaml --hosts 0", "--hosts 0"),
        ("c.yaml --hosts -1", "--hosts -1"),
        ("c.yaml --hosts=two", "--hosts two"),
        (f"c.yaml --hosts={5000 * '9'}", "--hosts 999"),
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
def test_invalid_arguments_are_refused_in_one_line(arguments, named):
    with pytest.raises(UsageError) as refused:
        local.parse(arguments.split())
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("arguments", [[], ["elsewhere"], ["--hosts", "2"]])
def test_an_unknown_target_is_refused(arguments):
    with pytest.raises(UsageError, match="expected where to launch"):
        launch._launch(arguments)


@pytest.mark.slow
def test_help_exits_with_0(capsys):
    for place in ("slurm", "k8s", "sky"):
        assert launch.main([place, "--help"]) == ExitCode.DONE
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: python -m jaxres.launch {place} ")
        assert len(shown.splitlines()) < 60, "an operator looks for an option"
    assert launch.main(["local", "--help"]) == ExitCode.DONE
    assert "virtual CPU devices" in capsys.readouterr().out


GIB = 2**30


@pytest.mark.parametrize(
    ("flags", "cores", "memory", "named"),
    [
        ("--hosts 16", 2, 4 * GIB, None),
        ("--hosts 17", 2, 64 * GIB, "--hosts 17: this machine (2 cores, 64.0 GiB of memory) has"),
        ("--hosts 5", 64, GIB, "has room for 4 workers. Give at most 4, or --oversubscribe"),
        ("--hosts 1", 1, GIB // 8, None),
        ("--hosts 1..9999999", 2, 4 * GIB, "--hosts 9999999"),
        ("--hosts 9999999 --oversubscribe", 2, 4 * GIB, None),
        ("--hosts 2 --devices-per-host 64", 2, 4 * GIB, None),
        ("--hosts 2 --devices-per-host 65", 2, 4 * GIB, "--devices-per-host 65: 130 virtual"),
        ("--hosts 2 --devices-per-host 65 --oversubscribe", 2, 4 * GIB, None),
    ],
)
def test_workers_that_the_machine_has_no_room_for_are_refused(flags, cores, memory, named):
    options = local.parse(["c.yaml", *flags.split()])
    if named is None:
        local.refuse_too_many(options, cores=cores, memory_bytes=memory)
        return
    with pytest.raises(UsageError, match=re.escape(named)):
        local.refuse_too_many(options, cores=cores, memory_bytes=memory)


def test_a_job_that_would_fill_this_machine_starts_nothing():
    many = Options(Path("absent.yaml"), (), 9999999, 9999999, None)
    with pytest.raises(UsageError, match="has room for"):  # Before the config is even read.
        local.launch(many, env={})


def test_every_worker_gets_its_rank_and_a_single_one_no_arguments():
    two = CLAIM.__class__(**(vars(CLAIM) | {"num_hosts": 2, "coordinator": "127.0.0.1:7"}))
    run_dir = RunDir(Path("runs/a"))
    command = attempt_runner.worker_command(run_dir, two, attempt_runner.HostRank(1, 2))
    rank = ["--host", "1", "--num-hosts", "2", "--coordinator", "127.0.0.1:7"]
    assert command[-6:] == rank
    alone = attempt_runner.worker_command(run_dir, CLAIM, attempt_runner.ALONE)
    assert command[:-6] == alone


def test_an_attempt_has_the_requested_number_of_hosts(monkeypatch):
    opened = []
    monkeypatch.setattr(
        attempt_runner, "run_attempt", lambda *_, **kwargs: opened.append(kwargs) or 0
    )
    for num_hosts, devices in ((1, None), (3, 2)):
        options = Options(Path("c"), (), num_hosts, num_hosts, devices, restart=False)
        local.launch(options, env={"HOME": "/"})
    single, three = opened
    with single["rendezvous"](None, None) as one, three["rendezvous"](None, None) as job:
        assert (one.num_hosts, one.hosts, one.coordinator) == (1, (0,), None)
        assert (job.num_hosts, job.hosts) == (3, (0, 1, 2))
        assert job.coordinator.startswith("127.0.0.1:")
    assert single["env"] == {"HOME": "/"}
    assert three["env"] == {"HOME": "/", "JAX_NUM_CPU_DEVICES": "2"}
    assert three["run"].keywords["env"] == three["env"]
