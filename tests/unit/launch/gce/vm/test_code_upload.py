"""Promises of the packed code: equal folders give equal bytes, and no special file blocks it."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from jaxres.faults import ConfigError
from jaxres.launch.gce.vm import code_package, instance_spec
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from tests.unit.secret_examples import TOKENS, hexadecimal, letters
from tests.waiting import SURE_SECONDS


def fill(folder: Path, *, reverse: bool = False) -> Path:
    """Creates a user's folder with the same content in either order of creation."""
    files = {"train.py": "a = 1\n", "pkg/__init__.py": "", "pkg/é.txt": "ü", "run.sh": "#!/bin/sh"}
    for name in sorted(files, reverse=reverse):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[name])
    (folder / "run.sh").chmod(0o755)
    return folder


def work(data: bytes) -> dict[str, tarfile.TarInfo]:
    """Returns the tar members of the user's folder."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {m.name: m for m in tar if m.name.startswith("work/")}


@pytest.mark.slow
def test_equal_folders_give_equal_bytes(tmp_path: Path) -> None:
    one, other = fill(tmp_path / "one"), fill(tmp_path / "other", reverse=True)
    os.utime(other / "train.py", (1, 1))
    (other / "pkg" / "__pycache__").mkdir()
    (other / "pkg" / "__pycache__" / "x.pyc").write_bytes(b"1")
    (other / ".git").mkdir()
    (other / ".git" / "HEAD").write_text("ref")
    data = code_package.pack(one)
    assert code_package.pack(other) == data
    members = work(data)
    assert set(members) == {
        f"work/{n}" for n in ("train.py", "pkg/__init__.py", "pkg/é.txt", "run.sh")
    }
    assert members["work/run.sh"].mode == 0o755
    assert members["work/train.py"].mode == 0o644
    (other / "train.py").write_text("a = 2\n")
    assert code_package.pack(other) != data


def test_the_packed_code_contains_jaxres_itself(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(code_package.pack(None))) as tar:
        names = tar.getnames()
    assert "code/jaxres/launch/gce/vm/agent.py" in names
    assert names == sorted(names)
    assert not [n for n in names if "__pycache__" in n or n.startswith("work/")]


@pytest.mark.slow
def test_links_inside_pipes_and_loops_neither_block_nor_are_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / "package")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "pkg" / "up").symlink_to("..")
    (folder / "link.py").symlink_to("train.py")
    members = work(code_package.pack(folder))
    assert set(members) - set(work(code_package.pack(fill(tmp_path / "plain")))) == {"work/link.py"}
    assert members["work/link.py"].isfile(), "what it points at, not the link"


def test_a_folder_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = fill(tmp_path / "package")
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match=r"launch\.gce\.package=.*more than 100 MiB.*code only"):
        code_package.pack(folder)


def test_many_files_that_are_too_large_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_package, "MAX_BYTES", 4 * 2**20)
    folder = fill(tmp_path / "package")
    for n in range(8):
        (folder / f"{n}.bin").write_bytes(bytes(2**20))
    with pytest.raises(ConfigError, match="more than 4 MiB"):
        code_package.pack(folder)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        code_package.pack(tmp_path / "absent")
    with pytest.raises(ConfigError, match="there is no such folder"):
        code_package.pack(Path(__file__))


def names(folder: Path) -> set[str]:
    """Returns the files of the user's folder that would be packed."""
    files = code_package.list_files(folder)
    return {f.name.removeprefix("work/") for f in files if f.name.startswith("work/")}


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        code_package.list_files(folder)
    assert "list them in" in str(raised.value), raised.value
    assert f"{folder / '.jaxresignore'}" in str(raised.value)
    return str(raised.value)


def test_links_out_of_the_folder_are_refused_by_name(tmp_path: Path) -> None:
    folder = fill(tmp_path / "package")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    targets = {"file": tmp_path / "outside/secret", "folder": tmp_path / "outside"}
    for name, target in (targets | {"zero": Path("/dev/zero"), "absent": Path("/nowhere")}).items():
        (folder / "pkg" / name).symlink_to(target)
    text = refusal(folder)
    for name in ("file", "folder", "zero", "absent"):
        assert f"\n  pkg/{name} (a link out of the folder, to /" in text, text
    (folder / ".jaxresignore").write_text("# not code\npkg/file\npkg/folder\nzero\nabs*\n")
    assert names(folder) == {"train.py", "pkg/__init__.py", "pkg/é.txt", "run.sh"}


