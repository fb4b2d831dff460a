"""Processes and signals of this host."""
