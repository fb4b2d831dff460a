"""Compute API calls of the launcher: lists, creations, deletions and their results.

Every call has a time limit and is made once. A call that the service does not answer raises
`ApiUnavailable`; the next cycle repeats it. Operations are polled here, not by the client's own
futures: those poll another address, and treat a failed operation as a success (facts:
google-cloud-compute 1.56, `extended_operation`).

`classify` maps errors of the API to kinds. The same cause comes as the reason of a response or as
the code of a failed operation, and a failed bulkInsert puts VM_MIN_COUNT_NOT_REACHED before it. So
all codes together decide.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jaxres.clock import Clock, SystemClock
from jaxres.config.schema.gce import GceSection
from jaxres.faults import ConfigError
from jaxres.launch.gce.api.aggregated_lists import ListedVms, accept_partial_success, read_pages
from jaxres.launch.gce.state.desired_state import InstanceGroup, PendingCreate, VmSpec
from jaxres.launch.gce.state.observed_state import EVENTS, CreateFailed, VmStatus
from jaxres.launch.gce.vm.instance_spec import PROGRAMS_SECRET, Machine

if TYPE_CHECKING:
    from google.cloud import compute_v1

    from jaxres.launch.gce.api.resize_requests import ResizeRequests


from collections.abc import Iterable

from jaxres.launch.gce.state.capacity_options import CreateErrorKind

TIMEOUT_SECONDS = 15.0
RETRY_SECONDS = 45.0
"""How long a command that has created nothing yet repeats a call that is not answered."""
MAX_PAUSE_SECONDS = 8.0
T = TypeVar("T")
RUN_LABEL, ID_LABEL, CODE_LABEL = "jaxres-run", "jaxres-id", "jaxres-code"
NoticeSupport = Literal["requested", "omitted", "refused"]
"""omitted: the last creation failed by an error that may be about the preemption notice. refused:
a creation without it was accepted after such an error."""
MAX_EVENTS = 500
"""Most operations of a zone that are read, newest first; one page."""


class ApiUnavailable(Exception):
    """The service has not answered or has failed; the same call may succeed later."""


class ApiRefused(ApiUnavailable):
    """The service refuses the call; permissions that were removed may be restored."""


class NoCredentials(ApiUnavailable):
    """The credentials are refused or can't be renewed."""


