"""Reads resources of a project that a config names; each is read once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.launch.gce.api.compute import (
    TIMEOUT_SECONDS,
    ApiUnavailable,
    Compute,
    NoCredentials,
    create_failed,
)


class ReadDenied(Exception):
    """The account may not read a resource; the message has the permission that it lacks."""


@dataclass
class ResourceReader:
    """Reads resources of a project with the retries of a command that has created nothing yet."""

    compute: Compute
    _found: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def get(self, kind: str, method: str = "get", **arguments: Any) -> Any | None:
        """Returns a resource; None: there is none. `project` may be another one.

        Raises:
          ReadDenied: the call is not allowed.
          ConfigError: there are no credentials, or the API is not enabled.
          StorageUnavailable: the service has not answered for RETRY_SECONDS.
        """
        return self._read(kind, method, arguments, lambda found: found)

    def list(self, kind: str, **arguments: Any) -> list[Any] | None:
        """Returns all resources of a kind in a zone or region; raises as `get` does."""
        return self._read(kind, "list", arguments, lambda found: [*found])

    def _read(
        self, kind: str, method: str, given: dict[str, Any], convert: Callable[[Any], Any]
    ) -> Any | None:
        arguments = {"project": self.compute.project, **given}
        key = (kind, method, *sorted(arguments.items()))
        if key not in self._found:
            self._found[key] = self._ask(kind, method, arguments, convert)
        return self._found[key]

    def _ask(
        self, kind: str, method: str, arguments: dict[str, Any], convert: Callable[[Any], Any]
    ) -> Any | None:
        from google.api_core.exceptions import Forbidden, NotFound

        call = getattr(self.compute.client(kind), method)

        def ask() -> Any:
            return self.compute.call(
                lambda: convert(call(**arguments, retry=None, timeout=TIMEOUT_SECONDS))
            )

        try:
            return self.compute.with_retries(ask)
        except NotFound:
            return None
        except Forbidden as error:
            message = create_failed(error).message
            if "has not been used" in str(error) or "accessNotConfigured" in str(error.errors):
                raise ConfigError(_not_enabled(arguments["project"], message)) from error
            raise ReadDenied(_permission(message)) from error
        except NoCredentials as error:
            raise ConfigError(str(error)) from error
        except ApiUnavailable as error:
            raise StorageUnavailable(
                f"the Compute API does not answer ({error}); nothing was created, rerun the same "
                "command"
            ) from error


def _permission(message: str) -> str:
    """Returns the permission that an error message names, or the message.

    >>> _permission("FORBIDDEN: Required 'compute.zones.get' permission for 'projects/p'")
    'this account lacks compute.zones.get'
    """
    found = re.search(r"'(compute\.[A-Za-z.]+)'", message)
    return f"this account lacks {found[1]}" if found else message


def _not_enabled(project: str, message: str) -> str:
    return (
        f"launch.gce.project={project}: the Compute Engine API is not enabled there. Enable "
        f"it: gcloud services enable compute.googleapis.com --project {project} ({message})"
    )
