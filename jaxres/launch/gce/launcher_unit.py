"""The launcher of `launch gce up --detach`: a systemd unit that outlives the shell.

systemd-run makes the unit. systemd starts it again when the launcher dies, and not after an exit
code with which no scheduler starts a run again. The unit only continues a job that exists, so a
restart never begins another one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxres.exit_codes import ROWS, RestartRule
from jaxres.faults import ConfigError, Fenced, UsageError, command_line
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.storage.path import GcsPath

RESTART_SECONDS = 5
"""Time from the death of a launcher to its restart; the lease of the dead one lasts longer."""
CALL_SECONDS = 60.0
VARIABLES = (
    *("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("LANG", "LC_ALL", "TZ", "TMPDIR", "NO_GCE_CHECK", "STORAGE_EMULATOR_HOST"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
"""Variables of the shell that the unit gets, if they are set."""
PREFIXES = ("GOOGLE_", "CLOUDSDK_", "GCE_", "JAXRES_")
"""Beginnings of the names of further ones."""
WITHOUT_SYSTEMD = (
    "Run `up` without --detach in tmux or with nohup, or on a small VM that has systemd "
    "(docs/gce.md)"
)


@dataclass(frozen=True)
class LauncherUnit:
    """The unit of one job's launcher."""

    name: str
    uid: int
    """User whose systemd runs it; 0: the systemd of the machine."""
    runtime_dir: Path
    """Folder of that systemd for files that are gone after a reboot."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flag of systemctl, systemd-run and journalctl."""
        return ("--user",) if self.uid else ()

    @property
    def environment_file(self) -> Path:
        """File with the variables of the unit, which only its user can read."""
        return self.runtime_dir / "jaxres" / f"{self.name}.env"


def unit_of(paths: LaunchPaths, *, uid: int, env: Mapping[str, str]) -> LauncherUnit:
    """Returns the unit of a job's launcher. Pure.

    >>> unit_of(LaunchPaths(GcsPath("bkt", "runs/first")), uid=0, env={}).name
    'jaxres-first-ef764c'
    """
    own = env.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    folder = own if uid else "/run"
    return LauncherUnit(f"jaxres-{paths.label.removeprefix('jx-')}", uid, Path(folder))


def final_codes() -> list[int]:
    """Returns the exit codes after which the launcher is not started again. Pure."""
    return sorted(row.code for row in ROWS if row.restart is RestartRule.NEVER)


def passed_variables(env: Mapping[str, str], secrets: Iterable[str]) -> dict[str, str]:
    """Returns the variables that the unit gets; `secrets` are names that the config has. Pure."""
    names = {*VARIABLES, *secrets}
    return {n: v for n, v in sorted(env.items()) if n in names or n.startswith(PREFIXES)}


def format_environment(variables: Mapping[str, str]) -> str:
    r"""Returns the content of an EnvironmentFile of systemd. Pure.

    >>> format_environment({"A": 'say "$x"'})
    'A="say \\"\\$x\\""\n'
    """
    quoted = {n: "".join(f"\\{c}" if c in '"\\$`' else c for c in variables[n]) for n in variables}
    return "".join(f'{name}="{value}"\n' for name, value in quoted.items())


def start_arguments(
    unit: LauncherUnit, command: Sequence[str], *, description: str, folder: Path
) -> list[str]:
    """Returns the command that starts the unit. Pure.

    Args:
      command: what it runs; its first word is a path.
      description: for the operator.
      folder: the working directory.
    """
    codes = " ".join(str(code) for code in final_codes() if code)
    return [
        "systemd-run",
        *unit.flags,
        f"--unit={unit.name}",
        f"--description={description}",
        "--collect",  # A unit that has failed leaves nothing, so that it can be started again.
        "--service-type=exec",  # The start fails at once if the program can't be run.
        f"--working-directory={folder}",
        f"--property=EnvironmentFile={unit.environment_file}",
        "--property=Restart=on-failure",
        f"--property=RestartSec={RESTART_SECONDS}",
        "--property=StartLimitIntervalSec=0",  # However often it dies.
        f"--property=RestartPreventExitStatus={codes}",
        "--",
        *(word.replace("$", "$$") for word in command),  # systemd expands variables.
    ]


