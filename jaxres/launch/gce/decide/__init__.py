"""Decisions from the desired and the observed state; pure."""
