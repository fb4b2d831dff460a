"""The pre-flight checklist: what a run would meet, told before it starts; nothing is written.

`jaxres doctor CONFIG.yaml [section.field=value ...]` looks at the devices that are here;
`--devices N [--hosts H]` plans for N devices that are not.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxres import config as configs
from jaxres import data, faults
from jaxres.config import Loaded, RunConfig
from jaxres.config.argparser import Parser
from jaxres.config.schema_training import FromRun, FromSeed
from jaxres.data import Dataset
from jaxres.engine import mesh_plan
from jaxres.engine.mesh_plan import Plan
from jaxres.faults import ConfigError, Exit, OutOfMemory, TypedEnd
from jaxres.storage import files
from jaxres.storage.path import BucketPath
from jaxres.supervisor import gce_metadata, preemption
from jaxres.supervisor.gce_metadata import Answer
from jaxres.telemetry.stdio import size
from jaxres.train import oom_advice

if TYPE_CHECKING:
    from jaxres.engine.sharding_report import Layout

USAGE = "jaxres doctor CONFIG.yaml [section.field=value ...] [--devices N [--hosts H]]"


@dataclass(frozen=True)
class Check:
    """One line of the list: what was looked at, and what to do where it is not well."""

    status: Literal["pass", "warn", "fail"]
    name: str
    says: str

    def __str__(self) -> str:
        """Returns the line."""
        return f"{self.status}  {self.name:<8}  {self.says}"


Told = Iterator[Check]


def main(words: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Prints the checklist and the layout; returns 0, or 78 where something fails."""
    try:
        options = _parse(words)
        loaded = configs.load(options.config, options.overrides)
    except TypedEnd as end:
        sys.stderr.write(faults.message(end.exit, str(end)))
        return end.exit
    failed = 0
    doctor = Doctor(loaded, num_devices=options.devices, num_hosts=options.hosts, env=env)
    for check in doctor.checks():
        sys.stdout.write(f"{check}\n")
        sys.stdout.flush()
        failed += check.status == "fail"
    sys.stdout.write(doctor.table())
    if not failed:
        return Exit.DONE
    what = "1 check fails" if failed == 1 else f"{failed} checks fail"
    sys.stderr.write(faults.message(Exit.CONFIG, f"{options.config}: {what}, see above"))
    return Exit.CONFIG


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="jaxres doctor", usage=USAGE)
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--hosts", type=int, default=None)
    options = parser.parse_intermixed_args(words)
    if options.hosts is not None and options.devices is None:
        parser.error("--hosts goes with --devices")
    options.hosts = options.hosts or 1
    if options.devices is not None and (options.devices < 1 or options.devices % options.hosts):
        parser.error(f"--devices {options.devices} is not a multiple of --hosts {options.hosts}")
    return options


