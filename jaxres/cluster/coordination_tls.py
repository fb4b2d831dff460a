"""Mutual TLS of JAX's coordination service, by certificates of a CA of the attempt.

JAX takes certificates since 0.11.2 (docs.jax.dev, Security considerations). The key of the CA
follows from the run's secret and the nonce of the claim: each host makes the same CA and signs its
own certificate. Nothing is stored: the files are in memory and belong to the worker's process.
Clients of an older attempt, or without the secret, are refused by the service, and the traffic is
encrypted. The collectives (NCCL, Gloo) stay as they are.
"""

from __future__ import annotations

import datetime
import hmac
import importlib.metadata
import os
import re
import secrets
from collections.abc import MutableMapping
from typing import Any

from jaxres.cluster.authentication import Secret

VARIABLE = "JAXRES_COORDINATION_KEY"
"""Environment variable of a worker with the key of the attempt, which it removes."""
SINCE = (0, 11, 2)
"""First version of jax with mutual TLS."""
_BEGIN = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""Clocks of hosts differ; the CA is of one attempt, so no date has to end it."""


def is_supported(version: str) -> bool:
    """Returns whether a version of jax has mutual TLS.

    >>> is_supported("0.10.2"), is_supported("0.11.2"), is_supported("0.12.0.1")
    (False, True, True)
    """
    numbers = re.findall(r"\d+", version)[:3]
    return tuple(map(int, numbers)) >= SINCE


def variables(secret: Secret | None, nonce: str, *, num_hosts: int) -> dict[str, str]:
    """Returns the variable for the workers of an attempt; none if there is nothing to protect.

    Args:
      secret: that of the run; None: one supervisor has all workers, and draws a key.
      nonce: that of the attempt's claim.
      num_hosts: number of workers of the attempt.
    """
    if num_hosts == 1 or not is_supported(importlib.metadata.version("jax")):
        return {}
    key = secrets.token_bytes(32) if secret is None else secret.key
    return {VARIABLE: hmac.digest(key, f"jaxres coordination {nonce}".encode(), "sha256").hex()}


def arguments(env: MutableMapping[str, str], *, host: int) -> dict[str, Any]:
    """Takes the key out of the environment; returns arguments of `jax.distributed.initialize`.

    None without a key. The files last as long as this process.
    """
    if (key := env.pop(VARIABLE, None)) is None:
        return {}
    prefix, chain, own, ca = certificates(bytes.fromhex(key), host=host)
    return {
        "mtls_cert_file": _in_memory("cert", chain),
        "mtls_key_file": _in_memory("key", own),
        "mtls_ca_file": _in_memory("ca", ca),
        "mtls_peer_uri_prefix": prefix,
    }


def certificates(key: bytes, *, host: int) -> tuple[str, bytes, bytes, bytes]:
    """Returns the URI that names the attempt, and a host's certificate, its key, and the CA's, PEM.

    Args:
      key: that of the attempt.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509 import oid

    curve = ec.SECP256R1()
    # 512 bits, so that no scalar is likelier than another.
    drawn = int.from_bytes(hmac.digest(key, b"ca", "sha512"))
    ca_key = ec.derive_private_key(drawn % (curve.group_order - 1) + 1, curve)
    own_key = ec.generate_private_key(curve)
    issuer = x509.Name([x509.NameAttribute(oid.NameOID.COMMON_NAME, "jaxres attempt")])
    prefix = f"jaxres://{hmac.digest(key, b'name', 'sha256').hex()[:16]}/"

    def certificate(name: x509.Name, public: Any, serial: int) -> x509.CertificateBuilder:
        found = x509.CertificateBuilder().subject_name(name).issuer_name(issuer)
        found = found.public_key(public).serial_number(serial)
        return found.not_valid_before(_BEGIN).not_valid_after(_END)

    ca = certificate(issuer, ca_key.public_key(), 1)
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    uri = x509.UniformResourceIdentifier(f"{prefix}host-{host}")
    own = certificate(x509.Name([]), own_key.public_key(), x509.random_serial_number())
    own = own.add_extension(x509.SubjectAlternativeName([uri]), critical=True)
    uses = [oid.ExtendedKeyUsageOID.SERVER_AUTH, oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    own = own.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    pem, sha256 = serialization.Encoding.PEM, hashes.SHA256()
    return (
        prefix,
        own.sign(ca_key, sha256).public_bytes(pem),
        own_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        ca.sign(ca_key, sha256).public_bytes(pem),
    )


def _in_memory(name: str, content: bytes) -> str:
    file = os.memfd_create(f"jaxres-{name}")
    os.write(file, content)
    return f"/proc/self/fd/{file}"
