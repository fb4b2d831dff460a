"""Fork server: a forked worker is like a spawned one; if a fork fails, no second worker runs."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

SURE_SECONDS = 5.0
ROOT = Path(__file__).parents[3]


def supervisor(folder, code):
    """Runs code in a process that has a fork server; returns the JSON that the code prints."""
    given = f"""
        import json, os, select, signal, sys, time
        from pathlib import Path
        from jaxres.clock import SystemClock
        from jaxres.runlog.paths import RunDir
        from jaxres.supervisor import processes
        from jaxres.supervisor.forkserver_client import ForkServer

        processes.become_subreaper()
        events = []
        env = dict(os.environ) | {{processes.TAG_VARIABLE: "a.1.2", "OPENBLAS_NUM_THREADS": "1"}}
        other = env | {{processes.TAG_VARIABLE: "b.1.2"}}
        command = [sys.executable, "-m", "jaxres.train.worker", {str(folder)!r}]
        command += ["--attempt", "1", "--parent", str(os.getpid()), "--host", "3"]
        beats, beat = os.pipe()
        run_dir = RunDir(Path({str(folder)!r}))
        fork_server = ForkServer(run_dir, emit=events.append, clock=SystemClock())

        def words(pid):
            return Path(f"/proc/{{pid}}/cmdline").read_bytes().rstrip(b"\\0").split(b"\\0")

        def fork(command=command, env=other):
            return fork_server.fork(command, env=env, status_fd=beat)

        def ready():
            until = time.monotonic() + 100
            while not events:
                fork_server.ensure_started(env)
                assert time.monotonic() < until
                time.sleep(0.01)
            return events.pop().pid
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(given) + textwrap.dedent(code)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_a_fork_is_like_a_spawned_worker_and_the_server_has_no_threads_or_files(
    tmp_path,
):
    """OpenBLAS is limited to one thread here; its threads would be allowed (see forkserver.py)."""
    reported = supervisor(
        tmp_path,
        """
        assert fork() is None, "there is none yet"
        pid = ready()
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        threads, files = (len(os.listdir(f"/proc/{pid}/{name}")) for name in ("task", "fd"))
        worker = fork()
        os.kill(worker.pid, signal.SIGSTOP)
        environ = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\\0")
        parent = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])
        print(json.dumps({
            "threads": threads, "files": files,
            "names": [name, Path(f"/proc/{worker.pid}/comm").read_text().strip()],
            "words": [word.decode() for word in words(worker.pid)],
            "marks": [entry.decode() for entry in environ if entry.startswith(b"JAXRES_ATTEMPT")],
            "own": os.getpgid(worker.pid) == worker.pid, "child": parent == os.getpid(),
            "runs": worker.poll() is None,
        }))
        worker.send_signal(signal.SIGKILL)
        assert worker.wait(timeout=60) == -signal.SIGKILL
        """,
    )
    assert (reported["threads"], reported["files"]) == (1, 4)
    assert reported["names"] == ["jaxres-fork", "jaxres-host003"]
    assert str(tmp_path) in reported["words"], "a process of this run, for ps and pkill"
    assert any(word.startswith("jaxres.train.") for word in reported["words"])
    assert reported["marks"] == ["JAXRES_ATTEMPT=a.1.2"], "no later supervisor would find it"
    assert reported["own"]
    assert reported["child"]
    assert reported["runs"]


@pytest.mark.slow
def test_a_worker_that_cannot_be_forked_is_refused_with_the_reason(tmp_path):
    reported = supervisor(
        tmp_path,
        """
        ready()
        assert fork(env=other | {"XLA_FLAGS": "--another"}) is None
        assert fork([*command, "--unknown"]) is None
        worker = fork()
        assert worker is not None, "none of these is its end"
        worker.wait(timeout=60)
        os.kill(*fork_server.pids, signal.SIGKILL)
        assert fork() is None
        print(json.dumps([event.message for event in events]))
        """,
    )
    assert "environment has changed" in reported[0]
    assert "the forked process has exited" in reported[1]
    assert len(reported) == 3


@pytest.mark.slow
def test_a_fork_server_that_does_not_answer_is_killed_and_forks_no_worker_later(tmp_path):
    reported = supervisor(
        tmp_path,
        """
        pid = ready()
        os.kill(pid, signal.SIGSTOP)
        assert fork() is None
        gone = not Path(f"/proc/{pid}").exists()
        time.sleep(0.2)
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        print(json.dumps([gone, children, events[0].message]))
        """,
    )
    assert reported[:2] == [True, []]
    assert "not answered for" in reported[2]


@pytest.mark.slow
def test_the_fork_server_dies_with_its_supervisor(tmp_path):
    pid = supervisor(tmp_path, "print(ready(), flush=True); os._exit(0)")
    until = time.monotonic() + SURE_SECONDS
    while any(f"{pid}" == entry.name for entry in Path("/proc").iterdir()):
        assert time.monotonic() < until, "it outlives its supervisor"
        time.sleep(0.01)
