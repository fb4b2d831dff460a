"""Which values are secrets, in both directions: what is hidden, and what stays in a trajectory."""

from __future__ import annotations

import random
import re
import string

import pytest

from jaxres import secret_values
from jaxres.config.schema.fields import iter_fields
from jaxres.secret_values import (
    HIDDEN,
    contains,
    is_rotatable,
    is_secret,
    kind_of_secret,
    redact,
    redact_text,
    without_rotatable,
)
from tests.unit.secret_examples import PRIVATE_KEY, TOKENS, URLS_WITH_TOKEN, letters

WORD = "hunter2"
SURE = (
    *("PGPASSWORD", "MYSQL_PWD"),
    *("password", "PASSWORD", "db_password", "dbPassword", "passwd", "passphrase", "api_key"),
    *("apikey", "apiKey", "api-key", "X-Api-Key", "WANDB_API_KEY", "openai_api_key", "secret_key"),
    *("AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "access_key", "account_key", "private_key"),
    *("client_secret", "app_secret", "Authorization", "connection_string", "webhook_secret"),
)
"""Names whose text is a secret, whatever it is."""
TOKEN_NAMES = (
    *("token", "TOKEN", "hf_token", "HF_TOKEN", "hub_token", "access_token", "accessToken"),
    *("auth_token", "use_auth_token", "api_token", "github_token", "bearer_token", "my_hf_token"),
    *("refresh_token", "sas_token", "session_token", "aws_session_token", "secret", "credentials"),
    *("jwt", "auth", "wandb_token", "s3_secret", "DB_PWD", "db_pass"),
)
"""Names whose text is hidden; it is no part of a trajectory only if it looks like a token."""
NO_SECRETS = (
    *("tokenizer", "tokenizer_name", "tokens", "special_tokens", "token_dtype", "token_ids"),
    *("max_tokens", "num_tokens", "tokens_per_row", "tokens_per_second", "token_type", "n_token"),
    *("pad_token", "eos_token", "bos_token", "unk_token", "mask_token", "sep_token", "cls_token"),
    *("image_token", "end_token", "stop_token", "user_token", "prompt_token", "token_env"),
    *("key", "keys", "rng_key", "key_dim", "num_key_value_heads", "public_key", "primary_key"),
    *("sort_key", "cache_key", "text_key", "monkey", "keyboard", "password_env", "api_key_env"),
    *("secretary", "author", "authors", "path", "patience", "passes", "bypass", "signature_dim"),
    *("api_version", "accession", "has_secrets", "secrets_per_row", "pattern", "name", "url"),
    *("credential_free", "auth_kind", "token_path", "secret_name", "cookies_per_page", "seed"),
)


def assert_no(failing: list[object]) -> None:
    assert not failing, "\n".join(map(str, failing))


def test_text_with_the_name_of_a_secret_is_hidden():
    names = [*SURE, *TOKEN_NAMES]
    assert_no([name for name in names if not is_secret(name, WORD)])
    assert_no([name for name in names if redact({"a": [{name: WORD}]}) != {"a": [{name: HIDDEN}]}])


def test_other_names_are_never_taken_for_secrets():
    values = (WORD, "hf_short", letters(20), "a b", "<eos>", "/data/x.json", 5, 0.5, True, None)
    pairs = [(name, value) for name in NO_SECRETS for value in values]
    assert_no([pair for pair in pairs if is_secret(*pair) or is_rotatable(*pair)])
    assert_no([pair for pair in pairs if redact(dict([pair])) != dict([pair])])
    assert_no([pair for pair in pairs if without_rotatable(dict([pair])) != dict([pair])])


def test_only_text_that_is_surely_a_secret_is_left_out_of_a_trajectory():
    sure = [(name, value) for name in SURE for value in (WORD, "two words", letters(30))]
    opaque = ("hf_short", "abcdef12", letters(30), *TOKENS.values())
    sure += [(name, value) for name in TOKEN_NAMES for value in opaque if value != PRIVATE_KEY]
    assert_no([pair for pair in sure if without_rotatable(dict([pair]))])
    vocabulary = ("<eos>", "[MASK]", "<|im_end|>", "eos", "endoftext", "\n", " ", "", "▁the")
    kept = [(name, value) for name in TOKEN_NAMES for value in (*vocabulary, 5, None, True)]
    kept += [(name, value) for name in SURE for value in (5, 0.5, None, True, [], {}, "")]
    assert_no([pair for pair in kept if without_rotatable(dict([pair])) != dict([pair])])


def test_special_tokens_are_shown():
    pairs = [(n, v) for n in ("token", "session_token") for v in ("<eos>", "[MASK]", "a b", 50256)]
    assert_no([pair for pair in pairs if redact(dict([pair])) != dict([pair])])


def test_a_known_token_is_a_secret_wherever_it_is():
    rows = list(TOKENS.items())
    assert_no([kind for kind, token in rows if redact({"note": token}) != {"note": HIDDEN}])
    assert_no([k for k, t in rows if redact_text(f"got {t!r} (401)") != f"got '{HIDDEN}' (401)"])
    assert_no([k for k, t in rows if without_rotatable({"x": [t]}) != {"x": [HIDDEN]}])
    assert_no([kind for kind, token in rows if kind_of_secret(f'KEY = "{token}"\n') is None])


def test_a_token_in_the_path_of_a_url_is_hidden():
    bot = f"https://api.telegram.org/bot{TOKENS['Telegram']}/sendMessage"
    assert redact_text(bot) == f"https://api.telegram.org/{HIDDEN}/sendMessage"
    assert redact_text(bot.replace(":AA", "%3AAA")) == redact_text(bot)
    assert contains({"url": bot})
    assert kind_of_secret(bot) == "Telegram token"
    rows = list(URLS_WITH_TOKEN.items())
    assert_no([(kind, redact(url)) for kind, url in rows if redact(url) != HIDDEN])
    assert_no([kind for kind, url in rows if without_rotatable({"x": url}) == {"x": url}])
    assert_no([kind for kind, url in rows if kind_of_secret(f"curl {url}\n") is None])


def test_a_known_token_right_after_an_escape_is_hidden():
    befores = ("\\n", "Bearer%20", "\\x1b", "\\u003d", "\x1b[31m", "\x1b[0;31m")
    given = [(before, token) for before in befores for token in TOKENS.values()]
    assert_no([pair for pair in given if pair[1] in redact_text("".join(pair))])


PLAIN_TEXTS = (
    *("https://host/webhooks/my-dataset-2024-long.parquet", "https://host/hooks/readme-of-hooks"),
    *("https://host/ping/train-2024-10-11-shards", "https://ntfy.sh/mytopic", "http://a:8/hook"),
    *("sk-learn", "sk-learn-classifier-with-a-long-name", "task-" + letters(24), "hf_hub_download"),
    *("hf_transfer", "ghp_", "AKIA", "AKIAIOSFODNN7", "pypi-mirror", "npm_config_cache", "SG.a.b"),
    *("eyJhbGciOi", "glpat-", "xoxb-", "ya29.", "whsec_", "-----BEGIN PUBLIC KEY-----"),
    *("-----BEGIN CERTIFICATE-----\nMIIB" + letters(60), "gs://bucket/a:b@c/d", "ssh://git@host/x"),
    *("https://host:8080/x@y", "https://h:80?m=a@b", "http://[::1]:80/a@b", "a://https://x/y@z"),
    *("https://host:8080/x?page=2&tokens=5", "http://[::1]:80/", "https://host/a@b:c", letters(64)),
    *("key=5 max_tokens=7 token=9", "password: must be text", "a token: one of"),
    *("sha256:" + "0f" * 32, "tokenizer=abc", "basic configurations", "s3://bucket/a:b@c"),
)


def test_texts_without_secrets_stay_as_they_are():
    assert_no([text for text in PLAIN_TEXTS if redact_text(text) != text])
    assert_no([text for text in PLAIN_TEXTS if without_rotatable({"x": text}) != {"x": text}])
    assert_no([text for text in PLAIN_TEXTS if kind_of_secret(text) is not None])


URLS = {
    "https://me:{}@host/data": "https://me:@host/data",
    "https://me:{}@host": "https://me:@host",
    "git+https://me:a@{}@host/x": "git+https://me:@host/x",
    "postgresql://me:{}@db:5432/runs": "postgresql://me:@db:5432/runs",
    "s3://KEY:{}@bucket/x": "s3://@bucket/x",
    "s3://KEY:a/b/{}@bucket/x": "s3://@bucket/x",
    "https://host/x?token={}&n=2": "https://host/x?token=&n=2",
    "https://host/x?n=2&api_key={}": "https://host/x?n=2&api_key=",
    "s3://AKIAIOSFODNN7ABCDEFG:{}@bucket/x": "s3://@bucket/x",
    "/a/https:/me:{}@host/data": "/a/https:/me:@host/data",
    "/a/s3:/KEY:{}@bucket/x": "/a/s3:/@bucket/x",
    "https://acc.blob.core.windows.net/c?sv=1&sp=r&sig={}": (
        "https://acc.blob.core.windows.net/c?sv=&sp=&sig="
    ),
    "https://b.s3.amazonaws.com/x?X-Amz-Date=1&X-Amz-Signature={}": (
        "https://b.s3.amazonaws.com/x?X-Amz-Date=&X-Amz-Signature="
    ),
    "https://storage.googleapis.com/b/x?X-Goog-Credential=a&X-Goog-Signature={}": (
        "https://storage.googleapis.com/b/x?X-Goog-Credential=&X-Goog-Signature="
    ),
    "https://d.cloudfront.net/x?Expires=1&Signature={}&Key-Pair-Id=K": (
        "https://d.cloudfront.net/x?Expires=&Signature=&Key-Pair-Id="
    ),
}
"""URLs with a secret, and what is shown of them."""


def test_passwords_and_signatures_in_urls_are_hidden_and_the_rest_is_not():
    wrong: list[object] = []
    for url, shown in URLS.items():
        given = url.format("a1b2c3d4" + letters(12))
        found = redact({"url": given})["url"]
        wrong += [(given, found)] * (found.replace(HIDDEN, "") != shown)
        wrong += [(given, "text")] * (redact_text(f"GET {given} 403") != f"GET {found} 403")
        wrong += [(given, "kept")] * (without_rotatable({"url": given})["url"] != found)
    assert_no(wrong)


UNQUOTED = {
    "postgresql://u:pa#{}@host/db": "postgresql://u:@host/db",
    "mysql+pymysql://u:pa?{}@h/db?x=1": "mysql+pymysql://u:@h/db?x=1",
    "postgresql://u:/pa/{}@host:5432/db": "postgresql://u:@host:5432/db",
    "redis://:pa#{}@host/0": "redis://:@host/0",
    "https://me:p@ss/{}@host/a": "https://me:@host/a",
    "git+https://me:{}@github.com/o/r@v1": "git+https://me:@github.com/o/r@v1",
}
"""URLs whose passwords have characters that other programs quote, and what is shown of them."""


def test_an_unquoted_password_of_a_url_is_hidden_and_the_rest_is_not():
    wrong: list[object] = []
    for url, shown in UNQUOTED.items():
        given = url.format(letters(12))
        found = redact({"url": given})["url"].replace(HIDDEN, "")
        wrong += [(given, found)] * (found != shown)
        text = redact_text(f"GET {given} 403").replace(HIDDEN, "")
        wrong += [(given, text)] * (text != f"GET {shown} 403")
        wrong += [(given, "packed")] * (kind_of_secret(given) != "password in a URL")
        wrong += [(given, "0644")] * (not contains({"url": given}))
    assert_no(wrong)
    quotes = f"postgresql://u:pa's\"{letters(9)}<>@host/db"
    assert redact({"url": quotes}) == {"url": f"postgresql://u:{HIDDEN}@host/db"}
    assert without_rotatable({"url": quotes}) == redact({"url": quotes})


def test_a_trajectory_has_all_of_a_url_that_may_be_host_or_path():
    given = {"url": f"https://me:{letters(9)}@data/rows@v1"}
    assert without_rotatable(given) == {"url": f"https://me:{HIDDEN}@data/rows@v1"}


MESSAGES = {
    "data.source.args.password='a b' given": f"data.source.args.password={HIDDEN} given",
    "--hf-token=abcdefgh": f"--hf-token={HIDDEN}",
    "HF_TOKEN=abcdefgh jaxres": f"HF_TOKEN={HIDDEN} jaxres",
    "{'password': 'x', 'n': 1}": f"{{'password': {HIDDEN}, 'n': 1}}",
    '{"api_key": "x"}': f'{{"api_key": {HIDDEN}}}',
    "Authorization: Bearer abcdef1234567890": f"Authorization: Bearer {HIDDEN}",
    "Authorization: Token abcdef1234567": f"Authorization: Token {HIDDEN}",
    "{'Authorization': 'ApiKey abcdef1234567'}": f"{{'Authorization': {HIDDEN}}}",
    "t.py --token abc123def4567 -n 2": f"t.py --token {HIDDEN} -n 2",
    "t.py --api-key 'my key' --n 2": f"t.py --api-key {HIDDEN} --n 2",
    "give --password to the program": "give --password to the program",
    "t.py --tokenizer abc123def4567": "t.py --tokenizer abc123def4567",
    "sources[0].args.secret=abc": f"sources[0].args.secret={HIDDEN}",
}


def test_assignments_of_secrets_in_messages_are_hidden():
    rows = [(text, redact_text(text), shown) for text, shown in MESSAGES.items()]
    assert_no([row for row in rows if row[1] != row[2]])


def test_the_secret_after_an_option_of_a_command_is_hidden():
    given = ["t.py", "--api-key", "abc", "-n", "2", "--password", "--token", "x", "--seed", "7"]
    shown = ["t.py", "--api-key", HIDDEN, "-n", "2", "--password", "--token", HIDDEN, "--seed", "7"]
    assert redact({"command": given}) == {"command": shown}
    assert redact(redact(given)) == shown
    assert contains(given)
    assert not contains(["t.py", "--tokens", "5", "--password"])


def test_what_is_hidden_stays_hidden():
    given = {"a": [*URLS, *TOKENS.values()], "token": WORD, "b": {"name": "HF_TOKEN", "value": "x"}}
    once = redact(given)
    assert redact(once) == once
    assert not contains(once)
    assert once["b"] == {"name": "HF_TOKEN", "value": HIDDEN}
    assert redact_text(redact_text(str(given))) == redact_text(str(given))


def test_all_texts_below_the_name_of_a_secret_are_hidden():
    given = {"credentials": {"user": "me", "parts": ["a", "b"], "retries": 3}}
    shown = {"credentials": {"user": HIDDEN, "parts": [HIDDEN, HIDDEN], "retries": 3}}
    assert redact(given) == shown
    assert without_rotatable(given) == given


PLACEHOLDERS = (
    *("hf_" + "x" * 34, "sk-" + "X" * 48, "AKIAIOSFODNN7EXAMPLE", "ghp_" + "0" * 36),
    *("https://user:password@host/x", "https://{user}:{pw}@host/x", "https://$USER:$PW@host/x"),
    *("http://user:pass@localhost:8080", "https://me:***@host", "-----BEGIN RSA PRIVATE KEY-----"),
    "if text.startswith('-----BEGIN PRIVATE KEY-----'): raise ValueError(text)",
)


RANDOM = "3f9a1c5e7b2d4f6a8c0e" + "1b3d5f7a9c2e4b6d8f0a"
FORMS = (
    *("WANDB_API_KEY={}", 'os.environ["WANDB_API_KEY"] = "{}"', 'dict(api_key="{}")'),
    *('os.environ.setdefault("WANDB_API_KEY", "{}")', 'api_key: str = "{}"', 'api_key: "{}"'),
    *("ENV WANDB_API_KEY {}", "ENV WANDB_API_KEY={}", "  api_key: '{}'", "WANDB_API_KEY := {}"),
    *("- name: WANDB_API_KEY\n  value: {}\n", "{{name: WANDB_API_KEY, value: {}}}"),
    *('"name": "WANDB_API_KEY", "value": "{}"', "train --api-key={}", "train --api-key {}"),
    *("WANDB_API_KEY ?= {}", '"WANDB_API_KEY":\n  "{}"', "export WANDB_API_KEY='{}'"),
    'variable "api_key" {{\n  type = string\n  default = "{}"\n}}',
    "https://acc.blob.core.windows.net/c?sv=1&sp=r&sig={}%3D",
    *('{{"Authorization": "Bearer {}"}}', "curl -H 'Authorization: Token {}' https://host"),
    *("curl -u me:{} https://host", "wandb login {}", "wandb.login(key='{}')"),
)
HARMLESS = (
    *("sha256: {}", "commit {}", 'load("{}")', "digest = '{}'", "the key is in {}", "- {}"),
    *("wandb.log({{'commit': '{}'}})", "curl https://host/me:{}", "Bearer {}"),
    *("api_key = load_key({}", "https://host/x?page={}", 'cache_key: "{}"', "# api_key\n{}"),
)


def test_a_random_value_under_the_name_of_a_secret_blocks_a_package_in_every_form():
    assert_no([form for form in FORMS if kind_of_secret(form.format(RANDOM)) is None])
    assert_no([form for form in HARMLESS if kind_of_secret(form.format(RANDOM)) is not None])
    assert_no([form for form in FORMS if kind_of_secret(form.format("x" * 40)) is not None])


def test_random_passwords_of_letters_and_few_digits_block_a_package_and_names_do_not():
    generator, letters = random.Random(0), string.ascii_letters + string.digits
    for length in (16, 20, 24, 32):
        words = ["".join(generator.choices(letters, k=length)) for _ in range(200)]
        missed = [word for word in words if kind_of_secret(f"PASSWORD: {word}\n") is None]
        assert len(missed) <= 24, missed
    names = "getThePasswordOfUser2 readPasswordFromFileV2 Llama3Tokenizer2"
    names += " password-prompt-version-2 MyDatabasePasswordV2 the/path/To/Password2/file"
    assert_no([w for w in names.split() if kind_of_secret(f"password = {w}\n") is not None])


def test_placeholders_of_documentation_block_no_package():
    assert_no([text for text in PLACEHOLDERS if kind_of_secret(text) is not None])


def test_no_key_of_the_schema_has_the_name_of_a_secret():
    """Those names are looked for in every section: a key of ours would leave the trajectory."""
    names = {leaf.key.rpartition(".")[2] for leaf in iter_fields()}
    assert_no([name for name in names if is_secret(name, "abcdefgh1") or is_secret(name, 5)])


@pytest.mark.parametrize("text", ["=" * 50_000, "a." * 50_000, "x" * 200_000, "A: " * 20_000])
def test_a_long_text_is_searched_in_linear_time(text: str):
    """A nested repetition would hang here."""
    assert redact_text(f"-----BEGIN PRIVATE KEY-----{text}").startswith(HIDDEN)
    assert redact_text(text) == text
    assert kind_of_secret(f"-----BEGIN PRIVATE KEY-----\n{text}!") in (None, "private key")


def test_every_form_is_a_regular_expression_that_ends():
    assert all(re.compile(form) for _, form in secret_values._TOKENS)
