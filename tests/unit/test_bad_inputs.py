"""Bad input of every command: one line with the exit code, no traceback, nothing written.

Each row of the table is a command line with the files that it finds. The commands run in this
process, through the functions that their entry points call.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxres import __main__ as jaxres_command
from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode, exit_name
from jaxres.launch import __main__ as launch
from jaxres.runlog import attempt_history
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, Commit, RunLog, Start
from jaxres.train import __main__ as train
from tests.unit.runlog.example_records import CLAIM

USAGE, CONFIG, STORAGE, BUG = ExitCode.USAGE, ExitCode.CONFIG, ExitCode.STORAGE, ExitCode.BUG
DIR = object()
"""A folder instead of a file."""
LOOP, MEMORY, NOWHERE = Path("loop"), Path("/proc/self/mem"), Path("nowhere")
"""Links: a loop if the file's name is `loop`; a file whose read fails; one that dangles."""
MINIMAL = """\
data: {source: {kind: text, path: corpus}, seq_len: 16}
model: {kind: mlp}
optimizer: {kind: adamw, learning_rate: 1e-3}
train: {steps: 4, global_batch_size: 8}
run: {dir: new}
"""
TEXT = "some text to learn from\n" * 50
Files = dict[str, object]


@dataclass(frozen=True)
class Row:
    """A command line, how it must end, and the files and variables that it finds."""

    line: str
    code: int
    says: str
    """Text of standard error; for `doctor`, of its checks too."""
    files: Files = field(default_factory=dict)
    """Text, bytes, DIR, or the target of a link as a Path."""
    env: dict[str, str] = field(default_factory=dict)
    lines: int = 1
    """Lines of standard error."""


def bad_config(content: object, says: str, *, lines: int = 1, code: int = CONFIG) -> Row:
    """A config file with this content."""
    return Row("train bad.yaml", code, says, {"bad.yaml": content}, lines=lines)


def bad_value(assignment: str, says: str, code: int = CONFIG) -> Row:
    """A setting on the command line."""
    return Row(f"train c.yaml {shlex.quote(assignment)}", code, says)


def bad_check(assignments: str, says: str) -> Row:
    """A setting that `doctor` tries on the data and the devices."""
    return Row(f"doctor c.yaml --devices 2 {assignments}", CONFIG, says, dict(DATA))


