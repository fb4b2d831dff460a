"""Checks before a job begins."""