SECRETS = {
    ".env": "TOKEN=1",
    "conf/.env.production": "TOKEN=1",
    "tls/server.pem": "x",
    "id_rsa": "x",
    "pkg/ID_ED25519": "x",
    "app.key": "x",
    "credentials-prod.json": "{}",
    "account.json": '{"type": "service_account", "private_key": "x"}',
    ".netrc": "machine a",
    ".aws/config": "x",
    "home/.ssh/known_hosts": "x",
    ".config/gcloud/active_config": "x",
    "deploy_key": "-----BEGIN OPENSSH PRIVATE KEY-----\nx",
}


NAMED = (
    *(".env", ".env.local", ".envrc", "prod.env", "secrets.yaml", "secrets.toml", "secrets.json"),
    *("home/.aws/credentials", "credentials", "credentials.toml", "aws_credentials", "rootkey.key"),
    *("home_accessKeys.csv", "id_rsa", "id_ecdsa", "deploy_ed25519", "server.p12", "server.pfx"),
    *("store.jks", "android.keystore", "vault.kdbx", "vault.kdb", "key.ppk", "AuthKey_1.p8"),
    *(".netrc", "_netrc", ".pgpass", ".my.cnf", ".htpasswd", ".git-credentials", ".pypirc"),
    *(".npmrc", ".yarnrc.yml", ".terraformrc", "terraform.tfstate", "terraform.tfstate.backup"),
    *(
        "prod.auto.tfvars",
        ".terraform.d/credentials.tfrc.json",
        ".dockercfg",
        ".docker/config.json",
    ),
    *("kubeconfig", "prod.kubeconfig", ".kube/config", ".config/gcloud/access_tokens.db"),
    *("application_default_credentials.json", "service-account.json", "client_secret_1.json"),
    *("gcp-credentials.json", "rclone.conf", ".config/rclone/rclone.conf", ".s3cfg", ".boto"),
    *(".passwd-s3fs", ".huggingface/token", "token", "hf_token.txt", ".cache/huggingface/token"),
    *(".kaggle/kaggle.json", "kaggle.json", ".databrickscfg", ".modal.toml", ".vault-token"),
    *(".config/wandb/settings", ".config/gh/hosts.yml", ".oci/config", ".azure/accessTokens.json"),
    *("token.json", "cookies.txt", ".bash_history", ".python_history", "client.ovpn"),
    *(".ssh/known_hosts", ".gnupg/trustdb.gpg", "secring.gpg", "login.keychain-db"),
)
"""Files that are refused whatever they have."""
WORDS = letters(40)
CONTENT = {
    **{f"settings/{kind}.yaml": f"value: {token}\n" for kind, token in TOKENS.items()},
    **{f"code/{kind}.py": f"KEY = {token!r}\n" for kind, token in TOKENS.items()},
    "notebook.ipynb": f'{{"outputs": [{{"text": "{TOKENS["Hugging Face"]}"}}]}}',
    "README.md": f"export HF_TOKEN={TOKENS['Hugging Face']}\n",
    "account.txt": '{"type": "service_account", "private_key": "x"}',
    "adc.json": f'{{"type": "authorized_user", "refresh_token": "{WORDS}"}}',
    "docker.json": f'{{"auths": {{"host": {{"auth": "{WORDS}"}}}}}}',
    "cluster.yaml": f"kind: Config\nusers:\n- user:\n    client-key-data: {WORDS}\n",
    "cluster-token.yaml": f"users:\n- user:\n    token: {WORDS}{WORDS}\n",
    "state.json": '{"version": 4, "terraform_version": "1.9", "lineage": "a"}',
    "netrc.txt": f"machine api.wandb.ai\n  login user\n  password {hexadecimal(40)}\n",
    "aws.ini": f"[default]\naws_secret_access_key = {WORDS}\n",
    "upload.py": f"client(aws_secret_access_key='{WORDS}')\n",
    "registry.txt": f"//registry/:_authToken={WORDS}\n",
    "users.txt": f"me:$2y$05${letters(53)}\n",
    "putty.txt": "PuTTY-User-Key-File-3: ssh-ed25519\n",
    "wg0.txt": f"[Interface]\nPrivateKey = {letters(43)}=\n",
    "azure.txt": f"AccountName=a;AccountKey={WORDS}{WORDS}==\n",
    "remote.txt": f"url = https://me:{letters(12)}@git.internal/a.git\n",
    "run.sh.txt": f"export WANDB_API_KEY={hexadecimal(40)}\n",
    "conf.yaml": f"tracker:\n  api_key: {hexadecimal(40)}\n",
    "conf.json": f'{{"datadog-api-key": "{hexadecimal(32)}"}}',
    "client.py": f"login(password={letters(24)!r})\n",
    "late.log": "x\n" * 10**6 + TOKENS["GitHub"],
}
"""Files that are refused for what is in them."""
NO_SECRETS = {
    "environment.py": "# a .env file, -----BEGIN RSA PRIVATE KEY-----",
    "settings.json": '{"key": "x", "private_key_path": "/a"}',
    "credentials.py": "_password = None\ntoken: str = load_token()\nsecret_access_key=key\n",
    "secrets.py": "import secrets\n",
    "secret_values.py": 'FORM = r"hf_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16}"\n',
    "tokenizer.json": '{"version": "1.0", "added_tokens": [{"content": "<eos>"}]}',
    "tokens.txt": "the\nof\n",
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "docs.md": "`https://user:password@host`, machine a login b password c, AKIAIOSFODNN7EXAMPLE\n",
    "by_name.py": "api_key=keys2024.of_the_tracker[0]; token = make_token_of_2024_rows(1)\n",
    "by_name.yaml": "secret_key: xxxxxxxxxxxxxxxx1234\napi_key: my-key-of-the-tracker-here\n",
    "compose.yaml": "url: postgres://app:${PASSWORD}@db/app\ntoken: ${TOKEN}\n",
    "id_rsa.pub": "ssh-rsa AAAA me@host\n",
    "weights.bin": "\0" + TOKENS["Hugging Face"],
    "requirements.txt": "torch==2.0 --hash=sha256:" + hexadecimal(64) + "\n",
    "ca.crt": "-----BEGIN CERTIFICATE-----\n" + letters(64) + "\n-----END CERTIFICATE-----\n",
    "configs/run.yaml": "data: {source: {args: {max_tokens: 5, token_env: HF_TOKEN}}}\n",
}
"""Files that are copied."""


