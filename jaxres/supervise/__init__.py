"""Outside the worker's process: owner of the run directory, deadlines, spawn and wait.

Never imports jax; speaks with the worker by argv, signals, exit code, run log and the beat that the
worker writes to a pipe.
"""