class Compute:
    """Compute API calls of one project."""

    def __init__(
        self, gce: GceSection, *, endpoint: str | None, clock: Clock | None = None
    ) -> None:
        """Creates a client; sends no request. `clock` is SystemClock if None.

        Raises:
          ConfigError: a package is missing, or there are no credentials.
        """
        from jaxres.launch.gce.api.resize_requests import ResizeRequests

        self._gce, self.project = gce, gce.project
        self.resize_requests: ResizeRequests = ResizeRequests(self, gce, create_failed, classify)
        self._clients: dict[str, Any] = {}
        self.endpoint = None if endpoint is None else _url(endpoint)
        self._options = _client_options(self.endpoint)
        self.credentials: Any = self._options["credentials"]
        self.clock = clock or SystemClock()
        self._notice: NoticeSupport = "requested"
        self._with_notice: set[str] = set()
        """Operations whose VMs were requested with a preemption notice."""
        self._template: Any | None = None
        self._console: Callable[[str], None] = lambda _: None
        self.client("InstancesClient")

    def set_console(self, console: Callable[[str], None]) -> None:
        """Sets the function that prints the API's refusals."""
        self._console = console

    def client(self, kind: str, *, is_of_lists: bool = False) -> Any:
        """Returns the client of a kind; without credentials if an endpoint is given.

        `is_of_lists`: that of lists of all zones, see aggregated_lists.py.
        """
        name = f"{kind} of lists" if is_of_lists else kind
        if name not in self._clients:
            made = getattr(_library(), kind)(**self._options)
            self._clients[name] = accept_partial_success(made) if is_of_lists else made
        return self._clients[name]

    def list(self, run: str) -> ListedVms:
        """Returns the VMs of a run, in all zones that are reachable."""
        key = {"project": self.project, "filter": f"labels.{RUN_LABEL}={run}"}
        found, missing = self.list_zones("InstancesClient", "instances", key)
        listed = sorted(found, key=lambda vm: vm.name)
        items = (item for vm in listed for item in vm.metadata.items)
        programs = next((item.value for item in items if item.key == PROGRAMS_SECRET), "")
        return ListedVms({vm.name: _observed(vm) for vm in found}, missing, programs)

    def list_zones(
        self, kind: str, word: str, key: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, str]]:
        """Returns the items of a field in the lists of all zones, and why zones are missing."""
        call = _call(self.client(kind, is_of_lists=True).aggregated_list, key)
        return self.list_call(lambda: read_pages(call().pages, word))

    def events(self, zone: str) -> dict[int, str]:
        """Returns the newest operation of the service itself (see EVENTS) on VMs of a zone, by id.

        A VM may be listed as running for an hour after its host has failed.
        """
        request = _library().ListZoneOperationsRequest(
            project=self.project,
            zone=zone,
            filter=" OR ".join(f'(operationType = "{kind}")' for kind in EVENTS),
            order_by="creationTimestamp desc",
            max_results=MAX_EVENTS,
        )
        client = self.client("ZoneOperationsClient")

        def ask() -> dict[int, str]:
            operations = client.list(request=request, retry=None, timeout=TIMEOUT_SECONDS)
            newest = list(itertools.islice(operations, MAX_EVENTS))
            return {op.target_id: op.operation_type for op in newest[::-1]}

        return self.list_call(ask)

    def exists(self, name: str, zone: str) -> bool:
        """Returns whether a VM of this name exists; unlike a list, this never lags."""
        return self.status(name, zone) is not None

    def status(self, name: str, zone: str) -> str | None:
        """Returns the status of a VM; None: it does not exist. Unlike a list, this never lags."""
        from google.api_core.exceptions import NotFound

        client = self.client("InstancesClient")
        key = {"project": self.project, "zone": zone, "instance": name}
        try:
            found = self.safe_call(lambda: client.get(**key, retry=None, timeout=TIMEOUT_SECONDS))
        except NotFound:
            return None
        return str(found.status)

    def has_external_ip(self, name: str, zone: str) -> bool:
        """Returns whether a VM has an external address; False also if there is no such VM."""
        from google.api_core.exceptions import NotFound

        client = self.client("InstancesClient")
        key = {"project": self.project, "zone": zone, "instance": name}
        try:
            found = self.safe_call(lambda: client.get(**key, retry=None, timeout=TIMEOUT_SECONDS))
        except NotFound:
            return False
        return any(one.access_configs for one in found.network_interfaces)

    def create(
        self, creation: PendingCreate, vms: Sequence[VmSpec], machine: Machine
    ) -> str | CreateFailed | None:
        """Requests VMs, all or none; returns the operation's name.

        None: the call must be repeated, see ResizeRequests.request.

        Raises:
          ApiUnavailable: the request may or may not have arrived; it may be repeated.
        """
        from google.api_core.exceptions import GoogleAPICallError

        zone = vms[0].zone
        machine = machine.without_notice(self._notice != "requested")
        machine = replace(machine, template_metadata=self._metadata_of_template())
        if machine.option.waits_in_queue and len(vms) > 1:
            return self.resize_requests.request(creation, zone, machine)
        try:
            operation = self._create(creation, zone, machine)
        except GoogleAPICallError as error:
            failed = create_failed(error)
            text = str(error)
            if not (machine.notice_seconds and may_refuse_notice(failed.kind, text, error.code)):
                return failed
            again = str(uuid.uuid5(uuid.UUID(creation.request_id), "without notice"))
            try:
                operation = self._create(
                    PendingCreate(creation.names, again), zone, machine.without_notice(True)
                )
            except GoogleAPICallError as without:  # The notice was not, or not the only, cause.
                second = create_failed(without)
                return failed if second.kind == "refused" else second
            self._omit_notice("refused")
            return operation
        if machine.notice_seconds:
            self._with_notice |= set(operation.split(","))
        return operation

    def _metadata_of_template(self) -> dict[str, str]:
        """Returns the metadata of the template; empty: there is none."""
        found = self.template()
        return {} if found is None else {i.key: i.value for i in found.properties.metadata.items}

    def template(self) -> Any | None:
        """Returns the instance template of the config, read once; None: there is none.

        Raises:
          ApiUnavailable: the service does not answer.
        """
        from google.api_core.exceptions import NotFound

        if self._template is None and self._gce.template is not None:
            client = self.client("InstanceTemplatesClient")
            name = self._gce.template.rpartition("/")[2]
            key = {"project": self.project, "instance_template": name}
            with contextlib.suppress(NotFound):  # The creation is refused with the reason.
                self._template = self.safe_call(
                    lambda: client.get(**key, retry=None, timeout=TIMEOUT_SECONDS)
                )
        return self._template

    def _omit_notice(self, support: NoticeSupport) -> None:
        self._notice = support
        self._console(
            "the API refuses the preemption notice of 120 s: continuing without it (30 s of "
            "shutdown are left)"
        )

    def _create(self, creation: PendingCreate, zone: str, machine: Machine) -> str:
        compute = _library()
        client = self.client("InstancesClient")
        names = creation.names
        if machine.option.waits_in_queue:
            (name,) = names
            request = compute.InsertInstanceRequest(
                project=self.project,
                zone=zone,
                instance_resource=machine.instance(name, zone),
                request_id=str(uuid.uuid5(uuid.UUID(creation.request_id), name)),
                source_instance_template=self._gce.template,
            )
            return self.call(_call(client.insert_unary, request)).name
        request = compute.BulkInsertInstanceRequest(
            project=self.project,
            zone=zone,
            bulk_insert_instance_resource_resource=machine.bulk(names),
            request_id=creation.request_id,
        )
        return self.call(_call(client.bulk_insert_unary, request)).name

    def create_result(self, operation: str, zone: str) -> CreateFailed | bool:
        """Returns the result of a creation: True: done, False: in progress, or why it failed.

        An operation is done only if its status is DONE and it has no error.
        """
        if (group := self.resize_requests.group_in(operation)) is not None:
            return self.resize_requests.result(group, zone)
        answers = [self.operation_result(name, zone) for name in operation.split(",")]
        refusals = [answer for answer in answers if isinstance(answer, CreateFailed)]
        if refusals and all(answer is not False for answer in answers):
            return refusals[0]
        return all(answer is True for answer in answers)

    def operation_result(self, name: str, zone: str | None) -> CreateFailed | bool:
        """Returns the result of one operation, as `create_result` does; None: a global one."""
        from google.api_core.exceptions import NotFound

        client = self.client("GlobalOperationsClient" if zone is None else "ZoneOperationsClient")
        key = {"project": self.project, "operation": name} | (
            {} if zone is None else {"zone": zone}
        )
        try:
            done = self.safe_call(lambda: client.get(**key, retry=None, timeout=TIMEOUT_SECONDS))
        except NotFound:
            return False  # The service has deleted it: `create_timed_out` limits the wait.
        if done.status != _library().Operation.Status.DONE:
            return False
        codes = [error.code for error in done.error.errors]
        messages = [error.message for error in done.error.errors if error.message]
        if codes or done.http_error_status_code:
            message = "; ".join(messages) or done.http_error_message
            status = done.http_error_status_code or None
            return self._failed(name, classify(codes, message, status), message, status)
        if self._notice == "omitted" and name not in self._with_notice:
            self._notice = "refused"
        return True

    def _failed(
        self, operation: str, failed: CreateFailed, message: str, status: int | None
    ) -> CreateFailed:
        """Returns the failure of an operation; the next one omits a notice that may be the cause.

        If that one is refused as well, the notice was not the cause.
        """
        has_notice = operation in self._with_notice
        if self._notice == "requested" and is_about_notice(message):
            has_notice = True  # Of a previous launcher.
        if has_notice and may_refuse_notice(failed.kind, message, status):
            if self._notice == "requested":
                self._omit_notice("omitted")
            return replace(failed, kind="notice_refused")
        if not has_notice and self._notice == "omitted" and failed.kind == "refused":
            self._notice = "requested"
        return failed

    def find_operation(self, creation: PendingCreate, zone: str) -> str | None:
        """Returns the operation of an earlier request; None: there is none."""
        if (found := self.resize_requests.find(creation, zone)) is not None:
            return found
        wanted = {creation.request_id} | {
            str(uuid.uuid5(uuid.UUID(creation.request_id), name))
            for name in (*creation.names, "without notice")
        }
        client = self.client("ZoneOperationsClient")
        request = {"project": self.project, "zone": zone}

        def ask() -> list[str]:
            pages = client.list(request=request, retry=None, timeout=TIMEOUT_SECONDS)
            return [op.name for op in pages if op.client_operation_id in wanted]

        return ",".join(self.list_call(ask)) or None

    def prepare(self, client: str, method: str, key: dict[str, Any]) -> Callable[[], Any]:
        """Returns a call of a method that has the fields of its request."""
        return _call(getattr(self.client(client), method), key)

    def delete(self, name: str, zone: str, group: InstanceGroup | None = None) -> None:
        """Requests the deletion of a VM, in its group if any; it is no error if there is none."""
        from google.api_core.exceptions import NotFound

        if group is not None:
            self.resize_requests.delete_vm(name, group)
            return
        compute = _library()
        client = self.client("InstancesClient")
        request = compute.DeleteInstanceRequest(project=self.project, zone=zone, instance=name)
        try:
            self.safe_call(_call(client.delete_unary, request))
        except NotFound:
            return

    def output(self, name: str, zone: str) -> str:
        """Returns the serial port output of a VM, which has the messages of the startup script.

        Raises:
          ApiUnavailable: it is not answered, or refused.
          NotFound: the VM does not exist.
        """
        client = self.client("InstancesClient")
        key = {"project": self.project, "zone": zone, "instance": name}
        found = self.safe_call(
            lambda: client.get_serial_port_output(**key, retry=None, timeout=TIMEOUT_SECONDS)
        )
        return str(found.contents)

    def with_retries(self, call: Callable[[], T], *, seconds: float = RETRY_SECONDS) -> T:
        """Returns the result of a call, which is repeated for some time until it is answered.

        Raises:
          NoCredentials: at once.
          ApiUnavailable: the last call has failed too.
        """
        until, pause = self.clock.monotonic() + seconds, 0.5
        is_printed = False
        while True:
            try:
                return call()
            except NoCredentials:
                raise
            except ApiUnavailable as error:
                if self.clock.monotonic() + pause > until:
                    raise
                if not is_printed:
                    self._console(f"the Compute API does not answer; trying again ({error})")
                is_printed = True
            self.clock.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def list_call(self, ask: Callable[[], T]) -> T:
        """Returns the result of a list call; a 404 (the project is gone) raises ApiUnavailable."""
        from google.api_core.exceptions import NotFound

        try:
            return self.safe_call(ask)
        except NotFound as error:
            raise ApiUnavailable(brief(error)) from error

    def safe_call(self, call: Callable[[], T]) -> T:
        """Returns the result of a call that changes nothing or may always be repeated.

        Raises:
          ApiUnavailable: ApiRefused if it is refused; training continues meanwhile.
          NotFound: the resource does not exist.
        """
        from google.api_core.exceptions import GoogleAPICallError, NotFound

        try:
            return self.call(call)
        except NotFound:
            raise
        except GoogleAPICallError as error:
            raise ApiRefused(brief(error)) from error

    def call(self, request: Callable[[], T]) -> T:
        """Returns the result of a call.

        Raises:
          ApiUnavailable: the call may succeed the next time; NoCredentials if it was not sent.
          GoogleAPICallError: any other error response.
        """
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException

        try:
            return request()
        except GoogleAuthError as error:
            raise NoCredentials(_NO_CREDENTIALS.format(error)) from error
        except (exceptions.TooManyRequests, exceptions.ServerError) as error:
            raise ApiUnavailable(brief(error)) from error
        except (exceptions.RetryError, RequestException, ConnectionError, TimeoutError) as error:
            raise ApiUnavailable(brief(error)) from error
        except exceptions.Forbidden as error:
            if create_failed(error).kind == "rate_limit":
                raise ApiUnavailable(brief(error)) from error
            raise


