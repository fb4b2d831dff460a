"""A training loop of the user's own: verified checkpoints, restarts and stops for it."""
