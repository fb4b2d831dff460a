"""Pre-flight checks of a config and this machine; leaves nothing but kept measurements.

`jaxres doctor CONFIG.yaml [section.field=value ...]` checks the devices of this machine;
`--devices N [--hosts H]` plans for N devices of other machines. After the checks follows the
production checklist (`checklist.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxres import config as configs
from jaxres import data, faults
from jaxres.clock import SystemClock
from jaxres.config import Loaded, RunConfig
from jaxres.config.argparser import Parser, local_path_argument
from jaxres.config.schema.training import FromRun, FromSeed
from jaxres.data import Dataset
from jaxres.data.tokens.tokenizer import LibraryTokenizer
from jaxres.engine import mesh_plan
from jaxres.engine.mesh_plan import MeshPlan
from jaxres.estimate import storage_rate
from jaxres.estimate.job_estimate import JobEstimate
from jaxres.exit_codes import ExitCode
from jaxres.faults import (
    ConfigError,
    OutOfMemory,
    PreemptedError,
    RunError,
    StoppedError,
    StorageRefused,
)
from jaxres.host import processes, signals
from jaxres.operate.doctor import checklist
from jaxres.operate.doctor import facts as checklist_facts
from jaxres.operate.doctor.check import Check
from jaxres.storage import files, probe
from jaxres.storage.path import is_remote
from jaxres.supervisor import jax_settings
from jaxres.supervisor.preemption import gce_metadata
from jaxres.supervisor.preemption import notices as preemption
from jaxres.supervisor.preemption.gce_metadata import Response
from jaxres.supervisor.run_config import find_run_dir, tell_repeated
from jaxres.telemetry import alert_sender, routing_check
from jaxres.telemetry.stdio import format_bytes
from jaxres.train import kept_results, resume_results
from jaxres.train.checks import oom_advice

if TYPE_CHECKING:
    from jaxres.engine.sharding_report import Layout

USAGE = (
    "jaxres doctor CONFIG.yaml [section.field=value ...] [--hardware quick|full] "
    "[--storage] [--devices N [--hosts H]] [--all] [--json] [--send-test-alert]"
)

MAX_DEVICES = 100_000
"""Largest number of devices to plan for; every number up to it is tried."""
MAX_PROBE_MIB = 4096
"""Largest probe of storage, which is in memory too."""


Checks = Iterator[Check]


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Prints the checks and the layout; returns 0, or 78 if a check fails."""
    try:
        options = _parse(arguments)
        tell_repeated(options.overrides)
        loaded = configs.load(options.config, options.overrides)
        configs.require_trainer(loaded.config, "jaxres doctor")
    except RunError as raised:
        error = faults.by_phase(raised, at_start=True)
        sys.stderr.write(faults.format_exit_message(error.exit_code, str(error)))
        return error.exit_code
    doctor = Doctor(
        loaded,
        num_devices=options.devices,
        num_hosts=options.hosts,
        hardware=options.hardware,
        probe_bytes=2**20 * options.storage_mib if options.storage else None,
        env=env,
    )
    checks: list[Check] = []
    for check in doctor.checks():
        checks.append(check)
        if not options.json:
            sys.stdout.write(f"{check}\n")
            sys.stdout.flush()
    items = doctor.checklist(checks, sends_test_alert=options.send_test_alert)
    if options.json:
        sys.stdout.write(as_json(options.config, checks, items))
    else:
        sys.stdout.write(f"\n{checklist.text(items, all_items=options.all)}{doctor.table()}")
    unprinted = [item for item in items if item.name not in checklist.COVERED]
    failed = sum(check.status == "fail" for check in (*checks, *unprinted))
    if not failed:
        return ExitCode.DONE
    what = "1 check fails" if failed == 1 else f"{failed} checks fail"
    sys.stderr.write(
        faults.format_exit_message(ExitCode.CONFIG, f"{options.config}: {what}, see above")
    )
    return ExitCode.CONFIG


