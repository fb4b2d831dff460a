"""A config with a program: what it may have, what identifies its run, and what is recorded."""

import hashlib
from pathlib import Path

import pytest

from jaxres.config import digest, dump_yaml, file_mode, load, load_recorded, trajectory
from jaxres.config.schema.program import TRAINER_KEYS
from jaxres.config.schema.run_config import RunConfig
from jaxres.faults import ConfigError

from .conftest import Write

PROGRAM = """
program:
  command: [python, main.py]
  files: [main.py]
"""
KEYS = (
    *("run.seed", "run.guarantee", "run.determinism", "data", "model", "init_from", "lora"),
    *("optimizer", "train", "mesh", "guards", "evaluation", "hooks", "compilation"),
    *("telemetry.tensorboard", "telemetry.sample_prompt", "telemetry.sample_tokens"),
)
GIVEN = {
    "data": "data.seq_len=8",
    "model": "model.kind=mlp",
    "init_from": "init_from.kind=seed",
    "lora": "lora=null",
    "optimizer": "optimizer.kind=adamw",
    "train": "train.steps=3",
    "mesh": "mesh.data=1",
    "guards": "guards.corruption=null",
    "evaluation": "evaluation.batches=1",
    "hooks": "hooks=[]",
    "compilation": "compilation.profile=auto",
    "run.guarantee": "run.guarantee=any",
    "run.determinism": "run.determinism=fast",
    "telemetry.tensorboard": "telemetry.tensorboard=false",
}
CODE = b"print('hello')\n"


@pytest.fixture
def program(write: Write) -> Path:
    Path("main.py").write_bytes(CODE)
    return write(PROGRAM)


def test_command_and_content_of_the_files_identify_a_run(program: Path):
    config = load(program).config
    files = {"main.py": hashlib.sha256(CODE).hexdigest()}
    identity = {"program": {"command": ["python", "main.py"], "files": files}}
    assert trajectory(config) == identity
    free = ("program.env.A='1'", "program.cwd=.", "deadlines.silence_seconds=9", "run.name=x")
    assert digest(load(program, free).config) == digest(config)
    assert digest(load(program, ["program.command=[python]"]).config) != digest(config)
    Path("main.py").write_text("print(2)")
    assert digest(load(program).config) != digest(config)


def test_a_recorded_config_is_as_it_was_loaded_and_has_no_key_of_the_trainer(program: Path):
    config = load(program).config
    recorded = Path("run/config.yaml")
    recorded.parent.mkdir()
    recorded.write_text(dump_yaml(config))
    Path("main.py").unlink()
    assert load_recorded(recorded).config == config
    top = {line.partition(":")[0] for line in recorded.read_text().splitlines() if line[:1] != " "}
    assert top.isdisjoint(TRAINER_KEYS)
    assert "seed" not in recorded.read_text()


@pytest.mark.parametrize("key", KEYS)
def test_each_key_of_the_trainer_is_refused_by_name(program: Path, key: str):
    assert key.partition(".")[0] in RunConfig.model_fields
    with pytest.raises(ConfigError, match=f": {key}: is for the trainer, which `program`"):
        load(program, [GIVEN.get(key, f"{key}=1")])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("program.command=[]", "program.command"),
        ("program.command=['']", "must be text that is not empty"),
        ("program.files=[absent.py]", "absent.py: no such file"),
        ("program.files=[.]", "no such file"),
        ("program.files_sha256={other.py: '0'}", "program.files_sha256"),
        ("program.env.JAXRES_HOST='1'", "is set by jaxres itself"),
        ("program.env.A=1", "must be text"),
        ("program.shell=true", "unknown key"),
        ("checkpoint.when={kind: epochs}", "does not know the epochs of a program"),
    ],
)
def test_bad_values_are_one_line_each(program: Path, override: str, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        load(program, [override])
    assert len(str(caught.value).splitlines()) == 1


def test_a_program_alerts_about_missing_commits_only_if_it_is_asked_to(program: Path):
    assert load(program).config.alerts.no_commit_minutes is None
    asked = load(program, ["alerts.no_commit_minutes=5"]).config
    assert asked.alerts.no_commit_minutes == 5


def test_a_config_with_an_environment_is_for_its_owner_only(program: Path):
    assert file_mode(dump_yaml(load(program).config)) == 0o666
    assert file_mode(dump_yaml(load(program, ["program.env.A='1'"]).config)) == 0o600
