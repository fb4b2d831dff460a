"""The history of attempts, computed from records, events and metrics of a hand-written run."""

from __future__ import annotations

import dataclasses
import json

from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.runlog import attempt_history, events
from jaxres.runlog.events import PhaseChanged, RunEnded
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, Body, Commit, Prune, Record, Start, SupervisorEnded
from jaxres.storage.checksummed_json import canonical_json
from tests.unit.runlog.example_records import CLAIM


def commit(step: int) -> Commit:
    return Commit(step=step, path=f"p{step}", manifest="m", bytes=1)


def start(step: int) -> Start:
    return Start(step=step, path=None, dataset="d", computation={})


def event(kind: type, at: float, **fields: object) -> dict[str, object]:
    return {"event": events.EVENTS.tag(kind), "time": 1000 + at, "monotonic": at} | fields


LOST = "host 2 (node-c, pid 9, last finished step 15): the worker was ended by SIGKILL"
BODIES: list[tuple[int, float, Body]] = [
    (1, 1000.0, dataclasses.replace(CLAIM, num_hosts=3)),
    (1, 1004.0, start(0)),
    (1, 1009.0, commit(10)),
    (1, 1020.0, AttemptEnded(exit=137, reason=LOST, committed=False, culprit=2)),
    (2, 1030.0, dataclasses.replace(CLAIM, attempt=2, num_hosts=3)),
    (2, 1033.0, start(10)),
    (3, 1050.0, dataclasses.replace(CLAIM, attempt=3)),
    (3, 1051.0, start(10)),
    (3, 1052.0, commit(20)),
    (3, 1053.0, Prune(steps=(10,))),
    (3, 1054.0, commit(30)),
    (3, 1055.0, AttemptEnded(exit=0, reason="", committed=True, culprit=0)),
    (3, 1056.0, SupervisorEnded(exit=0, reason="")),
    (4, 1060.0, dataclasses.replace(CLAIM, attempt=4)),
]
RECORDS = [Record(seq, n, time, body) for seq, (n, time, body) in enumerate(BODIES, start=1)]
EVENTS = {
    1: [
        event(PhaseChanged, 1.0, phase="import"),
        event(PhaseChanged, 3.0, phase="train"),
        event(PhaseChanged, 8.0, phase="save"),
        event(PhaseChanged, 9.0, phase="train"),
        event(RunEnded, 15.0),
    ],
    2: [event(PhaseChanged, 31.0, phase="train"), {"event": "note"}, event(PhaseChanged, 44.5)],
}
FINISHED = {1: 15, 2: 13, 3: 30}


def test_summary_has_cause_and_steps_gained_and_kept_of_each_attempt():
    first, second, third, fourth = attempt_history.fold(
        RECORDS, events=EVENTS, finished=FINISHED, is_alive=True
    )
    assert (first.cause, first.exit, first.culprit, first.reason) == (
        "signal 9 (SIGKILL)",
        137,
        2,
        LOST,
    )
    assert (first.start, first.end) == (1000.0, 1020.0)
    assert (first.start_step, first.finished_step, first.committed_step) == (0, 15, 10)
    assert (first.steps_gained, first.steps_kept) == (15, 10)
    assert (second.cause, second.exit, second.end) == ("killed", None, 1044.5)
    assert "no stop record" in second.reason
    assert (second.num_hosts, second.steps_gained, second.steps_kept) == (3, 3, 0)
    assert (third.cause, third.culprit, third.committed_step) == ("DONE", None, 30)
    assert (third.steps_gained, third.steps_kept) == (20, 20), "pruned steps were kept too"
    assert (fourth.cause, fourth.end, fourth.start_step, fourth.finished_step) == (
        *("running", None),
        *(None, None),
    )
    assert (
        attempt_history.fold(RECORDS, events={}, finished={}, is_alive=False)[-1].cause == "killed"
    )


