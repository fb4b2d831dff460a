"""With `up --detach` systemd keeps the launcher of a job alive until the job has ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce import launcher_unit
from jaxres.launch.gce.launcher_unit import LauncherUnit
from jaxres.launch.gce.state.lease import Lease
from jaxres.runlog.paths import RunDir
from tests.promises import booted_systemd
from tests.promises.booted_systemd import Systemd
from tests.promises.cloud import Cloud
from tests.promises.trainer import ROOT, assert_bit_exact
from tests.waiting import SURE_SECONDS

STAND_IN = r"""
echo "$ARGUMENT|$1|$PWD" >> "$0.starts"
until [ -e "$0.is-running" ]; do sleep 0.05; done
code=$(sed -n "$(wc -l < "$0.starts")p" "$0.codes")
if [ "$code" = killed ]; then kill -KILL $$; fi
exit "${code:-0}"
"""
"""Ends as the next line of a file says, with 0 if there is none, once systemd has seen it run.

One that is killed before systemd has seen its `exec` is a start that failed.
"""
ODD = """it's 100% of "$HOME" \\ `id`"""


@pytest.fixture
def systemd(tmp_path: Path, caches: Path) -> Iterator[Systemd]:
    if (obstacle := booted_systemd.obstacle()) is not None:
        pytest.skip(obstacle)
    caches.mkdir(exist_ok=True, parents=True)
    with booted_systemd.booted(tmp_path, writable=[caches]) as found:
        yield found


def wait(what: Callable[[], object], *, of: Callable[[], str]) -> None:
    until = time.monotonic() + SURE_SECONDS
    while not what():
        assert time.monotonic() < until, of()
        time.sleep(0.05)


def is_gone(systemd: Systemd, unit: LauncherUnit) -> bool:
    env = booted_systemd.USER_ENV if unit.uid else None
    found = systemd.show(f"{unit.name}.service", "LoadState", flags=unit.flags, env=env)
    return found == {"LoadState": "not-found"}


@pytest.mark.slow
@pytest.mark.parametrize("uid", [0, 1000])
def test_a_launcher_is_started_again_until_an_exit_code_that_is_final(
    systemd: Systemd, tmp_path: Path, uid: int
) -> None:
    """Every code ends a unit of its own; all of them run at once."""
    if uid:
        systemd.start_user_manager()
    before = ["killed", *(str(int(code)) for code in (ExitCode.BUG, ExitCode.STORAGE))]
    folder = tmp_path / ODD
    folder.mkdir()
    units = {}
    for code in launcher_unit.final_codes():
        unit = LauncherUnit(f"jaxres-it-{code}", uid, tmp_path)
        script = folder / f"ends with {code}"
        script.write_text(STAND_IN)
        Path(f"{script}.codes").write_text("\n".join([*before, str(code)]) + "\n")
        unit.environment_file.parent.mkdir(exist_ok=True)
        unit.environment_file.write_text(launcher_unit.format_environment({"ARGUMENT": ODD}))
        command = ["/bin/sh", str(script), ODD]
        arguments = launcher_unit.start_arguments(
            unit, command, description=f"of {ODD}", folder=folder
        )
        done = systemd.run(*arguments, env=booted_systemd.USER_ENV)
        assert done.returncode == 0, done.stdout
        Path(f"{script}.is-running").touch()
        units[unit] = Path(f"{script}.starts")
    for unit, starts in units.items():
        wait(lambda unit=unit: is_gone(systemd, unit), of=lambda: systemd.output.read_text())
        lines = starts.read_text().splitlines()
        assert lines[0] == f"{ODD}|{ODD}|{folder}"
        assert len(lines) == len(before) + 1, f"{unit.name}: started {len(lines)} times"


@pytest.mark.slow
def test_a_detached_launcher_that_is_killed_comes_back_and_ends_with_its_job(
    systemd: Systemd, cloud: Cloud, fault_free: RunDir
) -> None:
    env = {**os.environ, **cloud.env, "PYTHONPATH": str(ROOT)}

    def gce(*words: str) -> tuple[int, str]:
        command = ("sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), sys.executable, "-m")
        done = systemd.run(*command, "jaxres.launch", "gce", *words, env=env, seconds=SURE_SECONDS)
        return done.returncode, done.stdout

    def main_pid() -> int:
        return int(systemd.show(f"{unit.name}.service", "MainPID")["MainPID"])

    def epoch_of_the_lease() -> int:
        found = Lease(cloud.launch_paths.lease, holder="this test", seconds=1.0).other_holder()
        return 0 if found is None else found.epoch

    unit = launcher_unit.unit_of(cloud.launch_paths, uid=0, env={})
    gate = cloud.root / "gate"
    config = str(cloud.config(env={"FAULT": "row:360:gate", "GATE": str(gate)}))
    code, printed = gce("up", config, "--detach")
    assert code == 0, printed
    assert f"journalctl -u {unit.name} -f" in printed
    cloud.wait_commit(10)
    code, printed = gce("up", config, "--detach")
    assert code == ExitCode.FENCED, printed
    assert f"runs already, as the unit {unit.name}" in printed
    killed = main_pid()
    assert killed > 0, cloud.describe()
    before = cloud.desired_state()
    assert before is not None
    assert before.phase != "ended", "the job was not held"
    assert systemd.run("kill", "-KILL", str(killed)).returncode == 0
    wait(lambda: main_pid() not in (0, killed), of=lambda: f"no restart\n{cloud.describe()}")
    wait(
        lambda: epoch_of_the_lease() > before.epoch,
        of=lambda: f"the launcher that came back does not lead\n{cloud.describe()}",
    )
    gate.touch()
    wait(lambda: is_gone(systemd, unit), of=lambda: f"the unit stays\n{cloud.describe()}")
    after = cloud.desired_state()
    assert after is not None
    assert (after.phase, after.end and after.end.exit) == ("ended", ExitCode.DONE)
    assert after.epoch > before.epoch, "the launcher that came back has led nothing"
    assert after.capacity.placement == before.capacity.placement, "another job was started"
    assert_bit_exact(cloud.run_dir, fault_free)
    cloud.assert_nothing_is_left()
