"""The Compute API as the launcher needs it: lists, creations, deletions, and what became of them.

Every call has a time limit and is made once; what the service does not answer is `ServiceSilent`,
and the next cycle asks again. Operations are looked at here, never by the client's own futures:
those poll another address, and take a failed operation for a good one (facts: google-cloud-compute
1.56, `extended_operation`).

What an error of the Compute API means. Pure.

The same cause comes as an answer's reason or as the code of a failed operation, and a failed
bulkInsert puts VM_MIN_COUNT_NOT_REACHED before it; so the whole set of words counts.
"""

from __future__ import annotations

import functools
import itertools
import re
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxres.config.schema_gce import FlexStartRung, GceSection
from jaxres.faults import ConfigError
from jaxres.launch.desired_state import Creation, Vm
from jaxres.launch.instance_spec import Machine
from jaxres.launch.observed_state import EVENTS, Observed, Refused

if TYPE_CHECKING:
    from google.cloud import compute_v1


from collections.abc import Iterable

from jaxres.launch.capacity_options import Trouble

TIMEOUT_SECONDS = 15.0
T = TypeVar("T")
RUN_LABEL = "jaxres-run"
UNREACHABLE = "UNREACHABLE"
MOST_EVENTS = 500
"""Events of a zone that are looked at, newest first; a page."""


class ServiceSilent(Exception):
    """The service has not answered, or not well; the same call may go well later."""


