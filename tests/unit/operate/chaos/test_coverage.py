"""Every row of the table of faults has a scenario of `jaxres chaos`."""

from __future__ import annotations

from pathlib import Path

from jaxres import faults
from jaxres.operate.chaos import coverage
from jaxres.operate.chaos.scenarios import ALL
from tools.mutants.tables import read_all

ROOT = Path(__file__).parents[4]
DOCS = ROOT / "docs" / "prove.md"
MUTANTS = {
    "bad_config": "unknown-keys-ignored",
    "nonfinite_update": "masked-by-a-product",
    "diverged": "nonfinite-loss-is-good",
    "loss_spike": "lower-rate-lost-at-a-restart",
    "preemption": "save-begun-without-time",
    "operators_stop": "second-signal-ignored",
    "silent_corruption": "copies-not-compared-before-a-save",
    "straggler": "host-named-at-the-usual-speed",
    "damaged_checkpoint": "fallback-without-verification",
    "lost_log": "lost-log-is-a-new-run",
    "storage_unavailable": "failed-save-counts",
    "bad_record": "bad-records-read-again-after-a-restart",
    "damaged_data": "damaged-cache-stays",
    "out_of_memory": "oom-kill-of-another-job-counted",
    "unhealthy_device": "leave-saves-the-state",
    "missing_device": "missing-devices-not-noticed",
    "failed_preflight": "product-compared-with-the-devices-own",
    "hang": "deadline-fed-by-a-thread",
    "peer_lost": "survivors-take-the-cause-for-their-own",
    "crash": "leftovers-not-killed",
    "crash_loop": "budgets-reset-by-a-restart",
    "zombie": "late-worker-is-not-fenced",
    "host_lost": "only-vm-not-replaced",
    "no_capacity": "own-quota-taken-for-a-full-one",
    "launcher_lost": "lease-kept-after-an-error",
    "launch_state_lost": "damaged-state-deleted",
}
"""Row of the table of faults -> a wrong change of its response that a promise finds."""


def test_each_row_has_a_scenario() -> None:
    for row in faults.ALL:
        assert coverage.scenarios_of(row.name), row.name
    assert {name for scenario in ALL for name in scenario.rows} <= {row.name for row in faults.ALL}


def test_each_row_has_a_mutant_and_its_promise() -> None:
    assert set(MUTANTS) == {row.name for row in faults.ALL}
    promises = {mutant.name: mutant.promise for mutant in read_all()}
    for name in MUTANTS.values():
        file, _, test = promises[name].partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), name


def test_the_table_is_in_the_docs() -> None:
    assert coverage.table() in DOCS.read_text()
