"""Schema of a program: a command that jaxres runs in place of its own trainer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from jaxres.config.schema.base import LocalPath, Section, form, free

Word = Annotated[str, form(r"[^\x00]+", "text that is not empty")]
"""A word of a command line."""
VariableName = Annotated[str, form(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable, as HF_HOME")]
Value = Annotated[str, form(r"[^\x00]*", "text")]
Sha256 = Annotated[str, form(r"[0-9a-f]{64}", "a SHA-256 digest, 64 hexadecimal digits")]

OWN_VARIABLES = (
    *("JAXRES_RUN_DIR", "JAXRES_ATTEMPT", "JAXRES_ATTEMPT_NUMBER", "JAXRES_HOST"),
    *("JAXRES_NUM_HOSTS", "JAXRES_STATUS_FD", "JAXRES_STOP_SECONDS", "JAX_COORDINATOR_ADDRESS"),
)
"""Variables that jaxres gives to a program; JAXRES_ATTEMPT marks the processes of an attempt."""
TRAINER_KEYS = (
    *("run.seed", "run.guarantee", "run.determinism", "data", "model", "init_from", "lora"),
    *("optimizer", "train", "mesh", "guards", "evaluation", "hooks", "compilation"),
    *("telemetry.tensorboard", "telemetry.sample_prompt", "telemetry.sample_tokens"),
)
"""Keys that only the trainer reads; a config with a program has none of them."""
UNUSED_SECTIONS: dict[str, Any] = {
    "data": {"source": {"kind": "custom", "target": "program:unused"}},
    "train": {"steps": 2**31 - 1},
}
"""Values of the sections without a default in the memory of a process; no reader of a config with a
program uses them, and no number of steps reaches this one."""


class ProgramSection(Section):
    """A command that runs in place of the trainer, and the files that make up the run."""

    command: tuple[Word, ...]
    """The program and its arguments, as in [python, train.py, --width, "512"]."""
    files: tuple[LocalPath, ...] = ()
    """Files whose content belongs to the run; relative paths start at program.cwd.

    A run is not continued with another content (78)."""
    files_sha256: dict[str, Sha256] = Field({})
    """Digest of each of the files. jaxres computes it when it reads the config, and records it."""
    env: dict[VariableName, Value] = free({})
    """Variables that are added to the program's environment."""
    cwd: LocalPath = Field(Path(), json_schema_extra={"free": True, "content_path": True})
    """Working directory of the program."""


def trainer_keys(given: Iterable[str]) -> list[str]:
    """Returns the keys that only the trainer reads, of dotted ones.

    >>> trainer_keys(["run.dir", "train", "train.steps", "run.seed"])
    ['train', 'run.seed']
    """
    return [key for key in given if key in TRAINER_KEYS]


def without_trainer_keys(data: dict[str, Any]) -> dict[str, Any]:
    """Returns a dumped config without the keys that only the trainer reads."""
    kept: dict[str, Any] = {}
    for name, section in data.items():
        if name in TRAINER_KEYS:
            continue
        is_section = isinstance(section, dict)
        kept[name] = (
            {key: value for key, value in section.items() if f"{name}.{key}" not in TRAINER_KEYS}
            if is_section
            else section
        )
    return kept