def write(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def compressed(text: str) -> dict[str, bytes]:
    """Returns files that have a text in another encoding, or within an archive."""
    tar, packed = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        info = tarfile.TarInfo("conf.yaml")
        info.size = len(text.encode())
        file.addfile(info, io.BytesIO(text.encode()))
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a/weights.bin", bytes(100))
        archive.writestr("a/conf.yaml", text)
    encodings = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig")
    return {
        **{f"{encoding}.txt": text.encode(encoding) for encoding in encodings},
        "utf-16-be-bom.txt": codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
        "a.tar": tar.getvalue(),
        "a.tgz": gzip.compress(tar.getvalue()),
        "a.zip": packed.getvalue(),
        **{f"a.{module.__name__}": module.compress(text.encode()) for module in (gzip, bz2, lzma)},
        "cut.gz": gzip.compress(text.encode() + letters(2000).encode())[:-20],
    }


def test_a_secret_in_another_encoding_or_an_archive_is_refused(tmp_path: Path) -> None:
    files = compressed(f"export HF_TOKEN={TOKENS['Hugging Face']}\n")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    text = refusal(tmp_path)
    assert not [name for name in files if f"\n  {name} (" not in text], text
    assert "a.tgz (a.tgz/conf.yaml in it: has a Hugging Face token)" in text
    (tmp_path / "copied").mkdir()
    plain = compressed("export HF_TOKEN=$HF_TOKEN\n") | {"damaged.zip": b"PK\3\4" + bytes(600)}
    for name, data in plain.items():
        (tmp_path / "copied" / name).write_bytes(data)
    assert names(tmp_path / "copied") == plain.keys()
    with zipfile.ZipFile(tmp_path / "copied" / "home.zip", "w") as archive:
        archive.writestr("me/.env", "A=1")
    assert "home.zip (home.zip/me/.env in it: by its name" in refusal(tmp_path / "copied")


@pytest.mark.slow
def test_files_that_look_like_secrets_are_refused_by_name_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path / "package")
    secrets = SECRETS | dict.fromkeys(NAMED, "x") | CONTENT
    write(folder, secrets)
    write(folder, NO_SECRETS)
    monkeypatch.setattr(code_package, "MAX_NAMED", len(secrets))
    text = refusal(folder)
    copied = [name for name in secrets if f"\n  {name} (" not in text]
    assert not copied, f"would be copied: {copied}"
    refused = [name for name in NO_SECRETS if f"\n  {name} (" in text]
    assert not refused, f"is no secret: {refused}\n{text}"
    shown = [kind for kind, token in TOKENS.items() if token in text]
    assert not shown, "the message has the secret itself"
    (folder / ".jaxresignore").write_text("\n".join(secrets))
    assert not names(folder) & secrets.keys()
    assert {*NO_SECRETS, "train.py"} <= names(folder)
    assert ".jaxresignore" not in names(folder)


