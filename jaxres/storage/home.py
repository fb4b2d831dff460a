"""The home folder of a user that has none, as the unknown user id of a container.

Caches are below it by default. Libraries ask for it too, and fail where there is none.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from jaxres.storage import files

HOME = "HOME"


def ensure(environment: MutableMapping[str, str]) -> None:
    """Sets HOME where it is missing and the system has no entry of this user, or where it is empty.

    It is then a private folder of temporary files: caches in it are lost with the container.

    Raises:
      ConfigError: another account can use that folder.
    """
    given = environment.get(HOME)
    if given:
        return
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        folder = Path(tempfile.gettempdir()) / f"jaxres-home-{os.getuid()}"
        files.make_private_dir(folder)
        environment[HOME] = str(folder)
        return
    if given is not None:  # Empty: `~` would be the root folder.
        environment[HOME] = entry.pw_dir
