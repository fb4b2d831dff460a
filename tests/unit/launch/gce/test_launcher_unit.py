"""Promises of `up --detach`: what can fail fails in the terminal, and the unit begins no job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Fenced, UsageError
from jaxres.launch.gce import command as verbs
from jaxres.launch.gce import launcher_unit
from jaxres.launch.gce.launcher_unit import LauncherUnit
from jaxres.launch.gce.state.desired_state import JobEnd
from jaxres.launch.gce.state.lease import Lease
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from tests.tiers import slow_but
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce_config import config

RUN = GcsPath("bkt", "runs/it's $HOME")
PROGRAM = """#!/bin/bash
printf '%s\\n' "$*" >> "$CALLS/calls"
if [ -e "$CALLS/{name}-fails" ]; then cat "$CALLS/{name}-fails" >&2; exit 1; fi
{answer}
"""
ANSWERS = {
    "systemctl": """case "$*" in
*Version*) echo Version=252 ;;
*ActiveState*) cat "$CALLS/state" 2> /dev/null || echo ActiveState=inactive ;;
esac""",
    "loginctl": 'cat "$CALLS/linger" 2> /dev/null || echo Linger=yes',
    "systemd-run": "",
}


class Shell:
    """The shell of a user who runs `launch gce`, with stand-ins for systemd's programs."""

    def __init__(self, gce: GceEmulator, bucket: str, folder: Path) -> None:
        self.gce, self.folder, self.paths = gce, folder, LaunchPaths(GcsPath(bucket, "run"))
        (folder / "bin").mkdir()
        for name, answer in ANSWERS.items():
            (folder / "bin" / name).write_text(PROGRAM.format(name=name, answer=answer))
            (folder / "bin" / name).chmod(0o755)
        self.env = {
            **os.environ,
            **gce.env,
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "CALLS": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
            "GOOGLE_CLOUD_QUOTA_PROJECT": "q",
        }
        self.unit = launcher_unit.unit_of(self.paths, uid=1000, env=self.env)

    def config(self, **gce: object) -> str:
        text = configs.dump_yaml(
            config(**{"project": self.gce.project, "num_hosts": 1, "lease_seconds": 2.0, **gce})
        )
        path = self.folder / "config.yaml"
        path.write_text(text.replace("run:\n", f"run:\n  dir: {self.paths.run}\n", 1))
        return str(path)

    def up(self, *words: str, clock: SystemClock | None = None) -> int:
        return verbs.main(["up", *words], env=self.env, clock=clock)

    def set(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"{text}\n")

    def calls(self, beginning: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(beginning)]

    def units(self) -> list[str]:
        """Returns the arguments of each call of systemd-run."""
        return self.calls("--user --unit=")


