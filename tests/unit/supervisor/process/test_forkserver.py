"""Fork server: a forked worker is like a spawned one; if a fork fails, no second worker runs."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.waiting import SURE_SECONDS, wait_until

ROOT = Path(__file__).parents[4]


def supervisor(folder, code):
    """Runs code in a process that has a fork server; returns the JSON that the code prints."""
    given = f"""
        import json, os, select, signal, sys, time
        from pathlib import Path
        from jaxres.clock import SystemClock
        from jaxres.runlog.paths import RunDir
        from jaxres.supervisor.process import forkserver_client
        from jaxres.host import processes
        from jaxres.supervisor.process.forkserver_client import ForkServer
        from tests.promises.preloaded import Mount
        from tests.waiting import SURE_SECONDS, wait_until

        forkserver_client.FORK_SECONDS = SURE_SECONDS
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

        def fork(command=command, env=None):
            env = env or other
            return fork_server.fork(command, env=env, status_fd=beat, may_wait=lambda: True)

        def ready():
            wait_until(lambda: (fork_server.ensure_started(env), events)[1], "fork server")
            return events.pop().pid
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(given) + textwrap.dedent(code)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.slow
def test_a_fork_is_like_a_spawned_worker_and_the_server_has_no_threads_or_files(
    tmp_path,
):
    """OpenBLAS is limited to one thread here; its threads would be allowed (see forkserver.py)."""
    reported = supervisor(
        tmp_path,
        """
        run_dir.attempt(1).mkdir(parents=True)
        run_dir.log.mkdir()
        log = Mount.over(run_dir.log, built_in=run_dir.root)
        log.flag.touch()  # The worker waits for storage.
        env, other = env | log.env, other | log.env
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
        assert worker.wait(timeout=SURE_SECONDS) == -signal.SIGKILL
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
        worker.wait(timeout=SURE_SECONDS)
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
        forkserver_client.FORK_SECONDS = 1.0
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
def test_the_last_fork_waits_for_the_imports(tmp_path):
    """They last until the supervisor waits for them."""
    (modules := tmp_path / "modules").mkdir()
    hold = f"while not os.path.exists('{tmp_path}/waited'): time.sleep(0.01)"
    real = f"sys.path.remove({str(modules)!r})\ndel sys.modules['pydantic']\nimport pydantic"
    (modules / "pydantic.py").write_text(f"import os, sys, time\n{hold}\n{real}")
    is_forked, notes = supervisor(
        tmp_path,
        f"""
        env["PYTHONPATH"] = other["PYTHONPATH"] = {f"{modules}:{ROOT}"!r}
        fork_server.ensure_started(env)

        def may_wait():
            Path({str(tmp_path / "waited")!r}).touch()
            return True

        worker = fork_server.fork_last(command, env=other, status_fd=beat, may_wait=may_wait)
        if worker is not None:
            worker.send_signal(signal.SIGKILL)
            worker.wait(timeout=SURE_SECONDS)
        print(json.dumps([worker is not None, [getattr(e, "message", "") for e in events]]))
        """,
    )
    assert is_forked, notes


@pytest.mark.slow
@pytest.mark.parametrize("state", ["ready", "imports"])
def test_the_fork_server_dies_with_its_supervisor(tmp_path, state):
    """Also one whose imports hang, as on storage that is away."""
    (modules := tmp_path / "modules").mkdir()
    hangs = f"import time\nopen('{tmp_path}/hangs', 'x').close()\ntime.sleep(100_000)"
    (modules / "pydantic.py").write_text(hangs)
    pid = supervisor(
        tmp_path,
        "print(ready(), flush=True); os._exit(0)"
        if state == "ready"
        else f"""
        env["PYTHONPATH"] = {f"{modules}:{ROOT}"!r}
        fork_server.ensure_started(env)
        while not os.path.exists({str(tmp_path / "hangs")!r}):
            time.sleep(0.01)
        print(*fork_server.pids, flush=True)
        os._exit(0)
        """,
    )
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "end of it with its supervisor")


@pytest.mark.slow
@pytest.mark.parametrize("own", [0, 1], ids=["host 0", "host 1"])
def test_the_other_host_hears_from_a_supervisor_whose_fork_server_still_imports(tmp_path, own):
    """The imports last until the supervisor has looked after the others three times, then fail."""
    (modules := tmp_path / "modules").mkdir()
    hold = f"while not os.path.exists('{tmp_path}/waited'): time.sleep(0.01)"
    (modules / "pydantic.py").write_text(f"import os, sys, time\n{hold}\nsys.exit()")
    heard, code, notes = supervisor(
        tmp_path,
        f"""
        import math, socket
        from jaxres.cluster import peer_connections
        from jaxres.cluster.connection import Connection
        from jaxres.cluster.messages import Heartbeat, JobResult, LeaderHeartbeat
        from jaxres.cluster.peer_connections import PeerLinks
        from jaxres.config.schema.run_config import DeadlinesSection
        from jaxres.supervisor.attempt import AttemptSpec, Services
        from jaxres.supervisor.supervisor import supervise

        peer_connections.HEARTBEAT_SECONDS = 0.0
        own, other, heard = {own}, {1 - own}, []
        clock, (ours, theirs) = SystemClock(), socket.socketpair()
        peers, links = (PeerLinks(clock=clock, silence_seconds=math.inf) for _ in range(2))
        peers.add(other, "other", Connection(ours, None))
        links.add(own, "own", Connection(theirs, None))

        def fork(command, *, may_wait, **words):
            calls = 0

            def counted():
                nonlocal calls
                calls += 1
                answer = may_wait()
                if calls == 3:
                    heard.extend(message for _, message in links.receive())
                    Path({str(tmp_path / "waited")!r}).touch()
                return answer

            return fork_server.fork_last(command, may_wait=counted, **words)

        env["PYTHONPATH"] = {f"{modules}:{ROOT}"!r}
        fork_server.ensure_started(env)
        links.send(JobResult(75, other, "the other host stops", 0), to=own)
        run_dir.attempt(1).mkdir(parents=True)
        commands = {{own: [sys.executable, "-c", "pass"]}}
        spec = AttemptSpec(run_dir, 1, 1, commands, env, 2, DeadlinesSection())
        ended = supervise(spec, Services(clock, peers=peers, fork=fork))
        assert set(heard) <= {{LeaderHeartbeat((0, 0)) if own == 0 else Heartbeat(0, "start")}}
        print(json.dumps([len(heard), ended.code, [event.message for event in events]]))
        """,
    )
    assert heard == 3, "it is silent while it waits"
    assert len(notes) == 1, "the imports have not failed"
    assert "it is not ready yet" in notes[0]
    assert code == (70 if own == 0 else 75), "it has not gone on"


@pytest.mark.slow
def test_a_signal_is_handled_while_the_fork_server_still_imports(tmp_path):
    """The imports would take longer than the test may, and then fail."""
    (modules := tmp_path / "modules").mkdir()
    lasting = f"import sys, time\ntime.sleep({2 * SURE_SECONDS})\nsys.exit()"
    (modules / "pydantic.py").write_text(lasting)
    code, notes = supervisor(
        tmp_path,
        f"""
        import threading
        from jaxres.config.schema.run_config import DeadlinesSection
        from jaxres.host import signals
        from jaxres.supervisor.attempt import AttemptSpec, Services
        from jaxres.supervisor.supervisor import supervise

        signals.block()
        env["PYTHONPATH"] = {f"{modules}:{ROOT}"!r}
        fork_server.ensure_started(env)
        run_dir.attempt(1).mkdir(parents=True)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        commands = {{0: [sys.executable, "-c", "import time; time.sleep(6000)"]}}
        spec = AttemptSpec(run_dir, 1, 1, commands, env, 1, DeadlinesSection())
        ended = supervise(spec, Services(SystemClock(), fork=fork_server.fork_last))
        print(json.dumps([ended.code, [event.message for event in events]]))
        """,
    )
    assert len(notes) == 1
    assert "a signal has arrived while it imports" in notes[0]
    assert code == 75