_NO_CREDENTIALS = (
    "launch.gce: no credentials for Google Cloud ({}). Run `gcloud auth "
    "application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS."
)


def create_failed(error: Any) -> CreateFailed:
    """Returns the meaning of an error response of the API."""
    reasons = [d.get("reason", "") for d in error.errors if isinstance(d, dict)]
    message = _without_request(error.message or str(error))
    return classify([r for r in reasons if r], message, error.code)


def _call(call: Callable[..., T], request: Any) -> Callable[[], T]:
    return functools.partial(call, request=request, retry=None, timeout=TIMEOUT_SECONDS)


def brief(error: Exception) -> str:
    """Returns an error in one line, without the request."""
    text = _without_request(str(error).partition("\n")[0])
    return f"{type(error).__name__}: {text[:200]}"


def _without_request(text: str) -> str:
    """Returns an error message of the client without the method and the URL of the request.

    >>> _without_request("503 POST https://a.b:1/v1/p?requestId=1&x=2: Backend Error")
    '503 Backend Error'
    """
    text = re.sub(r"\b(?:GET|POST|PUT|PATCH|DELETE) https?://\S*?: ", "", text)
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text)  # Others without their query.


def _library() -> Any:
    try:
        from google.cloud import compute_v1
    except ImportError as error:
        raise ConfigError(
            f"launch gce: a package is missing ({error.name}). "
            "Run `pip install -e '.[gce]'` in the checkout of jaxres."
        ) from error
    return compute_v1


