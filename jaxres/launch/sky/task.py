"""The task of a run on SkyPilot: resources, setup and the script of each node. Pure.

SkyPilot replaces nodes that are lost, or that an exit code says to leave; on its nodes, jaxres
restarts the training by itself (sky.py). So no fault has two homes.

Sources, SkyPilot 0.14: fields and types from sky/utils/schemas.py (get_task_schema,
get_resources_schema); variables of a node from sky/skylet/constants.py. What follows an exit code
is in sky/jobs/recovery_strategy.py (should_restart_on_failure) and sky/jobs/controller.py: a code
of recover_on_exit_codes, of any node, starts the job again and is not counted; any other failure
uses one of max_restarts_on_errors; nodes that are gone always start it again. As soon as a node
exits with another code than 0, the processes of the other nodes are killed, and their code is 137
(sky/backends/task_codegen.py): 137 must not be in the list.
"""

from __future__ import annotations

import base64
import shlex
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from jaxres.config import RunConfig, dump_yaml, file_mode, yaml
from jaxres.exit_codes import SIGNAL_BASE, RestartRule, exit_row
from jaxres.launch.here_document import here_document
from jaxres.launch.k8s.manifest import CONFIG_FILE, PORT, Consequence, codes_with, consequence
from jaxres.secret_values import PRIVATE
from jaxres.storage.path import RunPath

Task = dict[str, Any]
"""A task, with the field names of its YAML."""
STRATEGY = "EAGER_NEXT_REGION"
"""Deletes all nodes before it creates others; FAILOVER would start the job on the same ones."""
VARIABLE = "JAXRES_CONFIG"
"""Secret of the task with a config that has secrets, in base64; SkyPilot does not show it."""
CANCELLED = SIGNAL_BASE + 9
"""Exit code that SkyPilot gives to the processes that it kills because another node has failed."""


def replaces_nodes(code: int) -> bool:
    """Returns whether SkyPilot starts the job again, on other nodes, after this exit code.

    >>> replaces_nodes(75), replaces_nodes(82), replaces_nodes(80), replaces_nodes(81)
    (True, True, False, False)
    """
    if exit_row(code).restart is RestartRule.WITHOUT_HOST:
        return True
    return consequence(code) is Consequence.RESTART_UNCOUNTED


def ends_node(code: int) -> bool:
    """Returns whether the process of a node ends with this code, rather than trains again."""
    return replaces_nodes(code) or consequence(code) in (Consequence.COMPLETE, Consequence.END)


def recover_on_exit_codes() -> list[int]:
    """Returns the codes after which SkyPilot creates other nodes; ascending."""
    restarted = [*codes_with(Consequence.RESTART), *codes_with(Consequence.RESTART_UNCOUNTED)]
    return sorted(code for code in restarted if replaces_nodes(code))


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options on the place of a run, which its config does not have."""

    name: str
    nodes: int = 1
    accelerators: tuple[str, int] | None = None
    """Name of the GPUs, and how many each node has; None: no GPU."""
    use_spot: bool = False
    disk_gb: int | None = None
    """Size of each node's disk in GB; None: SkyPilot's default."""
    infra: str = ""
    """Cloud, region and zone, as CLOUD/REGION/ZONE; empty: the cheapest."""
    image: str = ""
    """Container image; empty: SkyPilot's image of the cloud."""
    workdir: str = ""
    """Folder that is copied to the nodes; empty: none."""
    setup: tuple[str, ...] = ()
    """Lines of the shell that install jaxres on a new node."""
    python: str
    """The Python in which jaxres is installed, on the nodes."""


def task(config: RunConfig, root: RunPath, options: TaskOptions) -> Task:
    """Returns the task of a run.

    Args:
      config: the resolved config, which is in the script of the nodes; in a secret if it has one.
      root: the run directory, in a bucket.
    """
    resources: Task = {"infra": options.infra} if options.infra else {}
    if options.accelerators:
        resources["accelerators"] = {options.accelerators[0]: options.accelerators[1]}
    resources["use_spot"] = options.use_spot
    if options.disk_gb is not None:
        resources["disk_size"] = options.disk_gb
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    resources["job_recovery"] = {
        "strategy": STRATEGY,
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": recover_on_exit_codes(),
    }
    found: Task = {"name": options.name, "num_nodes": options.nodes, "resources": resources}
    if options.workdir:
        found["workdir"] = options.workdir
    if options.setup:
        found["setup"] = "".join(f"{line}\n" for line in ("set -e", *options.setup))
    text = dump_yaml(config)
    has_secret = file_mode(text) == PRIVATE
    if has_secret:
        found["secrets"] = {VARIABLE: base64.b64encode(text.encode()).decode()}
    found["run"] = _script(None if has_secret else text, root, options)
    return found


def _script(config: str | None, root: RunPath, options: TaskOptions) -> str:
    """Returns the script of each node: it writes the config and starts the node's process.

    A VM that replaces another may have its name, so its boot makes it another host.

    Args:
      config: the resolved config; None: it is in the variable.
      root, options: as for `task`.
    """
    file = f"$HOME/.jaxres/{options.name}/{CONFIG_FILE}"
    if config is None:
        write = f"""(umask 077; printf %s "${VARIABLE}" | base64 -d > "{file}")\nunset {VARIABLE}"""
    else:
        write = here_document(f'cat > "{file}"', config)
    gpus = f" JAXRES_MIN_DEVICES={options.accelerators[1]}" if options.accelerators else ""
    command = shlex.join([options.python, "-m", "jaxres.launch", "sky", "node"])
    platform = "\nexport JAXRES_PLATFORM=gpu" + gpus if options.accelerators else ""
    return f"""\
mkdir -p "$HOME/.jaxres/{options.name}"
{write}
JAXRES_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"
JAXRES_NUM_HOSTS="$SKYPILOT_NUM_NODES"
JAXRES_HOST_ID="$SKYPILOT_NODE_RANK"
JAXRES_INSTANCE="$(cat /proc/sys/kernel/random/boot_id)"
export JAXRES_COORDINATOR JAXRES_NUM_HOSTS JAXRES_HOST_ID JAXRES_INSTANCE{platform}
exec {command} "{file}" {shlex.quote(f"run.dir={root}")}
"""


def to_yaml(found: Task) -> str:
    """Returns the task as YAML, its scripts as blocks of lines that can be read and edited."""
    scripts = {name: found[name] for name in ("setup", "run") if name in found}
    head = yaml.dump({name: value for name, value in found.items() if name not in scripts})
    return head + "".join(f"{name}: |\n{indent(text, '  ')}" for name, text in scripts.items())
