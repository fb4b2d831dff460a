"""Fork server of the tests: imports jax once, then forks jaxres commands and their workers.

The import takes more than half of the time of a small run. A forked process is like a fresh one: a
child of the test process, with its own command line, environment and standard streams, and its
module runs as `__main__`. Only the imports are already done. For each command a few spare processes
are forked before it starts; they become its workers and its worker fork server. Other processes
(with another JAX environment, or of a second attempt) are started fresh.

Started by `tests.promises.forks` as `python -m tests.promises.fork_server FD ROOM`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tests.waiting import SURE_SECONDS

ORDER_BYTES = 1 << 18
CLONE_NEWNS = 0x00020000
IMPORTED = (
    "jaxres.train.__main__",
    "jaxres.train.worker",
    "jaxres.train.compiled.compile_cache",
    "jaxres.train.session",
    "jaxres.train.prepared.forkserver",
    "jaxres.launch.__main__",
)
MAY_DIFFER = (
    *("PACE", "HELDOUT_PACE", "FAULT", "POISON", "JITTER", "TAG", "NPROC", "HOME"),
    *("GATE", "HELD", "FLIP", "WRONG_PRODUCT", "WRONG_STEP", "BAD_HOST", "STEP_SECONDS", "HOLD"),
    *("PYTHONUNBUFFERED", "PYTEST_CURRENT_TEST", "STORAGE_EMULATOR_HOST"),
    *("TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING", "NO_GCE_CHECK"),
    *("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "GCE_METADATA_HOST", "GOOGLE_CLOUD_PROJECT"),
    *("DEAD", "FAKE_NVML", "HOOK", "SLOW", "HEALTH", "PREEMPTION"),
    *("GLIBC_TUNABLES", "LD_LIBRARY_PATH"),
)
"""Variables that no import reads, besides those of jaxres itself. LD_LIBRARY_PATH has the fake of
NVIDIA's library, which only a process of its own loads. The C library reads its own when
this process starts, which has those of a worker; no result depends on them."""
SET_AGAIN = ("JAX_NUM_CPU_DEVICES", "PYTHONPATH")
"""Variables that are read once, at the start or at an import, and that a fork reads again."""
BASE = dict(os.environ)


def may_fork(env: Mapping[str, str], base: Mapping[str, str]) -> bool:
    """Returns whether the imports do not depend on the difference of the environments.

    >>> may_fork({"PACE": "1", "JAXRES_X": "1"}, {}), may_fork({"JAX_PLATFORMS": "cpu"}, {})
    (True, False)
    >>> from jaxres.supervisor.process.worker_env import WORKER_VARIABLES
    >>> may_fork(WORKER_VARIABLES, {})  # Else every worker imports jax again.
    True
    """
    names = {name for name in {*env, *base} if env.get(name) != base.get(name)}
    may_differ = {*MAY_DIFFER, *SET_AGAIN}
    return all(name in may_differ or name.startswith("JAXRES_") for name in names)


def main(control: socket.socket) -> NoReturn:
    """Forks a command for every request, until the test process closes the socket."""
    prepare()
    control.send(b"ready")
    while True:
        data, files, _, _ = socket.recv_fds(control, ORDER_BYTES, 2)
        if not data:
            os._exit(0)
        order = json.loads(data)
        if order["command"][2:4] == ["jaxres.launch", "gce"]:
            _import_clients()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            control.close()
            _command(order, *files)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def prepare() -> None:
    """Imports the modules of the commands; asserts that a fork is safe."""
    for name in IMPORTED:
        importlib.import_module(name)
    from jaxres.train.prepared import forkserver

    forkserver.prepare()


def _import_clients() -> None:
    """Imports Google's clients before the first launcher, which else takes longer than the rest."""
    from google.cloud import compute_v1, storage  # noqa: F401

    from jaxres.train.prepared import forkserver

    forkserver.refuse_unforkable_state()


def _command(order: dict[str, Any], answer: int, output: int) -> NoReturn:
    """Runs the command once the test process is the parent."""
    until = time.monotonic() + SURE_SECONDS
    while os.getppid() != order["parent"]:
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.0005)
    if order["mounts_of"] is not None:
        _enter_mounts(order["mounts_of"])
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    spares = [Spare(answer) for _ in range(order["spares"])]
    subprocess.Popen = _popen(spares)  # type: ignore[misc, assignment]
    _hide(spares)
    _become(order["command"], order["env"])
    with socket.socket(fileno=answer) as asked:
        asked.send(str(os.getpid()).encode())
        if asked.recv(64) != b"go":
            os._exit(1)
    _run(order["command"])


def _enter_mounts(pid: int) -> None:
    """Enters the mount namespace of a process and keeps the working directory, as nsenter does."""
    folder = os.getcwd()
    with Path(f"/proc/{pid}/ns/mnt").open() as file:
        failed = ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNS)
        if failed:
            raise OSError(ctypes.get_errno(), "setns")
    os.chdir(folder)