def test_an_attempt_on_a_vm_that_was_lost_has_the_launchers_cause():
    def ends(*events: LaunchEvent) -> tuple[str, int | None, str]:
        found = attempt_history.fold(
            RECORDS, events=EVENTS, finished=FINISHED, is_alive=False, launch_events=events
        )
        assert (found[0].cause, found[2].cause) == ("signal 9 (SIGKILL)", "DONE"), "recorded"
        return found[1].cause, found[1].exit, found[1].reason

    preempted = LaunchEvent(1, "attempt_ended", 1048.0, cause="75", reason="vm-1: preempted")
    cause, code, reason = ends(preempted)
    assert (cause, code) == ("PREEMPTED", None)
    assert reason.startswith("vm-1: preempted, by the launcher")
    assert ends(dataclasses.replace(preempted, time=1051.0))[0] == "killed", "of a later attempt"
    assert ends(dataclasses.replace(preempted, cause=""))[0] == "killed"


def test_a_planned_end_is_the_cause_of_an_attempt_that_was_told_to_save_and_exit():
    def first(exit: int, event: LaunchEvent) -> tuple[str, str]:
        stop = AttemptEnded(exit=exit, reason="requested by SIGTERM", committed=False)
        records = [*RECORDS[:3], dataclasses.replace(RECORDS[3], body=stop), *RECORDS[4:]]
        found = attempt_history.fold(
            records, events=EVENTS, finished=FINISHED, is_alive=False, launch_events=[event]
        )[0]
        return found.cause, found.reason

    grow = LaunchEvent(1, "attempt_ended", 1021.0, cause="75", reason="more hosts", planned="grow")
    assert first(75, grow) == ("planned grow", "more hosts")
    assert first(75, dataclasses.replace(grow, planned=""))[0] == "PREEMPTED"
    assert first(75, dataclasses.replace(grow, time=1031.0))[0] == "PREEMPTED", "of a later attempt"
    assert first(70, grow)[0] == "BUG"


def test_seconds_by_phase_use_the_monotonic_clock_up_to_the_last_event():
    assert attempt_history.phase_seconds(EVENTS[1]) == {"import": 2.0, "train": 11.0, "save": 1.0}
    assert attempt_history.phase_seconds(EVENTS[2]) == {"train": 13.5}
    assert attempt_history.phase_seconds([]) == {}


def test_history_command_prints_a_table_or_json_lines(tmp_path, capsys):
    run_dir = RunDir(tmp_path)
    run_dir.log.mkdir()
    for record in RECORDS:
        fields = json.loads(record.encode())
        (run_dir.log / f"{record.seq:08d}.json").write_bytes(canonical_json(fields))
    for number, step in FINISHED.items():
        run_dir.attempt(number).mkdir(parents=True)
        row = json.dumps({"step": step, "seq": 2, "attempt": number})
        run_dir.metrics(number).write_text(f"{row}\n")
        lines = "".join(json.dumps(fields) + "\n" for fields in EVENTS.get(number, []))
        run_dir.events(number, 0).write_text(lines)
    assert checkpoints_cli.main(["history", str(tmp_path), "--attempts", "--json"], usage="") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["attempt"] for row in rows] == [1, 2, 3, 4]
    assert rows[0] == dataclasses.asdict(attempt_history.read(run_dir, is_alive=False)[0])
    assert rows[3]["cause"] == "killed"
    assert checkpoints_cli.main(["history", str(tmp_path), "--attempts"], usage="") == 0
    text = capsys.readouterr().out
    assert "signal 9 (SIGKILL) (exit 137), host 2" in text
    assert f"        {LOST}\n" in text
    assert "        train 11.0 s, import 2.0 s, save 1.0 s\n" in text
    assert [found.attempt for found in attempt_history.read(run_dir, is_alive=False, last=2)] == [
        3,
        4,
    ]


def test_steps_that_the_next_attempt_took_over_from_host_memory_are_kept():
    from_memory = Start(step=13, path=None, dataset="d", computation={}, tier="memory")
    bodies = [*BODIES[:5], (2, 1033.0, from_memory), *BODIES[6:]]
    records = [Record(seq, n, time, body) for seq, (n, time, body) in enumerate(bodies, start=1)]
    first, second, *_ = attempt_history.fold(
        records, events=EVENTS, finished=FINISHED, is_alive=False
    )
    assert (first.steps_gained, first.steps_kept, first.committed_step) == (15, 13, 10)
    assert (second.start_step, second.steps_kept) == (13, 0)
