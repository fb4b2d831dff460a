"""The per-host parent process: starts the worker, watches it, restarts it. Never imports jax."""
