"""The files of a step, read and verified without JAX."""
