"""Checks of the arguments of `launch k8s`, `sky` and `slurm` that their schedulers refuse.

A manifest that is refused hours later, or that is read as something else, is worse than an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from jaxres.config import RunConfig
from jaxres.engine import mesh_plan
from jaxres.faults import UsageError
from jaxres.storage.path import RunPath, is_remote

NAME = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""A name of Kubernetes (RFC 1123 label)."""
_DOTTED = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
LONG_NAME = rf"(?=.{{1,253}}$){_DOTTED}"
"""A name of Kubernetes with dots (RFC 1123 subdomain)."""
LABEL_NAME = rf"(?=.{{1,63}}$){_DOTTED}"
"""A name that is also the value of a label."""
NODE_LABEL = rf"((?=[^/]{{1,253}}/){_DOTTED}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?"
_FOLDER = "[a-z0-9]+(([.]|_{1,2}|-+)[a-z0-9]+)*"
IMAGE = (
    r"(?=.{1,500}$)([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?/)?"
    rf"{_FOLDER}(/{_FOLDER})*(:\w[\w.-]{{0,127}})?(@[a-z0-9]+:[0-9a-f]{{32,}})?"
)
"""A reference of an image: [HOST[:PORT]/]FOLDER.../NAME[:TAG][@DIGEST] (the OCI's grammar)."""
SIZE = "[1-9][0-9]{0,14}(k|[MGTP]|[KMGTP]i)"
"""A number of bytes as Kubernetes takes it. Without a unit, 64 would be 64 bytes."""
MAX_NODES = 100_000
"""Most pods of an indexed Job that run at a time (Kubernetes, batch validation)."""
MAX_GPUS = 1024
MAX_RESTARTS = 2**31 - 1
MAX_SECONDS = 7 * 24 * 3600
"""A node that waits longer than a week for a pod to end is a typing error."""


def text(flag: str, given: str, pattern: str, expected: str) -> str:
    """Returns the value of a flag; raises UsageError if it does not have the pattern."""
    if re.fullmatch(pattern, given, re.ASCII) is None:
        raise UsageError(f"{flag} {given[:60]!r}: expected {expected}")
    return given


def number(flag: str, given: int, least: int, most: int) -> int:
    """Returns the value of a flag; raises UsageError if it is out of bounds."""
    if not least <= given <= most:
        shown = given if abs(given) < 10**20 else f"{str(given)[:20]}..."
        raise UsageError(f"{flag} {shown}: expected a whole number from {least} to {most}")
    return given


def image(given: str) -> str:
    """Returns the value of --image."""
    return text("--image", given, IMAGE, "the name of an image, such as REGISTRY/jaxres:1")


SYSTEM_FOLDERS = ("/bin", "/dev", "/etc", "/lib", "/proc", "/sbin", "/sys", "/usr")
"""Folders of an image or of the pod that a mount would hide, or could not be in."""


def claim(given: str, taken: Sequence[str]) -> tuple[str, str]:
    """Returns the claim of --claim and where it is mounted.

    Args:
      given: the value of the flag.
      taken: paths where something else is mounted.
    """
    name, colon, path = given.partition(":")
    flag = f"--claim {given!r}"
    if not (colon and re.fullmatch(LONG_NAME, name, re.ASCII) and path.startswith("/")):
        raise UsageError(f"{flag}: expected the claim and its folder, as data:/data")
    if ".." in PurePosixPath(path).parts or not path.isprintable() or ":" in path:
        raise UsageError(f"{flag}: expected a folder without .., colons and control characters")
    path = path.rstrip("/") or "/"
    own = PurePosixPath(path)
    system = [one for one in map(PurePosixPath, SYSTEM_FOLDERS) if one.is_relative_to(own)]
    inside = [one for one in map(PurePosixPath, SYSTEM_FOLDERS) if own.is_relative_to(one)]
    if system or inside or path in taken:
        raise UsageError(f"{flag}: something else is at {path}; give another folder, as data:/data")
    return name, path


def job_name(given: str) -> str:
    """Returns the name of a job; raises UsageError if it is none."""
    expected = "up to 48 lower-case letters, digits and hyphens, the first of them a letter"
    return text("--name", given, "[a-z]([a-z0-9-]{0,46}[a-z0-9])?", expected)


def config_file(target: RunPath) -> Path:
    """Returns the target of a command that needs a config file; raises UsageError for a run."""
    if is_remote(target) or target.is_dir():
        raise UsageError(
            f"{target}: give the config file of the run, with the same overrides; its hosts resume "
            "the run"
        )
    return target


def require_feasible(config: RunConfig, *, nodes: int, gpus_per_node: int) -> None:
    """Raises ConfigError if the config has no mesh for all GPUs; without a number nothing is known.

    The hosts would find it themselves, but only once they are there.
    """
    if gpus_per_node and config.program is None:
        parts = (config.mesh, config.train, config.model)
        mesh_plan.plan(*parts, num_devices=nodes * gpus_per_node, num_hosts=nodes)
