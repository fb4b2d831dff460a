"""Injectors: the faults of each kind of scenario."""