DATA: Files = {
    "empty": DIR,
    "loop": LOOP,
    "no-json/meta.json": "{",
    "no-fields/meta.json": "{}",
    "no-object/meta.json": "[]",
}
JOB = "--num-hosts 2 --host-id 0 --coordinator"
COMMANDS = [
    Row("foo", USAGE, "'foo': unknown command (commands: train, launch, status"),
    Row("statsu run", USAGE, "did you mean 'status'?"),
    Row("''", USAGE, "'': unknown command"),
    Row("--versoin", USAGE, "unknown command"),
    Row("status", USAGE, "RUN_DIR (usage: `jaxres status --help`)"),
    Row("status --jsn run", USAGE, "unrecognized arguments: --jsn"),
    Row("status --js run", USAGE, "unrecognized arguments: --js"),
    Row("status none", USAGE, "none: no run here"),
    Row("status corpus", USAGE, "corpus: no run here"),
    Row("status c.yaml", USAGE, "c.yaml: no run here"),
    Row("status loop", USAGE, "loop: no run here", {"loop": LOOP}),
    Row("status empty", USAGE, "no log/", {"empty/log": DIR}),
    Row("status gs://B", CONFIG, "'gs://B': must be gs://BUCKET/FOLDER; a bucket's name has"),
    Row("status gs://bucket//x", CONFIG, "must be gs://BUCKET/FOLDER"),
    Row("history", USAGE, "required: RUN_DIR"),
    Row("history run --attempts=yes", USAGE, "--attempts"),
    Row("history none", USAGE, "none: no run here"),
    Row("history --attempts none", USAGE, "none: no run here"),
    Row("report", USAGE, "required: RUN_DIR"),
    Row("report none", USAGE, "none: no run here"),
    Row("report run --jsn", USAGE, "unrecognized arguments: --jsn"),
    Row("hosts", USAGE, "required: RUN_DIR"),
    Row("hosts none", USAGE, "none: no run here"),
    Row("hosts run --forget", USAGE, "--forget: expected one argument"),
    Row("hosts run --forget x", USAGE, "--forget x: no host of this name is left out"),
    Row("checkpoints", USAGE, "required: COMMAND"),
    Row("checkpoints lst run", USAGE, "invalid choice: 'lst'"),
    Row("checkpoints list", USAGE, "required: RUN_DIR"),
    Row("checkpoints list none", USAGE, "no run here"),
    Row("checkpoints list run x", USAGE, "unrecognized arguments: x"),
    Row("checkpoints verify run --step", USAGE, "--step: expected one argument"),
    Row("checkpoints verify run --step x", USAGE, "invalid int value: 'x'"),
    Row("checkpoints verify run --step 1.5", USAGE, "invalid int value: '1.5'"),
    Row("checkpoints verify none", USAGE, "no run here"),
    Row("checkpoints verify run", STORAGE, "run/checkpoints: can't be listed"),
    Row("checkpoints digest run", STORAGE, "run/checkpoints: can't be listed"),
    Row("checkpoints digest run --step 99", USAGE, "step 99 is not committed (committed: 2)"),
    Row("checkpoints digest run --step -1", USAGE, "step -1 is not committed"),
    Row("checkpoints digest none", USAGE, "no run here"),
    Row("checkpoints diff run", USAGE, "would be compared with itself"),
    Row("checkpoints diff run none", USAGE, "none: no run here"),
    Row("checkpoints diff run run --step 99", USAGE, "step 99 is not committed"),
    Row("checkpoints prune run --dry", USAGE, "unrecognized arguments: --dry"),
    Row("checkpoints prune run train.steps=3", USAGE, "only checkpoint.keep.*"),
    Row("checkpoints prune run checkpoint.keep.last=no", CONFIG, "must be a whole number"),
    Row("checkpoints prune run checkpoint.keep.last=-1", CONFIG, "must be at least 2"),
    Row("checkpoints prune run checkpoint.keep.lst=3", CONFIG, "did you mean 'last'?"),
    Row("checkpoints prune none", USAGE, "no run here"),
    Row("checkpoints replicate run", USAGE, "required: TO"),
    Row("checkpoints replicate none to", USAGE, "no run here"),
    Row("checkpoints replicate run run", CONFIG, "is the run directory itself"),
    Row("checkpoints replicate run run/inside", CONFIG, "is inside the run directory"),
    Row("checkpoints replicate run to --max-mb-per-second=0", USAGE, "expected a number above 0"),
    Row("checkpoints pin run", USAGE, "required: --step"),
    Row("checkpoints pin run --step 99", USAGE, "step 99 is not committed (committed: 2)"),
    Row("checkpoints pin none --step 2", USAGE, "no run here"),
    Row("checkpoints unpin run", USAGE, "required: --step"),
    Row("checkpoints export none", USAGE, "no run here"),
    Row("checkpoints export run", STORAGE, "run/checkpoints: can't be listed"),
    Row("checkpoints export run --step 99", USAGE, "step 99 is not committed"),
    Row("checkpoints export run --names foo", USAGE, "invalid choice: 'foo'"),
    Row("checkpoints export run --dtype float8", USAGE, "invalid choice: 'float8'"),
    Row("checkpoints export run --max-shard-bytes 0", USAGE, "must be at least 1"),
    Row("doctor https://me:hunter2@h/c", USAGE, "https://me:<secret>@h/c: must be a local path"),
    Row("checkpoints export run --out gs://bucket/x", USAGE, "must be a local path"),
    Row("checkpoints export run --out gs://B", CONFIG, "must be gs://BUCKET/FOLDER"),
    Row("checkpoints import none", CONFIG, "none: no such file"),
    Row("checkpoints import corpus", CONFIG, "expected one safetensors file"),
    Row("checkpoints import corpus --step 2", USAGE, "--step needs a run directory"),
    Row("checkpoints import corpus/a.txt", CONFIG, "not a valid safetensors file"),
    Row("checkpoints import run", USAGE, "no export here"),
    Row("checkpoints import run --step 2", USAGE, "no export of step 2"),
    Row("replay", USAGE, "required: --step"),
    Row("replay run", USAGE, "required: --step"),
    Row("replay run --step x", USAGE, "invalid int value"),
    Row("replay run --step 0", USAGE, "the first step of a run is 1"),
    Row("replay run --step 99", CONFIG, "has no step 99"),
    Row("replay none --step 1", USAGE, "none: no run here"),
    Row("replay c.yaml --step 1", USAGE, "c.yaml: no run here"),
    Row("doctor", USAGE, "required: CONFIG"),
    Row("doctor none.yaml", USAGE, "none.yaml: no such file"),
    Row("doctor run", USAGE, "run: is a folder"),
    Row("doctor c.yaml foo", USAGE, "foo): no such flag"),
    Row("doctor c.yaml --foo", USAGE, "unrecognized arguments: --foo"),
    Row("doctor c.yaml --hosts 2", USAGE, "--hosts needs --devices"),
    Row("doctor c.yaml --devices 0", USAGE, "--devices 0: expected a number from 1"),
    Row("doctor c.yaml --devices -2", USAGE, "--devices -2: expected a number from 1"),
    Row("doctor c.yaml --devices 99999999999", USAGE, "expected a number from 1"),
    Row("doctor c.yaml --devices x", USAGE, "invalid int value"),
    Row("doctor c.yaml --devices 3 --hosts 2", USAGE, "is not a multiple of --hosts 2"),
    Row("doctor c.yaml --devices 4 --hosts 0", USAGE, "--hosts 0: expected a number from 1"),
    Row("doctor c.yaml --devices 4 --hosts -2", USAGE, "--hosts -2: expected a number from 1"),
    Row("train", USAGE, "got nothing (usage: `python -m jaxres.train --help`)"),
    Row("train none.yaml", USAGE, "none.yaml: no such file"),
    Row("train quikstart", CONFIG, "did you mean 'quickstart'? (built-in configs: gpt2-124m,"),
    Row("doctor quikstart", CONFIG, "no built-in config has this name; did you mean 'quickstart'?"),
    Row("train c.yaml d.yaml", USAGE, "got c.yaml d.yaml"),
    Row("train --foo c.yaml", USAGE, "--foo: unknown flag"),
    Row("train c.yaml --inlin", USAGE, "--inlin: unknown flag"),
    Row("train c.yaml train.steps", USAGE, "got c.yaml train.steps"),
    Row("train c.yaml =3", USAGE, "(=3): no such flag"),
    Row("train c.yaml -x=1", USAGE, "(-x=1): no such flag"),
    Row("train c.yaml train..steps=3", USAGE, "no such flag"),
    Row("train corpus", USAGE, "corpus: no config.yaml here"),
    Row("train c.yaml/x", USAGE, "no such file"),
    Row("train run run.dir=other", CONFIG, "the run directory is given already"),
    Row(f"train {'x' * 300}.yaml", CONFIG, "File name too long"),
    Row("train gs://", USAGE, "must be gs://BUCKET/FOLDER"),
    Row("train gs://bucket", USAGE, "must be gs://BUCKET/FOLDER"),
    Row("train gs://bucket/../x", USAGE, "must be gs://BUCKET/FOLDER"),
    Row("train 'gs://bucket/a[1]'", USAGE, "without *?[]#"),
    Row("train c.yaml --num-hosts", USAGE, "--num-hosts: expected a value"),
    Row("train c.yaml --num-hosts 2", USAGE, "needs --coordinator"),
    Row("train c.yaml --num-hosts 2 --num-hosts 3", USAGE, "given twice, as 2 and as 3"),
    Row("train c.yaml --num-hosts 0 --host-id 0 --coordinator a:1", USAGE, "--num-hosts=0"),
    Row("train c.yaml --num-hosts x --host-id 0 --coordinator a:1", USAGE, "--num-hosts=x"),
    Row("train c.yaml --num-hosts 2 --host-id 2 --coordinator a:1", USAGE, "ids are 0 to 1"),
    Row("train c.yaml --num-hosts 2 --host-id -1 --coordinator a:1", USAGE, "--host-id=-1"),
    Row(f"train c.yaml {JOB} a", USAGE, "--coordinator=a: expected the address"),
    Row(f"train c.yaml {JOB} a:99999", USAGE, "a port is a number from 1 to 65535"),
    Row(f"train c.yaml {JOB} a:b", USAGE, "expected the address of host 0"),
    Row(f"train c.yaml --inline {JOB} a:1", USAGE, "--inline has no supervisor"),
    Row("train c.yaml", USAGE, "JAXRES_NUM_HOSTS=x", env={"JAXRES_NUM_HOSTS": "x"}),
    Row("train c.yaml", USAGE, "JAXRES_NUM_HOSTS=0", env={"JAXRES_NUM_HOSTS": "0"}),
    Row("train c.yaml", USAGE, "2 (JAXRES_NUM_HOSTS)", env={"JAXRES_NUM_HOSTS": "2"}),
    Row("train c.yaml", USAGE, "JAXRES_HOST_ID=-1", env={"JAXRES_HOST_ID": "-1"}),
    Row("train c.yaml", USAGE, "JAXRES_COORDINATOR=a:b", env={"JAXRES_COORDINATOR": "a:b"}),
    Row("train c.yaml --num-hosts 3", USAGE, "omit one", env={"JAXRES_NUM_HOSTS": "2"}),
    Row(f"train c.yaml {JOB} localhost:7", USAGE, "JAXRES_SECRET", env={"JAXRES_SECRET": "x"}),
    Row("launch", USAGE, "local, gce, slurm, k8s or sky (got nothing"),
    Row("launch foo c.yaml", USAGE, "got foo"),
    Row("launch local", USAGE, "got nothing"),
    Row("launch local c.yaml", USAGE, "--hosts: how many workers?"),
    Row("launch local c.yaml --hosts", USAGE, "--hosts without a value"),
    Row("launch local c.yaml --hosts 0", USAGE, "--hosts 0: expected a whole number"),
    Row("launch local c.yaml --hosts -1", USAGE, "--hosts -1"),
    Row("launch local c.yaml --hosts 2.5", USAGE, "--hosts 2.5"),
    Row("launch local c.yaml --hosts ²", USAGE, "--hosts ²"),
    Row("launch local c.yaml --hosts 3..2", USAGE, "the smaller number first"),
    Row("launch local c.yaml --hosts 1 --devices-per-host 0", USAGE, "--devices-per-host 0"),
    Row("launch local c.yaml --hosts 1 --foo", USAGE, "--foo: unknown flag"),
    Row("launch local none.yaml --hosts 1", USAGE, "none.yaml: no such file"),
    Row("launch k8s c.yaml --print", USAGE, "--image: which image has jaxres?"),
    Row("launch k8s c.yaml --print --image 'a b'", USAGE, "--image 'a b': expected the name"),
    Row("launch k8s c.yaml --print --image i --nodes 1e9", USAGE, "invalid int value: '1e9'"),
    Row("launch k8s c.yaml --print --image i", CONFIG, "it would be lost with its pod"),
    Row("launch sky", USAGE, "got nothing"),
    Row("launch sky c.yaml --print", USAGE, "how do the nodes get jaxres?"),
    Row("launch sky c.yaml --print --image i", CONFIG, "it would be lost with its nodes"),
    Row("launch sky c.yaml --print --image i run.dir=gs://bucket/x --gpus ü:8", USAGE, "H100:8"),
    Row("launch gce", USAGE, "expected one of up, check, status"),
    Row("launch gce foo", USAGE, "launch gce foo: expected one of"),
    Row("launch gce up", USAGE, "got nothing"),
    Row("launch gce up c.yaml", CONFIG, "launch.gce is missing"),
    Row("launch gce up c.yaml --dry", USAGE, "--dry: unknown flag"),
    Row("launch gce up c.yaml --dry-run", CONFIG, "launch.gce is missing"),
    Row("launch gce up c.yaml --dry-run --check", CONFIG, "launch.gce is missing"),
    Row("launch gce up c.yaml --check", USAGE, "--check: needs --dry-run"),
    Row("launch gce init c.yaml", CONFIG, "launch.gce is missing"),
    Row("launch gce status", USAGE, "got nothing"),
    Row("launch gce status run", USAGE, "are in buckets"),
    Row("launch gce status gs://B", USAGE, "must be gs://BUCKET/FOLDER"),
    Row("launch gce logs gs://bucket/x --attempt x", USAGE, "invalid int value"),
    Row("launch gce logs gs://bucket/x --follow --attempt 1", USAGE, "--attempt: --follow prints"),
    Row("launch gce ssh", USAGE, "required: run"),
    Row("launch gce cordon gs://bucket/x", USAGE, "required: --vm"),
    Row("launch gce drain run --vm x", USAGE, "are in buckets"),
    Row("launch gce uncordon gs://bucket/x --vm x --reason y", USAGE, "unrecognized arguments"),
    Row("launch gce stop run", USAGE, "are in buckets"),
    Row("launch gce down", USAGE, "got nothing"),
]
FILES = [
    bad_config("", "data.source.kind: missing", lines=3),
    bad_config("# only\n", "train.steps: missing", lines=3),
    bad_config("7\n", "bad.yaml:1: contains a single value (7)"),
    bad_config("[1, 2]\n", "contains a list"),
    bad_config("a: b: c\n", "not valid YAML: mapping values"),
    bad_config("train: {steps: 3\n", "bad.yaml:2: not valid YAML"),
    bad_config("\ttrain: 3\n", "cannot start any token"),
    bad_config("train: {steps: 3}\ntrain: {steps: 4}\n", "given twice (first at", lines=3),
    bad_config("train: {steps: 3, steps: 4}\n", "train.steps: given twice", lines=3),
    bad_config("&a [*a]\n", "aliases (*name) are not supported"),
    bad_config("--- 1\n--- 2\n", "another document"),
    bad_config("train: !!python/object:os.system {}\n", "the tag", lines=4),
    bad_config("? [1]\n: 2\n", "a key must be text (got a list or section)"),
    bad_config("1: 2\n", "a key must be text (got 1)"),
    bad_config("trian: {steps: 3}\n", "did you mean 'train'?", lines=4),
    bad_config("train: yes\n", "train: is a section", lines=3),
    bad_config("base: none.yaml\n", "none.yaml: no such file"),
    bad_config("base: 7\n", "must be a path relative to this file"),
    bad_config("base: bad.yaml\n", "a base can't have a base"),
    bad_config("base: corpus\n", "is a folder"),
    bad_config(b"\xff\xfe\x00", "can't be read: 'utf-8' codec"),
    bad_config(b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "can't be read: 'utf-8' codec"),
    bad_config("café: 1\n".encode("latin-1"), "invalid continuation byte"),
    bad_config("\x00\x01\x02", "control characters are not allowed"),
    bad_config("a" * 100_000, "contains a single value"),
    bad_config("{a: " * 3000, "is nested too deeply"),
    bad_config(DIR, "no config.yaml here", code=USAGE),
    bad_config(Path("bad.yaml"), "Too many levels of symbolic links"),
    bad_config(MEMORY, "storage failed (Input/output error)", code=STORAGE),
    bad_config(NOWHERE, "no such file", code=USAGE),
]
VALUES = [
    *(
        bad_value(f"train.steps={value}", "must be a whole number")
        for value in ("1.5", "x", "true", "null", "1e3", "[1]", "nan", ".inf", "0x", "''")
    ),
    *(bad_value(f"train.steps={value}", "must be greater than 0") for value in ("0", "-1")),
    bad_value("train.steps={a: 1}", "is a single value, not a section"),
    bad_value("train.steps=", "is empty"),
    bad_value("train.steps=9" + "9" * 30, "must be at most"),
    bad_value("train.steps=9" + "9" * 2000, "more than 1000 digits"),
    bad_value("train.steps={a: 1", "not valid YAML"),
    bad_value("train.steps=*a", "aliases"),
    bad_value("train.steps=!!python/name:os", "the tag"),
    bad_value("train.steps=\x1b[31m", "\\x1b[31m"),
    bad_value("train.foo=1", "unknown key"),
    bad_value("foo.bar=1", "foo: unknown key"),
    bad_value("train=1", "train: is a section"),
    bad_value("train.global_batch_size=0", "must be greater than 0"),
    bad_value("train.microbatches=3", "is not divisible by train.microbatches=3"),
    bad_value("run.seed=-1", "must be at least 0"),
    bad_value("run.seed=1" + "0" * 25, "at most 4,294,967,295"),
    bad_value("run.dir=", "is empty"),
    bad_value("run.dir=gs://B", "must be gs://BUCKET/FOLDER"),
    bad_value("run.dir=c.yaml/x", "Not a directory"),
    *(
        bad_value(f"optimizer.learning_rate={value}", "must be a finite number")
        for value in (".nan", ".inf", "1e400")
    ),
    bad_value("optimizer.learning_rate=-1", "must be greater than 0"),
    bad_value("optimizer.kind=foo", "must be adamw, lion, sgd, adafactor, muon or custom"),
    bad_value("optimizer.b1=1.5", "must be at most 1"),
    bad_value("optimizer.clip_norm=0", "must be greater than 0"),
    bad_value("model.kind=foo", "must be gpt, mlp, vit, custom or huggingface"),
    bad_value("model.kind=custom", "model.target: missing"),
    bad_value("model.num_heads=3", "gpt or vit has it"),
    bad_value("data.seq_len=0", "must be greater than 0"),
    bad_value(
        "data.source.kind=foo",
        "must be text, jsonl, parquet, huggingface, nanogpt, images, tokens, custom or mixture",
    ),
    bad_value("data.source.include=x", "must be a list"),
    bad_value("data.heldout_fraction=1", "must be less than 1"),
    bad_value("mesh.data=0", "must be at least 1, or -1"),
    bad_value("mesh.data=-2", "must be at least -1"),
    bad_value("mesh.data=3", "is not divisible by mesh.data"),
    bad_value("checkpoint.keep.last=1", "must be at least 2"),
    bad_value("checkpoint.save_every_steps=0", "must be greater than 0"),
    bad_value("checkpoint.save_every_steps=.nan", "must be a whole number"),
    bad_value("deadlines.step=0", "unknown key"),
    bad_value("restart.backoff_seconds=-1", "must be at least 0"),
    bad_value("alerts=1", "is a section"),
    bad_value("telemetry.tensorboard=maybe", "must be true or false"),
    bad_value("evaluation.batches=0", "must be greater than 0"),
    bad_value("init_from={kind: foo}", "init_from.kind"),
    bad_value("init_from={kind: run}", "init_from.path: missing"),
    bad_value("hosts.heartbeat_seconds=0", "must be greater than 0"),
    bad_value("preemption.metadata=maybe", "must be auto or off"),
]
CHECKS = [
    bad_check("data.source.path=none", "data.source.path: none does not exist"),
    bad_check("data.source.path=empty", "empty"),
    bad_check("data.source.path=loop", "loop"),
    bad_check("data.source.kind=tokens data.source.path=none", "none"),
    bad_check("data.source.kind=tokens data.source.path=no-json", "no-json"),
    bad_check("data.source.kind=tokens data.source.path=no-fields", "no-fields"),
    bad_check("data.source.kind=tokens data.source.path=no-object", "no-object"),
    bad_check("data.source.kind=custom data.source.target=nope", "data.source.target"),
    bad_check("data.source.kind=custom data.source.target=no.such:f", "data.source.target"),
    bad_check(
        "data.source.kind=custom data.source.target=json:nope", "module json has no function nope"
    ),
    bad_check("data.source.kind=custom data.source.target=json:dumps", "data.source.target"),
    bad_check("model.kind=custom model.target=json:dumps", "model.target"),
    bad_check("data.seq_len=100000000", "seq_len"),
]


