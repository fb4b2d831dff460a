"""Whether the emulated services are installed: a package of their own, which is on no index."""

from __future__ import annotations

import importlib.util

PACKAGE, FOLDER = "jaxres_emulators", "./emulators"
"""Its name for `import`, and its folder in a clone of jaxres."""


def why_not() -> str:
    """Returns why no emulated service can be started; empty: it can."""
    if is_there(PACKAGE):
        return ""
    return (
        f"{PACKAGE} is not installed: run `pip install {FOLDER}` in a clone of jaxres (it is on no "
        "package index)"
    )


def is_there(name: str) -> bool:
    """Returns whether a package is installed."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
