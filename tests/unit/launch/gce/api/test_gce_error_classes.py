"""Promises of the classification of Compute API errors."""

import pytest

from jaxres.launch.gce.api.compute import classify, is_about_notice
from jaxres_emulators.gce.errors import api_disabled, by_word, exists, no_permission, no_token
from jaxres_emulators.gce.operations import TEXTS, Failure

SHORT = "VM_MIN_COUNT_NOT_REACHED"
DETAILS = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
NO_MACHINE = "Machine type with name 'a3-megagpu-8g' does not exist in zone 'us-west1-a'."
PREEMPTED = TEXTS["UNSUPPORTED_OPERATION"]
FULL = TEXTS["CONDITION_NOT_MET"].format(reservation="r")
ZONES = "projects/p/zones"


@pytest.mark.parametrize(
    ("codes", "message", "status", "expected"),
    [
        # Codes of failed operations, with and without HTTP fields.
        (["ZONE_RESOURCE_POOL_EXHAUSTED"], "no resources", 503, "stockout"),
        ([DETAILS], "no resources", None, "stockout"),
        ([SHORT, DETAILS], "2 VMs", 503, "stockout"),
        ([SHORT], "2 VMs", 503, "stockout"),
        (["STOCKOUT"], "", None, "stockout"),
        (["RESOURCE_POOL_EXHAUSTED"], "", None, "stockout"),
        (["insufficientCapacity"], "", None, "stockout"),
        (["QUOTA_EXCEEDED"], "Quota 'CPUS' exceeded.", 403, "quota"),
        ([SHORT, "QUOTA_EXCEEDED"], "Quota 'CPUS' exceeded.", None, "quota"),
        ([SHORT, DETAILS, "QUOTA_EXCEEDED"], "", None, "quota"),
        (["UNSUPPORTED_OPERATION"], PREEMPTED, 503, "preempted"),
        (
            [SHORT, "UNSUPPORTED_OPERATION"],
            f"2; {PREEMPTED}",
            400,
            "preempted",
        ),
        (["UNSUPPORTED_OPERATION"], "a live migration is on", 400, "refused"),
        (["RESOURCE_ALREADY_EXISTS"], "exists", None, "exists"),
        ([SHORT, "RESOURCE_ALREADY_EXISTS"], "exists", 409, "exists"),
        (["CONDITION_NOT_MET"], FULL, 412, "stockout"),
        ([SHORT, "CONDITION_NOT_MET"], f"1 VM; {FULL}", None, "stockout"),
        (["conditionNotMet"], FULL, 412, "stockout"),
        (["CONDITION_NOT_MET"], "it requires reservation to be in READY state", 412, "passing"),
        (["CONDITION_NOT_MET"], "Specified reservation r does not exist.", 412, "refused"),
        (["INTERNAL_ERROR"], "try again", None, "passing"),
        (["INTERNAL_ERROR"], "try again", 503, "passing"),
        ([SHORT, "INTERNAL_ERROR"], "try again", 503, "passing"),
        # Reasons of responses.
        (["quotaExceeded"], "Quota", 403, "quota"),
        (["rateLimitExceeded"], "Rate Limit Exceeded", 403, "rate_limit"),
        (["userRateLimitExceeded"], "Rate Limit Exceeded", 403, "rate_limit"),
        ([], "Too many", 429, "rate_limit"),
        (["alreadyExists"], "exists", 409, "exists"),
        (["forbidden"], "Required 'compute.instances.create'", 403, "denied"),
        (["accessNotConfigured"], "not enabled", 403, "denied"),
        (["invalid"], f"Invalid value for field 'x': 'y'. {NO_MACHINE}", 400, "wrong_zone"),
        (["notFound"], f"The resource '{ZONES}/us-west9-z' was not found", 404, "wrong_zone"),
        (
            ["notFound"],
            f"The resource '{ZONES}/us-west1-a/machineTypes/a9' was not found",
            404,
            "wrong_zone",
        ),
        (
            ["notFound"],
            "The resource 'projects/p/global/images/gone' was not found",
            404,
            "refused",
        ),
        (["invalid"], "Invalid value for field 'resource.disks'", 400, "refused"),
        (["resourceNotReady"], "The resource is not ready", 400, "passing"),
        ([], "Request Timeout", 408, "passing"),
        (["internalError"], "", 500, "passing"),
        (["backendError"], "", 503, "passing"),
        ([], "", None, "passing"),
    ],
)
def test_all_codes_together_decide_the_kind(
    codes: list[str], message: str, status: int | None, expected: str
) -> None:
    for order in (codes, codes[::-1]):
        found = classify(order, message, status)
        assert found.kind == expected, found
    assert message.partition("\n")[0] in found.message


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (by_word("rateLimitExceeded"), "rate_limit"),
        (by_word("quotaExceeded"), "quota"),
        (by_word("forbidden"), "denied"),
        (by_word("resourceNotReady"), "passing"),
        (by_word("backendError"), "passing"),
        (by_word("503"), "passing"),
        (exists("projects/p/zones/us-central1-a/instances/jx-0"), "exists"),
        (no_permission("compute.instances.create", "projects/p"), "denied"),
        (no_token(), "denied"),
        (api_disabled("123"), "denied"),
    ],
    ids=lambda answer: getattr(answer, "reason", answer),
)
def test_responses_of_the_emulator_have_their_kinds(answer, expected: str) -> None:
    assert classify([answer.reason], answer.message, answer.status).kind == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((SHORT, DETAILS), "stockout"),
        ((SHORT, "UNSUPPORTED_OPERATION"), "preempted"),
        ((SHORT, "QUOTA_EXCEEDED"), "quota"),
        ((SHORT, "CONDITION_NOT_MET"), "stockout"),
        (("RESOURCE_ALREADY_EXISTS",), "exists"),
        (("INTERNAL_ERROR",), "passing"),
    ],
)
@pytest.mark.parametrize("has_http", [True, False])
def test_a_failed_operation_has_the_same_kind_with_and_without_http_fields(
    codes: tuple[str, ...], has_http: bool, expected: str
) -> None:
    operation = Failure(codes, has_http, {"zone": "us-central1-a", "count": 2}).reported()
    errors = operation["error"]["errors"]
    message = "; ".join(item["message"] for item in errors)
    status = operation.get("httpErrorStatusCode")
    assert classify([item["code"] for item in errors], message, status).kind == expected


def test_a_long_response_becomes_one_short_line() -> None:
    found = classify(["STOCKOUT"], "first line" + 2000 * "x" + "\nsecond", 503)
    assert len(found.message) <= 500
    assert "\n" not in found.message


def test_a_refused_preemption_notice_is_recognised_by_its_name() -> None:
    unknown = "Unknown name \"preemptionNoticeDuration\" at 'scheduling': Cannot find field."
    assert is_about_notice(unknown)
    assert is_about_notice("Invalid value for field scheduling.preemption_notice_duration")
    assert not is_about_notice("Instance failed to start due to preemption.")
