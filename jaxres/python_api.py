"""jaxres from Python and in notebooks: `train`, `Run`, `load_model`, `runs` and `branch`.

They are names of the package: `import jaxres; run = jaxres.train("my.yaml")`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxres import inference
from jaxres.checkpoint.weights import source as weights_source
from jaxres.checkpoint.weights.source import Step
from jaxres.cli import branch as branch_command
from jaxres.cli import runs as runs_command
from jaxres.cli import status as status_command
from jaxres.cli.checkpoints import history as history_command
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.config.yaml import dump
from jaxres.data.tokens.tokenizer import Tokenizer
from jaxres.exit_codes import ExitCode, exit_name
from jaxres.faults import ConfigError, UsageError
from jaxres.inference import LoadedModel
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir, root_of
from jaxres.runlog.run_log import Commit, RunHistory
from jaxres.storage.path import RunPath, is_path, parse_path
from jaxres.supervisor import run_config
from jaxres.train.__main__ import main

Overrides = Mapping[str, Any] | Sequence[str] | str
"""{"train.steps": 100}, or ["train.steps=100"] as on the command line; "train.steps=100" is one."""


@dataclass(frozen=True)
class Run:
    """A run directory, of a run that may be live, ended or on another machine."""

    dir: RunPath
    """A text that is given is made a path."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dir", root_of(self.dir))

    @property
    def config(self) -> RunConfig:
        """The config of the last attempt that trained."""
        return run_config.newest_config(self._run_dir)

    @property
    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return [commit.step for commit in self._history().committed]

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the metrics of each step, over all attempts, as `jaxres history --json`."""
        return self._rows(history_command.steps_text)

    def history(self) -> list[dict[str, Any]]:
        """Returns the end of each attempt, as `jaxres history --attempts --json`."""
        return self._rows(history_command.attempts_text)

    def status(self) -> dict[str, Any]:
        """Returns state, progress and the next action, as `jaxres status --json`."""
        found = status_command.read_status(self._run_dir, self._history(), clock=SystemClock())
        return json.loads(status_command.as_json(found))

    def restore(self, step: Step = "newest") -> dict[str, Any]:
        """Returns the whole training state of a step, every byte verified.

        Nested dicts of NumPy arrays: `params`, `opt`, `key`, `step`, `norms`, and those of
        `model_state`, `ema` and `loss_scale` that the run has.

        Raises:
          ConfigError: the step is not committed, or has no held-out loss.
          Unrestorable: the step is damaged.
        """
        return inference.state_of(self._run_dir, self._commit(step))

    def params(self, step: Step = "newest") -> dict[str, Any]:
        """Returns the parameters of a step as it evaluates them: averaged, with adapters added.

        Raises as `restore` does.
        """
        return inference.params_of(self._run_dir, self._commit(step))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the run trains with; None: it is not known."""
        return inference.tokenizer_of(self._run_dir)

    @property
    def _run_dir(self) -> RunDir:
        return RunDir(self.dir)

    def _history(self) -> RunHistory:
        history = run_log.fold(run_log.read_records(self._run_dir.log))
        if not history.claims:
            raise ConfigError(f"{self.dir}: no run here (no log/).")
        return history

    def _commit(self, step: Step) -> Commit:
        return weights_source.commit_of(self._run_dir, step)

    def _rows(self, text: Any) -> list[dict[str, Any]]:
        lines = text(self._run_dir, self._history(), as_json=True).splitlines()
        return [json.loads(line) for line in lines]


Config = str | Path | Run | Mapping[str, Any]
"""A config file, a run directory, a run, or the sections of a config."""


def train(config: Config, overrides: Overrides = ()) -> Run:
    """Trains in this process until the last step, or continues a run; returns the run.

    Signal handlers, signal mask and threads are as before when it returns. For runs of days the
    command `python -m jaxres.train` is better: it has a supervisor.

    Args:
      config: a config file, a run directory, a run, or the sections of a config.
      overrides: changes of the config.

    Raises:
      KeyboardInterrupt: interrupted, or asked to stop; the last finished step is saved, and the
        same call goes on.
      RuntimeError: training ended otherwise; the text has the exit code and its name.
      UsageError: a value of a dict is nothing that a config file can have.
    """
    words = _words(overrides)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(config, Mapping):
            target = Path(folder) / "python.yaml"
            target.write_text(dump(_plain(config, "")))
        else:
            place = str(config.dir if isinstance(config, Run) else config)
            target = Path(place) if "://" not in place else place
        code = main([str(target), *words, "--inline"])
        try:
            run_dir = run_config.resolve_run(parse_path(str(target)), words)[1]
        except (ConfigError, UsageError) as error:
            raise RuntimeError(f"nothing was trained: exit {exit_name(code)}, see above") from error
    run = Run(run_dir.root)
    if code == ExitCode.STOPPED:
        raise KeyboardInterrupt(f"{run_dir.root}: stopped and saved; the same call goes on")
    if code != ExitCode.DONE:
        raise RuntimeError(f"{run_dir.root}: training ended with exit {exit_name(code)}, see above")
    return run


def load_model(run: Run | str | Path, step: Step = "newest") -> LoadedModel:
    """Returns the model of a run with the parameters of a step, for inference on this machine.

    `run` may also be the folder of a decoder in Hugging Face's format, such as an export.

    Raises as `Run.restore` does.
    """
    return inference.load(run.dir if isinstance(run, Run) else run, step)


def runs(folder: str | Path = "runs") -> list[dict[str, Any]]:
    """Returns a row for each run in a folder and below it, as `jaxres runs --json`."""
    rows = runs_command.read_rows(parse_path(os.path.expanduser(folder)), clock=SystemClock())
    return [asdict(row) for row in rows]


def branch(
    run: Run | str | Path, to: str | Path, step: Step = "newest", overrides: Overrides = ()
) -> Run:
    """Makes a new run that begins with a step of another one, as `jaxres branch`; returns it.

    Raises:
      ConfigError: the step is not committed, or an override changes arrays or rows.
      UsageError: the directory exists.
    """
    origin = run if isinstance(run, Run) else Run(root_of(run))
    made = Run(root_of(to))
    branch_command.branch(
        RunDir(origin.dir),
        RunDir(made.dir),
        step=step,
        overrides=_words(overrides),
        env=os.environ,
    )
    return made


def _words(overrides: Overrides) -> list[str]:
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value)}" for key, value in _plain(overrides, "").items()]
    return [overrides] if isinstance(overrides, str) else list(overrides)


def _plain(value: Any, key: str) -> Any:
    """Returns a value as a config file can have it; a path is text, an array of no dims a number.

    Raises:
      UsageError: it is of another kind.
    """
    if isinstance(value, Mapping):
        return {name: _plain(below, f"{key}.{name}".lstrip(".")) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}[{number}]") for number, item in enumerate(value)]
    if is_path(value):
        return str(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise UsageError(
        f"{key}: a config has no {type(value).__name__}. Give text, numbers, true, false, None, "
        "lists or dicts of these."
    )