def as_json(config: Path, checks: Sequence[Check], items: Sequence[Check]) -> str:
    """Returns the output of `--json`."""
    found = {
        "config": str(config),
        "checks": [check.fields() for check in checks],
        "checklist": [item.fields() for item in items],
    }
    return json.dumps(found, indent=1) + "\n"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="jaxres doctor", usage=USAGE)
    parser.add_argument("config", type=local_path_argument, metavar="CONFIG")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--hardware", choices=("quick", "full"))
    parser.add_argument("--devices", type=int)
    parser.add_argument("--hosts", type=int, default=None)
    parser.add_argument("--storage-mib", type=int, default=256)
    for flag in ("--all", "--json", "--send-test-alert", "--storage"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_intermixed_args(arguments)
    if options.hosts is not None and options.devices is None:
        parser.error("--hosts needs --devices")
    for flag, is_given in (("--hardware", options.hardware), ("--storage", options.storage)):
        if is_given and options.devices is not None:
            parser.error(f"{flag} tests this machine, --devices plans for others")
    if not 1 <= options.storage_mib <= MAX_PROBE_MIB:
        parser.error(f"--storage-mib {options.storage_mib}: expected 1 to {MAX_PROBE_MIB:,}")
    options.hosts = 1 if options.hosts is None else options.hosts
    for name, number in (("--devices", options.devices), ("--hosts", options.hosts)):
        if number is not None and not 1 <= number <= MAX_DEVICES:
            parser.error(f"{name} {number}: expected a number from 1 to {MAX_DEVICES:,}")
    if options.devices is not None and options.devices % options.hosts:
        parser.error(f"--devices {options.devices} is not a multiple of --hosts {options.hosts}")
    return options


class Doctor:
    """Runs the checks in order; skips checks that depend on a failed one."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        num_devices: int | None,
        num_hosts: int,
        hardware: str | None = None,
        probe_bytes: int | None = None,
        env: Mapping[str, str],
    ) -> None:
        """Prepares the checks.

        Args:
          loaded: the config.
          num_devices: devices to plan for; None: those of this machine.
          hardware: extent of the tests of this machine's hardware; None: none.
          probe_bytes: size of the probe of storage; None: none is written.
        """
        self._loaded = loaded
        self._config: RunConfig = loaded.config
        self._num_devices = num_devices
        self._num_hosts = num_hosts
        self._here = num_devices is None
        self._hardware = hardware
        self._probe_bytes = probe_bytes
        self._env = env
        self._dataset: Dataset | None = None
        self._plan: MeshPlan | None = None
        self._mesh: Any = None
        self._platform = "cpu"
        self._layout: Layout | None = None
        self._shapes: Any = None
        self._known: JobEstimate | None = None

    def checks(self) -> Checks:
        """Yields the result of each check as soon as it is known."""
        yield Check("pass", "config", f"{self._loaded.name}: every key is known and valid")
        yield from _guarded("data", self._data, bad="fail" if self._here else "warn")
        yield from _guarded("mesh", self._devices)
        if self._plan is not None:
            yield from _guarded("state", self._state)
        if self._shapes is not None and not isinstance(self._config.init_from, FromSeed):
            yield from _guarded("init_from", self._source, bad="fail" if self._here else "warn")
        if not self._here:
            yield self._estimate()
            return  # Step and storage belong to another machine.
        if self._dataset is not None and self._layout is not None:
            yield from _guarded("step", self._step)
        yield from self._run_dir()
        yield from _guarded("notices", self._notices)
        yield from self._resume_check()
        if self._hardware is not None:
            yield from _guarded("hardware", self._test_hardware)
        if self._probe_bytes is not None:
            yield from _guarded("storage", self._probe)
        yield self._estimate()

    def _estimate(self) -> Check:
        """Returns the estimate of the job, which the checklist judges."""
        self._known = checklist_facts.estimate_of(
            self._config,
            find_run_dir(self._loaded),
            devices=self._devices_of_run(),
            state_bytes=None if self._layout is None else self._layout.global_bytes,
        )
        return Check("pass", "estimate", "; ".join(self._known.lines()))

    def _devices_of_run(self) -> checklist_facts.Devices:
        return checklist_facts.Devices(
            is_here=self._here,
            platform=self._platform if self._here else "gpu",
            number=self._plan.num_devices if self._plan is not None else 1,
            num_hosts=self._num_hosts,
        )

    def checklist(self, checks: Sequence[Check], *, sends_test_alert: bool) -> list[Check]:
        """Returns the items of the production checklist.

        Args:
          checks: the results of `checks`.
          sends_test_alert: whether a test message is sent to each target of the alerts.
        """
        assert self._known is not None, "checks() comes first"
        facts = checklist_facts.gather(
            self._config,
            find_run_dir(self._loaded),
            env=self._env,
            checks=worst(checks),
            devices=self._devices_of_run(),
            estimate=self._known,
            num_params=self._num_params(),
            test_alerts=tuple(self._test_alerts()) if sends_test_alert else None,
        )
        return checklist.judge(self._config, facts)

    def _num_params(self) -> int | None:
        if self._shapes is None:
            return None
        import jax

        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self._shapes.params))

    def _test_alerts(self) -> Iterator[tuple[str, bool, str]]:
        """Sends the test messages, unless a target can't be used, which is an item's failure."""
        try:
            targets = alert_sender.resolve(self._config.alerts, env=self._env)
        except ConfigError:
            return
        run = find_run_dir(self._loaded).root.absolute().name
        yield from routing_check.send(
            targets, run=run, nonce=secrets.token_hex(8), clock=SystemClock()
        )

    def table(self) -> str:
        """Returns the table of arrays per device; empty if it is unknown."""
        return "" if self._layout is None else f"\n{self._layout.table()}"

    def _data(self) -> Checks:
        import jax

        dataset = data.open_dataset(self._config.data, bad_records=self._config.guards.bad_records)
        dataset = dataset.for_model(
            self._config.model, has_64_bits=jax.config.read("jax_enable_x64")
        )
        self._dataset = dataset
        train = self._config.train
        dataset.order(seed=self._config.run.seed, rows_per_step=train.global_batch_size)
        yield Check(
            "pass",
            "data",
            f"{len(dataset.train):,} rows of {dataset.tokens_per_row} tokens to train on, "
            f"{len(dataset.heldout):,} held out",
        )
        if isinstance(dataset.tokenizer, LibraryTokenizer) and dataset.tokenizer.note:
            yield Check("pass", "tokenizer", dataset.tokenizer.note)

    def _devices(self) -> Checks:
        from jaxres.engine import mesh as meshes
        from jaxres.train.compiled import assemble

        config = self._config
        if self._num_devices is None:
            import jax

            with jax_settings.typed_errors(self._env):
                self._plan, self._mesh, slow = assemble.devices_here(config)
            self._platform = jax.default_backend()
            what = f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
        else:
            self._plan = mesh_plan.plan(
                config.mesh,
                config.train,
                config.model,
                num_devices=self._num_devices,
                num_hosts=self._num_hosts,
            )
            self._mesh = meshes.abstract(self._plan)
            per_host = self._num_devices // self._num_hosts
            slow = mesh_plan.crosses_hosts(self._plan, devices_per_host=per_host)
            what = f"{self._num_devices} devices of other machines, {per_host} per host"
        plan = self._plan
        axes = " ".join(f"{a}={n}" for a, n in zip(mesh_plan.AXES, plan.sizes, strict=True))
        yield Check("pass", "mesh", f"{what}: {axes}")
        if slow is not None:
            yield Check("warn", "mesh", slow)
        yield Check(
            "pass",
            "batch",
            f"{config.train.global_batch_size} rows = {plan.num_turns} (microbatches) x "
            f"{plan.rows_per_device} (rows a device at once) x {plan.batch_shards} (batch shards)",
        )

    def _state(self) -> Checks:
        from jaxres.engine import sharding_report
        from jaxres.train.compiled import assemble

        assert self._plan is not None
        shapes, model = assemble.state_shapes(
            self._config,
            vocab_size=self._dataset.vocab_size if self._dataset else None,
            mesh=self._mesh,
            platform=self._platform,
        )
        self._shapes = shapes
        self._layout = sharding_report.of(shapes, model, self._mesh)
        held = self._layout.device_bytes
        limit = sharding_report.device_limit(self._mesh) if self._here else None
        oom_advice.check_state_fits(held, limit)
        of = "" if limit is None else f" of {format_bytes(limit)}"
        whole = format_bytes(self._layout.global_bytes)
        yield Check(
            "pass", "state", f"{format_bytes(held)}{of} a device; a checkpoint takes {whole}"
        )
        for warning in self._layout.warnings():
            yield Check("warn", "state", warning)
        if self._here:
            snapshot, state = sharding_report.save_memory(self._layout)
            warning = oom_advice.warn_host_memory(snapshot, state)
            detail = (
                f"a save takes up to {format_bytes(snapshot)} of this host until it is committed"
            )
            yield Check("pass" if warning is None else "warn", "memory", warning or detail)
            yield from self._memory_tier()

    def _memory_tier(self) -> Checks:
        from jaxres.checkpoint.memory import tier as memory_tier
        from jaxres.engine import state as states

        section = self._config.checkpoint.memory
        if section is None:
            return
        size = memory_tier.size_bytes(states.to_plain(self._shapes))
        base = section.folder.expanduser()
        if not base.is_dir():
            yield Check("warn", "memory", f"checkpoint.memory would be off: {base}: no such folder")
            return
        problem = memory_tier.fit_problem(
            missing=size,
            base=base,
            free=files.free_bytes(base),
            available=processes.available_bytes(),
        )
        detail = f"states in host memory take {format_bytes(size)} of this host"
        if section.neighbor_copies:
            detail += ", and on several hosts as much again for the copies of another one's"
        text = detail if problem is None else f"checkpoint.memory would be off: {problem}"
        yield Check("pass" if problem is None else "warn", "memory", text)

    def _source(self) -> Checks:
        from jaxres.train import init_params

        section = self._config.init_from
        assert not isinstance(section, FromSeed)
        step = section.at_step if isinstance(section, FromRun) else None
        source = init_params.resolve_source(section, self._config.model, self._shapes, step=step)
        yield Check("pass", "init_from", source.summary())
        if self._dataset is not None:
            note = init_params.check_tokenizer(section, self._dataset)
            if note is not None:
                yield Check("warn", "init_from", note)

    def _step(self) -> Checks:
        import jax

        from jaxres.engine import sharding_report
        from jaxres.train.compiled import assemble, jitted_steps

        assert self._dataset is not None
        assert self._plan is not None
        parts = assemble.components(
            self._config,
            self._dataset,
            plan=self._plan,
            mesh=self._mesh,
            platform=self._platform,
        )
        try:
            needed = sharding_report.step_bytes(jitted_steps.compile_alone(parts))
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if not oom_advice.is_oom(error):
                raise
            raise OutOfMemory(oom_advice.oom_message(self._config, error)) from error
        warning = oom_advice.warn_device_memory(
            self._config, needed, sharding_report.device_limit(self._mesh)
        )
        if warning is not None:
            yield Check("warn", "step", warning)
        elif needed is None:
            yield Check("warn", "step", "compiles; XLA reports no memory estimate")
        else:
            yield Check(
                "pass", "step", f"compiles; about {format_bytes(needed)} a device (XLA's estimate)"
            )

    def _notices(self) -> Checks:
        if self._config.preemption.metadata == "off":
            yield Check("pass", "notices", "preemption.metadata is off: only signals are handled")
            return
        server = gce_metadata.detect(self._env, product=gce_metadata.product_name())
        if server is None:
            yield Check("pass", "notices", "this machine is no GCE VM: only signals are handled")
            return
        answer = gce_metadata.get(server, preemption.PREEMPTED)
        if isinstance(answer, Response):
            yield Check("pass", "notices", f"the metadata server {server} answers: {answer.text}")
        else:
            detail = f"{answer.why}. A run polls it; until it responds, only signals are handled"
            yield Check("warn", "notices", detail)

    def _resume_check(self) -> Checks:
        found = resume_results.read(self._config)
        yield Check("pass" if found.is_good else "warn", "resume", found.text)

    def _test_hardware(self) -> Checks:
        import jax

        from jaxres.train.checks import preflight
        from jaxres.train.jax_coordination import first_line

        assert self._hardware is not None
        run_dir = find_run_dir(self._loaded).local.absolute()
        tests = preflight.run(
            preflight.EXTENTS[self._hardware],
            dtypes=preflight.dtypes_of(self._config.model),
            places=[storage_rate.existing(run_dir)],
            host=socket.gethostname(),
            clock=SystemClock(),
        )
        try:
            for measured in tests:
                yield Check("pass", "hardware", str(measured))
        except jax.errors.JaxRuntimeError as error:
            text = f"a device has failed in a test, or its memory is in use: {first_line(error)}"
            yield Check("fail", "hardware", text)

    def _probe(self) -> Checks:
        """Writes a probe where the run's files are, reads it back and deletes it."""
        assert self._probe_bytes is not None
        root = find_run_dir(self._loaded).root
        folder = root if is_remote(root) else storage_rate.existing(root)
        clock, machine = SystemClock(), socket.gethostname()
        with signals.restored():
            signals.raise_on_stop()  # So that a stop deletes the probe too.
            found = probe.probe(folder, size_bytes=self._probe_bytes, clock=clock)
        rate = storage_rate.of_probe(found, root=root, machine=machine, clock=clock)
        what = f"{self._probe_bytes / 2**20:,.0f} MiB were written to {folder}, read and deleted"
        if not found.is_equal:
            remedy = "Choose another place with run.dir=..., and test this one"
            yield Check("fail", "storage", f"{what}: they read back differently", remedy)
            return
        kept = kept_results.kept(lambda: storage_rate.store(self._config, rate))
        remedy = ""
        if self._config.launch.gce is not None:
            remedy = "`launch gce check` measures it on a VM, which decides for this job"
        yield Check("pass", "storage", f"{what}: {rate}; {kept}", remedy)

    def _run_dir(self) -> Checks:
        run_dir = find_run_dir(self._loaded).root.absolute()
        if is_remote(run_dir):
            names = files.list_names(run_dir)
            yield Check("pass", "run.dir", f"{run_dir} can be read; it holds {len(names)} names")
            return
        existing = storage_rate.existing(run_dir)
        try:
            with tempfile.TemporaryFile(dir=existing):  # Unnamed: leaves nothing.
                pass
        except OSError as error:
            yield Check(
                "fail",
                "run.dir",
                f"{run_dir}: {existing} can't be written ({error.strerror}). Choose another "
                "directory with run.dir=..., or fix this one",
            )
            return
        free = shutil.disk_usage(existing).free
        if self._layout is None:
            yield Check(
                "pass", "run.dir", f"{run_dir} can be written; {format_bytes(free)} are free there"
            )
            return
        keep = self._config.checkpoint.keep
        count = (
            keep.last + keep.daily + keep.weekly + keep.best + 3
        )  # + known good, next, in flight.
        needed = count * self._layout.global_bytes
        size = format_bytes(self._layout.global_bytes)
        planned = f"{count} checkpoints of {size} (checkpoint.keep + 3)"
        if free < needed:
            yield Check(
                "warn",
                "run.dir",
                f"{run_dir}: {planned} need {format_bytes(needed)}, and {format_bytes(free)} are "
                "free. Free some space, lower checkpoint.keep.last, or choose another directory "
                "with run.dir=...",
            )
            return
        yield Check(
            "pass", "run.dir", f"{run_dir}: {planned} fit into the {format_bytes(free)} free there"
        )


def worst(checks: Sequence[Check]) -> dict[str, Check]:
    """Returns the checks by their names; of several of one name the worst."""
    order = ("n/a", "pass", "warn", "fail")
    found: dict[str, Check] = {}
    for check in checks:
        if check.name not in found or order.index(check.status) > order.index(
            found[check.name].status
        ):
            found[check.name] = check
    return found


def _guarded(
    name: str, checks: Callable[[], Checks], *, bad: Literal["warn", "fail"] = "fail"
) -> Checks:
    """Yields the checks; converts a RunError to a failed or warning check."""
    try:
        yield from checks()
    except (PreemptedError, StoppedError):
        raise
    except (ConfigError, StorageRefused) as error:
        yield Check(bad, name, str(error))
    except RunError as error:
        yield Check(
            bad, name, f"{error} (a run would exit with {error.exit_code} {error.exit_code.name})"
        )
