"""Finds config files: paths as they are given, and the configs of `configs/` by their names.

`builtin/` beside this module is a link to `configs/` in a checkout, and a folder in a wheel.
"""

from __future__ import annotations

from pathlib import Path

from jaxres.config.errors import did_you_mean, one_line, shorten
from jaxres.faults import ConfigError, UsageError
from jaxres.secret_values import redact_words
from jaxres.storage import files

FOLDER = Path(__file__).parent / "builtin"
SUFFIX = ".yaml"


def names() -> list[str]:
    """Returns the names of the built-in configs, sorted."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def base_names() -> list[str]:
    """Returns the names of the built-in configs and of the parts in `configs/gce/`."""
    parts = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.glob(f"gce/*{SUFFIX}"))
    return [*names(), *sorted(map(str, parts))]


def find_base(name: str, folder: Path) -> Path:
    """Returns the path of a base: a file beside the config that names it, else a built-in one.

    Bases may also be those of `configs/gce/`, as gce/a3-megagpu: parts of a config for one shape.
    """
    path, builtin = folder / name, FOLDER / f"{name}{SUFFIX}"
    is_name = name in names() or (name.startswith("gce/") and ".." not in name)
    return builtin if is_name and not files.name_exists(path) and builtin.exists() else path


def find(target: Path) -> Path:
    """Returns the path of a config: `target` if it exists, else the built-in config of that name.

    A file or folder of the working directory comes before a built-in config of its name. A path
    that does not exist is returned as it is, unless it could be meant as a name.

    Raises:
      ConfigError: one word without a suffix, of which there is neither a file nor a config.
      UsageError: an absent file with the file name of a built-in config, such as
        `configs/quickstart.yaml` where there is no checkout.
    """
    if files.name_exists(target):
        return target
    known = names()
    if str(target) in known:
        return FOLDER / f"{target}{SUFFIX}"
    if target.suffix == SUFFIX and target.stem in known:
        raise UsageError(f"{target}: no such file; the built-in config is named {target.stem!r}")
    if len(target.parts) == 1 and not target.suffix:
        text = one_line(shorten(redact_words(str(target))))
        hint = did_you_mean(text, known)
        raise ConfigError(
            f"{text}: no such file or run directory, and no built-in config has this name{hint} "
            f"(built-in configs: {', '.join(known)})"
        )
    return target
