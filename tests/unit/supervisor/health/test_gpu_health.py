"""Which readings of GPUs are faults: growth of counters, states, times, and what is unknown."""

import pytest

from jaxres.config.schema.hardware import HealthSection
from jaxres.supervisor.health import gpu_health
from jaxres.supervisor.health.gpu_health import MAX_WAITING, GpuState, XidReports, judge, judge_xid
from jaxres.supervisor.health.health_messages import GpuReading, XidReported

GPU = "GPU 0"
SECTION = HealthSection()
THERMAL, POWER_LIMIT = 0x40, 0x4


def judged(*readings, section=SECTION, seconds=10.0):
    """Returns the findings of each reading; a reading is a dict, None: the GPU is lost."""
    state, found = GpuState(), []
    for number, values in enumerate(readings):
        errors = {}
        if values is not None:
            errors = {name: why for name, why in values.items() if isinstance(why, str)}
        known = {name: v for name, v in (values or {}).items() if name not in errors}
        reading = GpuReading(GPU, known, errors, is_lost=values is None)
        state, new = judge(state, reading, section, now=seconds * number)
        found.append([(finding.kind, finding.action, finding.text) for finding in new])
    return found


def kinds(*readings, **settings):
    return [[kind for kind, _, _ in found] for found in judged(*readings, **settings)]


def ecc(*counts):
    return [{"ecc_uncorrected_volatile": count} for count in counts]


def test_an_ecc_counter_is_judged_by_its_growth_also_if_it_was_not_zero_before():
    assert kinds(*ecc(0, 0, 2, 2)) == [[], [], ["ecc"], []]
    assert kinds(*ecc(7, 7)) == [[], []], "errors of earlier programs"
    found = judged(*ecc(7, 7, 8))[-1]
    assert found == [("ecc", "leave", "1 uncorrectable ECC errors (7 before)")]
    assert kinds(*ecc(7, 0, 1)) == [[], [], ["ecc"]], "the driver was loaded again"


def test_a_reading_that_fails_is_unknown_and_neither_healthy_nor_a_fault():
    found = judged(*ecc(0, *["Unknown Error"] * 4, 0, 3))
    assert [[kind for kind, _, _ in each] for each in found] == [
        *([], [], [], ["unreadable"], [], []),
        ["ecc"],
    ]
    assert found[3][0][1] == "warn"
    assert "ecc_uncorrected_volatile can't be read any more: Unknown Error" in found[3][0][2]
    assert kinds(*ecc(5, "Timeout", 6))[-1] == ["ecc"], "it has grown since the last value"
    assert kinds(*ecc("Not Supported", "Not Supported")) == [[], []], "it was never readable"


@pytest.mark.parametrize("name", ["pending", "failed"])
def test_a_row_remapping_counts_from_the_first_reading_on_and_is_found_once(name):
    bad = {f"remapped_rows_{name}": 1}
    good = {f"remapped_rows_{name}": 0}
    assert kinds(bad, bad, good, bad) == [["row_remap"], [], [], ["row_remap"]]
    assert kinds(bad, {f"remapped_rows_{name}": "Timeout"}, bad)[-1] == [], "it was not over"
    assert judged(bad)[0][0][1] == "save"


def test_a_lost_gpu_is_found_once_and_makes_no_reading_unreadable():
    assert kinds({"power_mW": 1}, None, None) == [[], ["lost"], []]
    assert judged(None)[0][0][1] == "leave"


def test_slowed_clocks_are_a_fault_after_minutes_and_a_power_limit_never_is():
    hot, cool = {"clocks_event_reasons": THERMAL, "temperature_C": 84}, {"clocks_event_reasons": 1}
    found = judged(hot, hot, hot, hot, seconds=120.0)
    assert [len(each) for each in found] == [0, 0, 0, 1]
    assert found[-1][0] == (
        *("thermal", "warn"),
        "its clocks are slowed for 5 minutes at 84 °C: HW thermal slowdown",
    )
    assert kinds(hot, hot, cool, hot, hot, seconds=120.0) == [[]] * 5
    limited = {"clocks_event_reasons": POWER_LIMIT}
    assert kinds(*[limited] * 9, seconds=120.0) == [[]] * 9


def test_a_call_that_fails_now_and_then_is_not_told():
    assert kinds(*ecc(0, "Timeout", 0, "Timeout", "Timeout", 0) * 9) == [[]] * 54


