"""Weights of other tools, read and written."""
