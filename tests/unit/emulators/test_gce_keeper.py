"""The keeper of emulated VMs finds and kills every process, also one that is only beginning."""

from __future__ import annotations

import os
import subprocess

from jaxres_emulators.gce.vms import keeper
from tests.waiting import SURE_SECONDS

MARK = f"KEEPER_TEST_{os.getpid()}=yes"
BEGINS_SLOWLY = f"sleep 0.3; exec -c /usr/bin/env {MARK} sleep 1000"
"""It has no environment for 0.3 s, as if a busy machine kept it in the middle of its exec."""


def test_a_process_that_gets_its_environment_late_is_found_and_killed() -> None:
    with subprocess.Popen(["/bin/bash", "-c", BEGINS_SLOWLY], env={}) as process:
        try:
            keeper.kill(MARK)
            assert process.wait(timeout=SURE_SECONDS) < 0
            assert keeper.marked(MARK) == []
        finally:
            process.kill()
