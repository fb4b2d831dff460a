"""A supervisor of fake workers: `fake_supervisor FOLDER PARTS LIMITS`; writes FOLDER/ended.json."""

import dataclasses
import json
import os
import sys
from pathlib import Path

from jaxres.clock import SystemClock
from jaxres.config.schema import DeadlinesSection
from jaxres.config.schema_operations import HealthSection, PreemptionSection
from jaxres.runlog.paths import RunDir
from jaxres.supervisor import run_dir_watcher, supervisor
from jaxres.supervisor.health_watcher import HealthWatcher
from jaxres.supervisor.preemption_watcher import PreemptionWatcher
from jaxres.supervisor.run_lock import RunLock
from jaxres.telemetry import stdio


def main() -> None:
    folder, parts, limits = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    worker = str(Path(__file__).with_name("fake_worker.py"))
    supervisor.SILENT_SECONDS = 0.4
    run_dir_watcher.POLL_SECONDS, run_dir_watcher.CLOSE_SECONDS = 0.2, 0.2
    run_dir = RunDir(folder / "run")
    words = json.loads(os.environ.get("PREEMPTION", "{}"))
    section, clock = PreemptionSection(**words), SystemClock()
    health = HealthSection(**json.loads(os.environ["HEALTH"])) if "HEALTH" in os.environ else None
    with (
        PreemptionWatcher(section, env=os.environ, clock=clock, product="") as watcher,
        HealthWatcher(health, folder, env=os.environ, clock=clock) as health_watcher,
        RunLock(run_dir, clock=clock) as owner,
    ):
        ended = supervisor.supervise(
            {
                host: [
                    *(sys.executable, "-I", "-S", worker),
                    *(str(folder), str(host), str(len(parts)), json.dumps(part)),
                ]
                for host, part in enumerate(parts)
            },
            run_dir=run_dir,
            attempt=1,
            last_seq=1,
            limits=DeadlinesSection(**limits),
            run_lock=owner,
            clock=clock,
            env=os.environ,
            num_hosts=len(parts),
            preemption_watcher=watcher,
            health_watcher=health_watcher,
        )
    (folder / "ended.json").write_text(json.dumps(dataclasses.asdict(ended)))
    stdio.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
