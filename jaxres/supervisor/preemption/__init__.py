"""Notices that this host will be taken away."""
