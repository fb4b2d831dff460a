"""What an export takes over from the folder from which the run's weights came.

These settings change no number that the trainer computes, so a run does not keep them. Programs
that serve a model read them: the longest context, the tokens at which a text ends, chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxres.config import huggingface, huggingface_export
from jaxres.config.schema.run_config import RunConfig
from jaxres.config.schema.training import FromSafetensors
from jaxres.faults import ConfigError
from jaxres.storage import files, foreign_json
from jaxres.storage.path import normalized

LONGEST, END = "max_position_embeddings", "eos_token_id"
TOKENS = ("bos_token_id", "pad_token_id")
BESIDE = ("generation_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True)
class Origin:
    """Settings and files for an export."""

    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of config.json that replace the run's."""
    beside: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Name -> content of further files."""
    note: str = ""
    """What is taken, or why nothing is; empty: the run began with weights of its own."""


def find(config: RunConfig, exported: Mapping[str, Any]) -> Origin:
    """Returns the settings and files that an export with this config.json takes over."""
    start = config.init_from
    if not isinstance(start, FromSafetensors):
        return Origin()
    place = normalized(start.path)
    folder = files.folder_of(place)
    path = folder / "config.json"
    data = files.read(path)
    if data is None:
        return Origin(
            note=f"{path} is not here: {LONGEST} is data.seq_len={config.data.seq_len}, and "
            f"further tokens at which a text ends, and {', '.join(BESIDE)}, are unknown"
        )
    try:
        given = huggingface.of_text(dict(foreign_json.loads(data)))
        is_same = _is_same(given, exported, config.data.seq_len)
    except (ValueError, TypeError, ConfigError) as error:
        return Origin(note=f"{path}: {error}; nothing is taken over from it")
    if not is_same:
        return Origin(note=f"{path} is of another model now; nothing is taken over from it")
    fields = {key: given[key] for key in (LONGEST, *TOKENS) if key in given and key in exported}
    ends = given.get(END)
    beside = dict[str, bytes]()
    if exported[END] is None or exported[END] in (ends if isinstance(ends, list) else [ends]):
        fields |= {END: ends} if END in given else {}
        found = {name: files.read(folder / name) for name in BESIDE}
        beside = {name: content for name, content in found.items() if content is not None}
    taken = ", ".join([*(f"{key}={json.dumps(value)}" for key, value in fields.items()), *beside])
    return Origin(fields, beside, f"taken over from {folder}: {taken or 'nothing'}")


def _is_same(given: Mapping[str, Any], exported: Mapping[str, Any], seq_len: int) -> bool:
    """Returns whether two config.json describe the same function."""
    one, two = (huggingface.model_of(fields)[0] for fields in (given, exported))
    return huggingface_export.function(one, seq_len=seq_len) == huggingface_export.function(
        two, seq_len=seq_len
    )
