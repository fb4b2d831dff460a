"""Finds files that are secrets, by their names and by their content.

The content is searched in texts, also in UTF-16 and UTF-32, and in the members of archives and
compressed files. Other binary files are not searched: their bytes are no text that a program reads.
"""

from __future__ import annotations

import bz2
import codecs
import fnmatch
import gzip
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from jaxres import secret_values

SECRET_NAMES = (
    # Keys and stores of keys.
    *("*.pem", "*.key", "*.p8", "*.p12", "*.pkcs12", "*.pfx", "*.jks", "*.keystore", "*.bcfks"),
    *(
        "*.kdb",
        "*.kdbx",
        "*.psafe3",
        "*.ppk",
        "*.keychain",
        "*.keychain-db",
        "*.agekey",
        "secring.*",
    ),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*_rsa", "*_dsa", "*_ecdsa", "*_ed25519"),
    # Settings with passwords or tokens.
    *(".env*", "*.env", "secrets.json", "secrets.toml", "secrets.ini", "secrets.y*ml", "*.secret"),
    *("secrets.env", "*.secrets", ".secrets", "*.tfvars", "*.tfvars.json", "*.tfstate*"),
    *(".netrc", "_netrc", ".pgpass", "pgpass.conf", ".my.cnf", ".mylogin.cnf", ".htpasswd"),
    *(".pypirc", ".npmrc", ".yarnrc.yml", ".terraformrc", "terraform.rc", "*.tfrc.json"),
    *(".git-credentials", ".boto", "boto.cfg", ".s3cfg", "*passwd-s3fs", "rclone.conf"),
    *(".dockercfg", ".dockerconfigjson", "kubeconfig*", "*.kubeconfig", ".databrickscfg"),
    *(".vault-token", ".vault_pass*", ".modal.toml", "kaggle.json", "ngrok.yml", "*.ovpn"),
    # Credentials of clouds and services.
    *("credentials", "credentials.*", "*[-_]credentials", "*credentials*.json", "*accesskeys.csv"),
    *("client_secret*.json", "access_tokens.db", "service[-_]account*.json", "sa-key*.json"),
    *(
        "token",
        ".token",
        "token.json",
        "token.pickle",
        "hf_token*",
        ".hf_token*",
        "stored_tokens",
        "cookies.txt",
    ),
    # What was typed.
    *(".bash_history", ".zsh_history", ".python_history", ".psql_history", ".mysql_history"),
)
SECRET_FOLDERS = (
    *(".aws", ".ssh", ".gnupg", ".azure", ".kube", ".docker", ".oci", ".kaggle", ".mc"),
    *(".config/gcloud", ".config/gh", ".config/rclone", ".config/wandb", ".password-store"),
    *(".huggingface", ".cache/huggingface", ".terraform.d", ".pulumi", ".config/doctl"),
)
CODE_ENDINGS = (".py", ".pyi", ".ipynb", ".md", ".rst", ".pub")
"""Of files that are no secret by their name: `credentials.py` is code, `id_rsa.pub` is public."""
PRIVATE_KEY = re.compile(r"\s*-----BEGIN [A-Z0-9 ]*PRIVATE KEY")
SETTINGS = (
    ("the key of a service account", r'"private_key"\s*:\s*"[^"]'),
    ("credentials of a Google account", r'"refresh_token"\s*:\s*"[^"]{8}'),
    ("logins of container registries", r'"auths"\s*:\s*\{[^{}]*\{[^{}]*"auth"\s*:\s*"[^"]{8}'),
    (
        "credentials of a cluster",
        r"(?m)^[ \t]*-?[ \t]*(?:client-key-data|token):[ \t]*[\w+/=.-]{40}",
    ),
    ("the state of Terraform", r'"terraform_version"[\s\S]*"lineage"'),
    ("logins of machines", r"(?m)^machine\s+\S+\s+login\s+\S+\s+password\s+\S"),
    (
        "an AWS secret key",
        r"(?i)secret_access_key[\"']?\s*[=:]\s*[\"']?(?!\S*example)[a-z0-9/+]{40}\b",
    ),
    ("a token of a package registry", r"(?m)^(?://\S+:)?_(?:authToken|auth|password)=[^\s$]"),
    ("hashes of passwords", r"(?m)^[^\s:#]+:\$(?:apr1|2[aby]|[156])\$[./A-Za-z0-9$]{10}"),
    ("a key of PuTTY", r"\APuTTY-User-Key-File-"),
    ("a key of WireGuard", r"(?m)^PrivateKey\s*=\s*[A-Za-z0-9+/]{43}="),
    ("an account key of Azure", r"AccountKey=[A-Za-z0-9+/]{40}"),
)
"""Patterns of secrets in files that programs write or read; any file name."""
IN_CODE = ("an AWS secret key", "an account key of Azure")
"""Secrets that are searched for in code and texts too, which name the other ones."""
MAX_SEARCHED_BYTES = 4 * 2**20
"""First bytes of a text that are searched for secrets."""
MAX_ARCHIVE_BYTES = 16 * 2**20
"""First bytes of a compressed file, and of all members of an archive, that are searched."""
MOST_NESTED = 3
"""Archives within archives that are opened, such as a tar file within a gzip file."""
COMPRESSED = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
"""Exceptions about an archive that no program can read; the rest of it is not searched."""
ENCODINGS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def kind_of_file(root: Path, name: str) -> str | None:
    """Returns why a file of a folder is a secret; None: it is none.

    Raises:
      OSError: the file can't be read.
    """
    found = _by_name(f"/{root.parent.name}/{root.name}/{name}")
    if found is not None:
        return found
    with (root / name).open("rb") as file:
        for member, data in _members(file, name, depth=MOST_NESTED):
            kind = _by_content(member, data)
            if member != name and kind is None:
                kind = _by_name(f"/{member}")
            if kind is not None:
                return kind if member == name else f"{member} in it: {kind}"
    return None