def test_a_file_that_looks_like_a_secret_is_copied_on_purpose_by_its_path_only(
    tmp_path: Path,
) -> None:
    folder = fill(tmp_path / "package")
    write(folder, {"tests/a.pem": "x", "tests/b.pem": "x", "conf.yaml": TOKENS["Slack, bot"]})
    (folder / ".jaxresignore").write_text("!tests/a.pem\n! /conf.yaml\n")
    text = refusal(folder)
    assert "\n  tests/b.pem (" in text
    assert "tests/a.pem" not in text
    assert "conf.yaml" not in text
    (folder / ".jaxresignore").write_text("!tests/a.pem\n!conf.yaml\ntests/b.pem\n")
    assert {"tests/a.pem", "conf.yaml"} <= names(folder)
    for wrong in ("!*.pem", "!tests", "!absent", "!"):
        (folder / ".jaxresignore").write_text(f"{wrong}\ntests/b.pem\n")
        with pytest.raises(ConfigError, match=r"there is no such file.*without wildcards"):
            code_package.list_files(folder)


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", "-C", str(folder), *identity, *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=SURE_SECONDS)


def test_of_a_git_work_tree_what_git_ignores_is_not_copied(tmp_path: Path) -> None:
    folder = fill(tmp_path / "tree" / "package")
    git(tmp_path / "tree", "init", "-q")
    (tmp_path / "tree" / ".gitignore").write_text(".env\n*.bin\n")
    (folder / ".gitignore").write_text("data/\n")
    for name in (".env", "w.bin", "data/rows.txt", "new.py", "gone.py", "tracked.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    git(tmp_path / "tree", "add", "-f", "package/train.py", "package/gone.py")
    git(tmp_path / "tree", "add", "-f", "package/tracked.bin")
    (folder / "gone.py").unlink()
    assert names(folder) == {
        *("train.py", "pkg/__init__.py", "pkg/é.txt", "run.sh"),
        *("new.py", "tracked.bin", ".gitignore"),
    }
    (folder / "settings").symlink_to(".env")
    assert "settings (a link to .env, which is not copied)" in refusal(folder)


@pytest.mark.parametrize("git_file", ["whole", "absent", "leads nowhere"])
def test_files_of_a_submodule_are_copied_also_if_its_repository_is_gone(
    tmp_path: Path, git_file: str
) -> None:
    (tmp_path / "train.py").write_text("import lib.own")
    inner = tmp_path / "lib"
    inner.mkdir()
    (inner / "own.py").write_text("x = 1")
    git(tmp_path, "init", "-q")
    git(inner, "init", "-q")
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "a")
    git(tmp_path, "add", ".")
    if git_file != "whole":
        shutil.rmtree(inner / ".git")
    if git_file == "leads nowhere":
        (inner / ".git").write_text("gitdir: ../.git/modules/lib")
    assert names(tmp_path) - {"lib/.git"} == {"train.py", "lib/own.py"}


def test_a_folder_that_git_ignores_or_can_not_list_is_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / "tree" / "package")
    git(tmp_path / "tree", "init", "-q")
    (tmp_path / "tree" / ".gitignore").write_text("package\n")
    with pytest.raises(ConfigError, match="git ignores every file in it"):
        code_package.list_files(folder)
    (tmp_path / "tree" / ".git" / "config").write_text("[damaged")
    with pytest.raises(ConfigError, match=r"git can't list its files .*config"):
        code_package.list_files(folder)


def test_an_object_that_was_changed_after_its_upload_is_refused_and_replaced(
    gcs_bucket: str,
) -> None:
    folder = GcsPath(gcs_bucket, "run/launch/config")
    digest = instance_spec.upload(b"train: {}", folder, ".yaml")
    path = folder / f"{digest}.yaml"
    assert instance_spec.read_uploaded(path, digest) == b"train: {}"
    gcs_objects.write(path, b"model: {kind: custom}", over=None)
    with pytest.raises(ConfigError, match=rf"{digest}\.yaml: its bytes have the digest"):
        instance_spec.read_uploaded(path, digest)
    assert instance_spec.upload(b"train: {}", folder, ".yaml") == digest
    assert instance_spec.read_uploaded(path, digest) == b"train: {}"
