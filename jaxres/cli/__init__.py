"""Commands without JAX, on runs, checkpoints and plans: status, history, checkpoints, report."""