class Compute:
    """Calls of one project."""

    def __init__(self, gce: GceSection, *, endpoint: str | None) -> None:
        """Connects to nothing yet.

        Raises:
          ConfigError: a package is missing, or there are no credentials.
        """
        self._gce, self.project, self._endpoint = gce, gce.project, endpoint
        self._clients: dict[str, Any] = {}
        self._no_notice = False
        self._tell: Callable[[str], None] = lambda _: None
        self.client("InstancesClient")

    def told_by(self, tell: Callable[[str], None]) -> None:
        """Has a person told what the API did not take."""
        self._tell = tell

    def client(self, kind: str) -> Any:
        """Returns the client of a kind; anonymous where another address is given."""
        if kind not in self._clients:
            self._clients[kind] = getattr(_library(), kind)(**_words(self._endpoint))
        return self._clients[kind]

    def list(self, run: str) -> dict[str, Observed]:
        """Returns the VMs of a run, in all zones."""
        compute = _library()
        request = compute.AggregatedListInstancesRequest(
            project=self.project,
            filter=f"labels.{RUN_LABEL}={run}",
        )
        client = self.client("InstancesClient")

        def ask() -> dict[str, Observed]:
            pages = client.aggregated_list(request=request, retry=None, timeout=TIMEOUT_SECONDS)
            found = {}
            for zone, scoped in pages:
                if scoped.warning.code == UNREACHABLE:  # What is there may still be there.
                    raise ServiceSilent(f"{zone}: {scoped.warning.message}")
                found |= {vm.name: _observed(vm) for vm in scoped.instances}
            return found

        return self._listed(ask)

    def events(self, zone: str) -> dict[int, str]:
        """Returns what the service itself has done last to VMs of a zone: by id, a key of EVENTS.

        A VM whose host has failed may be listed as running for an hour after it.
        """
        request = _library().ListZoneOperationsRequest(
            project=self.project,
            zone=zone,
            filter=" OR ".join(f'(operationType = "{kind}")' for kind in EVENTS),
            order_by="creationTimestamp desc",
            max_results=MOST_EVENTS,
        )
        client = self.client("ZoneOperationsClient")

        def ask() -> dict[int, str]:
            operations = client.list(request=request, retry=None, timeout=TIMEOUT_SECONDS)
            newest = list(itertools.islice(operations, MOST_EVENTS))
            return {op.target_id: op.operation_type for op in newest[::-1]}

        return self._listed(ask)

    def exists(self, name: str, zone: str) -> bool:
        """Says whether the service knows a VM, asked for by name: unlike a list never late."""
        from google.api_core.exceptions import NotFound

        client = self.client("InstancesClient")
        words = {"project": self.project, "zone": zone, "instance": name}
        try:
            self._sure(lambda: client.get(**words, retry=None, timeout=TIMEOUT_SECONDS))
        except NotFound:
            return False
        return True

    def create(self, creation: Creation, vms: Sequence[Vm], machine: Machine) -> str | Refused:
        """Asks for VMs, all or none; returns the operation's name.

        Raises:
          ServiceSilent: nobody knows whether it was heard; the same request may be made again.
        """
        from google.api_core.exceptions import GoogleAPICallError

        try:
            return self._create(creation, vms[0].zone, machine.without_notice(self._no_notice))
        except GoogleAPICallError as error:
            if not self._no_notice and is_about_notice(str(error)):
                self._no_notice = True
                self._tell(
                    "the API refuses the notice of preemption of 120 s: going on without "
                    "(30 s of shutdown are left)"
                )
                again = str(uuid.uuid5(uuid.UUID(creation.request_id), "without notice"))
                return self.create(Creation(creation.names, again), vms, machine)
            return refused(error)

    def _create(self, creation: Creation, zone: str, machine: Machine) -> str:
        compute = _library()
        client = self.client("InstancesClient")
        names = creation.names
        if isinstance(machine.rung, FlexStartRung):  # A queue takes VMs one by one.
            operations = []
            for name in names:
                request = compute.InsertInstanceRequest(
                    project=self.project,
                    zone=zone,
                    instance_resource=machine.instance(name, zone),
                    request_id=str(uuid.uuid5(uuid.UUID(creation.request_id), name)),
                    source_instance_template=self._gce.template,
                )
                operations.append(self.answer(_call(client.insert_unary, request)).name)
            return ",".join(operations)
        request = compute.BulkInsertInstanceRequest(
            project=self.project,
            zone=zone,
            bulk_insert_instance_resource_resource=machine.bulk(names),
            request_id=creation.request_id,
        )
        return self.answer(_call(client.bulk_insert_unary, request)).name

    def became_of(self, operation: str, zone: str) -> Refused | bool:
        """Returns what has become of a creation: True: done, False: on its way, or why it failed.

        An operation counts as done only if it says so and names no error, whatever else it says.
        """
        answers = [self._became_of(name, zone) for name in operation.split(",")]
        refusals = [answer for answer in answers if isinstance(answer, Refused)]
        if refusals and all(answer is not False for answer in answers):
            return refusals[0]
        return all(answer is True for answer in answers)

    def _became_of(self, name: str, zone: str) -> Refused | bool:
        from google.api_core.exceptions import NotFound

        client = self.client("ZoneOperationsClient")
        words = {"project": self.project, "zone": zone, "operation": name}
        try:
            done = self._sure(lambda: client.get(**words, retry=None, timeout=TIMEOUT_SECONDS))
        except NotFound:
            return False  # Forgotten: `placing.hangs` waits for its end no longer than for others.
        if done.status != _library().Operation.Status.DONE:
            return False
        codes = [error.code for error in done.error.errors]
        messages = [error.message for error in done.error.errors if error.message]
        if codes or done.http_error_status_code:
            message = "; ".join(messages) or done.http_error_message
            return trouble(codes, message, done.http_error_status_code or None)
        return True

    def operation_of(self, creation: Creation, zone: str) -> str | None:
        """Returns the operation of a request that was made before; None: the service knows none."""
        wanted = {creation.request_id} | {
            str(uuid.uuid5(uuid.UUID(creation.request_id), word))
            for word in (*creation.names, "without notice")
        }
        client = self.client("ZoneOperationsClient")
        request = {"project": self.project, "zone": zone}

        def ask() -> list[str]:
            pages = client.list(request=request, retry=None, timeout=TIMEOUT_SECONDS)
            return [op.name for op in pages if op.client_operation_id in wanted]

        return ",".join(self._listed(ask)) or None

    def delete(self, name: str, zone: str) -> None:
        """Asks for the end of a VM; one that is not there is fine."""
        from google.api_core.exceptions import NotFound

        compute = _library()
        client = self.client("InstancesClient")
        request = compute.DeleteInstanceRequest(project=self.project, zone=zone, instance=name)
        try:
            self._sure(_call(client.delete_unary, request))
        except NotFound:
            return

    def output(self, name: str, zone: str) -> str:
        """Returns what a VM has written to its serial port: the startup script's words."""
        client = self.client("InstancesClient")
        words = {"project": self.project, "zone": zone, "instance": name}
        found = self.answer(
            lambda: client.get_serial_port_output(**words, retry=None, timeout=TIMEOUT_SECONDS)
        )
        return str(found.contents)

    def _listed(self, ask: Callable[[], T]) -> T:
        """Returns what a list returns; of a project that is gone nothing is known."""
        from google.api_core.exceptions import NotFound

        try:
            return self._sure(ask)
        except NotFound as error:
            raise ServiceSilent(_brief(error)) from error

    def _sure(self, call: Callable[[], T]) -> T:
        """Returns what a call returns that is always right to make.

        Raises:
          ServiceSilent: also where it is refused: rights that were taken away may be given back,
            and the training goes on meanwhile.
          NotFound: there is no such thing.
        """
        from google.api_core.exceptions import GoogleAPICallError, NotFound

        try:
            return self.answer(call)
        except NotFound:
            raise
        except GoogleAPICallError as error:
            raise ServiceSilent(_brief(error)) from error

    def answer(self, call: Callable[[], T]) -> T:
        """Returns what a call returns.

        Raises:
          ServiceSilent: it may go well the next time.
          ConfigError: there are no credentials.
          GoogleAPICallError: anything else, which is an answer.
        """
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException

        try:
            return call()
        except GoogleAuthError as error:
            raise ConfigError(_NO_CREDENTIALS.format(error)) from error
        except (exceptions.TooManyRequests, exceptions.ServerError) as error:
            raise ServiceSilent(_brief(error)) from error
        except (exceptions.RetryError, RequestException, ConnectionError, TimeoutError) as error:
            raise ServiceSilent(_brief(error)) from error
        except exceptions.Forbidden as error:
            if refused(error).trouble == "rate_limit":
                raise ServiceSilent(_brief(error)) from error
            raise


