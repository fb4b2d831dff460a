"""What a fleet's failures will cost, and what each measure against them saves; no jax."""
