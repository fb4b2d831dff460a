"""Injects the planned faults into a short run: real signals, real damage to real files.

The hook of `train/chaos_hooks/break_hook.py` holds the worker at the planned step, so that a fault
is there on any machine, however fast its steps are. The next hold is planned before a worker trains
on.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxres.clock import Clock
from jaxres.goodput import read_timeline, summary
from jaxres.operate.chaos import damage, leftovers
from jaxres.operate.chaos.emulated_bucket import emulated_bucket
from jaxres.operate.chaos.emulated_vms import emulated_vms
from jaxres.operate.chaos.fake_gpus import fake_gpus
from jaxres.operate.chaos.faults import data as data_faults
from jaxres.operate.chaos.faults import device as device_faults
from jaxres.operate.chaos.faults import file as file_faults
from jaxres.operate.chaos.faults import network as network_faults
from jaxres.operate.chaos.faults import process as process_faults
from jaxres.operate.chaos.faults import start as start_faults
from jaxres.operate.chaos.faults import state as state_faults
from jaxres.operate.chaos.faults import storage as storage_faults
from jaxres.operate.chaos.faults import vm as vm_faults
from jaxres.operate.chaos.faults import worker as worker_faults
from jaxres.operate.chaos.held_run import HeldRun
from jaxres.operate.chaos.job_network import ProxiedNetwork
from jaxres.operate.chaos.schedule import PlannedRun, ScheduledFault
from jaxres.operate.chaos.short_runs import Runner, Topology
from jaxres.operate.chaos.time_account import TimeAccount
from jaxres.operate.chaos.verdict import ChaosFacts, Injection
from jaxres.runlog import metrics, run_log
from jaxres.runlog.records import AttemptEnded, Claim

INJECT: Mapping[str, Callable[[HeldRun, int, ScheduledFault], Injection]] = {
    "worker-kill": process_faults.kill_worker,
    "notice": process_faults.notice,
    "stop": process_faults.stop_and_resume,
    "hang": process_faults.stop_worker,
    "supervisor-kill": process_faults.kill_supervisor,
    "zombie": process_faults.leave_zombie,
    "kill-in-save": process_faults.kill_in_save,
    "bit-flip": file_faults.damage_step,
    "lost-file": file_faults.damage_step,
    "torn-line": file_faults.tear_lines,
    "lost-log": file_faults.lose_log,
    "region-loss": file_faults.lose_region,
    "full-disk": storage_faults.fill_disk,
    "storage-outage": storage_faults.storage_outage,
    "bucket-flip": storage_faults.flip_in_bucket,
    "slow-storage": storage_faults.slow_storage,
    "damaged-cache": file_faults.damage_cache,
    "damaged-data": file_faults.damage_data,
    "partition": network_faults.partition,
    "peer-lost": network_faults.lose_host,
    "slow-network": network_faults.slow_network,
    "bad-config": start_faults.bad_config,
    "nan-step": state_faults.overflow_for_a_step,
    "nan-state": state_faults.leave_nan,
    "crash-loop": start_faults.crash_loop,
    "flipped-copy": state_faults.flip_copy,
    "missing-device": start_faults.missing_device,
    "bad-record": data_faults.bad_record,
    "spike": data_faults.spike,
    "out-of-memory": worker_faults.exhaust_memory,
    "unhealthy-device": device_faults.remap_row,
    "failed-preflight": start_faults.failed_preflight,
    "straggler": worker_faults.slow_host,
    "vm-lost": vm_faults.lose_vm,
    "stockout": vm_faults.stock_out,
    "launcher-kill": vm_faults.kill_launcher,
    "launch-state-lost": vm_faults.lose_launch_state,
}
"""Scenario -> its injector, called while every worker holds after the planned step."""


def _clock_offset(clock: Clock) -> float:
    """Returns by how much the wall clock is ahead of the monotonic one."""
    return clock.wall() - clock.monotonic()


def _account(run: HeldRun, clock_moved_seconds: float) -> TimeAccount | None:
    """Returns the time account of `jaxres report`; None: no attempt has recorded its end."""
    records = run_log.in_force(run_log.read_records(run.run_dir.log))
    begins = [record.time for record in records if isinstance(record.body, Claim)]
    ends = [record.time for record in records if isinstance(record.body, AttemptEnded)]
    if not begins or not ends:
        return None
    found = summary.summarize(read_timeline.read(run.run_dir, is_alive=False))
    return TimeAccount(
        by_activity=found.by_activity,
        seconds=found.seconds,
        wall_seconds=ends[-1] - begins[0],
        clock_moved_seconds=clock_moved_seconds,
        incidents=tuple(one for one in found.incidents if one.attempt not in run.set_aside),
    )


@dataclass
class FaultyRun:
    """One run with its faults."""

    runner: Runner
    planned: PlannedRun
    topology: Topology

    def execute(self) -> ChaosFacts:
        """Runs, injects each fault, waits for each recovery; returns the observed facts."""
        name = self.planned.name
        if self.planned.has_fake_gpus:
            with fake_gpus(self.runner, name) as (runner, gpus):
                return self._execute(HeldRun(runner, self.planned, self.topology, name, gpus=gpus))
        if self.planned.place == "disk":
            return self._execute(HeldRun(self.runner, self.planned, self.topology, name))
        if self.planned.place == "hosts":
            network = ProxiedNetwork(self.topology.hosts)
            with contextlib.closing(network):
                run = HeldRun(self.runner, self.planned, self.topology, name, network=network)
                return self._execute(run)
        if self.planned.place == "vms":
            with emulated_vms(self.runner, name, hosts=self.topology.hosts) as (runner, vms):
                return self._execute(HeldRun(runner, self.planned, self.topology, name, vms=vms))
        with emulated_bucket(self.runner, name) as (runner, server):
            return self._execute(HeldRun(runner, self.planned, self.topology, name, server=server))

    def _execute(self, run: HeldRun) -> ChaosFacts:
        offset = _clock_offset(run.runner.clock)
        try:
            injections = self._inject(run)
            code = run.runner.wait_exit()
            left = leftovers.find(run.run_dir, run.runner.clock, ports=run.ports)
            left += () if run.vms is None else run.vms.left()
        finally:
            run.end_others()
        observed = run.runner.observe(run.name, code)
        attempts = tuple(one for one in observed.attempts if one.attempt not in run.set_aside)
        return ChaosFacts(
            planned=self.planned,
            run=dataclasses.replace(observed, attempts=attempts),
            injections=tuple(injections),
            quarantined=frozenset(body.step for _, body in run.history().quarantined),
            uncommitted=frozenset(run.uncommitted),
            altered=tuple(run.altered),
            other_samples=run.other_samples,
            merged_lines=tuple(str(path) for path, end in run.torn if damage.is_merged(path, end)),
            left=left,
            kept=tuple(metrics.read_history(run.run_dir, run.history())),
            account=_account(run, abs(_clock_offset(run.runner.clock) - offset)),
        )

    def _inject(self, run: HeldRun) -> list[Injection]:
        done: list[Injection] = []
        run.plan(0)
        run.start()
        for number, fault in enumerate(self.planned.faults):
            if not run.wait_held(number):
                break  # It has ended by itself.
            attempt, root, run.fault_at = run.history().attempt, run.root, None
            one = INJECT[fault.scenario](run, number, fault)
            run.plan(number + 1)
            run.release(number, root=root)
            if one.evidence and one.recovery_seconds is None and run.fault_at is not None:
                seconds = run.wait_trained(attempt, number)
                one = dataclasses.replace(one, recovery_seconds=seconds)
            done.append(one)
        return done
