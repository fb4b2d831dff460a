"""What runs beside an attempt: trackers, replica, scrub, metrics, alerts."""