def launcher_command(run: GcsPath, *, waits: bool) -> list[str]:
    """Returns the unit's command, which continues the job with its recorded config. Pure."""
    flags = ["--resume-only", *(["--standby"] if waits else [])]
    return [sys.executable, "-m", "jaxres.launch", "gce", "up", str(run), *flags]


def require(unit: LauncherUnit, env: Mapping[str, str]) -> None:
    """Checks that the unit can be started, and outlives the session.

    Raises:
      UsageError: there is no systemd, or it ends the user's units when the user logs out.
      Fenced: the unit runs already.
    """
    try:
        answer = _call(unit, env, "systemctl", *unit.flags, "show", "--property=Version")
    except FileNotFoundError:
        raise UsageError(f"--detach: this machine has no systemd. {WITHOUT_SYSTEMD}.") from None
    if answer.returncode:
        whose = "its user units" if unit.uid else "the machine"
        raise UsageError(
            f"--detach: systemd does not manage {whose} here: {answer.stderr.strip()}. "
            f"{WITHOUT_SYSTEMD}."
        )
    if unit.uid:
        answer = _call(unit, env, "loginctl", "show-user", "--property=Linger", str(unit.uid))
        if answer.stdout.strip() != "Linger=yes":
            raise UsageError(
                "--detach: systemd would end the launcher when you log out. Run `loginctl "
                "enable-linger` once (it may need sudo, with your user name), then this again."
            )
    answer = _call(
        unit,
        env,
        "systemctl",
        *unit.flags,
        "show",
        "--property=ActiveState",
        f"{unit.name}.service",
    )
    if answer.stdout.strip() not in ("ActiveState=inactive", "ActiveState=failed"):
        raise Fenced(
            f"the launcher of this job runs already, as the unit {unit.name}; "
            f"`{_journal_command(unit)}` shows its output"
        )


def start(
    unit: LauncherUnit, run: GcsPath, env: Mapping[str, str], *, secrets: Iterable[str], waits: bool
) -> None:
    """Starts the unit for a job that is recorded.

    Raises:
      ConfigError: systemd refuses it.
    """
    path = unit.environment_file
    variables = passed_variables(env, secrets)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(format_environment(variables))
    arguments = start_arguments(
        unit,
        launcher_command(run, waits=waits),
        description=f"jaxres launcher of {run}",
        folder=Path.cwd(),
    )
    answer = _call(unit, env, *arguments)
    if answer.returncode:
        raise ConfigError(
            f"{shlex.join(arguments)}: {answer.stderr.strip()}. The job is recorded, and no "
            f"launcher leads it now: `{command_line('python -m jaxres.launch gce up', run)}` does."
        )


def describe(
    unit: LauncherUnit, run: GcsPath, env: Mapping[str, str], secrets: Iterable[str]
) -> str:
    """Returns the message about the running unit and its commands. Pure."""

    def command(verb: str, *flags: str) -> str:
        return command_line("python -m jaxres.launch gce", verb, run, *flags)

    names = ", ".join(passed_variables(env, secrets))
    return (
        f"{run}: the launcher runs as the unit {unit.name}. systemd starts it again if it dies; "
        "the unit ends with the job\n"
        f"  {_journal_command(unit)}    # its output\n"
        f"  {command('status')}\n"
        f"  {command('logs', '--follow')}\n"
        f"  {command('stop')}    # save, end, delete the VMs\n"
        f"  {command('down')}    # delete the VMs at once\n"
        f"variables that it has: {names}\n"
        "a reboot of this machine ends the unit, not the job. Then: "
        f"{command('up', '--detach', '--resume-only')}\n"
    )


def _journal_command(unit: LauncherUnit) -> str:
    return shlex.join(["journalctl", *unit.flags, "-u", unit.name, "-f"])


def _call(
    unit: LauncherUnit, env: Mapping[str, str], *command: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command of systemd; the user's systemd is found without a login session too."""
    own = {"XDG_RUNTIME_DIR": str(unit.runtime_dir)} if unit.uid else {}
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**env, **own, "LC_ALL": "C"},
            timeout=CALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{shlex.join(command)} has not answered in {CALL_SECONDS:.0f} s; run this again once "
            "systemd answers."
        ) from error
