"""The schema of a run's configuration: its sections, and what is known of each field."""