_NO_CREDENTIALS = (
    "launch.gce: there are no credentials for Google's services ({}). Run `gcloud auth "
    "application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS."
)


def refused(error: Any) -> Refused:
    """Returns what an answer of the API means that is no success."""
    reasons = [d.get("reason", "") for d in error.errors if isinstance(d, dict)]
    return trouble([r for r in reasons if r], error.message or str(error), error.code)


def _call(call: Callable[..., T], request: Any) -> Callable[[], T]:
    return functools.partial(call, request=request, retry=None, timeout=TIMEOUT_SECONDS)


def _brief(error: Exception) -> str:
    text = re.sub(r"\?[^\s:]*", "", str(error).partition("\n")[0])  # Without the query.
    return f"{type(error).__name__}: {text[:200]}"


def _library() -> Any:
    try:
        from google.cloud import compute_v1
    except ImportError as error:
        raise ConfigError(
            f"launch gce: a package is missing ({error.name}). "
            "Install it with: pip install 'jaxres[gce]'"
        ) from error
    return compute_v1


def _words(endpoint: str | None) -> dict[str, Any]:
    """Returns what a client is made with."""
    if endpoint is None:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError

        try:
            credentials, _ = google.auth.default(
                scopes=["https://www.googleapis.com/auth/cloud-platform"]
            )
        except DefaultCredentialsError as error:
            raise ConfigError(_NO_CREDENTIALS.format("none were found")) from error
        return {"credentials": credentials}
    from google.api_core.client_options import ClientOptions
    from google.auth.credentials import AnonymousCredentials

    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    options = ClientOptions(api_endpoint=url)
    return {"credentials": AnonymousCredentials(), "client_options": options}


def _observed(vm: compute_v1.Instance) -> Observed:
    interfaces = vm.network_interfaces
    ip = interfaces[0].network_i_p if interfaces else ""
    return Observed(vm.name, vm.zone.rpartition("/")[2], vm.status, ip, vm.id)


STOCKOUT = {
    "ZONE_RESOURCE_POOL_EXHAUSTED",
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
    "RESOURCE_POOL_EXHAUSTED",
    "STOCKOUT",
    "INSUFFICIENTCAPACITY",
    "RESOURCE_EXHAUSTED",
}
QUOTA = {"QUOTA_EXCEEDED", "QUOTAEXCEEDED", "LIMIT_EXCEEDED"}
RATE = {"RATELIMITEXCEEDED", "USERRATELIMITEXCEEDED", "RATE_LIMIT_EXCEEDED"}
EXISTS = {"RESOURCE_ALREADY_EXISTS", "ALREADYEXISTS"}
FORBIDDEN = {"FORBIDDEN", "PERMISSIONS_ERROR", "ACCESSNOTCONFIGURED", "SERVICE_DISABLED"}
NOT_YET = {"RESOURCENOTREADY", "RESOURCE_NOT_READY"}
"""A 400 that passes: something that the request names is still being made or changed."""
SHORT = "VM_MIN_COUNT_NOT_REACHED"
REMEDIES = {
    "stockout": "the zone has no capacity now",
    "quota": "ask for more quota, or add a rung of another kind or region",
}


def trouble(codes: Iterable[str], message: str, status: int | None) -> Refused:
    """Returns what the reasons of an answer, or the codes of an operation, mean.

    >>> trouble(["VM_MIN_COUNT_NOT_REACHED", "STOCKOUT"], "no VMs", 503).trouble
    'stockout'
    """
    words = {code.upper() for code in codes}
    text = f"{', '.join(sorted(words)) or status}: {message.partition(chr(10))[0]}"[:500]
    return Refused(_kind(words, message.lower(), status), text)


def _kind(words: set[str], message: str, status: int | None) -> Trouble:
    if words & RATE or status == 429:
        return "rate_limit"
    if words & QUOTA:
        return "quota"
    if words & EXISTS or status == 409:
        return "exists"
    if words & FORBIDDEN:
        return "refused"
    if "preempt" in message and "UNSUPPORTED_OPERATION" in words:
        return "preempted"
    if words & STOCKOUT or words == {SHORT}:
        return "stockout"
    if _names_no_machine_type(message):
        return "wrong_zone"
    if words & NOT_YET:
        return "passing"
    if status is not None and 400 <= status < 500 and status != 408:
        return "refused"
    return "passing"


def _names_no_machine_type(message: str) -> bool:
    """Whether the zone does not have the machine type, or is none itself."""
    is_absent = "does not exist in zone" in message or "not found" in message
    of_machine = "machinetype" in message.replace(" ", "").replace("_", "")
    of_zone = "/zones/" in message and message.count("/") < 6
    return is_absent and (of_machine or of_zone)


def is_about_notice(message: str) -> bool:
    """Whether the API refuses the notice of preemption that is asked for."""
    return "preemptionnotice" in message.replace("_", "").lower()
