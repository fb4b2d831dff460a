"""Faults of the hardware of this host."""
