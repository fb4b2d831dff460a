"""What each kind of scenario does to a run."""
