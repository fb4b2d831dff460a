"""How the doors of several hosts meet, check each other, and speak; never imports jax."""