def _url(endpoint: str) -> str:
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def _client_options(endpoint: str | None) -> dict[str, Any]:
    """Returns the arguments with which a client is created."""
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

    options = ClientOptions(api_endpoint=endpoint)
    return {"credentials": AnonymousCredentials(), "client_options": options}


def _observed(vm: compute_v1.Instance) -> VmStatus:
    interfaces = vm.network_interfaces
    ip = interfaces[0].network_i_p if interfaces else ""
    run_id, code = vm.labels.get(ID_LABEL, ""), vm.labels.get(CODE_LABEL, "")
    zone, physical_host = vm.zone.rpartition("/")[2], vm.resource_status.physical_host
    return VmStatus(vm.name, zone, vm.status, ip, vm.id, run_id, code, physical_host)


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
"""A status 400 that is temporary: a resource in the request is still being created or changed."""
MIN_COUNT = "VM_MIN_COUNT_NOT_REACHED"
RESERVATION_FULL = (
    "does not have available resources for the request",
    "does not have sufficient capacity for the requested resources",
    "does not currently have sufficient capacity for the requested resources",
)
"""Messages of CONDITION_NOT_MET, in lower case (source: autoscaler of Kubernetes)."""
RESERVATION_NOT_READY = "it requires reservation to be in ready state"
"""The same: the reservation is still being created or changed."""


