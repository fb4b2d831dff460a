"""Cost of a fleet's failures, and savings of each measure against them; no jax."""
