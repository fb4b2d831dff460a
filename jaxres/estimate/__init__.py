"""Estimate of a job before it runs: failures, saves, notices, prices. Pure, no jax."""