def test_clocks_are_not_slowed_for_the_time_in_which_they_can_not_be_read():
    hot, unknown = {"clocks_event_reasons": THERMAL}, {"clocks_event_reasons": "Timeout"}
    found = judged(hot, *[unknown] * 9, seconds=120.0)
    assert not [text for each in found for kind, _, text in each if kind == "thermal"]
    assert kinds(hot, hot, hot, hot, unknown, hot, seconds=120.0)[3:] == [["thermal"], [], []]


def test_a_storm_of_xid_errors_costs_no_more_for_each_than_a_few():
    reports, num_new = XidReports(), 0
    for number in range(10 * MAX_WAITING):
        reports, is_new = reports.add("kernel_log", now=number / 1000)
        num_new += is_new
    assert (num_new, len(reports.times)) == (10 * MAX_WAITING, MAX_WAITING)
    assert not reports.add("nvml", now=1.0)[1], "the same error, by the other source"


def test_heat_alone_is_told_from_85_degrees_on_and_again_once_it_was_cooler():
    def degrees(*values):
        return [{"temperature_C": value} for value in values]

    found = judged(*degrees(84, 85, 91, 80, 85, 79, "Timeout", 85))
    assert [len(each) for each in found] == [0, 1, 0, 0, 0, 0, 0, 1]
    assert found[1] == [("temperature", "warn", "85 °C, with a limit of 85 °C")]


def test_corrected_ecc_errors_are_told_if_many_come_in_a_minute():
    def counts(*values):
        return [{"ecc_corrected_volatile": value} for value in values]

    assert kinds(*counts(500, 501, 511), seconds=60.0) == [[], [], []]
    assert kinds(*counts(500, 511), seconds=60.0) == [[], ["ecc_corrected"]]
    assert judged(*counts(500, 1000), seconds=60.0)[1] == [
        ("ecc_corrected", "warn", "500 corrected ECC errors in 60 s")
    ]


def test_the_peak_of_the_memory_is_kept_and_an_exported_reading_that_fails_is_not():
    def reading(**values):
        return GpuReading(GPU, values, {}, False)

    state = GpuState()
    for used in (60, 70, 50):
        state, _ = judge(state, reading(memory_used_bytes=used), SECTION, now=0.0)
    assert gpu_health.readable(state) == {"memory_used_bytes": 50, "memory_peak_bytes": 70}
    state, _ = judge(state, reading(power_mW=1), SECTION, now=1.0)
    assert gpu_health.readable(state) == {"power_mW": 1, "memory_peak_bytes": 70}


@pytest.mark.parametrize("name", ["pcie_replays", "nvlink_errors"])
def test_link_errors_are_a_fault_if_many_come_in_a_minute(name):
    def counts(*values):
        return [{name: value} for value in values]

    assert kinds(*counts(5000, 5001, 5099), seconds=60.0) == [[], [], []]
    assert kinds(*counts(5000, 5101, 5400, 5400, 6000), seconds=60.0) == [
        *([], ["link"], [], [], ["link"])
    ]
    assert kinds(*counts(0, 500, 500, 500), seconds=20.0) == [[], [], [], ["link"]]
    assert kinds(*counts(9000, 3, 4), seconds=60.0) == [[], [], []], "the counter began again"


@pytest.mark.parametrize(
    ("xid", "kind", "action"),
    [
        *((48, "ecc", "leave"), (94, "ecc", "leave"), (95, "ecc", "leave")),
        *((63, "row_remap", "save"), (64, "row_remap", "save")),
        *((74, "xid", "leave"), (79, "xid", "leave"), (119, "xid", "leave"), (120, "xid", "leave")),
        *((13, "other_xid", "warn"), (31, "other_xid", "warn"), (43, "other_xid", "warn")),
        *((45, "other_xid", "warn"), (9999, "other_xid", "warn")),
    ],
)
def test_an_xid_error_has_the_action_of_its_class_and_one_of_a_program_only_warns(
    xid, kind, action
):
    finding = judge_xid(XidReported(GPU, xid), SECTION)
    assert (finding.kind, finding.action) == (kind, action)
    assert str(finding).startswith(f"GPU 0: Xid {xid}: ")


def test_the_policy_decides_what_follows_a_class():
    section = HealthSection(ecc="warn", xid="save", row_remap="leave")
    assert judged(*ecc(0, 1), section=section)[-1][0][1] == "warn"
    assert judge_xid(XidReported(GPU, 79), section).action == "save"
    assert judged({"remapped_rows_failed": 1}, section=section)[0][0][1] == "leave"
