"""Hooks by which a chaos run causes faults in a worker."""
