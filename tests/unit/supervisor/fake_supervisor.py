"""A supervisor of fake workers: `fake_supervisor FOLDER PARTS LIMITS`; writes FOLDER/ended.json.

No limit that the test has not set ends anything. A test lets time pass at once (FOLDER/passed),
as it passes for a process that runs, or for one that was suspended ("suspended" in LIMITS).
FOLDER/seen-HOST has the step and the phase that the supervisor knows, FOLDER/ticked the time that
had passed when it last looked for hosts that hang. While FOLDER/silent is there, storage does not
answer who reads the next record.
"""

import dataclasses
import functools
import json
import math
import os
import signal
import sys
from pathlib import Path

from jaxres.clock import Awake, SystemClock
from jaxres.config.schema.hardware import HealthSection
from jaxres.config.schema.supervision import DeadlinesSection, PreemptionSection
from jaxres.runlog.paths import RunDir
from jaxres.storage import local_store
from jaxres.supervisor import run_dir_watcher, supervisor
from jaxres.supervisor.attempt import AttemptSpec, Services
from jaxres.supervisor.health.health_watcher import HealthWatcher
from jaxres.supervisor.preemption.watcher import PreemptionWatcher
from jaxres.supervisor.process import watchdog
from jaxres.supervisor.run_lock import RunLock
from jaxres.telemetry import stdio
from tests.hanging import waiting_opener
from tests.waiting import SURE_SECONDS, wait_until


class PassingClock(SystemClock):
    """The clock of this machine, and the time that a test lets pass at once."""

    def __init__(self, folder: Path) -> None:
        object.__setattr__(self, "_file", folder / "passed")

    def passed(self) -> float:
        return float(self._file.read_text()) if self._file.exists() else 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.passed()


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def tell_what_is_known(folder: Path, clock: PassingClock) -> None:
    """Writes files for the test: what the supervisor has read, and when it has looked for hangs."""
    read_status, tick, known = supervisor._read_status, supervisor._tick, {}

    def reads(running, worker, *, now):
        read_status(running, worker, now=now)
        news = f"{worker.progress.step} {worker.progress.phase}"
        if known.get(worker.host) != news:
            known[worker.host] = news
            write(folder / f"seen-{worker.host}", news)

    def ticks(running, watch):
        passed = clock.passed()
        if passed != known.get("passed", 0.0):
            running.ticked_at = -math.inf
        if (ended := tick(running, watch)) is None and passed != known.get("passed", 0.0):
            known["passed"] = passed
            write(folder / "ticked", str(passed))
        return ended

    supervisor._read_status, supervisor._tick = reads, ticks


def wait_for_stacks(folder: Path) -> None:
    """A worker that runs notes that its stacks are asked for, however slow the machine is."""
    wait_for = supervisor.wait_for

    def waits(workers, *, seconds, clock):
        wait_for(workers, seconds=seconds, clock=clock)
        for worker in workers:
            noted = folder / f"signal-{int(signal.SIGUSR1)}-{worker.host}"
            stat = Path(f"/proc/{worker.process.pid}/stat")
            wait_until(
                lambda noted=noted, stat=stat: (
                    noted.exists()
                    or not stat.exists()
                    or stat.read_text().rpartition(")")[2].split()[0] in "tTZX"
                )
            )

    supervisor.wait_for = waits


def main() -> None:
    folder, parts, limits = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    worker = str(Path(__file__).with_name("fake_worker.py"))
    clock = PassingClock(folder)
    tell_what_is_known(folder, clock)
    wait_for_stacks(folder)
    if not limits.pop("suspended", False):
        supervisor.Awake = functools.partial(Awake, beyond_seconds=math.inf)
    sure = dict.fromkeys(DeadlinesSection.model_fields, 100 * SURE_SECONDS)
    watchdog.LEAVE_SECONDS = supervisor.LEAVE_SECONDS = 100 * SURE_SECONDS
    supervisor.SILENT_SECONDS = 0.4
    run_dir_watcher.POLL_SECONDS, run_dir_watcher.CLOSE_SECONDS = 0.2, 0.2
    run_dir = RunDir(folder / "run")
    record = run_dir.log / "00000002.json"
    local_store.open_file = waiting_opener(record, while_there=folder / "silent")
    words = json.loads(os.environ.get("PREEMPTION", "{}"))
    section = PreemptionSection(**words)
    health = HealthSection(**json.loads(os.environ["HEALTH"])) if "HEALTH" in os.environ else None
    with (
        PreemptionWatcher(section, env=os.environ, clock=clock, product="") as watcher,
        HealthWatcher(health, folder, env=os.environ, clock=clock) as health_watcher,
        RunLock(run_dir, clock=clock) as owner,
    ):
        commands = {
            host: [
                *(sys.executable, "-I", "-S", worker),
                *(str(folder), str(host), str(len(parts)), json.dumps(part)),
            ]
            for host, part in enumerate(parts)
        }
        spec = AttemptSpec(
            run_dir=run_dir,
            number=1,
            last_seq=1,
            commands=commands,
            env=os.environ,
            num_hosts=len(parts),
            limits=DeadlinesSection(**(sure | limits)),
        )
        services = Services(
            clock=clock,
            run_lock=owner,
            preemption_watcher=watcher,
            health_watcher=health_watcher,
        )
        ended = supervisor.supervise(spec, services)
    (folder / "ended.json").write_text(json.dumps(dataclasses.asdict(ended)))
    stdio.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