def _write(root: Path, files: Files) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or path.is_symlink():
            path.unlink()
        if content is DIR:
            path.mkdir(parents=True)
        elif isinstance(content, Path):
            path.symlink_to(content)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(str(content))


def _make_run(root: Path) -> None:
    """Writes a run that has committed step 2 and was stopped; the files of the step are absent."""
    run_dir = RunDir(root)
    log = RunLog.claim(run_dir.log, CLAIM, after=(), clock=SystemClock())
    start = log.append(Start(step=0, path=None, dataset="d", computation={}))
    log.append(Commit(step=2, path="checkpoints/00000002-0001", manifest="m", bytes=7))
    log.append(AttemptEnded(exit=ExitCode.STOPPED, reason="Ctrl-C", committed=True))
    line = {"seq": start.seq, "step": 1, "attempt": 1, "loss": 1.0, "grad_norm": 1.0}
    line |= {"learning_rate": 0.1, "tokens": 8, "step_seconds": 1.0, "skipped": False}
    event = {"time": 1.0, "monotonic": 1.0, "event": "phase_changed", "phase": "train"}
    config = MINIMAL.replace("run: {dir: new}\n", "")
    files = {
        "config.yaml": config,
        "attempts/0001/config.yaml": config,
        "attempts/0001/metrics.jsonl": json.dumps(line | {"samples": "s"}) + "\n",
        "attempts/0001/events-host000.jsonl": json.dumps(event) + "\n",
    }
    _write(root, dict(files))


