"""A small config of a job on VMs."""

from __future__ import annotations

import functools
import json
from typing import Any

from jaxres import config as configs
from jaxres.config import RunConfig
from tests.promises.trainer import TINY

OPTION = {
    "kind": "spot",
    "zones": ["us-central1-a", "us-central1-b"],
    "machine_type": "a2-highgpu-1g",
    "dollars_per_hour": 1.5,
}
IMAGE = "projects/debian-cloud/global/images/family/debian-12"


@functools.cache
def _tiny() -> str:
    return configs.load(TINY).config.model_dump_json()


def config(*, launch: dict[str, Any] | None = None, **gce: Any) -> RunConfig:
    """Returns the config of TINY on two VMs; `gce` and `launch` are further fields."""
    section = {"project": "p", "num_hosts": 2, "capacity_options": [OPTION], "image": IMAGE, **gce}
    fields = json.loads(_tiny())
    fields["launch"] |= {**(launch or {}), "gce": section}
    return RunConfig.model_validate_json(json.dumps(fields))
