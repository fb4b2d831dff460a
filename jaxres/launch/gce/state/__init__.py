"""State of a job of `launch gce`: desired, observed, and its files."""
