"""Records that tests of the run log and its readers start from."""

from jaxres.runlog.run_log import Claim

CLAIM = Claim(
    attempt=1,
    host="node-a",
    pid=7,
    boot_id="b",
    nonce="n",
    coordinator=None,
    num_hosts=1,
    threads=2,
    versions={"jax": "1"},
    fingerprint={"cpu": "x"},
    trajectory="7a",
)
