"""The calls of the Compute Engine API, and their routes."""