class Doctor:
    """Looks at one thing after the other; what has failed is not built upon."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        num_devices: int | None,
        num_hosts: int,
        env: Mapping[str, str],
    ) -> None:
        """Takes the config, and how many devices to plan for; None: those that are here."""
        self._loaded = loaded
        self._config: RunConfig = loaded.config
        self._num_devices = num_devices
        self._num_hosts = num_hosts
        self._here = num_devices is None
        self._env = env
        self._dataset: Dataset | None = None
        self._plan: Plan | None = None
        self._mesh: Any = None
        self._platform = "cpu"
        self._layout: Layout | None = None
        self._shapes: Any = None

    def checks(self) -> Told:
        """Yields each check as soon as it is made."""
        yield Check("pass", "config", f"{self._loaded.name}: every key is known and fits")
        yield from _typed("data", self._data, bad="fail" if self._here else "warn")
        yield from _typed("mesh", self._devices)
        if self._plan is not None:
            yield from _typed("state", self._state)
        if self._shapes is not None and not isinstance(self._config.init_from, FromSeed):
            yield from _typed("init_from", self._source, bad="fail" if self._here else "warn")
        if not self._here:
            return  # Step and storage are another machine's.
        if self._dataset is not None and self._layout is not None:
            yield from _typed("step", self._step)
        yield from self._place()
        yield from _typed("notices", self._notices)

    def table(self) -> str:
        """Returns what lies on each device; nothing where that could not be found out."""
        return "" if self._layout is None else f"\n{self._layout.table()}"

    def _data(self) -> Told:
        dataset = data.open_dataset(self._config.data)
        self._dataset = dataset
        yield Check(
            "pass",
            "data",
            f"{len(dataset.train):,} rows of {dataset.tokens_per_row} tokens to train on, "
            f"{len(dataset.heldout):,} held out",
        )

    def _devices(self) -> Told:
        from jaxres.engine import mesh as meshes
        from jaxres.train import build

        config = self._config
        if self._num_devices is None:
            import jax

            self._plan, self._mesh, slow = build.devices_here(config)
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
            what = f"{self._num_devices} devices that are not here, {per_host} a host"
        plan = self._plan
        axes = " ".join(f"{a}={n}" for a, n in zip(mesh_plan.AXES, plan.sizes, strict=True))
        yield Check("pass", "mesh", f"{what}: {axes}")
        if slow is not None:
            yield Check("warn", "mesh", slow)
        yield Check(
            "pass",
            "batch",
            f"{config.train.global_batch_size} rows = {plan.microbatches} (microbatches) x "
            f"{plan.rows_per_device} (rows a device at once) x {plan.batch_shards} (batch shards)",
        )

    def _state(self) -> Told:
        from jaxres.engine import sharding_report
        from jaxres.train import build

        assert self._plan is not None
        shapes, model = build.state_shapes(
            self._config,
            vocab_size=self._dataset.vocab_size if self._dataset else None,
            mesh=self._mesh,
            platform=self._platform,
        )
        self._shapes = shapes
        self._layout = sharding_report.of(shapes, model, self._mesh)
        held = self._layout.device_bytes
        limit = sharding_report.device_limit(self._mesh) if self._here else None
        oom_advice.refuse_large_state(held, limit)
        of = "" if limit is None else f" of {size(limit)}"
        whole = size(self._layout.global_bytes)
        yield Check("pass", "state", f"{size(held)}{of} a device; a checkpoint takes {whole}")
        for warning in self._layout.warnings():
            yield Check("warn", "state", warning)
        if self._here:
            snapshot, state = sharding_report.save_memory(self._layout)
            small = oom_advice.small_host(snapshot, state)
            says = f"a save takes up to {size(snapshot)} of this host until it is committed"
            yield Check("pass" if small is None else "warn", "memory", small or says)

    def _source(self) -> Told:
        from jaxres.train import init_params

        section = self._config.init_from
        assert not isinstance(section, FromSeed)
        step = section.at_step if isinstance(section, FromRun) else None
        found = init_params.find(section, self._config.model, self._shapes, step=step)
        yield Check("pass", "init_from", found.in_words())

    def _step(self) -> Told:
        import jax

        from jaxres.engine import sharding_report
        from jaxres.train import build

        assert self._dataset is not None
        assert self._plan is not None
        parts = build.assemble(
            self._config,
            self._dataset,
            plan=self._plan,
            mesh=self._mesh,
            platform=self._platform,
        )
        try:
            needs = sharding_report.step_bytes(build.traced_step(parts).lower().compile())
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if not oom_advice.is_exhausted(error):
                raise
            raise OutOfMemory(oom_advice.advice(self._config, error)) from error
        large = oom_advice.large_step(self._config, needs, sharding_report.device_limit(self._mesh))
        if large is not None:
            yield Check("warn", "step", large)
        elif needs is None:
            yield Check("warn", "step", "compiles; XLA does not say what memory it needs")
        else:
            yield Check("pass", "step", f"compiles; about {size(needs)} a device (XLA's estimate)")

    def _notices(self) -> Told:
        if self._config.preemption.metadata == "off":
            yield Check("pass", "notices", "preemption.metadata is off: only signals are heeded")
            return
        server = gce_metadata.find(self._env, product=gce_metadata.product_name())
        if server is None:
            yield Check("pass", "notices", "this machine is no GCE VM: only signals are heeded")
            return
        answer = gce_metadata.ask(server, preemption.PREEMPTED)
        if isinstance(answer, Answer):
            yield Check("pass", "notices", f"the metadata server {server} answers: {answer.text}")
        else:
            says = f"{answer.why}. The run would go on asking; until it answers, only signals count"
            yield Check("warn", "notices", says)

    def _place(self) -> Told:
        run_dir = configs.run_dir(self._config, self._loaded.name).absolute()
        if isinstance(run_dir, BucketPath):
            found = files.list_names(run_dir)
            yield Check("pass", "run.dir", f"{run_dir} can be read; {len(found)} names are there")
            return
        there = next(p for p in (run_dir, *run_dir.parents) if p.exists())
        try:
            with tempfile.TemporaryFile(dir=there):  # It never has a name, so nothing is left.
                pass
        except OSError as error:
            yield Check(
                "fail",
                "run.dir",
                f"{run_dir}: {there} can't be written ({error.strerror}). Choose another place "
                "with run.dir=..., or mend this one",
            )
            return
        free = shutil.disk_usage(there).free
        if self._layout is None:
            yield Check("pass", "run.dir", f"{run_dir} can be written; {size(free)} are free there")
            return
        keep = self._config.checkpoint.keep
        count = keep.last + keep.daily + keep.weekly + keep.best + 3  # Known good, next, in flight.
        needed = count * self._layout.global_bytes
        fits = f"{count} checkpoints of {size(self._layout.global_bytes)} (checkpoint.keep + 3"
        if free < needed:
            yield Check(
                "warn",
                "run.dir",
                f"{run_dir}: {fits}) need {size(needed)}, and {size(free)} are free. Free some "
                "space, lower checkpoint.keep.last, or choose another place with run.dir=...",
            )
            return
        yield Check("pass", "run.dir", f"{run_dir}: {fits}) fit into the {size(free)} free there")


def _typed(name: str, checks: Callable[[], Told], *, bad: Literal["warn", "fail"] = "fail") -> Told:
    """Yields the checks; a typed end among them becomes a line."""
    try:
        yield from checks()
    except ConfigError as error:
        yield Check(bad, name, str(error))
    except TypedEnd as end:
        yield Check(bad, name, f"{end} (a run would end with {end.exit} {end.exit.name})")
