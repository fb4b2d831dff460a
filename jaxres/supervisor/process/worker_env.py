"""Environment of the processes that compute: threads, memory, key and tag, and no secrets."""

from __future__ import annotations

from collections.abc import Mapping

from jaxres.cluster import coordination_tls, program_transfer
from jaxres.cluster.authentication import Secret
from jaxres.config import RunConfig
from jaxres.host import processes
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim
from jaxres.telemetry import alert_sender

WORKER_VARIABLES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Variables of a worker, unless they are set: malloc asks for transparent huge pages, without which
the page faults of fresh memory take most of the time of a warm restore. (glibc manual, 39.2)"""


def thread_variables(claim: Claim) -> dict[str, str]:
    """Returns the variable of XLA's CPU thread count: it changes bits, so all attempts use one."""
    return {"NPROC": str(claim.threads)}


def worker_env(
    env: Mapping[str, str],
    config: RunConfig,
    run_dir: RunDir,
    claim: Claim,
    *,
    secret: Secret | None = None,
) -> dict[str, str]:
    """Returns the environment of an attempt's workers: without secrets, with threads and tag.

    A program's has the tag only. `secret`: the run's, of which the attempt's keys follow; None:
    there is none.
    """
    given = env.get(program_transfer.GIVEN, "")
    own = {name: value for name, value in env.items() if name != program_transfer.GIVEN}
    secretless = alert_sender.scrub_secrets(config.alerts, own)
    if config.program is not None:
        return processes.tag_env(secretless, run_dir, claim)
    own = thread_variables(claim)
    own |= coordination_tls.variables(secret, claim.nonce, num_hosts=claim.num_hosts)
    own |= program_transfer.variables(secret, claim.nonce, num_hosts=claim.num_hosts, given=given)
    return processes.tag_env({**WORKER_VARIABLES, **secretless, **own}, run_dir, claim)