def _by_name(path: str) -> str | None:
    folder, _, last = path.lower().rpartition("/")
    if any(f"/{secret}/" in f"{folder}/" for secret in SECRET_FOLDERS):
        return "in a folder of credentials"
    if last.endswith(CODE_ENDINGS):
        return None
    if any(fnmatch.fnmatchcase(last, pattern) for pattern in SECRET_NAMES):
        return "by its name, a secret"
    return None


def _by_content(name: str, data: bytes) -> str | None:
    text = _text(data)
    if text is None:
        return None
    if PRIVATE_KEY.match(text):
        return "a private key"
    is_code = PurePosixPath(name).suffix.lower() in CODE_ENDINGS
    for kind, form in SETTINGS:
        if (kind in IN_CODE or not is_code) and re.search(form, text):
            return kind
    kind = secret_values.kind_of_secret(text)
    return None if kind is None else f"has a {kind}"


def _text(data: bytes) -> str | None:
    r"""Returns the text of a file's first bytes; None: they are no text.

    >>> _text("token".encode("utf-16-be")), _text(b"\0\1abc")
    ('token', None)
    """
    encoding = next((name for mark, name in ENCODINGS if data.startswith(mark)), "utf-8")
    head = data[:8192]
    if encoding == "utf-8" and b"\0" in head:
        even, odd = head[::2].count(0), head[1::2].count(0)
        if max(even, odd) * 4 < len(head) or min(even, odd) > 0:
            return None
        encoding = "utf-16-be" if even else "utf-16-le"
    return data[:MAX_SEARCHED_BYTES].decode(encoding, "replace")


def _members(file: IO[bytes], name: str, *, depth: int) -> Iterator[tuple[str, bytes]]:
    """Yields name and first bytes of a file, or of each member of an archive."""
    head = file.read(512)
    file.seek(0)
    opener = next((opener for magic, opener in COMPRESSED if head.startswith(magic)), None)
    if depth and opener is not None:
        inner = io.BytesIO(_beginning(opener(file)))
        yield from _members(inner, name, depth=depth - 1)
    elif depth and (head.startswith(b"PK\3\4") or head[257:262] == b"ustar"):
        left = MAX_ARCHIVE_BYTES
        for member, data in _archive(file, is_zip=head.startswith(b"PK")):
            yield from _members(io.BytesIO(data[:left]), f"{name}/{member}", depth=depth - 1)
            left -= len(data)
            if left <= 0:
                return
    else:
        yield name, file.read(MAX_SEARCHED_BYTES)


def _beginning(file: io.BufferedIOBase) -> bytes:
    """Returns the first bytes of a compressed file, up to the first that can't be read."""
    found = b""
    while len(found) < MAX_ARCHIVE_BYTES:
        try:
            data = file.read1(2**16)
        except DAMAGED:
            break
        if not data:
            break
        found += data
    return found


def _archive(file: IO[bytes], *, is_zip: bool) -> Iterator[tuple[str, bytes]]:
    """Yields the files in a zip or tar file, up to the first that can't be read."""
    try:
        if is_zip:
            with zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    if not info.is_dir() and not info.flag_bits & 1:  # Not encrypted.
                        yield info.filename, archive.open(info).read(MAX_SEARCHED_BYTES)
        else:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for entry in archive:
                    if entry.isfile() and (inner := archive.extractfile(entry)) is not None:
                        yield entry.name, inner.read(MAX_SEARCHED_BYTES)
    except (*DAMAGED, NotImplementedError):  # The latter: a compression that Python does not have.
        return
