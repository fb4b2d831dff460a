"""A strict stand-in for docker: containers that are process trees, and outlive their client.

    install(folder / "bin", state=folder / "docker")     # writes the program `docker`
    started(folder / "docker")                           # every container that was started

Like docker it refuses what it does not know: commands, flags, a name that is taken (125). A
container belongs to no client: a client that is killed leaves it, and `docker stop` ends it. While
the file `down` is in the state folder, no daemon answers; containers run on meanwhile.

What it does not have: images (every image has the programs of this machine), separate files,
networks and process ids, limits. A container gets the variables that are passed to it, and those
by which emulators are found.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

POLL_SECONDS = 0.02
FAILED = 125
"""Exit code of `docker run` if docker itself has failed."""
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")
PR_SET_CHILD_SUBREAPER = 36
EMULATORS = re.compile(r"PATH|GCE_\w+|NO_GCE_CHECK|STORAGE_EMULATOR_HOST")
CGROUP = "DOCKER_STAND_IN_CGROUP"
"""Variable with the cgroup of all containers, which are never in that of their client."""


def install(folder: Path, *, state: Path) -> Path:
    """Writes the program; returns its path."""
    state.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "docker"
    words = [sys.executable, "-I", str(Path(__file__).resolve()), str(state)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    return program


def log(state: Path) -> list[dict[str, Any]]:
    """Returns the log of the emulator: `start` and `end` of containers, and each `command`."""
    path = state / "log"
    text = path.read_text() if path.exists() else ""
    written = text[: text.rfind("\n") + 1]  # The last line may be written just now.
    return [json.loads(line) for line in written.splitlines()]


def started(state: Path, name: str) -> list[dict[str, Any]]:
    """Returns the starts of containers with a name, in order."""
    return [entry for entry in log(state) if entry["what"] == "start" and entry["name"] == name]


def running(state: Path) -> dict[str, int]:
    """Returns name -> pid of the first process of each container that runs now."""
    found: dict[str, int] = {}
    for entry in log(state):
        if entry["what"] == "start":
            found[entry["name"]] = entry["pid"]
        elif entry["what"] == "end":
            del found[entry["name"]]
    return found


def most_at_once(state: Path, name: str) -> int:
    """Returns the most containers with a name that have run at the same time."""
    now = most = 0
    for entry in log(state):
        if entry.get("name") == name:
            now += {"start": 1, "end": -1}.get(entry["what"], 0)
            most = max(most, now)
    return most


def _append(state: Path, **entry: object) -> None:
    file = os.open(state / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, json.dumps(entry).encode() + b"\n")
    os.close(file)


def _fail(message: str, code: int = 1) -> NoReturn:
    sys.stderr.write(f"docker: {message}\n")
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"{message}. See 'docker {self.prog} --help'.", FAILED)


def _parser(command: str) -> _Parser:
    return _Parser(prog=command, add_help=False, allow_abbrev=False)


def _run_parser() -> _Parser:
    parser = _parser("run")
    parser.add_argument("--detach", choices=["false"], default="false")
    parser.add_argument("--rm", action="store_true", required=True)
    parser.add_argument("--init", action="store_true")
    parser.add_argument("--network", choices=["host"])
    parser.add_argument("--ipc", choices=["host"])
    parser.add_argument("--gpus")
    parser.add_argument("--user")
    parser.add_argument("--name")
    parser.add_argument("--stop-timeout", type=int, default=10)
    parser.add_argument("--entrypoint", required=True)
    parser.add_argument("--volume", "-v", action="append", default=[])
    parser.add_argument("--workdir", "-w", required=True)
    parser.add_argument("--env", "-e", action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _run(state: Path, words: Sequence[str]) -> int:
    """Starts a container and waits for its end, as an attached client does."""
    flags = _run_parser().parse_args(words)
    name = flags.name or f"unnamed-{os.getpid()}"
    if not NAME.fullmatch(name):
        _fail(f"Invalid container name ({name})", FAILED)
    if flags.volume and flags.user != "0:0":  # The Dockerfile's user is another one.
        _fail("the container's user can't write the volume", FAILED)
    for volume in flags.volume:
        source, _, target = volume.partition(":")
        if source != target or not Path(source).is_dir():
            _fail(f"the volume {volume} is unknown here", FAILED)
    try:
        (state / name).mkdir()  # One of two that start at once gets the name.
    except FileExistsError:
        _fail(f'Conflict. The container name "/{name}" is already in use', FAILED)
    env = {key: value for key, value in os.environ.items() if EMULATORS.fullmatch(key)}
    for item in flags.env:
        key, has_value, value = item.partition("=")
        if has_value or key in os.environ:
            env[key] = value if has_value else os.environ[key]
    box = {
        "name": name,
        "stop_timeout": flags.stop_timeout,
        "has_init": flags.init,
        "command": [flags.entrypoint, *flags.arguments],
        "cwd": flags.workdir,
        "env": env,
    }
    (state / name / "box.json").write_text(json.dumps(box))
    keeper = subprocess.Popen(
        [sys.executable, "-I", __file__, str(state), "keep", name], start_new_session=True
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: keeper.send_signal(number))
    while (code := keeper.poll()) is None:
        if (state / "down").exists():
            _fail("error waiting for container: unexpected EOF", FAILED)
        time.sleep(POLL_SECONDS)
    return code


def _keep(state: Path, name: str) -> int:
    """Runs a container to its end, then kills what is left of its processes."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if CGROUP in os.environ:
        cgroup = Path(os.environ[CGROUP])
        cgroup.mkdir(exist_ok=True)
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    box = json.loads((state / name / "box.json").read_text())
    first = subprocess.Popen(
        box["command"],
        cwd=box["cwd"],
        env=box["env"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # For the first process only.
        signal.signal(number, lambda number, _: first.send_signal(number))
    signal.signal(signal.SIGUSR1, lambda *_: first.kill())
    (state / name / "keeper").write_text(str(os.getpid()))
    _append(state, what="start", name=name, pid=first.pid, stop_timeout=box["stop_timeout"])
    code = first.wait()
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    shutil.rmtree(state / name)
    _append(state, what="end", name=name, code=code)
    return 128 - code if code < 0 else code


def _children() -> list[int]:
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return [int(child) for child in path.read_text().split()]


def _keeper(state: Path, name: str) -> int:
    try:
        return int((state / name / "keeper").read_text())
    except (FileNotFoundError, ValueError):
        _fail(f"Error response from daemon: No such container: {name}")


def _send(state: Path, name: str, number: signal.Signals, *, seconds: float) -> bool:
    """Signals a container; returns whether it has ended within that time."""
    os.kill(_keeper(state, name), number)
    until = time.monotonic() + seconds
    while (state / name).exists():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _stop(state: Path, words: Sequence[str]) -> int:
    parser = _parser("stop")
    parser.add_argument("name")
    name = parser.parse_args(words).name
    _keeper(state, name)
    box = json.loads((state / name / "box.json").read_text())
    if not _send(state, name, signal.SIGTERM, seconds=box["stop_timeout"]):
        _send(state, name, signal.SIGUSR1, seconds=60)
    return 0


def _rm(state: Path, words: Sequence[str]) -> int:
    parser = _parser("rm")
    parser.add_argument("--force", "-f", action="store_true")
    parser.add_argument("name")
    flags = parser.parse_args(words)
    _keeper(state, flags.name)
    if not flags.force:
        _fail("cannot remove a running container: stop it before, or force the removal")
    _send(state, flags.name, signal.SIGUSR1, seconds=60)
    return 0


def _pull(state: Path, words: Sequence[str]) -> int:
    parser = _parser("pull")
    parser.add_argument("image")
    sys.stdout.write(f"{parser.parse_args(words).image}\n")
    return 0


COMMANDS: Mapping[str, Any] = {"run": _run, "stop": _stop, "rm": _rm, "pull": _pull}


def main(state: Path, command: str, *words: str) -> int:
    """Runs one command of docker, or keeps one container (`keep`)."""
    if command == "keep":
        return _keep(state, *words)
    _append(state, what="command", words=[command, *words], pid=os.getpid())
    if (state / "down").exists():
        _fail("Cannot connect to the Docker daemon", FAILED if command == "run" else 1)
    if command not in COMMANDS:
        _fail(f"'{command}' is not a docker command")
    return COMMANDS[command](state, words)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *(sys.argv[2:] or ["help"])))
