"""Checks while a run trains: wrong devices, slow hosts, non-finite values."""
