"""Accounts for the time of a run: every second of its attempts and of the gaps between them."""
