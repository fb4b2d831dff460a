"""Companions of an attempt: trackers, replica, scrub, metrics, alerts."""