def _hide(spares: list[Spare]) -> None:
    """Lets a supervisor take its spare processes neither for children nor for leftovers.

    One that has become a worker is no longer in the list, and is a child like any other.
    """
    from jaxres.host import processes

    children, find = processes._children, processes._find_leftovers

    def pids() -> set[int]:
        return {spare.pid for spare in spares}

    processes._children = lambda: children() - pids()
    processes._find_leftovers = lambda *args, keep, **kwargs: find(
        *args, keep={*keep, *pids()}, **kwargs
    )


class Spare:
    """A forked process that waits for its command."""

    def __init__(self, answer: int) -> None:
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self.orders.close()
            os.close(answer)
            _spare(theirs)
        theirs.close()

    def becomes(self, command: Sequence[str], *, env: Mapping[str, str], keep: int) -> bool:
        """Sends a command and waits until it has started; False: the process has exited."""
        mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        order = {"command": list(command), "env": dict(env), "mask": mask, "keep": keep}
        with self.orders, suppress(OSError):
            socket.send_fds(self.orders, [json.dumps(order).encode()], [keep])
            return self.orders.recv(64) == b"begun"
        return False


def _spare(orders: socket.socket) -> NoReturn:
    data, files, _, _ = socket.recv_fds(orders, ORDER_BYTES, 1)
    if not data:
        os._exit(0)
    order = json.loads(data)
    os.setpgid(0, 0)
    kept = orders.fileno()
    if order["keep"] == kept:  # The socket uses this descriptor number.
        kept = os.dup(kept)
        orders.detach()
        orders = socket.socket(fileno=kept)
    if files[0] != order["keep"]:
        os.dup2(files[0], order["keep"])
        os.close(files[0])
    signal.pthread_sigmask(signal.SIG_SETMASK, order["mask"])
    _become(order["command"], order["env"])
    orders.send(b"begun")
    orders.close()
    _run(order["command"])


def _popen(spares: list[Spare]) -> type:
    """Returns a Popen class that uses the spare processes for workers and fork servers."""

    class Popen(subprocess.Popen):
        def __init__(self, args: Any, **kwargs: Any) -> None:
            is_aside = kwargs.get("process_group") == 0 and len(kwargs.get("pass_fds", ())) == 1
            env = kwargs.get("env") or {}
            if is_aside and list(args[:2]) == [sys.executable, "-m"] and may_fork(env, BASE):
                while spares:
                    spare = spares.pop(0)
                    if spare.becomes(args, env=env, keep=kwargs["pass_fds"][0]):
                        self._adopt(args, spare.pid)
                        return
            super().__init__(args, **kwargs)

        def _adopt(self, args: Any, pid: int) -> None:
            import threading

            self.args, self.pid, self.returncode = args, pid, None
            self.stdin = self.stdout = self.stderr = None
            self._child_created, self._input = True, None
            self._communication_started = False
            self._waitpid_lock = threading.Lock()
            self._sigint_wait_secs = 0.25
            self.text_mode = self.pipesize = None

    return Popen


def _become(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Sets the environment and the command line of this process, also as shown in /proc.

    Both are overwritten in place, in the memory that the kernel shows.
    """
    os.environ.clear()
    os.environ.update(env)  # The C library's copies are elsewhere from here on.
    _set_again(env)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end, env_begin, env_end = map(int, fields[45:49])
    _write(begin, end, [os.fsencode(argument) for argument in command])
    _write(env_begin, env_end, [os.fsencode(f"{name}={value}") for name, value in env.items()])


def _set_again(env: Mapping[str, str]) -> None:
    """Does what the start of Python and the import of jax do with SET_AGAIN."""
    num_devices = int(env.get("JAX_NUM_CPU_DEVICES", -1))
    sys.modules["jax"].config.update("jax_num_cpu_devices", num_devices)
    folders = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[1:1] = [folder for folder in folders if folder not in sys.path]
    if any((Path(folder) / "sitecustomize.py").exists() for folder in folders):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _write(begin: int, end: int, arguments: list[bytes]) -> None:
    data = b"".join(argument + b"\0" for argument in arguments)
    room = end - begin
    assert len(data) <= room, f"no room for {len(data)} bytes, only for {room}"
    ctypes.memmove(begin, data.ljust(room, b"\0"), room)


def _run(command: Sequence[str]) -> NoReturn:
    """Runs `python -m MODULE ...` in this process."""
    module = command[2]
    package = f"{module}.__main__"
    sys.modules.pop(package if package in sys.modules else module, None)
    sys.argv[:] = [module, *command[3:]]
    random.seed()
    sys.modules["numpy"].random.seed()
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter itself does.
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exc()
        else:
            sys.excepthook(*sys.exc_info())
        code = 1
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    gc.collect()
    main(socket.socket(fileno=int(sys.argv[1])))