def _snapshot(root: Path) -> dict[str, object]:
    """Returns every name below a folder with its content."""
    return {
        path.relative_to(root).as_posix(): (
            os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else path.stat().st_mode
        )
        for path in root.rglob("*")
    }


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores what a command changes in its process: signals, hook, environment."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "JAXRES_", "JOB_"))]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    hook = sys.excepthook
    yield
    sys.excepthook = hook
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ.clear()
    os.environ.update(before)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_command(line: str) -> int:
    """Runs a command as its entry point does; returns the exit code."""
    words = shlex.split(line)
    if words[:1] == ["train"]:
        return train.main(words[1:])
    if words[:1] == ["launch"]:
        return launch.main(words[1:])
    return jaxres_command.main(words)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two configs, a corpus, and the folder of a run."""
    folder = tmp_path_factory.mktemp("original")
    corpus: Files = {"corpus/a.txt": TEXT, "corpus/b.txt": TEXT[:300]}
    _write(folder, {"c.yaml": MINIMAL, "d.yaml": MINIMAL} | corpus)
    _make_run(folder / "run")
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: None) -> Path:
    """The working directory: a copy of the original."""
    monkeypatch.setenv("HOME", str(original.parent / "home"))  # Caches of the data.
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "row", [*COMMANDS, *FILES, *VALUES, *CHECKS], ids=lambda row: f"{row.line[:60]} {row.says[:20]}"
)
def test_bad_input_is_one_line_with_its_exit_code(
    row: Row, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(folder, row.files)
    for name, value in row.env.items():
        monkeypatch.setenv(name, value)
    before = _snapshot(folder)
    code = run_command(row.line)
    out, err = capsys.readouterr()
    assert code == row.code, out + err
    assert len(err.splitlines()) == row.lines, err
    assert err.endswith(f"(exit {exit_name(row.code)})\n")
    assert row.says in (out + err if row.line.startswith("doctor") else err), out + err
    assert "Traceback" not in out + err
    assert _snapshot(folder) == before


LOOKING = (
    *("status", "history", "history --attempts", "checkpoints list", "checkpoints verify"),
    *("checkpoints prune --dry-run", "hosts"),
)
RUN_FILES = {
    "owner.json": ("status",),
    "attempts/0001/metrics.jsonl": ("status", "history", "history --attempts"),
    "attempts/0001/events-host000.jsonl": ("status", "history --attempts"),
    "events-supervisor.jsonl": ("status",),
    "attempts/0001/config.yaml": ("status", "checkpoints prune --dry-run"),
    "config.yaml": ("status",),
    "alerts.jsonl": ("status",),
    "log/00000002.json": LOOKING,
    "log/00000004.json": ("status", "history"),
    "log/x.json": ("status",),
    "pins": ("checkpoints list", "checkpoints prune --dry-run"),
    "checkpoints": ("checkpoints verify", "status"),
}
"""Files and folders of a run, and the commands that read them."""
ODD: tuple[object, ...] = (
    *("", "{", "[]", "7", "null", "{}", "[[]]", '{"step": "x"}', '{"time": "x", "event": 1}'),
    *('{"event": "phase_changed"}', '{"event": "run_built", "time": 1, "steps": "x"}'),
    *('{"event": "gave_up", "time": 1, "attempt": [], "exit": "x"}', b"\xff\xfe", "[" * 9999),
    *('{"seq": 2, "step": 1e999}', DIR),
)


@pytest.mark.parametrize("name", RUN_FILES)
def test_odd_files_of_a_run_never_end_in_a_traceback(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "run" / name
    for content in ODD:
        _remove(path)
        _write(folder, {f"run/{name}": content})
        before = _snapshot(folder)
        for verb in RUN_FILES[name]:
            code = run_command(f"{verb} run")
            out, err = capsys.readouterr()
            assert "Traceback" not in out + err
            assert code in (0, 1, 3, USAGE, STORAGE, CONFIG, ExitCode.UNRESTORABLE), (
                verb,
                content,
                err,
            )
            if code > 1 and code != 3:
                assert err.endswith(f"(exit {exit_name(code)})\n"), (verb, content, err)
                assert str(path.name) in err or "checkpoints" in err, (verb, content, err)
        assert _snapshot(folder) == before


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def test_an_unexpected_error_is_one_line_and_its_traceback_is_printed_on_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An overflow stands for every error that no code expects."""

    def overflow(*_: object, **__: object) -> None:
        raise OverflowError("as of a number that no code expects")

    monkeypatch.setattr(attempt_history, "read", overflow)
    assert run_command("history --attempts run") == BUG
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("jaxres history --attempts: OverflowError: ")
    assert line.endswith("set JAXRES_TRACEBACK=1 for the traceback (exit 70 BUG)")
    monkeypatch.setenv("JAXRES_TRACEBACK", "1")
    assert run_command("history --attempts run") == BUG
    assert "Traceback (most recent call last)" in capsys.readouterr().err
