"""Only workers of one attempt, which have its key, speak with its coordination service."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from jaxres.cluster import coordination_tls
from jaxres.cluster.authentication import Secret
from jaxres.cluster.coordination_tls import VARIABLE
from jaxres.config import RunConfig
from jaxres.runlog.paths import RunDir
from jaxres.supervisor.process.worker_env import worker_env
from tests.unit.cluster.supervisors import free_address
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS

KEYS = [bytes([number]) * 32 for number in (1, 2)]
SECRETS = [Secret(key, "test") for key in KEYS]
HAS_TLS = coordination_tls.is_supported(importlib.metadata.version("jax"))


def side(folder, key, host):
    """Returns a TLS connection without a socket that trusts the CA of the key."""
    _, chain, own, ca = coordination_tls.certificates(key, host=host)
    for name, content in (("chain", chain), ("key", own), ("ca", ca)):
        (folder / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if host == 0 else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "chain", folder / "key")
    context.load_verify_locations(folder / "ca")
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    return context.wrap_bio(inward, outward, server_side=host == 0), inward, outward


def meet(folder, keys):
    """Handshakes; returns what each side knows of the other."""
    sides = [side(folder, key, host) for host, key in enumerate(keys)]
    for _ in range(4):
        for (connection, _, outward), (_, other, _) in (sides, sides[::-1]):
            with suppress(ssl.SSLWantReadError):
                connection.do_handshake()
            other.write(outward.read())
    return [connection.getpeercert() for connection, *_ in sides]


def test_two_hosts_of_an_attempt_accept_each_other_and_are_named(tmp_path):
    prefix = coordination_tls.certificates(KEYS[0], host=0)[0]
    assert prefix.endswith("/")
    others = meet(tmp_path, [KEYS[0], KEYS[0]])
    names = [dict(each["subjectAltName"])["URI"] for each in others]
    assert names == [f"{prefix}host-1", f"{prefix}host-0"]


def test_a_host_of_another_attempt_is_refused(tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError):
        meet(tmp_path, KEYS)


def test_each_attempt_and_each_run_has_another_key(monkeypatch):
    monkeypatch.setattr(coordination_tls.importlib.metadata, "version", lambda _: "0.12.0")
    drawn = [
        coordination_tls.variables(secret, nonce, num_hosts=2)[VARIABLE]
        for secret in (*SECRETS, None, None)
        for nonce in ("a", "b")
    ]
    assert len(set(drawn)) == 8
    again = coordination_tls.variables(SECRETS[0], "a", num_hosts=2)[VARIABLE]
    assert again == drawn[0], "all hosts make the same one"
    assert SECRETS[0].key.hex() not in drawn, "a worker does not get the secret of the run"
    assert coordination_tls.variables(SECRETS[0], "a", num_hosts=1) == {}
    monkeypatch.setattr(coordination_tls.importlib.metadata, "version", lambda _: "0.10.2")
    assert coordination_tls.variables(SECRETS[0], "a", num_hosts=2) == {}


def test_the_supervisors_of_an_attempt_give_their_workers_the_same_key(tmp_path, monkeypatch):
    monkeypatch.setattr(coordination_tls.importlib.metadata, "version", lambda _: "0.12.0")
    sections = {"data": {"source": {"kind": "text", "path": "x"}}, "train": {"steps": 9}}
    config, claim = RunConfig.model_validate(sections), dataclasses.replace(CLAIM, num_hosts=2)
    given = [
        worker_env({}, config, RunDir(tmp_path), claim, secret=each)
        for each in (SECRETS[0], SECRETS[0], SECRETS[1])
    ]
    first, second, other = (env[VARIABLE] for env in given)
    assert first == second != other


def test_a_worker_keeps_the_key_from_what_it_starts():
    env = {VARIABLE: KEYS[0].hex()}
    given = coordination_tls.arguments(env, host=1)
    assert env == {}
    assert {name for name in given if name.endswith("_file")} == {
        "mtls_cert_file",
        "mtls_key_file",
        "mtls_ca_file",
    }
    assert b"PRIVATE KEY" in Path(given["mtls_key_file"]).read_bytes()
    assert coordination_tls.arguments(env, host=1) == {}


JOINS = """
import os, sys, jax
from jaxres.cluster import coordination_tls
host, port = int(sys.argv[1]), sys.argv[2]
given = coordination_tls.arguments(os.environ, host=host)
jax.distributed.initialize(
    f"127.0.0.1:{port}", 2, host, initialization_timeout=5, cluster_detection_method="deactivate",
    coordinator_bind_address=f"127.0.0.1:{port}" if host == 0 else None, **given
)
print("joined", flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TLS, reason="this jax has no mutual TLS")
@pytest.mark.parametrize(("other", "joins"), [(KEYS[0], True), (KEYS[1], False), (None, False)])
def test_the_service_of_jax_accepts_only_workers_with_the_key(other, joins):
    port = free_address().port

    def start(host, key):
        env = {"JAX_PLATFORMS": "cpu"} | ({} if key is None else {VARIABLE: key.hex()})
        return subprocess.Popen(
            [sys.executable, "-c", JOINS, str(host), str(port)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    with start(0, KEYS[0]) as leader, start(1, other) as follower:
        assert (follower.stdout.readline() == b"joined\n") == joins
        leader.communicate(timeout=SURE_SECONDS)
        follower.communicate(timeout=SURE_SECONDS)
