"""Secrets of a config: where they are not shown, who can read them, and that they can change."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from jaxres import config as configs
from jaxres import secret_values
from jaxres.cli import runs
from jaxres.cluster import compatibility
from jaxres.config import RunConfig
from jaxres.config.schema.alert_kinds import Kind
from jaxres.config.schema.alerts import GenericTarget
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, UsageError
from jaxres.launch.k8s import manifest as k8s_manifest
from jaxres.launch.sky import task as sky_task
from jaxres.runlog.attempt_result import AttemptResult, stop_record
from jaxres.runlog.paths import RunDir
from jaxres.secret_values import HIDDEN
from jaxres.storage.path import GcsPath
from jaxres.supervisor import run_config
from jaxres.supervisor.companions import tracker_copy
from jaxres.telemetry import stdio
from jaxres.telemetry.incidents import Incident, messages
from tests.emulators import kubernetes, skypilot
from tests.promises.trainer import TINY
from tests.unit.secret_examples import TOKENS, letters
from tests.waiting import SURE_SECONDS

OLD, NEW = "hf_" + letters(34), "hf_" + letters(34, 3)
CUSTOM = "data.source={kind: custom, target: 'a:b', args: {%s}}"
MIXTURE = (
    "data.source={kind: mixture, sources: ["
    "{name: own, weight: 1, source: {kind: custom, target: 'a:b', args: {token: %s}}},"
    "{name: web, weight: 1, source: {kind: text, path: '{stdlib}'}}]}"
)
PLACES = {
    CUSTOM % "n: 5, token: %s": "data.source.args.token",
    CUSTOM % "options: {headers: [{Authorization: 'Bearer %s'}]}": (
        "data.source.args.options.headers[0].Authorization"
    ),
    CUSTOM % "note: %s": "data.source.args.note",
    CUSTOM % "url: 'https://me:%s@host/x'": "data.source.args.url",
    CUSTOM % "url: 'https://host/x?n=1&X-Amz-Signature=%s'": "data.source.args.url",
    MIXTURE: "data.source.sources[0].source.args.token",
    "data.validation=[{name: a, source: {kind: custom, target: 'a:b', args: {api_key: %s}}}]": (
        "data.validation[0].source.args.api_key"
    ),
    "model={kind: custom, target: 'a:b', args: {hub_token: %s}}": "model.args.hub_token",
    "optimizer={kind: custom, target: 'a:b', args: {password: %s}}": "optimizer.args.password",
    "hooks=[{target: 'a:b', args: {webhook_secret: %s}}]": "hooks[0].args.webhook_secret",
    "telemetry.trackers=[{kind: mlflow, tracking_uri: 'https://me:%s@host'}]": (
        "telemetry.trackers[0].tracking_uri"
    ),
}
"""An override with a secret, and the key under which it is."""


def load(override: str, value: str = OLD) -> RunConfig:
    bare = ("telemetry.sample_tokens=0", "run.dir=/run")
    return configs.load(TINY, [*bare, override % value if "%s" in override else override]).config


def shows(text: str) -> bool:
    """Returns whether a text has the beginning of one of the secrets: a message may be cut."""
    return any(secret[:10] in text for secret in (OLD, NEW, "opensesame"))


def assert_no(failing: list[Any]) -> None:
    assert not failing, "\n".join(map(str, failing))


def test_a_run_goes_on_with_another_secret_and_only_its_key_is_named():
    wrong: list[Any] = []
    for place, key in PLACES.items():
        one, other = load(place), load(place, NEW)
        try:
            configs.check_same(one, other, "/run")
        except ConfigError as error:
            wrong.append((key, str(error)))
        same = configs.digest(one) == configs.digest(other), configs.diff(one, other)
        found = configs.changed_secrets(one, other)
        wrong += [(key, same, found)] * ((same, found) != ((True, []), [key]))
        wrong += [(key, "unchanged")] * (configs.changed_secrets(one, one) != [])
    assert_no(wrong)


OTHER_ROWS = {
    "token: '<eos>'": "token: '<pad>'",
    "token: eos": "token: pad",
    "token: 5": "token: 6",
    "key: abc1": "key: abc2",
    "tokenizer: gpt2": "tokenizer: gpt3",
    "special_tokens: [a]": "special_tokens: [b]",
    "pad_token: a1b2c3d4": "pad_token: a1b2c3d5",
    "max_tokens: 100": "max_tokens: 200",
    "token_dtype: uint16": "token_dtype: uint32",
    "url: 'https://me:x@host/a'": "url: 'https://me:x@host/b'",
    "url: 'https://me:x@one/a'": "url: 'https://me:x@two/a'",
    "url: 'https://me:x@host/a?part=1'": "url: 'https://me:x@host/a?part=2'",
    "password: [a]": "password: [b]",
    "n: 5, token: x": "n: 6, token: x",
}


def test_what_is_no_secret_still_refuses_the_resume():
    wrong: list[Any] = []
    for recorded, given in OTHER_ROWS.items():
        one, other = load(CUSTOM % recorded), load(CUSTOM % given)
        if configs.digest(one) == configs.digest(other) or not configs.diff(one, other):
            wrong.append((recorded, given))
    assert_no(wrong)


def test_a_run_that_was_named_after_its_secret_is_found():
    config = load("model={kind: custom, target: 'a:b', args: {hub_token: %s}}")
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": None})})
    *earlier, current = (path.name for path in configs.run_dirs(config, "x"))
    old = configs.digest(config, with_secrets=True)
    assert current == f"x-{configs.digest(config)[:8]}" != f"x-{old[:8]}"
    assert f"x-{old[:8]}" in earlier
    assert len({*earlier, current}) == 3, "the path of the data is in the first definition only"


SECTIONS = {
    **dict.fromkeys(PLACES, 0o600),
    CUSTOM % "n: 5": 0o600,
    CUSTOM % "": 0o666,
    "run.seed=3": 0o666,
    "model={kind: custom, target: 'a:b', args: {max_tokens: 5, token: '<eos>'}}": 0o666,
    "telemetry.trackers=[{kind: mlflow, tracking_uri: 'http://host:5000'}]": 0o666,
}


def test_a_config_with_a_secret_anywhere_is_for_its_owner_only():
    modes = {place: configs.file_mode(configs.dump_yaml(load(place))) for place in SECTIONS}
    assert_no([(place, mode) for place, mode in modes.items() if mode != SECTIONS[place]])
    assert configs.file_mode("[damaged") == 0o600


def record(config: RunConfig, folder: Path, attempt: int, *, after: int | None) -> list[str]:
    """Records a config as the supervisor of an attempt does; returns what it prints."""
    printed: list[str] = []
    starts: Any = [] if after is None else [SimpleNamespace(attempt=after)]
    run_config.record(config, RunDir(folder), attempt, starts, printed.append)
    return printed


def test_the_next_attempt_reports_a_changed_secret_once_without_its_value(tmp_path: Path):
    place, key = next(iter(PLACES.items()))
    assert record(load(place), tmp_path, 1, after=None) == []
    printed = record(load(place, NEW), tmp_path, 2, after=1)
    assert [line.partition(": changed")[0] for line in printed] == [key]
    assert not shows(printed[0])
    assert record(load(place, NEW), tmp_path, 3, after=2) == []
    assert [path.stat().st_mode & 0o77 for path in tmp_path.rglob("config.yaml")] == [0] * 4


def test_trackers_get_no_secret(tmp_path: Path):
    history: Any = SimpleNamespace(rollbacks=(), claims=[SimpleNamespace(nonce="n")])
    sent = {p: tracker_copy._identity(RunDir(tmp_path), load(p), history) for p in PLACES}
    assert_no([place for place, found in sent.items() if shows(json.dumps(found.config))])
    assert_no([place for place, found in sent.items() if HIDDEN not in json.dumps(found.config)])


def test_a_refusal_shows_no_secret():
    wrong: list[Any] = []
    for place in PLACES:
        one = load(place)
        given = configs.load(TINY, [place % NEW, "telemetry.sample_tokens=0", "data.seq_len=9"])
        with pytest.raises(ConfigError) as raised:
            configs.check_same(one, given.config, "/run", origins=given.origins)
        shown = str(raised.value) + str(configs.free_changes(one, given.config))
        wrong += [(place, shown)] * shows(shown)
    assert_no(wrong)


def test_a_secret_that_is_not_known_to_be_one_of_its_kind_is_refused_without_its_value():
    """A text named `token` that may be a token of a vocabulary belongs to the trajectory."""
    one, other = load(CUSTOM % "token: opensesame"), load(CUSTOM % "token: swordfish")
    assert configs.diff(one, other) == [("data.source.args.token", HIDDEN, HIDDEN)]


BROKEN = (
    *(f"{place % OLD}" for place in PLACES),
    *(f"data.source.args.token={OLD}", f"train.steps={OLD}", f"run.seed={OLD}", f"{OLD}=5"),
    "data.source.args.password=opensesame",
    *(f"data.source={{kind: {OLD}}}", f"data.source={{kind: text, path: [{OLD}]}}"),
    *("data.source.args.url=s3://opensesame:opensesame@bucket/{{",),
)


def test_an_error_of_the_config_shows_no_secret():
    wrong: list[Any] = []
    for override in BROKEN:
        with pytest.raises((ConfigError, UsageError)) as raised:
            configs.load(TINY, [override, "train.steps=-1", "model.kind=absent"])
        text = str(raised.value)
        wrong += [text] * shows(text)
    with pytest.raises(UsageError) as flag:
        configs.load(TINY, ["--hf-token", f"--api-key.x {OLD}", f"-password={OLD}"])
    assert not shows(str(flag.value))
    assert_no(wrong)


def test_the_origins_of_values_have_no_secret():
    shown = {
        p: str(configs.load(TINY, [p % OLD, "telemetry.sample_tokens=0"]).origins) for p in PLACES
    }
    assert_no([place for place, origins in shown.items() if shows(origins)])


def test_compared_runs_show_no_secret_and_that_it_differs():
    wrong: list[Any] = []
    for place in PLACES:
        rows = runs.differences([load(place), load(place, NEW)])
        text = json.dumps(rows)
        wrong += [(place, text)] * (shows(text) or len(rows) != 1)
        wrong += [(place, "trajectory")] * any(row["trajectory"] for row in rows)
    assert_no(wrong)


def test_hosts_print_no_secret_of_theirs():
    values = compatibility.values_of(configs.trajectory(load(CUSTOM % "token: opensesame, n: 5")))
    text = compatibility.own_values_message(
        ["data.source.args.token", "data.source.args.n"], values
    )
    assert "data.source.args.n: 5" in text
    assert "data.source.args.token: " in text
    assert "opensesame" not in text


@pytest.mark.slow
def test_kubernetes_gets_a_secret_instead_of_a_config_map():
    options = k8s_manifest.ClusterOptions(image="me/a:1", name="jaxres-a", grace_seconds=9, nodes=2)
    wrong: list[Any] = []
    for place, mode in SECTIONS.items():
        objects = k8s_manifest.manifests(load(place), GcsPath("bucket", "run"), options)
        printed = list(yaml.safe_load_all(k8s_manifest.to_yaml(objects)))
        for found in printed:
            kubernetes.check(found)
        (volume, *_) = kubernetes.job_spec(printed[-1])["template"]["spec"]["volumes"]
        named = volume.get("secret", {}).get("secretName"), volume.get("configMap", {}).get("name")
        expected = (
            ("Secret", ("jaxres-a", None)) if mode == 0o600 else ("ConfigMap", (None, "jaxres-a"))
        )
        wrong += [(place, printed[0]["kind"], named)] * ((printed[0]["kind"], named) != expected)
        wrong += [(place, "elsewhere")] * shows(json.dumps(printed[1:]))
        wrong += [place] * (printed != objects)
    assert_no(wrong)


def test_skypilot_gets_the_config_as_a_secret_which_a_node_can_read(
    tmp_path: Path, run_script: Callable[[str, dict[str, str]], str]
):
    place = next(iter(PLACES))
    options = sky_task.TaskOptions(name="jaxres-a", python=str(tmp_path / "python"), image="me/a:1")
    task = yaml.safe_load(
        sky_task.to_yaml(sky_task.task(load(place), GcsPath("bucket", "run"), options))
    )
    skypilot.check(task)
    assert not shows(json.dumps(task))
    assert run_script(task["run"], task["secrets"]) == "private\n"
    (written,) = tmp_path.rglob("config.yaml")
    assert configs.load_recorded(written).config.data == load(place).data
    assert "secrets" not in sky_task.task(load("run.seed=3"), GcsPath("bucket", "run"), options)


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[[str, dict[str, str]], str]:
    """Runs the script of a node up to the training, which prints whether the config is private."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ -z "$JAXRES_CONFIG" ] && [ "$(stat -c %a "$5")" = 600 ] && echo private\n'
    )
    python.chmod(0o755)

    def run(script: str, secrets: dict[str, str]) -> str:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SKYPILOT_NODE_RANK": "0"}
        env |= {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.7", **secrets}
        command = ["bash", "-euc", script]
        done = subprocess.run(
            command, env=env, capture_output=True, timeout=SURE_SECONDS, check=True
        )
        return done.stdout.decode()

    return run


def test_messages_alerts_and_records_show_no_secret(capsys: pytest.CaptureFixture[str]):
    wrong: list[Any] = []
    for kind, token in TOKENS.items():
        reason = (
            f"OSError: 401 for https://me:{letters(9)}@host/x?sig={letters(9)}, {token} refused"
        )
        incident = Incident(kind=Kind.GAVE_UP, run="a", attempt=1, step=2, reason=reason)
        target = GenericTarget(url_env="URL")
        given = {"key": "k", "time": 0.0, "secret": "", "left_out": {}, "is_open": {}}
        sent = json.dumps([message.body for message in messages(target, incident, **given)])
        recorded = stop_record(AttemptResult(ExitCode.BUG, reason)).reason
        stdio.eprint(reason)
        for text in (sent, recorded, capsys.readouterr().err):
            assert "OSError: 401" in text
            wrong += [(kind, text)] * (token in text or letters(9) in text)
    assert_no(wrong)


LINES = 'open-sesame\nsesame "two"\nsésame-drei'
SPELLED = [
    ({"url": "https://me:hunter%4022x@host"}, "login with hunter@22x failed"),
    ({"url": "https://me:hunter%4022x@host"}, "login with hunter%4022x failed"),
    ({"url": "https://host/x?token=a%2Fb%20hunter"}, "no a/b hunter"),
    ({"url": "s3://minioadmin:abc/def+hunter@b"}, "no match for abc/def+hunter"),
    ({"url": "s3://minioadmin:abc/def+hunter@b"}, "GET /?k=abc%2fdef%2bhunter"),
    ({"dsn": "postgresql://me:hunter22@host/db"}, "login with hunter22 failed"),
    ({"connection_string": "Server=a;Password=hunter22;"}, "login with hunter22 failed"),
    ({"authorization": "Bearer hunter22hunter"}, "hunter22hunter has expired"),
    ({"credentials": '{"type": "a", "password": "hunter 7"}'}, "login with hunter 7 failed"),
    ({"password": "\n hunter22 \n"}, "login with hunter22 failed"),
    ({"password": LINES}, "login with open-sesame failed"),
    ({"password": LINES}, json.dumps('a sesame "two"')),
    ({"password": LINES}, json.dumps("sésame-drei")),
    ({"password": LINES}, json.dumps("sésame-drei", ensure_ascii=False)),
    ({"password": LINES}, repr("sésame-drei".encode())),
    ({"password": LINES}, repr("a\nopen-sesame")),
    ({"password": "hunter&22<7"}, "<Code>no hunter&amp;22&lt;7</Code>"),
    ({"password": "hunter'22\"7"}, "<p>no hunter&#x27;22&quot;7, hunter&apos;22&quot;7</p>"),
]
"""A config's secrets, and messages of other code that have a part of one, or another spelling."""


@pytest.mark.parametrize(("data", "message"), SPELLED)
def test_parts_and_other_spellings_of_a_secret_of_the_config_are_hidden(
    data: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(secret_values, "_hidden", set())
    before = secret_values.redact_text(message)
    secret_values.hide({"args": data})
    text = secret_values.redact_text(message)
    assert not any(word in text for word in ("hunter", "sesame", "same-drei")), text
    assert before != text
    assert secret_values.redact_text("me of host: db a") == "me of host: db a"


WORD = "open-sesame\n'42"


@pytest.mark.parametrize(
    "override",
    [
        "hooks=[{target: 'a:b', args: {password: %s}}]",
        CUSTOM % "headers: [{name: API_KEY, value: %s}]",
        CUSTOM % "url: 'https://host/x?sig=open-sesame'",
    ],
)
def test_a_secret_of_the_config_in_an_exception_of_custom_code_is_hidden(override: str):
    configs.load(TINY, [override % json.dumps(WORD) if "%s" in override else override])
    word = WORD if "%s" in override else "open-sesame"
    error = RuntimeError(f"no access: {word}", word)
    for text in (str(error), repr(error), stop_record(AttemptResult(70, str(error))).reason):
        assert "sesame" not in secret_values.redact_text(text)
    assert "sesame" not in stop_record(AttemptResult(70, str(error))).reason
    assert secret_values.redact_text("open sesame, reopen-sesames") == "open sesame, reopen-sesames"
