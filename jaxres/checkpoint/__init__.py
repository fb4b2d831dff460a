"""Checkpoints: asynchronous saves, verified restores, retention, weight import and export.

A step is committed by its record in the run log, and by nothing else.
"""
