"""The run directory: paths, run log, events, metrics."""