def classify(codes: Iterable[str], message: str, status: int | None) -> CreateFailed:
    """Returns the meaning of a response's reasons or an operation's codes.

    >>> classify(["VM_MIN_COUNT_NOT_REACHED", "STOCKOUT"], "no VMs", 503).kind
    'stockout'
    """
    upper_codes = {code.upper() for code in codes}
    text = f"{', '.join(sorted(upper_codes)) or status}: {message.partition(chr(10))[0]}"[:500]
    return CreateFailed(_kind(upper_codes, message.lower(), status), text)


def _kind(codes: set[str], message: str, status: int | None) -> CreateErrorKind:
    if codes & RATE or status == 429:
        return "rate_limit"
    if codes & QUOTA:
        return "quota"
    if codes & EXISTS or status == 409:
        return "exists"
    if codes & FORBIDDEN or status in (401, 403):
        return "denied"
    if "preempt" in message and "UNSUPPORTED_OPERATION" in codes:
        return "preempted"
    if codes & STOCKOUT or codes == {MIN_COUNT} or any(t in message for t in RESERVATION_FULL):
        return "stockout"
    if _names_no_machine_type(message):
        return "wrong_zone"
    if codes & NOT_YET or RESERVATION_NOT_READY in message:
        return "passing"
    if status is not None and 400 <= status < 500 and status != 408:
        return "refused"
    return "passing"


def _names_no_machine_type(message: str) -> bool:
    """Returns whether the zone lacks the machine type, or does not exist."""
    is_absent = "does not exist in zone" in message or "not found" in message
    of_machine = "machinetype" in message.replace(" ", "").replace("_", "")
    of_zone = "/zones/" in message and message.count("/") < 6
    return is_absent and (of_machine or of_zone)


def may_refuse_notice(kind: CreateErrorKind, message: str, status: int | None) -> bool:
    """Returns whether a failed creation may succeed without the preemption notice.

    The notice is a preview feature, and its refusal need not name it.

    >>> may_refuse_notice("refused", "Not allowed to use a preview feature.", 400)
    True
    >>> may_refuse_notice("quota", "Quota exceeded.", 400)
    False
    """
    return is_about_notice(message) or (status == 400 and kind == "refused")


def is_about_notice(message: str) -> bool:
    """Returns whether the API refuses the requested preemption notice."""
    return "preemptionnotice" in message.replace("_", "").lower()
