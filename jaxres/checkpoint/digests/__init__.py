"""Digests and sums of arrays."""
