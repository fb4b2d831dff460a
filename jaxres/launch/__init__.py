"""Starts and supervises whole jobs: `local` on this machine. Never imports jax."""
