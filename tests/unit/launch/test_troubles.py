"""Promises of the classifier: what the Compute API says is taken for what it means."""

import pytest

from jaxres.launch.gce_api import is_about_notice, trouble
from tests.emulators.gce.errors import api_disabled, by_word, exists, no_permission, no_token
from tests.emulators.gce.operations import TEXTS, Failure

SHORT = "VM_MIN_COUNT_NOT_REACHED"
DETAILS = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
NO_MACHINE = "Machine type with name 'a3-megagpu-8g' does not exist in zone 'us-west1-a'."
PREEMPTED = TEXTS["UNSUPPORTED_OPERATION"]
ZONES = "projects/p/zones"


@pytest.mark.parametrize(
    ("codes", "message", "status", "expected"),
    [
        # Codes of failed operations, with and without the fields of HTTP.
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
        (["INTERNAL_ERROR"], "try again", None, "passing"),
        (["INTERNAL_ERROR"], "try again", 503, "passing"),
        ([SHORT, "INTERNAL_ERROR"], "try again", 503, "passing"),
        # Reasons of answers.
        (["quotaExceeded"], "Quota", 403, "quota"),
        (["rateLimitExceeded"], "Rate Limit Exceeded", 403, "rate_limit"),
        (["userRateLimitExceeded"], "Rate Limit Exceeded", 403, "rate_limit"),
        ([], "Too many", 429, "rate_limit"),
        (["alreadyExists"], "exists", 409, "exists"),
        (["forbidden"], "Required 'compute.instances.create'", 403, "refused"),
        (["accessNotConfigured"], "not enabled", 403, "refused"),
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
def test_the_whole_set_of_words_says_what_a_refusal_means(
    codes: list[str], message: str, status: int | None, expected: str
) -> None:
    for order in (codes, codes[::-1]):
        found = trouble(order, message, status)
        assert found.trouble == expected, found
    assert message.partition("\n")[0] in found.words


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (by_word("rateLimitExceeded"), "rate_limit"),
        (by_word("quotaExceeded"), "quota"),
        (by_word("forbidden"), "refused"),
        (by_word("resourceNotReady"), "passing"),
        (by_word("backendError"), "passing"),
        (by_word("503"), "passing"),
        (exists("projects/p/zones/us-central1-a/instances/jx-0"), "exists"),
        (no_permission("compute.instances.create", "projects/p"), "refused"),
        (no_token(), "refused"),
        (api_disabled("123"), "refused"),
    ],
    ids=lambda answer: getattr(answer, "reason", answer),
)
def test_the_emulators_answers_mean_what_they_say(answer, expected: str) -> None:
    assert trouble([answer.reason], answer.message, answer.status).trouble == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((SHORT, DETAILS), "stockout"),
        ((SHORT, "UNSUPPORTED_OPERATION"), "preempted"),
        ((SHORT, "QUOTA_EXCEEDED"), "quota"),
        (("RESOURCE_ALREADY_EXISTS",), "exists"),
        (("INTERNAL_ERROR",), "passing"),
    ],
)
@pytest.mark.parametrize("has_http", [True, False])
def test_a_failed_operation_means_the_same_with_and_without_the_fields_of_http(
    codes: tuple[str, ...], has_http: bool, expected: str
) -> None:
    told = Failure(codes, has_http, {"zone": "us-central1-a", "count": 2}).told()
    errors = told["error"]["errors"]
    message = "; ".join(one["message"] for one in errors)
    status = told.get("httpErrorStatusCode")
    assert trouble([one["code"] for one in errors], message, status).trouble == expected


def test_a_long_answer_is_one_short_line_for_a_person() -> None:
    found = trouble(["STOCKOUT"], "first line" + 2000 * "x" + "\nsecond", 503)
    assert len(found.words) <= 500
    assert "\n" not in found.words


def test_a_refused_notice_of_preemption_is_known_by_its_name() -> None:
    unknown = "Unknown name \"preemptionNoticeDuration\" at 'scheduling': Cannot find field."
    assert is_about_notice(unknown)
    assert is_about_notice("Invalid value for field scheduling.preemption_notice_duration")
    assert not is_about_notice("Instance failed to start due to preemption.")