@pytest.fixture
def shell(
    gce: GceEmulator, gcs_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Shell:
    shell = Shell(gce, gcs_bucket, tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", shell.env["PATH"])
    return shell


@pytest.mark.parametrize("uid", [0, 1000])
def test_the_unit_is_started_again_but_after_a_final_exit_code(uid: int) -> None:
    unit = LauncherUnit("jaxres-run", uid, Path("/run"))
    command = launcher_unit.launcher_command(RUN, waits=False)
    found = launcher_unit.start_arguments(unit, command, description="d", folder=Path("/a b"))
    at = found.index("--")
    assert found[at + 2 :] == [
        *("-m", "jaxres.launch", "gce", "up", "gs://bkt/runs/it's $$HOME", "--resume-only")
    ]
    assert ("--user" in found) == (uid != 0)
    assert {"--working-directory=/a b", "--collect", "--service-type=exec"} <= set(found)
    properties = dict(
        word.removeprefix("--property=").split("=", 1)
        for word in found[:at]
        if word.startswith("--property=")
    )
    assert properties["Restart"] == "on-failure"
    assert properties["StartLimitIntervalSec"] == "0", "systemd gives the launcher up"
    final = {int(code) for code in properties["RestartPreventExitStatus"].split()}
    assert final == {
        *(ExitCode.USAGE, ExitCode.STOPPED, ExitCode.CONFIG, ExitCode.DIVERGED),
        *(ExitCode.FENCED, ExitCode.NO_PROGRESS, ExitCode.UNRESTORABLE),
    }


@pytest.mark.slow
def test_a_detached_job_is_recorded_and_left_to_a_unit_that_only_continues_it(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.up(shell.config(), "--detach") == ExitCode.DONE
    (arguments,) = shell.units()
    assert arguments.endswith(f" -m jaxres.launch gce up {shell.paths.run} --resume-only")
    assert f"--unit={shell.unit.name} " in arguments
    desired = StateObject(shell.paths.desired_state).read()
    assert desired is not None
    assert (desired.phase, shell.gce.vms()) == ("placing", {})
    assert Lease(shell.paths.lease, holder="the unit", seconds=60).acquire(may_be_led=True), (
        "the unit would wait for the lease"
    )
    printed = capsys.readouterr().out
    assert f"the launcher runs as the unit {shell.unit.name}" in printed
    assert f"journalctl --user -u {shell.unit.name} -f" in printed
    for verb in ("status", "logs", "stop", "down"):
        assert f"python -m jaxres.launch gce {verb} {shell.paths.run}" in printed


@pytest.mark.slow
def test_secrets_reach_the_unit_by_a_file_that_only_its_user_reads(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = 'https://h/s?"$a`b\\'
    shell.env |= {"HOOK": secret, "OTHER_SECRET": "se-cret", "GOOGLE_API": "x"}
    targets = "alerts.targets=[{kind: generic, url_env: HOOK}]"
    assert shell.up(shell.config(), targets, "--detach") == ExitCode.DONE
    path = shell.unit.environment_file
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    text = path.read_text()
    assert f"--property=EnvironmentFile={path} " in shell.units()[0]
    assert secret not in shell.units()[0]
    assert secret not in capsys.readouterr().out
    assert 'GOOGLE_CLOUD_QUOTA_PROJECT="q"\n' in text
    assert "OTHER_SECRET" not in text, "a variable that the launcher does not need"
    quoted = subprocess.run(
        ["bash", "-c", f'set -a; . "{path}"; printf %s "$HOOK"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert quoted.stdout == secret


def test_a_bad_config_is_told_in_the_terminal_and_starts_no_unit(shell: Shell) -> None:
    path = shell.config(image="projects/debian-cloud/global/images/family/none")
    with pytest.raises(ConfigError, match=r"launch\.gce\.image"):
        shell.up(path, "--detach")
    assert shell.units() == [], "the error would be in the journal only"
    assert StateObject(shell.paths.desired_state).read() is None
    with pytest.raises(ConfigError, match="HOOK is not set"):
        shell.up(shell.config(), "alerts.targets=[{kind: generic, url_env: HOOK}]", "--detach")
    assert shell.units() == []


def without_systemd(shell: Shell) -> None:
    (shell.folder / "bin" / "systemctl").unlink()
    shell.env["PATH"] = str(shell.folder / "bin")


def offline(shell: Shell) -> None:
    text = "#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2; exit 1\n"
    (shell.folder / "bin" / "systemctl").write_text(text)


@pytest.mark.parametrize(
    ("break_it", "error", "says"),
    [
        (without_systemd, UsageError, "has no systemd. Run `up` without --detach in tmux"),
        (offline, UsageError, "here: Failed to connect to bus: No medium found. Run `up` without"),
        (lambda s: s.set("linger", "Linger=no"), UsageError, "loginctl enable-linger"),
        (lambda s: s.set("state", "ActiveState=activating"), Fenced, "runs already, as the unit"),
    ],
)
def test_what_keeps_the_unit_from_its_start_is_told_before_the_job_is_recorded(
    shell: Shell, break_it: Callable[[Shell], None], error: type[Exception], says: str
) -> None:
    path = shell.config()
    break_it(shell)
    with pytest.raises(error) as found:
        shell.up(path, "--detach")
    assert says in str(found.value)
    assert shell.units() == []
    assert StateObject(shell.paths.desired_state).read() is None


@pytest.mark.slow
def test_a_unit_that_systemd_refuses_leaves_a_job_that_up_continues(shell: Shell) -> None:
    shell.set("systemd-run-fails", "Failed to start transient service unit: no")
    with pytest.raises(ConfigError) as found:
        shell.up(shell.config(), "--detach")
    assert "transient service unit: no. The job is recorded, and no launcher leads" in str(
        found.value
    )
    assert f"gce up {shell.paths.run}` does" in str(found.value)


def record(shell: Shell, **changes: object) -> StateObject:
    """Records a job, then changes its desired state."""
    assert shell.up(shell.config(), "--detach") == ExitCode.DONE
    state = StateObject(shell.paths.desired_state)
    desired = state.read()
    assert desired is not None
    state.write(changed(desired, **changes), epoch=desired.epoch)
    (shell.folder / "calls").unlink()
    return state


ENDED = {"phase": "ended", "end": JobEnd(ExitCode.STOPPED, "stopped by an operator", 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    slow_but([["--resume-only"], ["--resume-only", "--detach"]], ["--resume-only", "--detach"]),
)
def test_a_launcher_that_comes_back_after_the_end_of_its_job_begins_no_other_one(
    shell: Shell, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    state = record(shell, **ENDED)
    assert shell.up(str(shell.paths.run), *flags) == ExitCode.DONE
    assert "the job has ended; --resume-only starts none" in capsys.readouterr().out
    desired = state.read()
    assert desired is not None
    assert desired.phase == "ended", "another job was begun"
    assert (shell.units(), shell.gce.vms()) == ([], {})


class Waits(SystemClock):
    """A clock that calls a function at the first wait, and has no others."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then: Callable[[], None] | None = then

    def sleep(self, seconds: float) -> None:
        then, self._then = self._then, None
        assert then is not None, f"it waits again, for {seconds} s"
        then()


@pytest.mark.slow
def test_a_launcher_that_stands_by_ends_with_the_job_that_it_waits_for(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    state = record(shell, phase="running", attempt=1)
    desired = state.read()
    assert desired is not None
    leading = Lease(shell.paths.lease, holder="the leader", seconds=3600)
    assert leading.acquire(after_epoch=desired.epoch)

    def end() -> None:
        state.write(replace(desired, **ENDED), epoch=leading.epoch)
        leading.release()

    code = shell.up(str(shell.paths.run), "--standby", clock=Waits(end))
    assert code == ExitCode.STOPPED, "it has begun the job again"
    assert "stopped by an operator" in capsys.readouterr().out
    found = state.read()
    assert found is not None
    assert (found.phase, shell.gce.vms()) == ("ended", {})


@pytest.mark.slow
def test_a_detached_launcher_that_stands_by_waits_in_its_unit(shell: Shell) -> None:
    state = record(shell, phase="running", attempt=1)
    desired = state.read()
    assert desired is not None
    leading = Lease(shell.paths.lease, holder="the leader", seconds=3600)
    assert leading.acquire(after_epoch=desired.epoch)

    def fails() -> None:
        raise AssertionError("the terminal waits for the lease")

    flags = ("--detach", "--standby")
    assert shell.up(str(shell.paths.run), *flags, clock=Waits(fails)) == ExitCode.DONE
    assert shell.units()[0].endswith(f"up {shell.paths.run} --resume-only --standby")


def test_detach_is_not_taken_with_a_dry_run(shell: Shell) -> None:
    with pytest.raises(UsageError, match="not with --dry-run"):
        shell.up(shell.config(), "--detach", "--dry-run")
