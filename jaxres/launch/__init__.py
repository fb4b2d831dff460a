"""Starts and supervises whole jobs: `local` on this machine, `gce` on VMs. Never imports jax."""
