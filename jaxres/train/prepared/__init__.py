"""Processes that have imported JAX before an attempt needs them."""
